//! Windows: the rows that pass through the layers together.
//!
//! A window holds rows of one or several sequences, each sequence's rows together and in order (a [`Span`]). It is a
//! transaction: ops read a sequence's committed state and write its pending state, and only [`crate::Backend::commit`]
//! makes the pending one the sequence's own.

use crate::{Checkpoint, SeqSlot, Spec};

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

/// Checks a window's spans against what there is, and counts their rows. Backends do it before they touch a sequence's memory.
///
/// # Errors
/// A sentence: a span is out of order, of a sequence that there isn't, or longer than the context; or its cuts are.
pub fn check_spans(spec: &Spec, spans: &[Span]) -> Result<usize, String> {
    let mut rows = 0;
    for (i, span) in spans.iter().enumerate() {
        let twice = spans[..i].iter().any(|other| other.slot == span.slot);
        let end = span.start.checked_add(span.rows);
        let beyond = span.slot.0 as usize >= spec.sequences || end.is_none_or(|end| end > spec.context);
        let ascending = span.cuts.windows(2).all(|pair| pair[0].after < pair[1].after);
        let inside =
            |cut: &Cut| (1..=span.rows).contains(&cut.after) && (cut.to.0 as usize) < spec.checkpoints;
        let cut = ascending && span.cuts.iter().all(inside);
        if span.row != rows || span.rows == 0 || twice || beyond || !cut {
            return Err(format!("span {i} of the window is out of order or out of range: {span:?}"));
        }
        rows += span.rows;
    }
    if rows > spec.window.max(spec.sequences) {
        return Err(format!("a window of {rows} rows where there is room for {}", spec.window));
    }
    Ok(rows)
}
