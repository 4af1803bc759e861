//! One sequence: its committed tokens, its checkpoints, and the answer it is working on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use strata_backend::Checkpoint;

use crate::event::Constraint;
use crate::sampling::Sampler;

/// Ends an answer from another thread. Takes effect at the next layer boundary.
#[derive(Debug, Clone, Default)]
pub struct Canceller(Arc<AtomicBool>);

impl Canceller {
    /// Asks the answer to end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn renew(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// What a sequence is doing.
pub(crate) struct Task {
    /// What is to be read, all of it.
    pub prompt: Vec<u32>,
    /// How much of the prompt is committed.
    pub read: usize,
    /// Sequence lengths at which to keep a checkpoint, ascending.
    pub checkpoints: Vec<usize>,
    /// Tokens still to be answered.
    pub left: usize,
    pub stop: Vec<u32>,
    pub sampler: Sampler,
    pub constraint: Option<Box<dyn Constraint>>,
    /// Chosen, told, and not yet read.
    pub next: Option<u32>,
}

/// A sequence's host side. Its state lies in the backend.
pub(crate) struct Sequence {
    pub epoch: u32,
    /// Committed tokens.
    pub tokens: Vec<u32>,
    /// Kept recurrent states by the number of tokens they hold, ascending.
    pub checkpoints: Vec<(usize, Checkpoint)>,
    pub task: Option<Task>,
    pub canceller: Canceller,
}

impl Sequence {
    pub fn new(epoch: u32, tokens: Vec<u32>) -> Self {
        Sequence { epoch, tokens, checkpoints: Vec::new(), task: None, canceller: Canceller::default() }
    }
}

/// How many tokens two sequences begin with alike.
pub(crate) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
