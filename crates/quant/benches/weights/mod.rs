//! Weights to multiply with.

use strata_quant::Format;

/// Fills `bytes` with blocks of random bits, no two rows alike: copies of one would keep the few entries of a code book that
/// they use in the first cache. Exponents are ordinary: subnormal results would be slow for reasons of their own.
pub fn fill(format: Format, bytes: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    let (at, exponent) = match format {
        Format::F32 => (3, 0x3e),
        Format::F16 | Format::Bf16 => (1, 0x3e),
        Format::Mxfp4 => (0, 120),
        _ => return,
    };
    bytes.chunks_exact_mut(format.block_bytes()).for_each(|block| block[at] = exponent);
}
