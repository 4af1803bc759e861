//! IQ4_XS: 256 nibbles into the table of IQ4_NL, 6-bit scales less 32 per 32, an f16 scale.
//!
//! Bytes: `d` 0..2, the scales' high bit pairs 2..4, their low nibbles 4..8, nibbles 8..136 (of each 16 bytes
//! the low ones, then the high ones).

use super::{IQ4_VALUES, half, nibbles, word};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const LEN: usize = 256;
    const BYTES: usize = 136;

    fn term(block: &[u8], i: usize) -> Term {
        let low = i32::from(block[4 + i / 2] >> (i % 2 * 4) & 15);
        let high = i32::from(word(block, 2) >> (2 * i) & 3);
        let w = std::array::from_fn(|j| IQ4_VALUES[usize::from(nibbles(&block[8 + 16 * i..], j))]);
        Term { s: [(low | high << 4) - 32; 2], ..Term::plain(half(block, 0), w) }
    }
}
