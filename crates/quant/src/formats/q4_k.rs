//! Q4_K: 256 nibbles, 6-bit scales and 6-bit minimums per 32, an f16 scale for each.
//!
//! Bytes: `d` 0..2, `d_min` 2..4, scales and minimums 4..16, nibbles 16..144 (of each 32 bytes the low ones,
//! then the high ones).

use super::{half, scale_min_6};
use crate::block::{BlockFormat, Minimum, Term};

pub(crate) struct Q4K;

impl BlockFormat for Q4K {
    const LEN: usize = 256;
    const BYTES: usize = 144;
    const MINIMUM: Minimum = Minimum::Subtracted;

    fn term(block: &[u8], i: usize) -> Term {
        let (s, m) = scale_min_6(&block[4..16], i);
        Term {
            w: std::array::from_fn(|j| (block[16 + i / 2 * 32 + j] >> (i % 2 * 4) & 15) as i8),
            s: [s; 2],
            d: [half(block, 0); 2],
            m: [m; 2],
            d_min: half(block, 2),
        }
    }
}
