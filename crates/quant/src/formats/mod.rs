//! The block formats, one file each: how bytes become [`Term`](crate::block::Term)s.
//!
//! Owns the layouts and the dispatch from a [`Format`] to its type, [`with_block_format!`]. A layout's facts
//! are public (the PyPI package `gguf` decodes all of them); the folding into integers is the arithmetic
//! contract's.

pub(crate) mod grids;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod nvfp4;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

pub(crate) use iq1_m::Iq1M;
pub(crate) use iq1_s::Iq1S;
pub(crate) use iq2_s::Iq2S;
pub(crate) use iq2_xs::Iq2Xs;
pub(crate) use iq2_xxs::Iq2Xxs;
pub(crate) use iq3_s::Iq3S;
pub(crate) use iq3_xxs::Iq3Xxs;
pub(crate) use iq4_nl::Iq4Nl;
pub(crate) use iq4_xs::Iq4Xs;
pub(crate) use mxfp4::Mxfp4;
#[cfg(x86_paths)]
pub(crate) use mxfp4::scale as mxfp4_scale;
pub(crate) use nvfp4::Nvfp4;
#[cfg(x86_paths)]
pub(crate) use nvfp4::scale as nvfp4_scale;
pub(crate) use q2_0::Q2_0;
pub(crate) use q2_k::Q2K;
pub(crate) use q3_k::Q3K;
pub(crate) use q4_0::Q4_0;
pub(crate) use q4_1::Q4_1;
pub(crate) use q4_k::Q4K;
pub(crate) use q5_0::Q5_0;
pub(crate) use q5_1::Q5_1;
pub(crate) use q5_k::Q5K;
pub(crate) use q6_k::Q6K;
pub(crate) use q8_0::Q8_0;

/// Evaluates `$body` with the type `$F` standing for the block format `$format`, or `$float` for F32, F16 and
/// BF16.
macro_rules! with_block_format {
    ($format:expr, $F:ident => $body:expr, float => $float:expr) => {
        with_block_format!(@ $format, $F, $body, $float;
            Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_0 Q2K Q3K Q4K Q5K Q6K Iq1S Iq1M Iq2Xxs Iq2Xs Iq2S Iq3Xxs Iq3S Iq4Nl Iq4Xs
            Mxfp4 Nvfp4)
    };
    (@ $format:expr, $F:ident, $body:expr, $float:expr; $($name:ident)*) => {
        match $format {
            $crate::Format::F32 | $crate::Format::F16 | $crate::Format::Bf16 => $float,
            $($crate::Format::$name => {
                type $F = $crate::formats::$name;
                $body
            })*
        }
    };
}
pub(crate) use with_block_format;

/// The f16 at `bytes[at..]`.
fn half(bytes: &[u8], at: usize) -> f32 {
    crate::math::f16_to_f32(word(bytes, at))
}

/// The little-endian u16 at `bytes[at..]`.
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The little-endian u32 at `bytes[at..]`.
fn dword(bytes: &[u8], at: usize) -> u32 {
    u32::from(word(bytes, at)) | u32::from(word(bytes, at + 2)) << 16
}

/// Low nibbles of 16 bytes, then their high nibbles.
fn nibbles(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

/// The two bits of value `i` of the `t`-th 32 values, where each group of 32 bytes holds four runs of 32
/// values.
fn two_bits(bytes: &[u8], t: usize, i: usize) -> u8 {
    bytes[t / 4 * 32 + i] >> (t % 4 * 2) & 3
}

/// Eight sign bits from the seven that are stored: the eighth makes their number even.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() as u8) & 1) << 7
}

/// `value`, negated if bit `i` of `signs` is set.
fn signed(value: u8, signs: u8, i: usize) -> i8 {
    if signs >> i & 1 == 1 { -(value as i8) } else { value as i8 }
}

/// The eight 6-bit scales and minimums that Q4_K and Q5_K keep in 12 bytes: the scale and minimum of `t`.
fn scale_min_6(b: &[u8], t: usize) -> (i32, i32) {
    let (s, m) = if t < 4 {
        (b[t] & 63, b[t + 4] & 63)
    } else {
        (b[t + 4] & 15 | b[t - 4] >> 6 << 4, b[t + 4] >> 4 | b[t] >> 6 << 4)
    };
    (i32::from(s), i32::from(m))
}

/// The values of IQ4_NL and IQ4_XS.
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the E2M1 values of MXFP4 and NVFP4.
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
