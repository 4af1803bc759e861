//! What the choice of a token looks at: a row's largest logits, after its sequence's penalties, biases and constraint, and the mass of all
//! of them. A backend that finds these where the logits are spares its host whole rows.

use strata_quant::math;

/// The most values of a row that [`crate::Backend::largest`] is asked for.
pub const MOST_LARGEST: usize = 128;

/// The most adjustments of a row that a backend needs to take. Texts of the longest contexts hold fewer different tokens.
pub const MOST_ADJUSTMENTS: usize = 32_768;

/// The mass of the most probable token: masses are whole numbers, so that no order of summing them matters.
pub const UNIT_MASS: u64 = 1 << 40;

/// What penalties and biases do to one token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adjustment {
    /// Whose.
    pub token: u32,
    /// Divides a positive logit, multiplies others.
    pub repetition: f32,
    /// Subtracted then.
    pub minus: f32,
    /// Added at last. Where nothing is, -0.0: it leaves zeros of either sign as they are.
    pub plus: f32,
}

impl Adjustment {
    /// One that changes nothing.
    pub const fn none(token: u32) -> Adjustment {
        Adjustment { token, repetition: 1.0, minus: 0.0, plus: -0.0 }
    }

    /// The adjusted logit. What isn't a number can't be chosen: it is negative infinity.
    pub fn apply(&self, logit: f32) -> f32 {
        let repeated = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        let adjusted = repeated - self.minus + self.plus;
        if adjusted.is_nan() { f32::NEG_INFINITY } else { adjusted }
    }
}

/// A logit's mass at a temperature above zero, [`UNIT_MASS`] for the row's largest one, `max`, rounded down; 0 for what isn't a number.
#[inline(always)]
pub fn mass(logit: f32, max: f32, temperature: f32) -> u64 {
    (math::exp((logit - max) / temperature) * UNIT_MASS as f32) as u64
}

/// What happens to a row's logits before a token is chosen.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogitRow<'a> {
    /// At most one of each token.
    pub adjustments: &'a [Adjustment],
    /// The tokens that may be chosen, bit `t % 32` of word `t / 32`; the logits of the others are negative infinity.
    pub mask: Option<&'a [u32]>,
    /// Of masses. 0 where the largest is chosen: zeros of either sign are equal then, else the negative one is less. No mass is asked for then.
    pub temperature: f32,
}

/// Which values of a buffer are wanted: the largest of each row, first to last.
#[derive(Debug, Clone, Copy)]
pub struct Largest<'a> {
    /// The buffer's first rows.
    pub rows: &'a [LogitRow<'a>],
    /// Values in a row.
    pub width: usize,
    /// How many of a row, at most [`MOST_LARGEST`].
    pub count: usize,
}

impl Largest<'_> {
    /// What [`crate::Backend::largest`] finds in `[rows][width]` logits, by its definition: all of them are sorted.
    pub fn find(&self, logits: &[f32], out: &mut [(u32, f32)], masses: &mut [u64]) {
        let rows =
            self.rows.iter().zip(logits.chunks_exact(self.width)).zip(out.chunks_exact_mut(self.count));
        for (at, ((row, logits), out)) in rows.enumerate() {
            if logits.iter().any(|logit| !logit.is_finite()) {
                out.fill((0, f32::NAN));
                continue;
            }
            let logits = row.adjust(logits);
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            let of = |at: u32| logits[at as usize];
            order.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
            out.iter_mut().zip(&order).for_each(|(out, &at)| *out = (at, of(at)));
            if let Some(of_row) = masses.get_mut(at) {
                *of_row = logits.iter().map(|&logit| mass(logit, out[0].1, row.temperature)).sum();
            }
        }
    }
}

impl LogitRow<'_> {
    fn adjust(&self, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        for adjustment in self.adjustments {
            let logit = &mut logits[adjustment.token as usize];
            *logit = adjustment.apply(*logit);
        }
        for (token, logit) in logits.iter_mut().enumerate() {
            let allowed = self.mask.is_none_or(|mask| mask[token / 32] >> (token % 32) & 1 == 1);
            let value = if allowed { *logit } else { f32::NEG_INFINITY };
            *logit = if self.temperature == 0.0 { value + 0.0 } else { value };
        }
        logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand.
    #[test]
    fn adjustments_follow_one_another() {
        let all = Adjustment { token: 0, repetition: 2.0, minus: 0.5, plus: 0.25 };
        assert_eq!((all.apply(4.0), all.apply(-4.0)), (1.75, -8.25));
        let certain = Adjustment { plus: f32::INFINITY, ..all };
        assert_eq!(
            (certain.apply(-4.0), certain.apply(f32::NEG_INFINITY)),
            (f32::INFINITY, f32::NEG_INFINITY)
        );
    }

    /// Oracle: the same bits, zeros' signs too.
    #[test]
    fn none_changes_nothing() {
        for logit in [0.0, -0.0, 1.5, -3.0e38, 1e-45, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Adjustment::none(0).apply(logit).to_bits(), logit.to_bits());
        }
    }

    /// Oracle: by hand. A token falls by its penalty, one isn't allowed, zeros of either sign are one to the greedy, and a row has a NaN.
    #[test]
    fn the_largest_are_found() {
        let adjustments = [Adjustment { repetition: 4.0, ..Adjustment::none(1) }];
        let greedy = LogitRow { adjustments: &adjustments, mask: Some(&[0b11011]), temperature: 0.0 };
        let rows = [greedy, LogitRow { temperature: 1.0, ..greedy }, greedy];
        let logits = [-0.0, 3.0, 9.0, 0.0, -1.0, -0.0, 3.0, 9.0, 0.0, -1.0, 1.0, f32::NAN, 0.0, 0.0, 0.0];
        let (mut out, mut masses) = ([(9, 0.0); 9], [0; 3]);
        Largest { rows: &rows, width: 5, count: 3 }.find(&logits, &mut out, &mut masses);
        assert_eq!(out[..6], [(1, 0.75), (0, 0.0), (3, 0.0), (1, 0.75), (3, 0.0), (0, -0.0)]);
        assert!(out[6].1.is_nan());
        let shares: f64 = [0.75, 0.0, 0.0, -1.0].iter().map(|logit: &f64| (logit - 0.75).exp()).sum();
        assert!((masses[1] as f64 / UNIT_MASS as f64 - shares).abs() < 1e-6);
    }

    /// Oracle: e^x in f64.
    #[test]
    fn masses_are_shares_of_the_largest() {
        assert_eq!(mass(3.0, 3.0, 0.7), UNIT_MASS);
        assert_eq!((mass(f32::NEG_INFINITY, 3.0, 0.7), mass(f32::NAN, 3.0, 0.7)), (0, 0));
        let expected = (-2.0f64 / 0.5).exp() * UNIT_MASS as f64;
        assert!((mass(1.0, 3.0, 0.5) as f64 / expected - 1.0).abs() < 1e-6);
    }
}
