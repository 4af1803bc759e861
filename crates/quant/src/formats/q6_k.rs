//! Q6_K: 256 values of 6 bits less 32, signed 8-bit scales per 16, an f16 scale.
//!
//! Bytes: low nibbles 0..128 (of each 64 bytes the low ones, then the high ones), high two bits 128..192,
//! scales 192..208, `d` 208..210.

use super::{half, two_bits};
use crate::block::{BlockFormat, Term};

pub(crate) struct Q6K;

impl BlockFormat for Q6K {
    const LEN: usize = 256;
    const BYTES: usize = 210;

    fn term(block: &[u8], i: usize) -> Term {
        let w = std::array::from_fn(|j| {
            let low = block[i / 4 * 64 + i % 2 * 32 + j] >> (i % 4 / 2 * 4) & 15;
            (low | two_bits(&block[128..], i, j) << 4) as i8 - 32
        });
        let s = [block[192 + 2 * i], block[193 + 2 * i]].map(|b| i32::from(b as i8));
        Term { s, ..Term::plain(half(block, 208), w) }
    }
}
