//! Q5_0: 32 values of 5 bits less 16 and an f16 scale.
//!
//! Bytes: `d` 0..2, fifth bits 2..6 (bit `i` for value `i`), nibbles 6..22 (the low ones are values 0..16).

use super::{dword, half, nibbles};
use crate::block::{BlockFormat, Term};

pub(crate) struct Q5_0;

impl BlockFormat for Q5_0 {
    const LEN: usize = 32;
    const BYTES: usize = 22;

    fn term(block: &[u8], _: usize) -> Term {
        let high = dword(block, 2);
        let w = std::array::from_fn(|i| (nibbles(&block[6..], i) | ((high >> i & 1) as u8) << 4) as i8 - 16);
        Term::plain(half(block, 0), w)
    }
}
