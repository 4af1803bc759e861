//! IQ2_XS: 256 values as 32 signed rows of a grid of 512 rows of 8 values, odd scales per 16, an f16 scale
//! (an eighth).
//!
//! Bytes: `d` 0..2, words 2..66 of 9 index and 7 sign bits, scales 66..74, two nibbles in a byte.

use super::grids::IQ2_XS;
use super::{even_signs, half, signed, word};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq2Xs;

impl BlockFormat for Iq2Xs {
    const LEN: usize = 256;
    const BYTES: usize = 74;

    fn term(block: &[u8], i: usize) -> Term {
        let scales = block[66 + i];
        let w = std::array::from_fn(|j| {
            let packed = word(block, 2 + 8 * i + j / 8 * 2);
            let grid = IQ2_XS[usize::from(packed & 511)].to_le_bytes();
            signed(grid[j % 8], even_signs(u32::from(packed >> 9)), j % 8)
        });
        let s = [scales & 15, scales >> 4].map(|s| 2 * i32::from(s) + 1);
        Term { s, ..Term::plain(half(block, 0) / 8.0, w) }
    }
}
