//! Q5_1: 32 values of 5 bits, an f16 scale and an f16 minimum that is added.
//!
//! Bytes: `d` 0..2, minimum 2..4, fifth bits 4..8 (bit `i` for value `i`), nibbles 8..24 (the low ones are
//! values 0..16).

use super::{dword, half, nibbles};
use crate::block::{BlockFormat, Minimum, Term};

pub(crate) struct Q5_1;

impl BlockFormat for Q5_1 {
    const LEN: usize = 32;
    const BYTES: usize = 24;
    const MINIMUM: Minimum = Minimum::Added;

    fn term(block: &[u8], _: usize) -> Term {
        let high = dword(block, 4);
        let w = std::array::from_fn(|i| (nibbles(&block[8..], i) | ((high >> i & 1) as u8) << 4) as i8);
        Term { m: [1; 2], d_min: half(block, 2), ..Term::plain(half(block, 0), w) }
    }
}
