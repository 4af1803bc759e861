//! Activations: quantising and packing them, in 256 bits.
//!
//! Owns the vector counterpart of what [`activations`](crate::activations) defines.
//!
//! Safety: the processor has AVX2; slices and pointers have the lengths stated.

use std::arch::x86_64::*;

use crate::activations::{GROUP, TINY};

/// Quantises blocks of 32, as many as `d` has: `x` and `q` have 32 values for each, `sums` two.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn quantise(x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
    let magnitude = _mm256_set1_ps(f32::from_bits(0x7fff_ffff));
    for (block, d) in d.iter_mut().enumerate() {
        let x = x.as_ptr().add(32 * block);
        let x = [
            _mm256_loadu_ps(x),
            _mm256_loadu_ps(x.add(8)),
            _mm256_loadu_ps(x.add(16)),
            _mm256_loadu_ps(x.add(24)),
        ];
        // As integers, magnitudes compare like the floats they are, and everything not finite is above them.
        let bits = x.map(|x| _mm256_castps_si256(_mm256_and_ps(x, magnitude)));
        let largest =
            _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
        let largest = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
        let largest = _mm_max_epi32(largest, _mm_shuffle_epi32::<0b01_00_11_10>(largest));
        let largest = _mm_max_epi32(largest, _mm_shuffle_epi32::<0b10_11_00_01>(largest));
        let amax = f32::from_bits(_mm_cvtsi128_si32(largest) as u32);
        let q = q.as_mut_ptr().add(32 * block);
        let sums = sums.as_mut_ptr().add(2 * block);
        if !(amax.is_finite() && amax >= TINY) {
            *d = if amax.is_finite() { 0.0 } else { f32::NAN };
            q.write_bytes(0, 32);
            sums.write_bytes(0, 2);
            continue;
        }
        *d = amax / 127.0;
        let factor = _mm256_set1_ps(127.0 / amax);
        // Rounds to nearest, ties to even. A product is at most 127 (1 + 2^-23): nothing to clamp.
        let i = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)));
        let bytes = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(q.cast(), bytes);
        // Sums of eight bytes each, of 128 more than the values.
        let eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
        let halves = _mm256_add_epi64(eights, _mm256_shuffle_epi32::<0b01_00_11_10>(eights));
        *sums = _mm256_cvtsi256_si32(halves) - 16 * 128;
        *sums.add(1) = _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(halves)) - 16 * 128;
    }
}

/// `members` (at most [`GROUP`]) columns of `len` elements, `stride` apart, to `len` rows of [`GROUP`] lanes.
/// Lanes without a column become zero.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn pack(columns: *const u32, stride: usize, members: usize, len: usize, to: *mut u32) {
    let zeros = [0u32; 8];
    for half in 0..GROUP / 8 {
        let mut i = 0;
        while i + 8 <= len {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (lane, row) in rows.iter_mut().enumerate() {
                let col = 8 * half + lane;
                let from = if col < members { columns.add(col * stride + i) } else { zeros.as_ptr() };
                *row = _mm256_loadu_si256(from.cast());
            }
            for (j, row) in transpose(rows).into_iter().enumerate() {
                _mm256_storeu_si256(to.add((i + j) * GROUP + 8 * half).cast(), row);
            }
            i += 8;
        }
        for i in i..len {
            for lane in 8 * half..8 * half + 8 {
                *to.add(i * GROUP + lane) = if lane < members { *columns.add(lane * stride + i) } else { 0 };
            }
        }
    }
}

/// Transposes 8 x 8 dwords.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    let (ab, cd) = (
        [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)],
        [_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)],
    );
    let (ef, gh) = (
        [_mm256_unpacklo_epi32(e, f), _mm256_unpackhi_epi32(e, f)],
        [_mm256_unpacklo_epi32(g, h), _mm256_unpackhi_epi32(g, h)],
    );
    // Columns i and 4 + i of rows 0..4, and of rows 4..8.
    let low = [
        _mm256_unpacklo_epi64(ab[0], cd[0]),
        _mm256_unpackhi_epi64(ab[0], cd[0]),
        _mm256_unpacklo_epi64(ab[1], cd[1]),
        _mm256_unpackhi_epi64(ab[1], cd[1]),
    ];
    let high = [
        _mm256_unpacklo_epi64(ef[0], gh[0]),
        _mm256_unpackhi_epi64(ef[0], gh[0]),
        _mm256_unpacklo_epi64(ef[1], gh[1]),
        _mm256_unpackhi_epi64(ef[1], gh[1]),
    ];
    [
        _mm256_permute2x128_si256::<0x20>(low[0], high[0]),
        _mm256_permute2x128_si256::<0x20>(low[1], high[1]),
        _mm256_permute2x128_si256::<0x20>(low[2], high[2]),
        _mm256_permute2x128_si256::<0x20>(low[3], high[3]),
        _mm256_permute2x128_si256::<0x31>(low[0], high[0]),
        _mm256_permute2x128_si256::<0x31>(low[1], high[1]),
        _mm256_permute2x128_si256::<0x31>(low[2], high[2]),
        _mm256_permute2x128_si256::<0x31>(low[3], high[3]),
    ]
}
