//! What goes into the engine and what comes out of it.

use crate::sampling::{Sampling, TokenMask};

/// A sequence. Stays unique: the id of a closed sequence is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// Restricts the answer, token by token.
pub trait Constraint: Send {
    /// The tokens that may come next; asked for more than once, maybe.
    fn mask(&mut self) -> TokenMask<'_>;
    /// The token that came.
    fn accept(&mut self, token: u32);
}

/// Tokens to read, and how to answer them.
pub struct Request {
    /// Read after what the sequence holds already; not empty.
    pub prompt: Vec<u32>,
    /// Tokens to answer at most; `None` until the context is full.
    pub max_tokens: Option<usize>,
    /// How the answer's tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the answer and aren't part of it.
    pub stop: Vec<u32>,
    /// Lengths of the sequence at which to keep a checkpoint while the prompt is read.
    pub checkpoints: Vec<usize>,
    /// What the answer must look like.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// A request with the model's own end tokens as stops.
    pub fn new(prompt: Vec<u32>, sampling: Sampling, stop: &[u32]) -> Self {
        Request {
            prompt,
            max_tokens: None,
            sampling,
            stop: stop.to_vec(),
            checkpoints: Vec::new(),
            constraint: None,
        }
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A stop token was chosen.
    Stop(u32),
    /// `max_tokens` were answered.
    Length,
    /// The sequence has as many tokens as the context allows.
    Context,
    /// [`crate::Canceller::cancel`] was called.
    Cancelled,
    /// The window failed. The sequence holds what was committed before.
    Failed(String),
}

/// What a step brought.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Part of the prompt is read.
    Read {
        /// Whose.
        seq: SeqId,
        /// Prompt tokens read so far.
        read: usize,
        /// Prompt tokens in all.
        of: usize,
    },
    /// A token of the answer.
    Token {
        /// Whose.
        seq: SeqId,
        /// Its id.
        token: u32,
        /// Its log-probability, if asked for.
        logprob: Option<f32>,
        /// The most probable tokens at this place, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// The answer is finished; the sequence stays open.
    Done {
        /// Whose.
        seq: SeqId,
        /// Why.
        reason: Reason,
    },
}
