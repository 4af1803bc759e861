//! IQ3_S: 256 values as 64 signed rows of a grid of 512 rows of 4 values, odd scales per 32, an f16 scale.
//!
//! Bytes: `d` 0..2, low 8 bits of the grid indices 2..66, their high bits 66..74, sign bits 74..106, scales
//! 106..110, two nibbles in a byte.

use super::grids::IQ3_S;
use super::{half, signed};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq3S;

impl BlockFormat for Iq3S {
    const LEN: usize = 256;
    const BYTES: usize = 110;

    fn term(block: &[u8], i: usize) -> Term {
        let high = block[66 + i];
        let w = std::array::from_fn(|j| {
            let index = usize::from(block[2 + 8 * i + j / 4]) | usize::from(high >> (j / 4) & 1) << 8;
            signed(IQ3_S[index].to_le_bytes()[j % 4], block[74 + 4 * i + j / 8], j % 8)
        });
        let scale = block[106 + i / 2] >> (i % 2 * 4) & 15;
        Term { s: [2 * i32::from(scale) + 1; 2], ..Term::plain(half(block, 0), w) }
    }
}
