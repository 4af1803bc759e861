//! IQ1_S: 256 values as 32 rows of a grid of 2048 rows of 8 values in -1..=1, shifted by 1/8 up or down per
//! 32, odd scales per 32, an f16 scale. In eighths the values are the integers `8 g +- 1`.
//!
//! Bytes: `d` 0..2, low 8 bits of the grid indices 2..34, words 34..50, one per 32 values: four times the
//! high 3 bits of an index, the scale's 3 bits, the shift's sign.

use super::grids::IQ1;
use super::{half, word};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq1S;

impl BlockFormat for Iq1S {
    const LEN: usize = 256;
    const BYTES: usize = 50;

    fn term(block: &[u8], i: usize) -> Term {
        let high = word(block, 34 + 2 * i);
        let shift = if high >> 15 == 1 { -1 } else { 1 };
        let w = std::array::from_fn(|j| {
            let index = usize::from(block[2 + 4 * i + j / 8]) | usize::from(high >> (j / 8 * 3) & 7) << 8;
            8 * (IQ1[index].to_le_bytes()[j % 8] as i8) + shift
        });
        Term { s: [2 * i32::from(high >> 12 & 7) + 1; 2], ..Term::plain(half(block, 0) / 8.0, w) }
    }
}
