//! One sequence's sampler: its parameters, and how often each token has occurred.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use strata_quant::{Isa, dispatch, math};

use super::{Sampling, uniform};

/// Tokens that are sorted at first, and the most that [`Sampler::decided_by`] says.
const FEW: usize = 256;

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

#[derive(Debug, Clone, Copy, Default)]
struct Occurrences {
    anywhere: bool,
    answered: u32,
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
    seen: BTreeMap<u32, Occurrences>,
}

impl Sampler {
    /// A sampler whose sequence holds `prompt` so far. The parameters must have been validated.
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Self {
        let mut seen = BTreeMap::<u32, Occurrences>::new();
        for &token in prompt {
            seen.entry(token).or_default().anywhere = true;
        }
        Sampler { sampling, seen }
    }

    /// How many of the largest logits decide, whatever the others are; nothing if all may have a say, or are asked for.
    pub fn decided_by(&self) -> Option<usize> {
        let s = &self.sampling;
        let as_they_are =
            s.repetition_penalty == 1.0 && s.presence_penalty == 0.0 && s.frequency_penalty == 0.0;
        if !as_they_are || !s.logit_bias.is_empty() || s.logprobs.is_some() {
            return None;
        }
        if self.is_greedy() { Some(1) } else { Some(s.top_k).filter(|k| (1..=FEW).contains(k)) }
    }

    /// Whether the largest logit is chosen.
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// As [`Sampler::choose`], from the [`Sampler::decided_by`] largest logits, in order and finite, or more of them.
    pub fn choose_of(&mut self, largest: &[(u32, f32)], position: usize) -> Result<Choice, SampleError> {
        let (first, max) = *largest.first().ok_or(SampleError::NothingLeft(position))?;
        let few = &largest[..largest.len().min(self.sampling.top_k.max(1))];
        let pick = || self.pick(few.iter().copied(), few.len(), None, max, position);
        let token = if self.is_greedy() { first } else { pick().unwrap_or(first) };
        self.count(token);
        Ok(Choice { token, logprob: None, top: Vec::new() })
    }

    fn count(&mut self, token: u32) {
        let seen = self.seen.entry(token).or_default();
        seen.anywhere = true;
        seen.answered += 1;
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
        let s = &self.sampling;
        adjusted.clear();
        adjusted.extend(logits.iter().map(|l| if l.is_nan() { f32::NEG_INFINITY } else { *l }));
        for (&token, seen) in &self.seen {
            let Some(logit) = adjusted.get_mut(token as usize) else { continue };
            if seen.anywhere && s.repetition_penalty != 1.0 {
                *logit =
                    if *logit > 0.0 { *logit / s.repetition_penalty } else { *logit * s.repetition_penalty };
            }
            if seen.answered > 0 {
                *logit -= s.presence_penalty + s.frequency_penalty * seen.answered as f32;
            }
        }
        for &(token, bias) in &s.logit_bias {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit += bias;
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
        let top_k = self.sampling.top_k;
        let first = largest(logits)?;
        let max = logits[first as usize];
        // An infinite logit is certain; the lower of several.
        if max == f32::INFINITY {
            return Some(first);
        }
        order.clear();
        order.extend((0..logits.len() as u32).filter(|&t| logits[t as usize] > f32::NEG_INFINITY));
        let limit = if top_k == 0 { order.len() } else { top_k.min(order.len()) };
        // With no top-k the mass is that of all tokens, in id order, whatever part of the order gets sorted below.
        let whole = (top_k == 0).then(|| mass(isa, logits, max, self.sampling.temperature));

        // Sorting a whole vocabulary costs more than the draw is worth: sort a prefix that holds the mass sought.
        let mut sorted = limit.min(FEW);
        loop {
            sort_prefix(order, sorted, logits);
            let prefix = order[..sorted].iter().map(|&t| (t, logits[t as usize]));
            match self.pick(prefix, limit, whole, max, position) {
                None => sorted = (sorted * 8).min(limit),
                token => return token,
            }
        }
    }

    /// A logit's probability relative to the largest one's.
    fn weight(&self, logit: f32, max: f32) -> f64 {
        f64::from(math::exp((logit - max) / self.sampling.temperature))
    }

    /// Draws from the first of `limit` tokens, in order with their logits; nothing if those to draw from may go on behind them. `whole` is
    /// the mass that top-p is a part of, if it isn't theirs.
    fn pick(
        &self,
        prefix: impl ExactSizeIterator<Item = (u32, f32)> + Clone,
        limit: usize,
        whole: Option<f64>,
        max: f32,
        position: usize,
    ) -> Option<u32> {
        let Sampling { top_p, min_p, seed, .. } = self.sampling;
        let weights = prefix.clone().map(|(_, logit)| self.weight(logit, max));
        let total = whole.unwrap_or_else(|| weights.clone().sum());
        let floor = f64::from(min_p);
        let (mut kept, mut sum) = (0, 0.0);
        for w in weights.clone() {
            if kept > 0 && (sum >= f64::from(top_p) * total || w < floor) {
                break;
            }
            (kept, sum) = (kept + 1, sum + w);
        }
        if kept == prefix.len() && prefix.len() < limit {
            return None;
        }
        let target = uniform(seed, position as u64) * sum;
        let (mut reached, mut last) = (0.0, None);
        for ((token, _), w) in prefix.zip(weights).take(kept) {
            reached += w;
            last = Some(token);
            if target < reached {
                break;
            }
        }
        last
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
    /// The sum of `exp((logit - max) / temperature)`, ascending, in f64. What isn't a number adds nothing.
    fn mass(isa, logits: &[f32], max: f32, temperature: f32) -> f64 {
        let (mut sum, mut weights) = (0.0, [0.0f32; 256]);
        for part in logits.chunks(weights.len()) {
            for (weight, &logit) in weights.iter_mut().zip(part) {
                let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
                *weight = math::exp((logit - max) / temperature);
            }
            sum = weights[..part.len()].iter().fold(sum, |sum, &weight| sum + f64::from(weight));
        }
        sum
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
    let log_sum = mass(isa, logits, max, 1.0).ln();
    let log = |t: u32| ((f64::from(logits[t as usize]) - f64::from(max)) - log_sum) as f32;
    order.clear();
    order.extend((0..logits.len() as u32).filter(|&t| !logits[t as usize].is_nan()));
    let n = n.min(order.len());
    sort_prefix(order, n, logits);
    (log(token), order[..n].iter().map(|&t| (t, log(t))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        let w = |t: u32| f64::from(math::exp((logits[t as usize] - max) / s.temperature));
        let total: f64 = order.iter().map(|&t| w(t)).sum();
        let mut kept = Vec::new();
        let mut sum = 0.0;
        for &t in &order {
            if !kept.is_empty() && (sum >= f64::from(s.top_p) * total || w(t) < f64::from(s.min_p)) {
                break;
            }
            sum += w(t);
            kept.push(t);
        }
        let target = uniform(s.seed, position as u64) * sum;
        let mut reached = 0.0;
        kept.iter()
            .copied()
            .find(|&t| {
                reached += w(t);
                target < reached
            })
            .unwrap_or(kept[kept.len() - 1])
    }

    proptest! {
        #[test]
        fn draws_as_the_slow_sampler_does(
            logits in prop::collection::vec(-8i8..8, 1..700),
            top_k in 0usize..20, top_p in 0.05f32..1.0, min_p in 0.0f32..0.5, seed: u64, position in 0usize..1000,
        ) {
            // Quarters tie often.
            let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) / 4.0).collect();
            let s = Sampling { temperature: 0.7, top_k, top_p, min_p, seed, ..Sampling::default() };
            prop_assert_eq!(choose(s.clone(), &logits, position), slow(&s, &logits, position));
        }
    }

    proptest! {
        /// Oracle: the choice from all logits. The largest are found as a device does: those of equal value by the lower id, and for
        /// greedy zeros of either sign are equal.
        #[test]
        fn the_largest_decide_as_all_do(
            logits in prop::collection::vec(-3i8..3, 1..700), k in 1usize..40,
            top_p in 0.05f32..1.0, min_p in 0.0f32..0.5, greedy: bool, seed: u64, position in 0usize..1000,
        ) {
            let logits: Vec<f32> =
                logits.into_iter().map(|l| if l == -1 { -0.0 } else { f32::from(l) / 4.0 }).collect();
            let temperature = if greedy { 0.0 } else { 0.7 };
            let s = Sampling { temperature, top_k: k, top_p, min_p, seed, ..Sampling::default() };
            let mut sampler = Sampler::new(s.clone(), &[]);
            let decided_by = sampler.decided_by().unwrap();
            prop_assert_eq!(decided_by, if greedy { 1 } else { k });
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            let value = |t: u32| if greedy { logits[t as usize] + 0.0 } else { logits[t as usize] };
            order.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(a.cmp(&b)));
            let few: Vec<_> = order.iter().take(decided_by).map(|&t| (t, value(t))).collect();
            let token = sampler.choose_of(&few, position).unwrap().token;
            prop_assert_eq!(token, choose(s, &logits, position));
        }
    }

    /// Oracle: what each parameter looks at.
    #[test]
    fn what_looks_at_all_logits_says_so() {
        let decided = |s: Sampling| Sampler::new(s, &[]).decided_by();
        let top = Sampling { top_k: 20, ..Sampling::default() };
        assert_eq!((decided(Sampling::greedy()), decided(top.clone())), (Some(1), Some(20)));
        for s in [
            Sampling { top_k: 0, ..top.clone() },
            Sampling { top_k: 257, ..top.clone() },
            Sampling { repetition_penalty: 1.1, ..top.clone() },
            Sampling { presence_penalty: 0.1, ..top.clone() },
            Sampling { frequency_penalty: 0.1, ..top.clone() },
            Sampling { logit_bias: vec![(1, 1.0)], ..top.clone() },
            Sampling { logprobs: Some(0), ..top },
        ] {
            assert_eq!(decided(s), None);
        }
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
        s.sampling.logit_bias = (0..logits.len() as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
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
