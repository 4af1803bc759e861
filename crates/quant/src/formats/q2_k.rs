//! Q2_K: 256 values of 2 bits, 4-bit scales and 4-bit minimums per 16, an f16 scale for each.
//!
//! Bytes: scales (low nibble) and minimums (high nibble) 0..16, codes 16..80, `d` 80..82, `d_min` 82..84.

use super::{half, two_bits};
use crate::block::{BlockFormat, Minimum, Term};

pub(crate) struct Q2K;

impl BlockFormat for Q2K {
    const LEN: usize = 256;
    const BYTES: usize = 84;
    const MINIMUM: Minimum = Minimum::Subtracted;

    fn term(block: &[u8], i: usize) -> Term {
        let both = [block[2 * i], block[2 * i + 1]];
        Term {
            w: std::array::from_fn(|j| two_bits(&block[16..], i, j) as i8),
            s: both.map(|b| i32::from(b & 15)),
            d: [half(block, 80); 2],
            m: both.map(|b| i32::from(b >> 4)),
            d_min: half(block, 82),
        }
    }
}
