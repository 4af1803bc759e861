//! Weights to multiply with.

use strata_quant::Format;

/// `rows` times the same row of random bytes with ordinary scales: subnormal and infinite ones would be slow for reasons of
/// their own.
pub fn rows(format: Format, k: usize, rows: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    let blocks = k / format.block_len();
    let one: Vec<u8> = (0..blocks * format.block_bytes())
        .map(|i| match (format, i % format.block_bytes()) {
            (Format::F32, 3) | (Format::F16 | Format::Bf16, 1) => 0x3e,
            (Format::Mxfp4, 0) => 120,
            _ => next(),
        })
        .collect();
    one.iter().copied().cycle().take(one.len() * rows).collect()
}
