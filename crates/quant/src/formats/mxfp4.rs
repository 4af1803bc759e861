//! MXFP4: 32 E2M1 values, doubled to integers, and half their E8M0 scale.
//!
//! Bytes: exponent 0, nibbles 1..17 (the low ones are values 0..16, the high ones 16..32). The scale is
//! `2^(e - 128)`: subnormal for `e < 2`, NaN for `e = 255`.

use super::{E2M1_DOUBLED, nibbles};
use crate::block::{BlockFormat, Term};

pub(crate) struct Mxfp4;

/// `2^(e - 128)`.
pub(crate) const fn scale(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((e as u32 - 1) << 23),
    }
}

impl BlockFormat for Mxfp4 {
    const LEN: usize = 32;
    const BYTES: usize = 17;

    fn term(block: &[u8], _: usize) -> Term {
        let w = std::array::from_fn(|i| E2M1_DOUBLED[usize::from(nibbles(&block[1..], i))]);
        Term::plain(scale(block[0]), w)
    }
}
