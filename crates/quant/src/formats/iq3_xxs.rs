//! IQ3_XXS: 256 values as 64 signed rows of a grid of 256 rows of 4 values, odd scales per 32, an f16 scale
//! (a quarter).
//!
//! Bytes: `d` 0..2, grid indices 2..66, dwords 66..98, one per 32 values: four times 7 sign bits and the
//! scale's 4.

use super::grids::IQ3_XXS;
use super::{dword, even_signs, half, signed};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq3Xxs;

impl BlockFormat for Iq3Xxs {
    const LEN: usize = 256;
    const BYTES: usize = 98;

    fn term(block: &[u8], i: usize) -> Term {
        let packed = dword(block, 66 + 4 * i);
        let w = std::array::from_fn(|j| {
            let grid = IQ3_XXS[usize::from(block[2 + 8 * i + j / 4])].to_le_bytes();
            signed(grid[j % 4], even_signs(packed >> (j / 8 * 7)), j % 8)
        });
        Term { s: [2 * (packed >> 28) as i32 + 1; 2], ..Term::plain(half(block, 0) / 4.0, w) }
    }
}
