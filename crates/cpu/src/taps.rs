//! Causal depthwise convolutions: the rows that one output row looks at, and their weighted sum.
//!
//! Rounding: taps accumulate by FMA from zero, oldest first.

use crate::strip::{STRIP, Strip};

/// Most taps of a convolution.
pub(crate) const MOST_TAPS: usize = 8;

/// Calls a function that is generic over the number of taps, from 1 to [`MOST_TAPS`].
macro_rules! with_taps {
    ($kernel:expr, $function:ident($($arg:expr),* $(,)?)) => {
        match $kernel {
            1 => $function::<1>($($arg),*),
            2 => $function::<2>($($arg),*),
            3 => $function::<3>($($arg),*),
            4 => $function::<4>($($arg),*),
            5 => $function::<5>($($arg),*),
            6 => $function::<6>($($arg),*),
            7 => $function::<7>($($arg),*),
            _ => $function::<{ $crate::taps::MOST_TAPS }>($($arg),*),
        }
    };
}
pub(crate) use with_taps;

/// What a convolution reads: `history` has the `(kernel - 1) * dilation` rows before `rows`, both `[..][channels]`, the taps
/// are `[kernel][channels]`.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) history: &'a [f32],
    pub(crate) rows: &'a [f32],
    pub(crate) taps: &'a [f32],
    pub(crate) channels: usize,
    pub(crate) dilation: usize,
}

/// The input rows of one output row, oldest first, and their taps.
pub(crate) struct Taps<'a, const K: usize> {
    rows: [&'a [f32]; K],
    taps: [&'a [f32]; K],
}

impl<'a, const K: usize> Taps<'a, K> {
    /// For output row `t`.
    #[inline(always)]
    pub(crate) fn new(input: Input<'a>, t: usize) -> Self {
        let Input { history, rows, taps, channels, dilation } = input;
        let mut out = Taps { rows: [&[]; K], taps: [&[]; K] };
        for j in 0..K {
            let at = (t + j * dilation) * channels;
            let (from, at) = if at < history.len() { (history, at) } else { (rows, at - history.len()) };
            out.rows[j] = &from[at..at + channels];
            out.taps[j] = &taps[j * channels..(j + 1) * channels];
        }
        out
    }

    /// The convolution of `len` (at most 16) channels from `first` on; the others' places hold nothing of use.
    #[inline(always)]
    pub(crate) fn convolve(&self, first: usize, len: usize) -> Strip {
        let mut acc = [0.0; STRIP];
        for j in 0..K {
            let (row, taps) = (&self.rows[j][first..first + len], &self.taps[j][first..first + len]);
            match (row.first_chunk::<STRIP>(), taps.first_chunk::<STRIP>()) {
                (Some(row), Some(taps)) => {
                    for c in 0..STRIP {
                        acc[c] = taps[c].mul_add(row[c], acc[c]);
                    }
                }
                _ => {
                    for c in 0..len {
                        acc[c] = taps[c].mul_add(row[c], acc[c]);
                    }
                }
            }
        }
        acc
    }
}
