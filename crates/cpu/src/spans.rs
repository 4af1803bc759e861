//! A window's spans, in pieces that an op takes at a time.
//!
//! Owns the order: rows ascending, pieces of limited size, and a piece ends wherever a span is cut, so that the state
//! after a piece is what the cut's checkpoint wants.

use std::ops::Range;

use strata_backend::{Checkpoint, Layer, Span};

use crate::state::State;

/// Rows of one span inside a piece of the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Portion {
    /// Whose rows.
    pub(crate) slot: usize,
    /// The first row in the piece.
    pub(crate) row: usize,
    /// How many.
    pub(crate) rows: usize,
    /// Position of the first row.
    pub(crate) position: usize,
    /// The version of the state before these rows: the committed one for a span's first rows, then the pending one.
    pub(crate) from: usize,
    /// The pending version.
    pub(crate) to: usize,
    /// Where the state after these rows is to be copied.
    pub(crate) cut: Option<Checkpoint>,
}

/// A piece of a window, and the same as the arrays that regions are cut by. Reused.
pub(crate) struct Piece {
    /// The piece's rows, in the window.
    pub(crate) rows: Range<usize>,
    /// The spans' parts, in row order.
    pub(crate) portions: Vec<Portion>,
    /// Their slots.
    pub(crate) slots: Vec<u32>,
    /// The first row of each in the piece, and the end.
    pub(crate) bounds: Vec<u32>,
}

impl Piece {
    /// Bytes that [`Piece::new`] allocates.
    pub(crate) fn bytes(sequences: usize) -> usize {
        sequences * (size_of::<Portion>() + 4) + (sequences + 1) * 4
    }

    /// Room for the portions of so many sequences.
    pub(crate) fn new(sequences: usize) -> Piece {
        Piece {
            rows: 0..0,
            portions: Vec::with_capacity(sequences),
            slots: Vec::with_capacity(sequences),
            bounds: Vec::with_capacity(sequences + 1),
        }
    }

    /// Becomes the piece from row `first` on, of up to `most` rows, not beyond the next cut. False when there are no rows left.
    pub(crate) fn take(
        &mut self,
        state: &State,
        layer: Layer,
        spans: &[Span],
        first: usize,
        most: usize,
    ) -> bool {
        let cuts = spans.iter().flat_map(|span| span.cuts.iter().map(|cut| span.row + cut.after));
        let all = spans.last().map_or(0, |span| span.row + span.rows);
        let end = cuts.filter(|&end| end > first).fold(all.min(first + most), usize::min);
        self.rows = first..end;
        self.portions.clear();
        self.slots.clear();
        self.bounds.clear();
        self.bounds.push(0);
        for span in spans {
            let (start, end) = (span.row.max(first), (span.row + span.rows).min(end));
            if start >= end {
                continue;
            }
            let committed = state.committed(span.slot, layer);
            self.portions.push(Portion {
                slot: span.slot.0 as usize,
                row: start - first,
                rows: end - start,
                position: span.start + start - span.row,
                from: if start == span.row { committed } else { 1 - committed },
                to: 1 - committed,
                cut: span.cuts.iter().find(|cut| span.row + cut.after == end).map(|cut| cut.to),
            });
            self.slots.push(span.slot.0);
            self.bounds.push((end - first) as u32);
        }
        !self.rows.is_empty()
    }

    /// The portion of one of the piece's rows, and the row's position.
    pub(crate) fn position(&self, row: usize) -> (&Portion, usize) {
        let portion = &self.portions[self.bounds.partition_point(|&end| end as usize <= row) - 1];
        (portion, portion.position + row - portion.row)
    }
}
