//! IQ2_XXS: 256 values as 32 signed rows of a grid of 256 rows of 8 values, odd scales per 32, an f16 scale
//! (an eighth).
//!
//! Bytes: `d` 0..2, then 8 bytes per 32 values: four grid indices, and a dword with four times 7 sign bits
//! and the scale's 4.

use super::grids::IQ2_XXS;
use super::{dword, even_signs, half, signed};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq2Xxs;

impl BlockFormat for Iq2Xxs {
    const LEN: usize = 256;
    const BYTES: usize = 66;

    fn term(block: &[u8], i: usize) -> Term {
        let indices = &block[2 + 8 * i..];
        let packed = dword(indices, 4);
        let w = std::array::from_fn(|j| {
            let grid = IQ2_XXS[usize::from(indices[j / 8])].to_le_bytes();
            signed(grid[j % 8], even_signs(packed >> (j / 8 * 7)), j % 8)
        });
        Term { s: [2 * (packed >> 28) as i32 + 1; 2], ..Term::plain(half(block, 0) / 8.0, w) }
    }
}
