//! Q8_0: 32 signed bytes and an f16 scale.
//!
//! Bytes: `d` 0..2, `w` 2..34.

use super::half;
use crate::block::{BlockFormat, Term};

pub(crate) struct Q8_0;

impl BlockFormat for Q8_0 {
    const LEN: usize = 32;
    const BYTES: usize = 34;

    fn term(block: &[u8], _: usize) -> Term {
        Term::plain(half(block, 0), std::array::from_fn(|i| block[2 + i] as i8))
    }
}
