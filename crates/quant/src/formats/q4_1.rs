//! Q4_1: 32 nibbles, an f16 scale and an f16 minimum that is added.
//!
//! Bytes: `d` 0..2, minimum 2..4, nibbles 4..20 (the low ones are values 0..16, the high ones 16..32).

use super::{half, nibbles};
use crate::block::{BlockFormat, Minimum, Term};

pub(crate) struct Q4_1;

impl BlockFormat for Q4_1 {
    const LEN: usize = 32;
    const BYTES: usize = 20;
    const MINIMUM: Minimum = Minimum::Added;

    fn term(block: &[u8], _: usize) -> Term {
        let w = std::array::from_fn(|i| nibbles(&block[4..], i) as i8);
        Term { m: [1; 2], d_min: half(block, 2), ..Term::plain(half(block, 0), w) }
    }
}
