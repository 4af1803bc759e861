//! Q2_0 (tensor type 42): 64 values of 2 bits less 1 and an f16 scale.
//!
//! Bytes: `d` 0..2, codes 2..18, four consecutive values in a byte, the first in its lowest bits.

use super::half;
use crate::block::{BlockFormat, Term};

pub(crate) struct Q2_0;

impl BlockFormat for Q2_0 {
    const LEN: usize = 64;
    const BYTES: usize = 18;

    fn term(block: &[u8], i: usize) -> Term {
        let codes = &block[2 + 8 * i..];
        Term::plain(half(block, 0), std::array::from_fn(|j| (codes[j / 4] >> (j % 4 * 2) & 3) as i8 - 1))
    }
}
