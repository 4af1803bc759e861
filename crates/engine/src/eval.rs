//! How well a model predicts a text, and how far two models are from each other on it.
//!
//! The convention: the text is cut into windows of N tokens, each read into an empty sequence with nothing put in front.
//! The first half of a window is only context; the logits at N/2 to N-2 score the tokens N/2+1 to N-1. What is left of the
//! text behind the last whole window is not used.
//!
//! Owns the arithmetic (in f64) and the order in which two models read, so that memory stays bounded: only a few rows of
//! logits are held at a time, whatever the window and the vocabulary.
//!
//! Invariant: figures depend on the logits and the convention only, not on how many rows are read together.

use std::path::PathBuf;

use crate::engine::{Engine, Wants};
use crate::error::EngineError;
use crate::event::SeqId;

/// Rows of logits that are held while the other model reads the same tokens.
const ROWS_TOGETHER: usize = 32;

/// Why a text can't be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A window without a token to score.
    #[error("a window of {0} tokens has none to score: it must have at least 3")]
    Window(usize),
    /// A limit of no windows.
    #[error("0 windows are asked for: there must be at least 1")]
    NoWindows,
    /// Less text than one window.
    #[error(
        "the text has {tokens} tokens, fewer than one window of {window}: give a longer text or a smaller --context"
    )]
    TooShort {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
    /// Two models with different numbers of tokens.
    #[error("the models can't be compared: one has {0} tokens in its vocabulary, the other {1}")]
    Vocabularies(usize, usize),
    /// Logits that no probability follows from.
    #[error(
        "{}: its logits give token {at} of the text no probability: the model file is damaged, or its values overflow",
        .file.display()
    )]
    NoProbability {
        /// The model's file.
        file: PathBuf,
        /// The scored token's place in the text.
        at: usize,
    },
}

/// How a text is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Tokens of a window.
    pub window: usize,
    /// Windows to use at most.
    pub limit: Option<usize>,
}

impl Cut {
    /// How many windows of a text of `tokens` tokens are used.
    ///
    /// # Errors
    /// If that is none, or a window scores nothing.
    pub fn windows(&self, tokens: usize) -> Result<usize, EvalError> {
        if self.window < 3 {
            return Err(EvalError::Window(self.window));
        }
        if self.limit == Some(0) {
            return Err(EvalError::NoWindows);
        }
        match (tokens / self.window).min(self.limit.unwrap_or(usize::MAX)) {
            0 => Err(EvalError::TooShort { tokens, window: self.window }),
            windows => Ok(windows),
        }
    }

    /// Tokens that each window scores.
    pub fn scored(&self) -> usize {
        self.window - 1 - self.window / 2
    }
}

/// Perplexity over the tokens scored so far.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Perplexity {
    /// The exponential of the mean negative log-likelihood.
    pub value: f64,
    /// Its standard error, by the spread of the single tokens: `value * s / sqrt(n)`, s² the sample variance. NaN, and null in
    /// JSON, for a single token, which has no spread; likewise all errors here.
    pub error: f64,
    /// Tokens scored.
    pub tokens: u64,
}

/// Negative log-likelihoods: their mean and their squared distances from it, updated one by one (Welford), so that a small
/// spread around a large mean isn't lost.
#[derive(Debug, Clone, Copy, Default)]
struct Likelihood {
    mean: f64,
    distances: f64,
    tokens: u64,
}

impl Likelihood {
    fn add(&mut self, nll: f64) {
        self.tokens += 1;
        let off = nll - self.mean;
        self.mean += off / self.tokens as f64;
        self.distances += off * (nll - self.mean);
    }

    fn perplexity(&self) -> Perplexity {
        let n = self.tokens as f64;
        let value = self.mean.exp();
        let variance = self.distances / (n - 1.0);
        let error = if self.tokens > 1 { value * (variance / n).sqrt() } else { f64::NAN };
        Perplexity { value, error, tokens: self.tokens }
    }
}

/// How values are spread.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The standard error of the mean.
    pub error: f64,
    /// The middle value.
    pub median: f64,
    /// 99 % of the values are not above it (interpolated between neighbours).
    pub percentile_99: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of some values, in any order; at least one.
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0);
        let quantile = |q: f64| {
            let at = q * (n - 1.0);
            let (low, part) = (at.floor() as usize, at.fract());
            let high = (low + 1).min(values.len() - 1);
            values[low] + part * (values[high] - values[low])
        };
        Spread {
            mean,
            error: (variance / n).sqrt(),
            median: quantile(0.5),
            percentile_99: quantile(0.99),
            max: quantile(1.0),
        }
    }
}

/// What two models say about the same text.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// The model's own perplexity.
    pub model: Perplexity,
    /// The other's.
    pub other: Perplexity,
    /// Kullback-Leibler divergence of the model from the other, nats per token: the sum of `q ln(q/p)`, where q is the
    /// other's distribution and p the model's.
    pub divergence: Spread,
    /// Share of tokens at which both find the same token most probable (of equal ones, the lower id).
    pub agreement: f64,
    /// The standard error of that share.
    pub agreement_error: f64,
}

/// What is known after a window.
#[derive(Debug, Clone, Copy)]
pub struct Passed {
    /// Windows read.
    pub windows: usize,
    /// Windows in all.
    pub of: usize,
    /// The model's perplexity so far.
    pub perplexity: Perplexity,
}

/// Told after every window.
pub type Observer<'o> = dyn FnMut(Passed) + 'o;

/// The natural logarithm of a softmax's denominator, less the largest logit, and the largest logit with its first place.
struct Normal {
    max: f64,
    log_sum: f64,
    top: usize,
}

impl Normal {
    /// Of a row of logits; `None` if it gives no probabilities.
    fn of(logits: &[f32]) -> Option<Normal> {
        let mut top = 0;
        for (token, &logit) in logits.iter().enumerate() {
            if logit.is_nan() {
                return None;
            }
            if logit > logits[top] {
                top = token;
            }
        }
        let max = f64::from(*logits.get(top)?);
        let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
        max.is_finite().then(|| Normal { max, log_sum: sum.ln(), top })
    }

    fn log_probability(&self, logit: f32) -> f64 {
        f64::from(logit) - self.max - self.log_sum
    }
}

/// The negative log-likelihood of `token`, and the row's norm.
fn score(logits: &[f32], token: u32) -> Option<(f64, Normal)> {
    let normal = Normal::of(logits)?;
    let nll = -normal.log_probability(*logits.get(token as usize)?);
    nll.is_finite().then_some((nll, normal))
}

/// The sum of `q ln(q/p)`; a token that q excludes adds nothing. Rounding can't make it negative.
fn divergence(p: &[f32], p_normal: &Normal, q: &[f32], q_normal: &Normal) -> f64 {
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let log_q = q_normal.log_probability(q);
        if log_q == f64::NEG_INFINITY { 0.0 } else { log_q.exp() * (log_q - p_normal.log_probability(p)) }
    });
    terms.sum::<f64>().max(0.0)
}

/// The perplexity of a text.
///
/// # Errors
/// If the text is shorter than a window, the engine fails, or the logits are broken.
pub fn perplexity(
    engine: &mut Engine,
    tokens: &[u32],
    cut: Cut,
    observer: &mut Observer<'_>,
) -> Result<Perplexity, EvalError> {
    let of = cut.windows(tokens.len())?;
    let mut likelihood = Likelihood::default();
    for (at, window) in tokens.chunks_exact(cut.window).take(of).enumerate() {
        let seq = engine.open()?;
        let read = read_alone(engine, seq, window, &mut likelihood);
        engine.close(seq)?;
        if let Some(place) = read? {
            return Err(no_probability(engine, at * cut.window + place));
        }
        observer(Passed { windows: at + 1, of, perplexity: likelihood.perplexity() });
    }
    Ok(likelihood.perplexity())
}

/// Both models' perplexity on a text, and how far the first is from the second.
///
/// # Errors
/// As [`perplexity`]; and if the models' vocabularies differ in size.
pub fn compare(
    engine: &mut Engine,
    other: &mut Engine,
    tokens: &[u32],
    cut: Cut,
    observer: &mut Observer<'_>,
) -> Result<Comparison, EvalError> {
    let of = cut.windows(tokens.len())?;
    let (own, its) = (engine.spec.shape.vocab, other.spec.shape.vocab);
    if own != its {
        return Err(EvalError::Vocabularies(own, its));
    }
    let mut pair = Pair::default();
    for (at, window) in tokens.chunks_exact(cut.window).take(of).enumerate() {
        let (seq, its_seq) = (engine.open()?, other.open()?);
        let read = read_together(engine, seq, other, its_seq, window, &mut pair);
        engine.close(seq)?;
        other.close(its_seq)?;
        if let Some((place, whose)) = read? {
            let broken = if whose == Whose::Model { engine } else { other };
            return Err(no_probability(broken, at * cut.window + place));
        }
        observer(Passed { windows: at + 1, of, perplexity: pair.model.perplexity() });
    }
    Ok(pair.comparison())
}

/// The error of a model whose logits for the token `at` are broken.
fn no_probability(engine: &Engine, at: usize) -> EvalError {
    EvalError::NoProbability { file: engine.model().gguf.path().to_owned(), at }
}

/// One of two models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    Model,
    Other,
}

/// Reads a window into an empty sequence and scores its second half. Returns the first token without a probability.
fn read_alone(
    engine: &mut Engine,
    seq: SeqId,
    window: &[u32],
    likelihood: &mut Likelihood,
) -> Result<Option<usize>, EngineError> {
    let half = window.len() / 2;
    let mut broken = None;
    engine.forward(seq, &window[..half], Wants::Nothing, &mut |_, _| ())?;
    engine.forward(seq, &window[half..window.len() - 1], Wants::All, &mut |row, logits| {
        let scored = half + row + 1;
        match score(logits, window[scored]) {
            Some((nll, _)) => likelihood.add(nll),
            None => broken = broken.or(Some(scored)),
        }
    })?;
    Ok(broken)
}

/// As [`read_alone`], with two models that take turns after every few rows; also says whose logits are broken.
fn read_together(
    engine: &mut Engine,
    seq: SeqId,
    other: &mut Engine,
    its_seq: SeqId,
    window: &[u32],
    pair: &mut Pair,
) -> Result<Option<(usize, Whose)>, EngineError> {
    let (half, end) = (window.len() / 2, window.len() - 1);
    let vocab = engine.spec.shape.vocab;
    let mut broken = None;
    let mut held = Vec::with_capacity(ROWS_TOGETHER * vocab);
    engine.forward(seq, &window[..half], Wants::Nothing, &mut |_, _| ())?;
    other.forward(its_seq, &window[..half], Wants::Nothing, &mut |_, _| ())?;
    for first in (half..end).step_by(ROWS_TOGETHER) {
        let tokens = &window[first..end.min(first + ROWS_TOGETHER)];
        held.clear();
        engine.forward(seq, tokens, Wants::All, &mut |_, logits| held.extend_from_slice(logits))?;
        other.forward(its_seq, tokens, Wants::All, &mut |row, q| {
            let scored = first + row + 1;
            let p = &held[row * vocab..(row + 1) * vocab];
            if let Err(whose) = pair.add(p, q, window[scored]) {
                broken = broken.or(Some((scored, whose)));
            }
        })?;
    }
    Ok(broken)
}

/// What accumulates over a pair of models.
#[derive(Default)]
struct Pair {
    model: Likelihood,
    other: Likelihood,
    divergences: Vec<f64>,
    agreed: u64,
}

impl Pair {
    /// Scores a token by both models' logits, or says whose give no probability.
    fn add(&mut self, p: &[f32], q: &[f32], token: u32) -> Result<(), Whose> {
        let (p_nll, p_normal) = score(p, token).ok_or(Whose::Model)?;
        let (q_nll, q_normal) = score(q, token).ok_or(Whose::Other)?;
        self.model.add(p_nll);
        self.other.add(q_nll);
        self.divergences.push(divergence(p, &p_normal, q, &q_normal));
        self.agreed += u64::from(p_normal.top == q_normal.top);
        Ok(())
    }

    fn comparison(self) -> Comparison {
        let n = self.divergences.len() as f64;
        let agreement = self.agreed as f64 / n;
        Comparison {
            model: self.model.perplexity(),
            other: self.other.perplexity(),
            divergence: Spread::of(self.divergences),
            agreement,
            agreement_error: (agreement * (1.0 - agreement) / (n - 1.0)).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
    }

    /// Oracle: the convention, counted by hand.
    #[test]
    fn windows_and_scored_tokens_are_counted() {
        let cut = Cut { window: 512, limit: Some(40) };
        assert_eq!(cut.windows(512 * 50).unwrap(), 40);
        assert_eq!(cut.windows(1023).unwrap(), 1);
        assert_eq!(cut.scored(), 255);
        assert_eq!(Cut { window: 3, limit: None }.scored(), 1);
        assert!(matches!(cut.windows(511), Err(EvalError::TooShort { tokens: 511, window: 512 })));
        assert!(matches!(Cut { window: 2, limit: None }.windows(9), Err(EvalError::Window(2))));
        assert!(matches!(Cut { window: 4, limit: Some(0) }.windows(9), Err(EvalError::NoWindows)));
    }

    /// Oracle: softmax written out.
    #[test]
    fn likelihoods_are_log_softmax() {
        let logits = [1.0f32, -2.0, 0.5, 1.0];
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let (nll, normal) = score(&logits, 2).unwrap();
        assert!(close(nll, sum.ln() - 0.5));
        assert_eq!(normal.top, 0);
        assert!(score(&[0.0, f32::NAN], 0).is_none());
        assert!(score(&[f32::NEG_INFINITY; 2], 0).is_none());
        assert!(score(&[f32::INFINITY, 0.0], 1).is_none());
        assert!(score(&logits, 4).is_none());
    }

    /// Oracle: a uniform model over V tokens has perplexity V with no spread; two different values, by hand.
    #[test]
    fn perplexity_of_known_likelihoods() {
        let mut uniform = Likelihood::default();
        (0..10).for_each(|_| uniform.add(64f64.ln()));
        let perplexity = uniform.perplexity();
        assert!(close(perplexity.value, 64.0) && perplexity.error < 1e-6 && perplexity.tokens == 10);

        let mut two = Likelihood::default();
        two.add(1.0);
        two.add(3.0);
        let perplexity = two.perplexity();
        // Mean 2, sample variance 2, standard error 1.
        assert!(close(perplexity.value, 2f64.exp()) && close(perplexity.error, 2f64.exp()));
    }

    /// Oracle: the definition over two tokens; zero for equal distributions, whatever constant is added to the logits.
    #[test]
    fn divergence_of_known_distributions() {
        let p = [0.0f32, 0.0];
        let q = [3f32.ln(), 0.0];
        let (pn, qn) = (Normal::of(&p).unwrap(), Normal::of(&q).unwrap());
        let expected = 0.75 * (0.75f64 / 0.5).ln() + 0.25 * (0.25f64 / 0.5).ln();
        assert!((divergence(&p, &pn, &q, &qn) - expected).abs() < 1e-7);
        let shifted = [q[0] + 7.0, q[1] + 7.0];
        let sn = Normal::of(&shifted).unwrap();
        assert!(divergence(&shifted, &sn, &q, &qn) < 1e-6);
        let sure = [0.0, f32::NEG_INFINITY];
        let sure_normal = Normal::of(&sure).unwrap();
        assert!(close(divergence(&p, &pn, &sure, &sure_normal), 2f64.ln()));
        assert_eq!(divergence(&sure, &sure_normal, &p, &pn), f64::INFINITY);
    }

    /// Oracle: order statistics of 0 to 100.
    #[test]
    fn spread_of_known_values() {
        let spread = Spread::of((0..=100).rev().map(f64::from).collect());
        assert_eq!((spread.mean, spread.median, spread.percentile_99, spread.max), (50.0, 50.0, 99.0, 100.0));
        let pair = Spread::of(vec![4.0, 2.0]);
        assert_eq!((pair.median, pair.error), (3.0, 1.0));
    }

    /// Oracle: counting by hand.
    #[test]
    fn agreement_counts_equal_tops() {
        let mut pair = Pair::default();
        pair.add(&[1.0, 0.0], &[2.0, 0.0], 0).unwrap();
        pair.add(&[1.0, 0.0], &[0.0, 2.0], 1).unwrap();
        assert_eq!(pair.add(&[f32::NAN, 0.0], &[0.0, 2.0], 1), Err(Whose::Model));
        assert_eq!(pair.add(&[1.0, 0.0], &[0.0, f32::NAN], 1), Err(Whose::Other));
        let comparison = pair.comparison();
        assert_eq!(
            (comparison.agreement, comparison.agreement_error, comparison.model.tokens),
            (0.5, 0.5, 2)
        );
    }
}
