//! Q5_K: 256 values of 5 bits, 6-bit scales and 6-bit minimums per 32, an f16 scale for each.
//!
//! Bytes: `d` 0..2, `d_min` 2..4, scales and minimums 4..16, fifth bits 16..48 (bit `t` of byte `i` for value
//! `i` of the `t`-th 32), nibbles 48..176 (of each 32 bytes the low ones, then the high ones).

use super::{half, scale_min_6};
use crate::block::{BlockFormat, Minimum, Term};

pub(crate) struct Q5K;

impl BlockFormat for Q5K {
    const LEN: usize = 256;
    const BYTES: usize = 176;
    const MINIMUM: Minimum = Minimum::Subtracted;

    fn term(block: &[u8], i: usize) -> Term {
        let (s, m) = scale_min_6(&block[4..16], i);
        let w = std::array::from_fn(|j| {
            let low = block[48 + i / 2 * 32 + j] >> (i % 2 * 4) & 15;
            (low | (block[16 + j] >> i & 1) << 4) as i8
        });
        Term { w, s: [s; 2], d: [half(block, 0); 2], m: [m; 2], d_min: half(block, 2) }
    }
}
