//! One sequence's sampler: its parameters, and how often each token has occurred.

use std::cmp::Ordering;

use strata_backend::{Adjustment, LogitRow, MOST_LARGEST, UNIT_MASS, mass};
use strata_quant::{Isa, dispatch};

use super::{Sampling, uniform};

/// Tokens that a constraint allows: one bit per token, bit `t % 32` of word `t / 32`.
#[derive(Debug, Clone, Copy)]
pub struct TokenMask<'a>(pub &'a [u32]);

impl TokenMask<'_> {
    /// Whether `token` may be chosen.
    pub fn allows(&self, token: usize) -> bool {
        self.0.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Its id.
    pub token: u32,
    /// Its log-probability by the model's own distribution (no penalty, bias, mask or temperature), if asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens with their log-probabilities, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// No token can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The mask leaves nothing.
    #[error("the constraint allows no token at position {0}")]
    NothingAllowed(usize),
    /// Biases and penalties leave nothing, or nothing that the mask allows.
    #[error(
        "the logit biases and penalties leave no token to choose at position {0}: take some of --logit-bias away"
    )]
    NothingLeft(usize),
}

/// What a sampler looks at, where it need not be all logits of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LooksAt {
    /// So many of the largest.
    pub largest: usize,
    /// The mass of all.
    pub mass: bool,
}

/// Memory to choose in, for all samplers that choose one after the other.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    order: Vec<u32>,
}

impl Scratch {
    /// For so many tokens; it grows when there are more.
    pub fn new(vocab: usize) -> Scratch {
        Scratch { adjusted: Vec::with_capacity(vocab), order: Vec::with_capacity(vocab) }
    }

    /// The most that [`Scratch::new`] takes, bytes.
    pub(crate) fn bytes(vocab: usize) -> usize {
        vocab * (size_of::<f32>() + size_of::<u32>())
    }
}

/// One sequence's sampler.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    /// Those of the tokens with a penalty or a bias, by token.
    adjustments: Vec<Adjustment>,
    /// How often each of them was answered.
    answered: Vec<u32>,
}

impl Sampler {
    /// A sampler whose sequence holds `prompt` so far. The parameters must have been validated.
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Self {
        let repetition = sampling.repetition_penalty;
        let repeated = prompt.iter().filter(|_| repetition != 1.0);
        let biased = sampling.logit_bias.iter().map(|(token, _)| token);
        let mut tokens: Vec<u32> = repeated.chain(biased).copied().collect();
        tokens.sort_unstable();
        tokens.dedup();
        let mut adjustments: Vec<Adjustment> = tokens.into_iter().map(Adjustment::none).collect();
        for &(token, bias) in &sampling.logit_bias {
            let at = adjustments.binary_search_by_key(&token, |a| a.token);
            at.into_iter().for_each(|at| adjustments[at].plus += bias);
        }
        if repetition != 1.0 {
            for token in prompt {
                let at = adjustments.binary_search_by_key(token, |a| a.token);
                at.into_iter().for_each(|at| adjustments[at].repetition = repetition);
            }
        }
        Sampler { sampling, answered: vec![0; adjustments.len()], adjustments }
    }

    /// The most memory that a sampler takes for tokens with a penalty or a bias, bytes.
    pub(crate) fn bytes(tokens: usize) -> usize {
        // A list that grows may be half empty.
        2 * tokens * (size_of::<Adjustment>() + size_of::<u32>())
    }

    /// What decides of a row; nothing if all of it may.
    pub fn looks_at(&self) -> Option<LooksAt> {
        let Sampling { top_k, logprobs, .. } = self.sampling;
        match top_k {
            _ if logprobs.is_some() => None,
            _ if self.sampling.temperature == 0.0 => Some(LooksAt { largest: 1, mass: false }),
            0 => Some(LooksAt { largest: MOST_LARGEST, mass: true }),
            1..=MOST_LARGEST => Some(LooksAt { largest: top_k, mass: false }),
            _ => None,
        }
    }

    /// What happens to a row of logits before [`Sampler::choose_of`] has the largest.
    pub fn row<'a>(&'a self, mask: Option<TokenMask<'a>>) -> LogitRow<'a> {
        LogitRow {
            adjustments: &self.adjustments,
            mask: mask.map(|TokenMask(words)| words),
            temperature: self.sampling.temperature,
        }
    }

    /// As [`Sampler::choose`], from what it [`looks_at`](Sampler::looks_at) of its [`row`](Sampler::row): the largest logits, in order, maybe
    /// more of them, and the mass of all. Nothing if that doesn't decide: where the mass is asked for, or no token can be chosen.
    pub fn choose_of(&mut self, largest: &[(u32, f32)], mass: u64, position: usize) -> Option<Choice> {
        let top_k = self.sampling.top_k;
        let &(first, max) = largest.first().filter(|(_, logit)| *logit > f32::NEG_INFINITY)?;
        let token = if self.sampling.temperature == 0.0 || max == f32::INFINITY {
            first
        } else if top_k == 0 {
            self.pick(largest.iter().copied(), false, Some(mass), max, position)?
        } else {
            self.pick(largest.iter().take(top_k).copied(), true, None, max, position)?
        };
        self.count(token);
        Some(Choice { token, logprob: None, top: Vec::new() })
    }

    fn count(&mut self, token: u32) {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        if repetition_penalty == 1.0 && presence_penalty == 0.0 && frequency_penalty == 0.0 {
            return;
        }
        let at = self.adjustments.binary_search_by_key(&token, |a| a.token).unwrap_or_else(|at| {
            self.adjustments.insert(at, Adjustment::none(token));
            self.answered.insert(at, 0);
            at
        });
        self.answered[at] += 1;
        let adjustment = &mut self.adjustments[at];
        adjustment.repetition = repetition_penalty;
        adjustment.minus = presence_penalty + frequency_penalty * self.answered[at] as f32;
    }

    /// Chooses the token at `position` from the model's `logits`, and counts it as answered.
    pub fn choose(
        &mut self,
        logits: &[f32],
        position: usize,
        mask: Option<TokenMask<'_>>,
        scratch: &mut Scratch,
    ) -> Result<Choice, SampleError> {
        let (isa, Scratch { adjusted, order }) = (Isa::detect(), scratch);
        self.adjust(logits, mask, adjusted);
        let greedy = self.sampling.temperature == 0.0;
        let token = if greedy { largest(adjusted) } else { self.draw(isa, position, adjusted, order) }
            .ok_or(if mask.is_some() && self.sampling.logit_bias.is_empty() {
                SampleError::NothingAllowed(position)
            } else {
                SampleError::NothingLeft(position)
            })?;
        self.count(token);
        let (logprob, top) = match self.sampling.logprobs {
            None => (None, Vec::new()),
            Some(n) => {
                let (own, top) = log_probabilities(isa, logits, token, n, order);
                (Some(own), top)
            }
        };
        Ok(Choice { token, logprob, top })
    }

    /// Penalties, bias, mask; a NaN can't be chosen.
    fn adjust(&self, logits: &[f32], mask: Option<TokenMask<'_>>, adjusted: &mut Vec<f32>) {
        adjusted.clear();
        adjusted.extend(logits.iter().map(|l| if l.is_nan() { f32::NEG_INFINITY } else { *l }));
        for adjustment in &self.adjustments {
            if let Some(logit) = adjusted.get_mut(adjustment.token as usize) {
                *logit = adjustment.apply(*logit);
            }
        }
        if let Some(mask) = mask {
            for (token, logit) in adjusted.iter_mut().enumerate() {
                if !mask.allows(token) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    fn draw(&self, isa: Isa, position: usize, logits: &[f32], order: &mut Vec<u32>) -> Option<u32> {
        let Sampling { top_k, temperature, .. } = self.sampling;
        let first = largest(logits)?;
        let max = logits[first as usize];
        // An infinite logit is certain; the lower of several.
        if max == f32::INFINITY {
            return Some(first);
        }
        order.clear();
        order.extend((0..logits.len() as u32).filter(|&t| logits[t as usize] > f32::NEG_INFINITY));
        let whole = (top_k == 0).then(|| masses(isa, logits, max, temperature));

        // Sorting a whole vocabulary costs more than the draw is worth: sort a prefix that holds the mass sought.
        let mut sorted = if top_k == 0 { MOST_LARGEST } else { top_k }.min(order.len());
        loop {
            sort_prefix(order, sorted, logits);
            let prefix = order[..sorted].iter().map(|&t| (t, logits[t as usize]));
            let all = top_k > 0 || sorted == order.len();
            match self.pick(prefix, all, whole, max, position) {
                None if !all => sorted = (sorted * 8).min(order.len()),
                token => return token,
            }
        }
    }

    /// Draws from tokens in order with their logits, after which others follow unless they are `all`; nothing if those others may be drawn. `whole` is
    /// the mass that top-p is a part of, if it isn't theirs.
    fn pick(
        &self,
        prefix: impl Iterator<Item = (u32, f32)> + Clone,
        all: bool,
        whole: Option<u64>,
        max: f32,
        position: usize,
    ) -> Option<u32> {
        let Sampling { top_p, min_p, seed, temperature, .. } = self.sampling;
        let (top_p, floor) = (f64::from(top_p), f64::from(min_p) * UNIT_MASS as f64);
        let masses = prefix.map(|(token, logit)| (token, mass(logit, max, temperature)));
        let total = whole.unwrap_or_else(|| masses.clone().map(|(_, mass)| mass).sum());
        // How many tokens stay, and their mass.
        let (mut kept, mut sum) = (usize::MAX, total);
        if top_p < 1.0 || floor > 0.0 {
            (kept, sum) = (0, 0);
            let cut = masses.clone().find(|&(_, mass)| {
                let below = kept > 0 && (sum as f64 >= top_p * total as f64 || (mass as f64) < floor);
                if !below {
                    (kept, sum) = (kept + 1, sum + mass);
                }
                below
            });
            if cut.is_none() && !all {
                return None;
            }
        }
        let target = uniform(seed, position as u64) * sum as f64;
        let (mut reached, mut last) = (0, None);
        for (token, mass) in masses.take(kept).take_while(|(_, mass)| *mass > 0) {
            (reached, last) = (reached + mass, Some(token));
            if target < reached as f64 {
                return last;
            }
        }
        // Rounding may put the target at the very end.
        last.filter(|_| all || reached == sum)
    }
}

/// The first of the largest logits.
fn largest(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut value = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > value {
            (best, value) = (Some(token as u32), logit);
        }
    }
    best
}

/// Larger logits first, equal ones by the lower id.
fn by_logit(logits: &[f32], a: u32, b: u32) -> Ordering {
    logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}

/// Brings the `n` first of `order` to its front, sorted.
fn sort_prefix(order: &mut [u32], n: usize, logits: &[f32]) {
    if n < order.len() {
        order.select_nth_unstable_by(n, |&a, &b| by_logit(logits, a, b));
    }
    order[..n].sort_unstable_by(|&a, &b| by_logit(logits, a, b));
}

dispatch! {
    /// The mass of all logits.
    fn masses(isa, logits: &[f32], max: f32, temperature: f32) -> u64 {
        logits.iter().map(|&logit| mass(logit, max, temperature)).sum()
    }
}

/// The log-probability of `token` and those of the `n` most probable tokens.
fn log_probabilities(
    isa: Isa,
    logits: &[f32],
    token: u32,
    n: usize,
    order: &mut Vec<u32>,
) -> (f32, Vec<(u32, f32)>) {
    let max = logits.iter().copied().filter(|l| !l.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let log_sum = (masses(isa, logits, max, 1.0) as f64 / UNIT_MASS as f64).ln();
    let log = |t: u32| ((f64::from(logits[t as usize]) - f64::from(max)) - log_sum) as f32;
    order.clear();
    order.extend((0..logits.len() as u32).filter(|&t| !logits[t as usize].is_nan()));
    let n = n.min(order.len());
    sort_prefix(order, n, logits);
    (log(token), order[..n].iter().map(|&t| (t, log(t))).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use strata_backend::Largest;

    use super::*;

    fn next(
        sampler: &mut Sampler,
        logits: &[f32],
        position: usize,
        mask: Option<TokenMask<'_>>,
    ) -> Result<Choice, SampleError> {
        sampler.choose(logits, position, mask, &mut Scratch::default())
    }

    fn choose(sampling: Sampling, logits: &[f32], position: usize) -> u32 {
        next(&mut Sampler::new(sampling, &[]), logits, position, None).unwrap().token
    }

    /// Oracle: the definition of greedy, ties to the lower id, NaN never.
    #[test]
    fn greedy_takes_the_first_largest() {
        assert_eq!(choose(Sampling::greedy(), &[1.0, 3.0, f32::NAN, 3.0], 0), 1);
    }

    /// Oracle: a slow sampler that sorts everything and follows the documented order.
    fn slow(s: &Sampling, logits: &[f32], position: usize) -> u32 {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| by_logit(logits, a, b));
        if s.top_k > 0 {
            order.truncate(s.top_k);
        }
        let max = logits[order[0] as usize];
        let mass = |t: u32| mass(logits[t as usize], max, s.temperature);
        let total: u64 = order.iter().map(|&t| mass(t)).sum();
        let floor = f64::from(s.min_p) * UNIT_MASS as f64;
        let mut kept = Vec::new();
        let mut sum = 0;
        for &t in &order {
            let enough = sum as f64 >= f64::from(s.top_p) * total as f64;
            if !kept.is_empty() && (enough || (mass(t) as f64) < floor) {
                break;
            }
            sum += mass(t);
            kept.push(t);
        }
        let target = uniform(s.seed, position as u64) * sum as f64;
        let mut reached = 0;
        kept.iter()
            .copied()
            .find(|&t| {
                reached += mass(t);
                target < reached as f64
            })
            .unwrap_or(kept[kept.len() - 1])
    }

    proptest! {
        #[test]
        fn draws_as_the_slow_sampler_does(
            logits in prop::collection::vec(-8i8..8, 1..700),
            top_k in prop_oneof![0usize..20, 120usize..720], top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5], seed: u64, position in 0usize..1000,
        ) {
            // Quarters tie often.
            let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) / 4.0).collect();
            let s = Sampling { temperature: 0.7, top_k, top_p, min_p, seed, ..Sampling::default() };
            prop_assert_eq!(choose(s.clone(), &logits, position), slow(&s, &logits, position));
        }
    }

    fn find(row: LogitRow<'_>, logits: &[f32], count: usize) -> (Vec<(u32, f32)>, u64) {
        let count = count.min(logits.len());
        let (mut largest, mut mass) = (vec![(0, 0.0); count], [0]);
        Largest { rows: &[row], width: logits.len(), count }.find(logits, &mut largest, &mut mass);
        (largest, mass[0])
    }

    proptest! {
        /// Oracle: the choices from all logits, one after the other, as counts and penalties grow. Where few don't decide is said, and is rare.
        #[test]
        fn the_largest_decide_as_all_do(
            logits in prop::collection::vec(-30i8..30, 40..700), prompt in prop::collection::vec(0u32..40, 0..9),
            bias in prop::collection::vec((0u32..2, -9i8..9), 0..4), mask in prop::option::of(prop::collection::vec(any::<u32>(), 22)),
            top_k in 0usize..40, top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0], min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            penalties: [bool; 3], greedy: bool, seed: u64,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(|l| if l == -1 { -0.0 } else { f32::from(l) / 4.0 }).collect();
            let penalty = |at: usize, value: f32| if penalties[at] { value } else { 0.0 };
            let infinite = |b: i8| if b.abs() == 8 { f32::from(b) * f32::INFINITY } else { f32::from(b) / 4.0 };
            let s = Sampling {
                temperature: if greedy { 0.0 } else { 0.3 },
                repetition_penalty: 1.0 + penalty(0, 0.3),
                presence_penalty: penalty(1, 0.25),
                frequency_penalty: penalty(2, -0.125),
                logit_bias: bias.into_iter().map(|(token, b)| (token, infinite(b))).collect(),
                top_k, top_p, min_p, seed, ..Sampling::default()
            };
            let mask = mask.as_deref().map(TokenMask);
            let (mut few, mut all) = (Sampler::new(s.clone(), &prompt), Sampler::new(s, &prompt));
            for position in 0..12 {
                let looks_at = few.looks_at().unwrap();
                let (largest, mass) = find(few.row(mask), &logits, looks_at.largest);
                let expected = next(&mut all, &logits, position, mask);
                match few.choose_of(&largest, mass, position) {
                    Some(choice) => prop_assert_eq!(Ok(choice), expected),
                    None => {
                        prop_assert!(expected.is_err() || looks_at.mass);
                        prop_assert_eq!(&next(&mut few, &logits, position, mask), &expected);
                        if expected.is_err() { break }
                    }
                }
            }
        }
    }

    /// Oracle: what each parameter looks at.
    #[test]
    fn what_looks_at_all_logits_says_so() {
        let looks_at = |s: Sampling| Sampler::new(s, &[]).looks_at();
        let some = |largest, mass| Some(LooksAt { largest, mass });
        let top = Sampling { top_k: 20, ..Sampling::default() };
        assert_eq!((looks_at(Sampling::greedy()), looks_at(top.clone())), (some(1, false), some(20, false)));
        assert_eq!(looks_at(Sampling { repetition_penalty: 1.1, ..top.clone() }), some(20, false));
        assert_eq!(looks_at(Sampling { logit_bias: vec![(1, 1.0)], ..top.clone() }), some(20, false));
        assert_eq!(looks_at(Sampling { top_k: 0, ..top.clone() }), some(MOST_LARGEST, true));
        assert_eq!(looks_at(Sampling { top_k: MOST_LARGEST + 1, ..top.clone() }), None);
        assert_eq!(looks_at(Sampling { logprobs: Some(0), ..top }), None);
    }

    /// Oracle: a distribution that few tokens hold nearly all of, so that they decide nearly always; and one that is flat, so that they rarely do.
    #[test]
    fn few_decide_where_they_hold_the_mass() {
        let decided = |step: f32, top_p: f32| {
            let logits: Vec<f32> = (0..2000).map(|t| -step * t as f32).collect();
            let mut sampler = Sampler::new(Sampling { top_p, ..Sampling::default() }, &[]);
            let (largest, mass) = find(sampler.row(None), &logits, MOST_LARGEST);
            (0..1000).filter(|&at| sampler.choose_of(&largest, mass, at).is_some()).count()
        };
        assert_eq!((decided(0.2, 1.0), decided(0.02, 0.9)), (1000, 1000));
        // e^-1.28 of the mass lies beyond the few.
        assert!((680..760).contains(&decided(0.01, 1.0)), "{}", decided(0.01, 1.0));
        assert_eq!(decided(0.01, 0.9), 0);
    }

    /// Oracle: the distribution itself, over many positions.
    #[test]
    fn frequencies_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let s = Sampling { seed: 3, ..Sampling::default() };
        let n = 40_000;
        let mut counts = [0; 4];
        for p in 0..n {
            counts[choose(s.clone(), &logits, p) as usize] += 1;
        }
        let sum: f32 = logits.iter().map(|l| l.exp()).sum();
        for (count, l) in counts.iter().zip(logits) {
            let (got, want) = (*count as f32 / n as f32, l.exp() / sum);
            assert!((got - want).abs() < 0.01, "{got} {want}");
        }
    }

    /// Oracle: the documented meaning of each penalty, by hand.
    #[test]
    fn penalties_bias_and_mask_move_the_choice() {
        let logits = [2.0f32, 1.9, -1.0];
        let greedy = Sampling::greedy();
        let of =
            |s: Sampling, prompt: &[u32]| next(&mut Sampler::new(s, prompt), &logits, 0, None).unwrap().token;
        assert_eq!(of(Sampling { repetition_penalty: 1.2, ..greedy.clone() }, &[0]), 1);
        // A prompt's tokens aren't answered ones.
        assert_eq!(of(Sampling { presence_penalty: 1.0, ..greedy.clone() }, &[0]), 0);
        let mut s = Sampler::new(Sampling { frequency_penalty: 0.06, ..greedy.clone() }, &[]);
        let said: Vec<u32> = (0..4).map(|p| next(&mut s, &logits, p, None).unwrap().token).collect();
        assert_eq!(said, [0, 0, 1, 0]);
        assert_eq!(of(Sampling { logit_bias: vec![(2, 4.0)], ..greedy.clone() }, &[]), 2);
        let mut s = Sampler::new(greedy, &[]);
        assert_eq!(next(&mut s, &logits, 0, Some(TokenMask(&[0b110]))).unwrap().token, 1);
        assert_eq!(next(&mut s, &logits, 5, Some(TokenMask(&[0]))), Err(SampleError::NothingAllowed(5)));
        let logit_bias = (0..logits.len() as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
        let mut s = Sampler::new(Sampling { logit_bias, ..Sampling::greedy() }, &[]);
        let left = next(&mut s, &logits, 5, None).unwrap_err();
        assert!(left == SampleError::NothingLeft(5) && left.to_string().contains("bias"), "{left}");
        assert_eq!(next(&mut s, &[f32::NAN; 3], 6, None), Err(SampleError::NothingLeft(6)));
    }

    /// Oracle: log softmax in f64.
    #[test]
    fn logprobs_are_the_models_own() {
        let logits = [0.5f32, 2.0, -1.0, 2.0];
        let s = Sampling {
            logprobs: Some(2),
            temperature: 0.0,
            logit_bias: vec![(0, 9.0)],
            ..Sampling::default()
        };
        let c = next(&mut Sampler::new(s, &[]), &logits, 0, None).unwrap();
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert_eq!(c.token, 0);
        assert!((f64::from(c.logprob.unwrap()) - (0.5 - sum.ln())).abs() < 1e-6);
        assert_eq!(c.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3]);
    }
}
