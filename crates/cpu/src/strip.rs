//! Lane-32 dots of sixteen vectors at a time.
//!
//! Vectors that are dotted often with the same short vector (state columns, pooled keys) are stored side by side in strips:
//! element `j` of sixteen of them, then element `j + 1`. The 32 lanes of the contract are then 32 sums of a whole register
//! each, which fold by adding registers, where folding the lanes of one register takes shuffles.
//!
//! Invariant: the bits of `strata_quant::lanes::dot` for each of the sixteen.

/// Vectors in a strip.
pub(crate) const STRIP: usize = 16;

/// One element of each vector of a strip.
pub(crate) type Strip = [f32; STRIP];

/// Adds all elements.
#[inline(always)]
pub(crate) fn add(a: Strip, b: Strip) -> Strip {
    let mut out = [0.0; STRIP];
    for c in 0..STRIP {
        out[c] = a[c] + b[c];
    }
    out
}

/// Folds the lanes 0 to 31 that `$lane($args.., i)` gives, in the order of the contract: 16, 8, 4, 2, 1.
macro_rules! fold_lanes {
    ($lane:ident($($arg:expr),*)) => {
        $crate::strip::fold_lanes!(@1, 0, $lane, ($($arg),*))
    };
    (@32, $i:expr, $lane:ident, ($($arg:expr),*)) => { $lane($($arg,)* $i) };
    (@16, $i:expr, $($rest:tt)*) => { $crate::strip::fold_lanes!(@both 16, 32, $i, $($rest)*) };
    (@8, $i:expr, $($rest:tt)*) => { $crate::strip::fold_lanes!(@both 8, 16, $i, $($rest)*) };
    (@4, $i:expr, $($rest:tt)*) => { $crate::strip::fold_lanes!(@both 4, 8, $i, $($rest)*) };
    (@2, $i:expr, $($rest:tt)*) => { $crate::strip::fold_lanes!(@both 2, 4, $i, $($rest)*) };
    (@1, $i:expr, $($rest:tt)*) => { $crate::strip::fold_lanes!(@both 1, 2, $i, $($rest)*) };
    (@both $width:literal, $next:tt, $i:expr, $($rest:tt)*) => {
        $crate::strip::add(
            $crate::strip::fold_lanes!(@$next, $i, $($rest)*),
            $crate::strip::fold_lanes!(@$next, $i + $width, $($rest)*),
        )
    };
}
pub(crate) use fold_lanes;

/// The dots of a strip's vectors with `x`, of the strip's length.
#[inline(always)]
pub(crate) fn dots(strip: &[Strip], x: &[f32]) -> Strip {
    let strip = &strip[..x.len()];
    fold_lanes!(lane(strip, x))
}

/// Lane `i` of the dots.
#[inline(always)]
fn lane(strip: &[Strip], x: &[f32], i: usize) -> Strip {
    let mut acc = [0.0; STRIP];
    let mut j = i;
    while j < x.len() {
        for c in 0..STRIP {
            acc[c] = strip[j][c].mul_add(x[j], acc[c]);
        }
        j += 32;
    }
    acc
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_quant::lanes;

    /// Oracle: the contract's dot of each vector.
    #[test]
    fn sixteen_dots_have_the_bits_of_one() {
        for dim in [1, 12, 16, 31, 32, 33, 64, 96, 128, 200] {
            let value = |i: usize| ((i * 7919 + dim) % 1009) as f32 / 100.0 - 5.0;
            let vectors: Vec<Vec<f32>> =
                (0..STRIP).map(|c| (0..dim).map(|j| value(c * dim + j)).collect()).collect();
            let strip: Vec<Strip> = (0..dim).map(|j| std::array::from_fn(|c| vectors[c][j])).collect();
            let x: Vec<f32> = (0..dim).map(|j| value(3 * j + 1)).collect();
            let found = dots(&strip, &x);
            for (c, vector) in vectors.iter().enumerate() {
                assert_eq!(found[c].to_bits(), lanes::dot(vector, &x).to_bits(), "vector {c} of {dim}");
            }
        }
    }
}
