//! Windows: the rows that pass through the layers together.
//!
//! A window holds rows of one or several sequences, each sequence's rows together and in order (a [`Span`]). It is a
//! transaction: ops read a sequence's committed state and write its pending state, and only [`crate::Backend::commit`]
//! makes the pending one the sequence's own.

use crate::{Checkpoint, SeqSlot};

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Whose tokens.
    pub slot: SeqSlot,
    /// The first row in the window.
    pub row: usize,
    /// How many rows.
    pub rows: usize,
    /// The first row's position: how many tokens of the sequence are committed.
    pub start: usize,
    /// Where to copy the recurrent state in passing, ascending.
    pub cuts: Vec<Cut>,
}

/// A position inside a span at which every layer's recurrent state is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// After this many rows of the span (1 to `rows`).
    pub after: usize,
    /// Where the copy goes.
    pub to: Checkpoint,
}

/// The rows that pass through the layers together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Token ids, one per row.
    pub tokens: Vec<u32>,
    /// The sequences' parts, in row order, covering all rows.
    pub spans: Vec<Span>,
}

impl Window {
    /// How many rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Adds the next tokens of a sequence and returns the span.
    pub fn push(&mut self, slot: SeqSlot, start: usize, tokens: &[u32]) -> &mut Span {
        let span = Span { slot, row: self.tokens.len(), rows: tokens.len(), start, cuts: Vec::new() };
        self.tokens.extend_from_slice(tokens);
        self.spans.push(span);
        self.spans.last_mut().expect("a span was pushed")
    }
}
