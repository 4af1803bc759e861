//! Random weights in every format: random codes under scales chosen so that the values have a wanted spread.
//!
//! Owns which bytes of a block are scales and what is put there. Codes stay random, except the sub-scales of the K
//! formats with minimums, which are set so that a block's values lie around zero. What a code means is `strata-quant`'s
//! business: the spread of the values under a scale of one is measured with its decoder, once per format.
//!
//! Every block picks its scale from a table of 256 that vary by an eighth either way; half of them are negative in the
//! formats whose codes don't lie around zero (and whose quantisers do write negative scales), so that the mean over many
//! blocks is zero in all formats.
//!
//! Invariant: a block's bytes depend on its number, the stream, the format and the wanted spread only; no value is
//! infinite or NaN.

use half::f16;
use half::slice::HalfFloatSliceExt;
use std::sync::OnceLock;
use strata_quant::{Format, dequantise};

use crate::stream::Stream;

/// Where a block keeps the scale that the others multiply.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// An f16 at this byte.
    Half(usize),
    /// An f16 at this byte, negative in half of the blocks.
    SignedHalf(usize),
    /// An f16 at the first place, and at the second one the f16 of the minimums: this many scales.
    HalfAndMinimum(usize, usize, f32),
    /// IQ1_M: the four nibbles of an f16, in the high nibbles of four words from this byte on.
    Nibbles(usize),
    /// MXFP4: `2^(e - 128)` at this byte.
    Power(usize),
    /// NVFP4: four bytes from this one on, half of an E4M3 each.
    Quarters(usize),
}

/// The table of formats: `None` for those without blocks.
fn scale_of(format: Format) -> Option<Scale> {
    use Scale::*;
    Some(match format {
        Format::F32 | Format::F16 | Format::Bf16 => return None,
        Format::Q8_0 => Half(0),
        Format::Q4_0 | Format::Q5_0 | Format::Q2_0 | Format::Iq4Nl => SignedHalf(0),
        // d q + m with q from 0 to 15 or 31.
        Format::Q4_1 => HalfAndMinimum(0, 2, -7.5),
        Format::Q5_1 => HalfAndMinimum(0, 2, -15.5),
        // d s q - d_min m, with m about s.
        Format::Q2K => HalfAndMinimum(80, 82, 1.5),
        Format::Q4K => HalfAndMinimum(0, 2, 7.5),
        Format::Q5K => HalfAndMinimum(0, 2, 15.5),
        // Their sub-scales are signed.
        Format::Q3K => Half(108),
        Format::Q6K => Half(208),
        Format::Iq4Xs => Half(0),
        // Their codes carry signs.
        Format::Iq1S | Format::Iq2Xxs | Format::Iq2Xs | Format::Iq2S | Format::Iq3Xxs | Format::Iq3S => {
            Half(0)
        }
        Format::Iq1M => Nibbles(48),
        Format::Mxfp4 => Power(0),
        Format::Nvfp4 => Quarters(0),
    })
}

/// A source of random weights of one format and spread: any blocks of it, at any time, by any thread.
///
/// ```
/// use strata_quant::Format;
/// use strata_synth::Weights;
///
/// let weights = Weights::random(Format::Q4K, 1, 0.02);
/// let mut blocks = vec![0; 16 * Format::Q4K.block_bytes()];
/// weights.fill(0, &mut blocks);
/// let mut later = vec![0; 4 * Format::Q4K.block_bytes()];
/// weights.fill(12, &mut later);
/// assert!(blocks.ends_with(&later));
/// ```
#[derive(Clone, Debug)]
pub struct Weights {
    format: Format,
    stream: Stream,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// Floats: `mean + std * noise`.
    Floats { mean: f32, std: f32 },
    /// Blocks, and the 256 scales to choose from: the scale's bits, and the minimum's in the upper half.
    Blocks(Scale, Box<[u32; 256]>),
}

impl Weights {
    /// Weights around zero whose root mean square is `std`, for use outside of a model.
    pub fn random(format: Format, seed: u64, std: f32) -> Self {
        Self::new(format, Stream::new(seed, "weights"), std)
    }

    /// Weights around zero whose root mean square is `std`.
    pub(crate) fn new(format: Format, stream: Stream, std: f32) -> Self {
        let kind = match scale_of(format) {
            None => Kind::Floats { mean: 0.0, std },
            Some(scale) => Kind::Blocks(scale, scales(scale, std / unit_spread(format, scale))),
        };
        Self { format, stream, kind }
    }

    /// Floats around `mean`. The format is a float format.
    pub(crate) fn around(format: Format, stream: Stream, mean: f32, std: f32) -> Self {
        debug_assert!(format.is_float());
        Self { format, stream, kind: Kind::Floats { mean, std } }
    }

    /// The same scales over other codes.
    pub(crate) fn with_stream(&self, stream: Stream) -> Self {
        Self { stream, ..self.clone() }
    }

    /// The blocks (values, in a float format) from number `first` on, as many as `out` has bytes for.
    pub fn fill(&self, first: u64, out: &mut [u8]) {
        match &self.kind {
            &Kind::Floats { mean, std } => {
                encode(self.format, first, out, |first, values| noise(self.stream, first, mean, std, values));
            }
            Kind::Blocks(scale, table) => {
                self.stream.fill(first * self.format.block_bytes() as u64, out);
                set_scales(self.format, *scale, table, out);
            }
        }
    }
}

/// The values from number `first` on of a float tensor: `mean + std * noise`, where the noise is the sum of two even
/// distributions of 16 bits, of variance 1, and never beyond 2.45.
pub(crate) fn noise(stream: Stream, first: u64, mean: f32, std: f32, out: &mut [f32]) {
    /// The standard deviation of the sum of two numbers from 0 to 65535: 2^16 / sqrt(6).
    const SPREAD: f32 = 26_754.9;
    let scale = std / SPREAD;
    let value = |bits: u32| {
        let sum = (bits & 0xFFFF) + (bits >> 16);
        mean + scale * (sum as i32 - 65_535) as f32
    };
    // Bytes first: a compiler that mixes the two loops makes 64-bit products of narrow vectors, slowly.
    let mut bytes = [0; 4 * AT_ONCE];
    for (i, out) in out.chunks_mut(AT_ONCE).enumerate() {
        let bytes = &mut bytes[..4 * out.len()];
        stream.fill(4 * (first + (i * AT_ONCE) as u64), bytes);
        for (bits, out) in bytes.chunks_exact(4).zip(out) {
            *out = value(u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]));
        }
    }
}

/// How many floats are made at once.
const AT_ONCE: usize = 256;

/// Writes values in a float format, from number `first` on, as many as `out` has bytes for. `values` makes those from a
/// number on.
pub(crate) fn encode(format: Format, first: u64, out: &mut [u8], values: impl Fn(u64, &mut [f32])) {
    let mut floats = [0.0f32; AT_ONCE];
    let size = format.block_bytes();
    for (i, out) in out.chunks_mut(AT_ONCE * size).enumerate() {
        let floats = &mut floats[..out.len() / size];
        values(first + (i * AT_ONCE) as u64, floats);
        match format {
            Format::F16 => {
                let mut halves = [f16::ZERO; AT_ONCE];
                let halves = &mut halves[..floats.len()];
                halves.convert_from_f32_slice(floats);
                for (bytes, half) in out.chunks_exact_mut(2).zip(halves) {
                    bytes.copy_from_slice(&half.to_le_bytes());
                }
            }
            Format::Bf16 => {
                for (bytes, value) in out.chunks_exact_mut(2).zip(floats) {
                    // To nearest; the value is finite and far from the largest.
                    let bits = value.to_bits();
                    let rounded = bits + 0x7FFF + (bits >> 16 & 1);
                    bytes.copy_from_slice(&((rounded >> 16) as u16).to_le_bytes());
                }
            }
            _ => {
                debug_assert_eq!(format, Format::F32);
                for (bytes, value) in out.chunks_exact_mut(4).zip(floats) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

/// Replaces the random bytes where scales belong. The byte that is overwritten first chooses among the table.
fn set_scales(format: Format, scale: Scale, table: &[u32; 256], out: &mut [u8]) {
    let size = format.block_bytes();
    let put = |block: &mut [u8], at: usize, bits: u32| {
        block[at..at + 2].copy_from_slice(&(bits as u16).to_le_bytes());
    };
    match scale {
        Scale::Half(at) | Scale::SignedHalf(at) => {
            for block in out.chunks_exact_mut(size) {
                put(block, at, table[usize::from(block[at])]);
            }
        }
        Scale::HalfAndMinimum(at, min_at, _) => {
            for block in out.chunks_exact_mut(size) {
                let bits = table[usize::from(block[at])];
                put(block, at, bits);
                put(block, min_at, bits >> 16);
                match format {
                    Format::Q2K => even_scales_2(block),
                    Format::Q4K | Format::Q5K => even_scales_6(block),
                    _ => {}
                }
            }
        }
        Scale::Nibbles(at) => {
            for block in out.chunks_exact_mut(size) {
                let bits = table[usize::from(block[0])];
                for (j, word) in block[at..at + 8].chunks_exact_mut(2).enumerate() {
                    word[1] = word[1] & 0x0F | (bits >> (4 * j) << 4) as u8;
                }
            }
        }
        Scale::Power(at) => {
            for block in out.chunks_exact_mut(size) {
                block[at] = table[usize::from(block[at])] as u8;
            }
        }
        Scale::Quarters(at) => {
            for block in out.chunks_exact_mut(size) {
                for byte in &mut block[at..at + 4] {
                    *byte = table[usize::from(*byte)] as u8;
                }
            }
        }
    }
}

/// Q2_K, bytes 0..16: a scale from 8 to 15 in the low nibble, the same minimum in the high one.
fn even_scales_2(block: &mut [u8]) {
    for byte in &mut block[..16] {
        let s = *byte & 7 | 8;
        *byte = s | s << 4;
    }
}

/// Q4_K and Q5_K, bytes 4..16: eight 6-bit scales from 32 to 63 and minimums that differ from them in the last two bits.
/// The first four of each lie whole in the low six bits of words 0 and 1; the other four are split between word 2 (low
/// nibbles: scales) and the upper two bits of words 0 and 1. Four at a time, a byte each.
fn even_scales_6(block: &mut [u8]) {
    let word = |i: usize| u32::from_le_bytes([block[i], block[i + 1], block[i + 2], block[i + 3]]);
    let (a, b, c) = (word(4), word(8), word(12));
    let scale = |random: u32| random & 0x1F1F_1F1F | 0x2020_2020;
    let (s_first, s_last) = (scale(a), scale(b));
    let (m_first, m_last) = (s_first ^ c & 0x0303_0303, s_last ^ c >> 2 & 0x0303_0303);
    let packed = [
        s_first | (s_last & 0x3030_3030) << 2,
        m_first | (m_last & 0x3030_3030) << 2,
        s_last & 0x0F0F_0F0F | (m_last & 0x0F0F_0F0F) << 4,
    ];
    for (to, word) in block[4..16].chunks_exact_mut(4).zip(packed) {
        to.copy_from_slice(&word.to_le_bytes());
    }
}

/// The root mean square of a format's values under a scale of one.
fn unit_spread(format: Format, scale: Scale) -> f32 {
    static MEASURED: [OnceLock<f32>; Format::ALL.len()] = [const { OnceLock::new() }; Format::ALL.len()];
    *MEASURED[format as usize].get_or_init(|| {
        let one = match scale {
            Scale::Half(_) | Scale::SignedHalf(_) | Scale::Nibbles(_) => u32::from(f16::ONE.to_bits()),
            Scale::HalfAndMinimum(_, _, per) => pair(1.0, per),
            Scale::Power(_) => 128,
            Scale::Quarters(_) => 8 << 3,
        };
        const VALUES: usize = 1 << 18;
        let blocks = VALUES / format.block_len();
        let mut bytes = vec![0; blocks * format.block_bytes()];
        let mut values = vec![0.0; blocks * format.block_len()];
        Stream::new(0, format.name()).fill(0, &mut bytes);
        set_scales(format, scale, &[one; 256], &mut bytes);
        dequantise(format, &bytes, &mut values);
        let squares: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        (squares / values.len() as f64).sqrt() as f32
    })
}

/// An f16 and, in the upper half, its minimum: `per` times as much.
fn pair(d: f32, per: f32) -> u32 {
    u32::from(f16::from_f32(d).to_bits()) | u32::from(f16::from_f32(d * per).to_bits()) << 16
}

/// 256 scales around `wanted`, as `set_scales` stores them.
fn scales(scale: Scale, wanted: f32) -> Box<[u32; 256]> {
    let mut table = Box::new([0; 256]);
    for (i, entry) in table.iter_mut().enumerate() {
        // The mean of (1 + j)^2 over j from -1/8 to 1/8 is 1 + 1/192.
        let jitter = (i as f32 + 0.5) / 1024.0 - 0.125;
        let d = wanted * (1.0 + jitter) / (1.0f32 + 1.0 / 192.0).sqrt();
        // Decides between two neighbours where scales are so coarse that always taking the nearer one would show.
        let dither = (f32::from((i as u8).reverse_bits()) + 0.5) / 256.0;
        *entry = match scale {
            Scale::Half(_) | Scale::Nibbles(_) => u32::from(dithered(d, dither).to_bits()),
            Scale::SignedHalf(_) => {
                let d = dithered(d, dither);
                u32::from((if i % 2 == 1 { -d } else { d }).to_bits())
            }
            Scale::HalfAndMinimum(_, _, per) => pair(dithered(d, dither).to_f32(), per),
            Scale::Power(_) => power(d, dither),
            Scale::Quarters(_) => quarter(d, dither),
        };
    }
    table
}

/// `d` as an f16, finite. Below the normal numbers, where steps are even, up or down by `dither`.
fn dithered(d: f32, dither: f32) -> f16 {
    let steps = d * (1u32 << 24) as f32;
    if steps < 1024.0 { f16::from_bits((steps + dither) as u16) } else { f16::from_f32(d).min(f16::MAX) }
}

/// The code of `2^(e - 128)`, chosen between two powers so that the mean square is that of `d`.
fn power(d: f32, dither: f32) -> u32 {
    let bits = d.to_bits();
    // d = f * 2^(exponent - 127) with f from 1 to 2, and E[4^n] = f^2 for n = 1 with this probability.
    let (exponent, f) = (bits >> 23, f32::from_bits(bits & 0x007F_FFFF | 0x3F80_0000));
    let up = u32::from(dither < (f * f - 1.0) / 3.0);
    (exponent + 1 + up).clamp(1, 254)
}

/// Half an E4M3: a code from 0 to 0x7E, chosen between two neighbours so that the mean square is that of `d`.
fn quarter(d: f32, dither: f32) -> u32 {
    let value = |code: u32| match (code >> 3, code & 7) {
        (0, f) => f as f32 / 1024.0,
        (e, f) => (8 + f) as f32 * 2f32.powi(e as i32 - 11),
    };
    let above = (1..=0x7E).find(|&code| value(code) > d).unwrap_or(0x7E);
    let (low, high) = (value(above - 1), value(above));
    above - u32::from(dither >= (d * d - low * low) / (high * high - low * low))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(format: Format, std: f32) -> Vec<f32> {
        let blocks = 4096usize.max((1 << 17) / format.block_len());
        let mut bytes = vec![0; blocks * format.block_bytes()];
        Weights::new(format, Stream::new(3, "values"), std).fill(0, &mut bytes);
        let mut values = vec![0.0; blocks * format.block_len()];
        dequantise(format, &bytes, &mut values);
        values
    }

    /// Oracle: the decoder of `strata-quant`. In every format and over the range that a model needs, the values' root mean
    /// square is the wanted one, their mean is near zero, and all are finite.
    #[test]
    fn values_have_the_wanted_spread() {
        for format in Format::ALL {
            for std in [0.002f32, 0.02, 0.15, 1.0] {
                let values = values(format, std);
                assert!(values.iter().all(|v| v.is_finite()), "{format}");
                let n = values.len() as f64;
                let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let spread = (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
                let (mean, spread) = (mean / f64::from(std), spread / f64::from(std));
                assert!((spread - 1.0).abs() < 0.03, "{format}: {spread} times {std}");
                assert!(mean.abs() < 0.03, "{format}: mean {mean} times {std}");
                let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs())) / std;
                assert!(largest < 8.0, "{format}: {largest} times {std}");
            }
        }
    }

    /// Oracle: the fill of all blocks at once.
    #[test]
    fn blocks_depend_on_their_number_only() {
        for format in Format::ALL {
            let weights = Weights::new(format, Stream::new(5, "parts"), 0.02);
            let size = format.block_bytes();
            let mut whole = vec![0; 37 * size];
            weights.fill(0, &mut whole);
            for (first, count) in [(0, 1), (1, 7), (5, 32), (36, 1)] {
                let mut part = vec![0; count * size];
                weights.fill(first as u64, &mut part);
                assert_eq!(part, whole[first * size..][..count * size], "{format} {first}");
            }
        }
    }

    /// Oracle: the definition of the K formats' packed scales (the decoder), read back under a scale of one and codes of zero:
    /// then every value is the minimum alone, whole multiples of it from 32 to 63.
    #[test]
    fn k_format_sub_scales_are_sane() {
        for format in [Format::Q4K, Format::Q5K] {
            let mut block = vec![0; format.block_bytes()];
            Stream::new(1, "sub-scales").fill(0, &mut block[4..16]);
            even_scales_6(&mut block);
            block[..4].copy_from_slice(&pair(1.0, 1.0).to_le_bytes());
            let mut minimums = vec![0.0; 256];
            dequantise(format, &block, &mut minimums);
            assert!(minimums.iter().all(|v| (-63.0..=-32.0).contains(v)), "{format}");
            block[16..].fill(0xFF);
            let mut tops = vec![0.0; 256];
            dequantise(format, &block, &mut tops);
            let most = if format == Format::Q4K { 15.0 } else { 31.0 };
            for (top, minimum) in tops.iter().zip(&minimums) {
                let scale = (top - minimum) / most;
                assert!(
                    (32.0..=63.0).contains(&scale) && (scale + minimum).abs() <= 3.0,
                    "{format}: {scale}, {minimum}"
                );
            }
        }
    }
}
