//! IQ4_NL: 32 nibbles into a table of 16 values, and an f16 scale.
//!
//! Bytes: `d` 0..2, nibbles 2..18 (the low ones are values 0..16, the high ones 16..32).

use super::{IQ4_VALUES, half, nibbles};
use crate::block::{BlockFormat, Term};

pub(crate) struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const LEN: usize = 32;
    const BYTES: usize = 18;

    fn term(block: &[u8], _: usize) -> Term {
        let w = std::array::from_fn(|i| IQ4_VALUES[usize::from(nibbles(&block[2..], i))]);
        Term::plain(half(block, 0), w)
    }
}
