//! Q4_0: 32 nibbles less 8 and an f16 scale.
//!
//! Bytes: `d` 0..2, nibbles 2..18 (the low ones are values 0..16, the high ones 16..32).

use super::{half, nibbles};
use crate::block::{BlockFormat, Term};

pub(crate) struct Q4_0;

impl BlockFormat for Q4_0 {
    const LEN: usize = 32;
    const BYTES: usize = 18;

    fn term(block: &[u8], _: usize) -> Term {
        Term::plain(half(block, 0), std::array::from_fn(|i| nibbles(&block[2..], i) as i8 - 8))
    }
}
