//! NVFP4: 64 E2M1 values, doubled to integers, with half an E4M3 scale per 16.
//!
//! Bytes: scales 0..4, nibbles 4..36 (of each 8 bytes the low ones, then the high ones). The scale's sign bit
//! is ignored; 0x7F (NaN in E4M3) is 0, but 0xFF is the 240 that its other bits say.

use super::E2M1_DOUBLED;
use crate::block::{BlockFormat, Term};

pub(crate) struct Nvfp4;

/// Half the E4M3 number `b`, its sign ignored.
pub(crate) const fn scale(b: u8) -> f32 {
    let (exponent, fraction) = ((b >> 3 & 15) as u32, (b & 7) as u32);
    match (b, exponent, fraction) {
        (0x7f, ..) => 0.0,
        (_, 0, f) => f as f32 * (1.0 / 1024.0),
        // 2^(exponent - 8) * (1 + fraction / 8)
        (_, e, f) => f32::from_bits((e + 127 - 8) << 23 | f << 20),
    }
}

impl BlockFormat for Nvfp4 {
    const LEN: usize = 64;
    const BYTES: usize = 36;
    const SPLIT: bool = true;

    fn term(block: &[u8], i: usize) -> Term {
        let w = std::array::from_fn(|j| {
            let byte = block[4 + 16 * i + j / 16 * 8 + j % 8];
            E2M1_DOUBLED[usize::from(byte >> (j % 16 / 8 * 4) & 15)]
        });
        Term { d: [scale(block[2 * i]), scale(block[2 * i + 1])], ..Term::plain(0.0, w) }
    }
}
