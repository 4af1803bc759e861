//! IQ1_M: 256 values as 32 rows of the grid of IQ1_S, shifted by 1/8 up or down per 8, odd scales per 16, an
//! f16 scale. In eighths the values are the integers `8 g +- 1`.
//!
//! Bytes: low 8 bits of the grid indices 0..32, nibbles 32..48 (the high 3 bits of an index, the shift's
//! sign), words 48..56: four scales of 3 bits each, and in their highest nibbles the f16.

use super::grids::IQ1;
use super::word;
use crate::block::{BlockFormat, Term};
use crate::math::f16_to_f32;

pub(crate) struct Iq1M;

/// The bits of the f16 scale, scattered over four words.
fn scale_bits(block: &[u8]) -> u16 {
    (0..4).fold(0, |bits, i| bits | word(block, 48 + 2 * i) >> 12 << (4 * i))
}

impl BlockFormat for Iq1M {
    const LEN: usize = 256;
    const BYTES: usize = 56;

    fn term(block: &[u8], i: usize) -> Term {
        let scale = |j: usize| 2 * i32::from(word(block, 48 + j / 4 * 2) >> (j % 4 * 3) & 7) + 1;
        let w = std::array::from_fn(|j| {
            let group = 4 * i + j / 8;
            let high = block[32 + group / 2] >> (group % 2 * 4) & 15;
            let index = usize::from(block[group]) | usize::from(high & 7) << 8;
            8 * (IQ1[index].to_le_bytes()[j % 8] as i8) + if high >> 3 == 1 { -1 } else { 1 }
        });
        Term { s: [scale(2 * i), scale(2 * i + 1)], ..Term::plain(f16_to_f32(scale_bits(block)) / 8.0, w) }
    }
}
