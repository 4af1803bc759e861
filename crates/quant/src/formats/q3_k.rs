//! Q3_K: 256 values of 3 bits less 4, 6-bit scales less 32 per 16, an f16 scale.
//!
//! Bytes: high bits 0..32 (bit `t` of byte `i` for value `i` of the `t`-th 32), low two bits 32..96,
//! scales 96..108 (8 bytes with two low nibbles each, 4 bytes with four high bit pairs each), `d` 108..110.

use super::{half, two_bits};
use crate::block::{BlockFormat, Term};

pub(crate) struct Q3K;

impl BlockFormat for Q3K {
    const LEN: usize = 256;
    const BYTES: usize = 110;

    fn term(block: &[u8], i: usize) -> Term {
        let scale = |j: usize| {
            let low = block[96 + j % 8] >> (j / 8 * 4) & 15;
            let high = block[104 + j % 4] >> (j / 4 * 2) & 3;
            i32::from(low | high << 4) - 32
        };
        let w = std::array::from_fn(|j| {
            let high = block[j] >> i & 1;
            (two_bits(&block[32..], i, j) | high << 2) as i8 - 4
        });
        Term { s: [scale(2 * i), scale(2 * i + 1)], ..Term::plain(half(block, 108), w) }
    }
}
