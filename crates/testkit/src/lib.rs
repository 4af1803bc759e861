//! For tests only: golden vectors from disk, and where they are; slow oracles of the ops.
//!
//! Golden files lie under `tests/data` of the repository. `STRATA_GOLDEN` names another folder of the same
//! layout, so that anyone can try other vectors; `STRATA_MODELS` names a folder with the large models that the
//! repository doesn't carry.

pub mod faulty;
pub mod golden;
pub mod oracle;

/// The largest absolute difference of two equally long lists of finite numbers.
///
/// Panics where a value is not finite: a NaN is at no distance from anything, and `max` would pass it over.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lists of different lengths");
    assert!(a.iter().chain(b).all(|v| v.is_finite()), "a value that is not finite has no distance");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::distance;

    /// Oracle: by hand.
    #[test]
    fn distances() {
        assert_eq!(distance(&[1.0, -2.0], &[1.5, -2.25]), 0.5);
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(std::panic::catch_unwind(|| distance(&[bad], &[0.0])).is_err());
        }
    }
}
