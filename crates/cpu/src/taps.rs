//! Causal depthwise convolutions: the rows that one output row looks at, and their weighted sum.
//!
//! Rounding: taps accumulate by FMA from zero, oldest first.

use crate::strip::{STRIP, Strip};

/// Most taps of a convolution.
pub(crate) const MOST_TAPS: usize = 16;

/// The input rows of one output row, oldest first, and their taps.
pub(crate) struct Taps<'a> {
    rows: [&'a [f32]; MOST_TAPS],
    /// `[kernel][channels]`
    taps: &'a [f32],
    channels: usize,
}

impl<'a> Taps<'a> {
    /// For row `t` of `input`, `[rows][channels]`; `history` has the `(kernel - 1) * dilation` rows before it.
    #[inline(always)]
    pub(crate) fn new(
        history: &'a [f32],
        input: &'a [f32],
        taps: &'a [f32],
        channels: usize,
        t: usize,
        dilation: usize,
    ) -> Self {
        let mut rows: [&[f32]; MOST_TAPS] = [&[]; MOST_TAPS];
        for (j, row) in rows.iter_mut().enumerate().take(taps.len() / channels) {
            let at = (t + j * dilation) * channels;
            let row_at = |rows: &'a [f32], at: usize| &rows[at..at + channels];
            *row = if at < history.len() { row_at(history, at) } else { row_at(input, at - history.len()) };
        }
        Taps { rows, taps, channels }
    }

    /// The convolution of `len` (at most 16) channels from `first` on; the others' places hold nothing of use.
    #[inline(always)]
    pub(crate) fn convolve(&self, first: usize, len: usize) -> Strip {
        let mut acc = [0.0; STRIP];
        for (row, taps) in self.rows.iter().zip(self.taps.chunks_exact(self.channels)) {
            let (row, taps) = (&row[first..first + len], &taps[first..first + len]);
            match (row.first_chunk::<STRIP>(), taps.first_chunk::<STRIP>()) {
                (Some(row), Some(taps)) => {
                    for c in 0..STRIP {
                        acc[c] = taps[c].mul_add(row[c], acc[c]);
                    }
                }
                _ => {
                    for ((acc, &tap), &row) in acc.iter_mut().zip(taps).zip(row) {
                        *acc = tap.mul_add(row, *acc);
                    }
                }
            }
        }
        acc
    }
}
