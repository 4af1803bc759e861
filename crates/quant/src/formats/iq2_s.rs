//! IQ2_S: 256 values as 32 signed rows of a grid of 1024 rows of 8 values, odd scales per 16, an f16 scale
//! (an eighth).
//!
//! Bytes: `d` 0..2, low 8 bits of the grid indices 2..34, sign bits 34..66, high 2 bits of the indices 66..74
//! (four in a byte), scales 74..82, two nibbles in a byte.

use super::grids::IQ2_S;
use super::{half, signed};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq2S;

impl BlockFormat for Iq2S {
    const LEN: usize = 256;
    const BYTES: usize = 82;

    fn term(block: &[u8], i: usize) -> Term {
        let (high, scales) = (block[66 + i], block[74 + i]);
        let w = std::array::from_fn(|j| {
            let group = 4 * i + j / 8;
            let index = usize::from(block[2 + group]) | usize::from(high >> (j / 8 * 2) & 3) << 8;
            signed(IQ2_S[index].to_le_bytes()[j % 8], block[34 + group], j % 8)
        });
        let s = [scales & 15, scales >> 4].map(|s| 2 * i32::from(s) + 1);
        Term { s, ..Term::plain(half(block, 0) / 8.0, w) }
    }
}
