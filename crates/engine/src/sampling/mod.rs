//! Choosing the next token from logits.
//!
//! A choice is a pure function of the logits, the sequence's own tokens and (seed, position): never of the batch, of
//! earlier draws, or of the backend. The order is fixed: penalties, bias, mask, temperature, top-k, top-p, min-p, draw.
//! Equal logits are ordered by the lower token id. Probabilities are whole numbers ([`strata_backend::mass`]), whose sums no order
//! changes, so that the same logits give the same choice everywhere.

mod philox;
mod sampler;

pub use philox::uniform;
pub use sampler::{Choice, LooksAt, SampleError, Sampler, Scratch, TokenMask};

/// How the next token is chosen.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Only the so many most probable tokens; 0 for all.
    pub top_k: usize,
    /// Only the most probable tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most probable one; 0 for all.
    pub min_p: f32,
    /// Positive logits of tokens already in the sequence are divided by this, negative ones multiplied; 1 for none.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens already answered.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens already answered, once per occurrence.
    pub frequency_penalty: f32,
    /// Added to single tokens' logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// The draw at a position depends on this and the position only.
    pub seed: u64,
    /// Report the chosen token's log-probability and those of the so many most probable tokens.
    pub logprobs: Option<usize>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{parameter} is {value}, but must be {range}")]
pub struct SamplingError {
    /// Which.
    pub parameter: &'static str,
    /// What was given.
    pub value: String,
    /// What is possible.
    pub range: String,
}

impl Sampling {
    /// The largest logit always.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Checks every parameter's range, for a vocabulary of `vocab` tokens.
    pub fn validate(&self, vocab: usize) -> Result<(), SamplingError> {
        let check = |parameter, value: f32, ok: bool, range: &str| {
            if ok {
                Ok(())
            } else {
                Err(SamplingError { parameter, value: value.to_string(), range: range.into() })
            }
        };
        let t = self.temperature;
        check("temperature", t, t >= 0.0 && t.is_finite(), "at least 0 and finite")?;
        check("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1")?;
        let r = self.repetition_penalty;
        check("repetition_penalty", r, r > 0.0 && r.is_finite(), "above 0 and finite")?;
        check("presence_penalty", self.presence_penalty, self.presence_penalty.is_finite(), "finite")?;
        check("frequency_penalty", self.frequency_penalty, self.frequency_penalty.is_finite(), "finite")?;
        for &(token, bias) in &self.logit_bias {
            if bias.is_nan() {
                let value = format!("NaN for token {token}");
                return Err(SamplingError { parameter: "logit_bias", value, range: "a number".into() });
            }
            if token as usize >= vocab {
                let range = format!("for token ids below {vocab}");
                return Err(SamplingError {
                    parameter: "logit_bias",
                    value: format!("for token {token}"),
                    range,
                });
            }
        }
        Ok(())
    }
}
