//! [`Vector`] in 256 bits.
//!
//! Safety: as [`vector`](super::vector) says.

use std::arch::x86_64::*;

use super::vector::{Lanes, Vector};

/// AVX2 with integer products in steps of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// AVX2 with integer products by AVX-VNNI, and look-ups by gathering.
#[derive(Clone, Copy)]
pub(super) struct AvxVnni;

/// Four vectors, one for each of four rows: their sums over each 128-bit lane, as `[row 0, 1, 2, 3]` in that
/// lane.
#[inline(always)]
unsafe fn reduce_four(v: &impl Lanes<__m256i>, first: usize) -> __m256i {
    let (a, b) = (v.lane(first), v.lane(first + 1));
    let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (c, d) = (v.lane(first + 2), v.lane(first + 3));
    let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
}

/// The 128-bit halves of `a` added, and those of `b`.
#[inline(always)]
unsafe fn by_four(a: __m256, b: __m256) -> __m256d {
    _mm256_castps_pd(_mm256_add_ps(
        _mm256_permute2f128_ps::<0x20>(a, b),
        _mm256_permute2f128_ps::<0x31>(a, b),
    ))
}

/// The sums of vectors `i` and `i + 4`, and of `i + 1` and `i + 5`, folded to two lanes each.
#[inline(always)]
unsafe fn fold_two(v: &impl Lanes<__m256>, i: usize) -> __m256 {
    let (a, b) = (by_four(v.lane(i), v.lane(i + 4)), by_four(v.lane(i + 1), v.lane(i + 5)));
    _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
}

/// Of four rows of 8 at `p`: columns `i` and `4 + i`, in 128 bits each.
#[inline(always)]
unsafe fn transpose_four(p: *const f32) -> [__m256; 4] {
    let (a, b) = (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
    let (c, d) = (_mm256_loadu_ps(p.add(16)), _mm256_loadu_ps(p.add(24)));
    let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    [
        _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
        _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
        _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
        _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
    ]
}

/// All bits in the bytes whose bit of `bits` is set.
#[inline(always)]
unsafe fn mask_of_bits(bits: u64) -> __m256i {
    let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as u32 as i32), spread);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
}

/// A bit count as the shift instructions take it; a constant becomes an immediate.
#[inline(always)]
unsafe fn count(bits: usize) -> __m128i {
    _mm_cvtsi32_si128(bits as i32)
}

macro_rules! vector_256 {
    ($name:ident, gathers $gathers:literal, wide $takes_wide:literal, $dot:ident, $dot_wide:ident) => {
        impl Vector for $name {
            const LANES: usize = 8;
            const GATHERS: bool = $gathers;
            const TAKES_WIDE: bool = $takes_wide;
            type I = __m256i;
            type F = __m256;
            type Indices = __m128i;
            type Block = $name;

            #[inline(always)]
            unsafe fn load(p: *const i32) -> __m256i {
                _mm256_loadu_si256(p.cast())
            }
            #[inline(always)]
            unsafe fn store(p: *mut i32, v: __m256i) {
                _mm256_storeu_si256(p.cast(), v)
            }
            #[inline(always)]
            unsafe fn load_f(p: *const f32) -> __m256 {
                _mm256_loadu_ps(p)
            }
            #[inline(always)]
            unsafe fn store_f(p: *mut f32, v: __m256) {
                _mm256_storeu_ps(p, v)
            }
            #[inline(always)]
            unsafe fn splat(v: i32) -> __m256i {
                _mm256_set1_epi32(v)
            }
            #[inline(always)]
            unsafe fn splat_f(v: f32) -> __m256 {
                _mm256_set1_ps(v)
            }
            #[inline(always)]
            unsafe fn load_pairs(p: *const u64) -> [__m256i; 2] {
                let a = _mm256_castsi256_ps(_mm256_loadu_si256(p.cast()));
                let b = _mm256_castsi256_ps(_mm256_loadu_si256(p.add(4).cast()));
                let first = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
                let second = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
                [
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(first),
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(second),
                ]
            }
            #[inline(always)]
            unsafe fn halves(v: __m256i) -> __m256 {
                let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, low));
                _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
            }
            #[inline(always)]
            unsafe fn load_halves(p: *const u16) -> __m256 {
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
            }
            #[inline(always)]
            unsafe fn load_words(p: *const u16) -> __m256i {
                _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))
            }
            #[inline(always)]
            unsafe fn load_bytes(p: *const u8) -> __m256i {
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))
            }
            #[inline(always)]
            unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
                _mm256_add_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn sub(a: __m256i, b: __m256i) -> __m256i {
                _mm256_sub_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn shl(v: __m256i, bits: u32) -> __m256i {
                _mm256_sll_epi32(v, count(bits as usize))
            }
            #[inline(always)]
            unsafe fn shr(v: __m256i, bits: u32) -> __m256i {
                _mm256_srl_epi32(v, count(bits as usize))
            }
            #[inline(always)]
            unsafe fn signed_byte(v: __m256i, byte: usize) -> __m256i {
                _mm256_srai_epi32::<24>(_mm256_sll_epi32(v, count(24 - 8 * byte)))
            }
            #[inline(always)]
            unsafe fn to_f(v: __m256i) -> __m256 {
                _mm256_cvtepi32_ps(v)
            }
            #[inline(always)]
            unsafe fn as_f(v: __m256i) -> __m256 {
                _mm256_castsi256_ps(v)
            }
            #[inline(always)]
            unsafe fn add_f(a: __m256, b: __m256) -> __m256 {
                _mm256_add_ps(a, b)
            }
            #[inline(always)]
            unsafe fn mul(a: __m256, b: __m256) -> __m256 {
                _mm256_mul_ps(a, b)
            }
            #[inline(always)]
            unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
                _mm256_fmadd_ps(a, b, c)
            }
            #[inline(always)]
            unsafe fn fnma(a: __m256, b: __m256, c: __m256) -> __m256 {
                _mm256_fnmadd_ps(a, b, c)
            }
            #[inline(always)]
            unsafe fn dot(acc: __m256i, codes: __m256i, a: __m256i) -> __m256i {
                $dot(acc, codes, a)
            }
            #[inline(always)]
            unsafe fn dot_wide(acc: __m256i, codes: __m256i, a: __m256i) -> __m256i {
                $dot_wide(acc, codes, a)
            }
            #[inline(always)]
            unsafe fn reduce_halves(v: &impl Lanes<__m256i>) -> [[__m256i; 2]; 2] {
                let (a, b) = (reduce_four(v, 0), reduce_four(v, 4));
                let halves =
                    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
                [halves; 2]
            }
            #[inline(always)]
            unsafe fn reduce(v: &impl Lanes<__m256i>) -> [__m256i; 2] {
                let [[a, b], _] = Self::reduce_halves(v);
                [_mm256_add_epi32(a, b); 2]
            }
            #[inline(always)]
            unsafe fn fold(v: &impl Lanes<__m256>) -> __m256 {
                let (a, b) = (fold_two(v, 0), fold_two(v, 2));
                _mm256_add_ps(
                    _mm256_shuffle_ps::<0b10_00_10_00>(a, b),
                    _mm256_shuffle_ps::<0b11_01_11_01>(a, b),
                )
            }
            #[inline(always)]
            unsafe fn transpose(p: *mut f32) {
                let (low, high) = (transpose_four(p), transpose_four(p.add(32)));
                for (i, (low, high)) in low.into_iter().zip(high).enumerate() {
                    _mm256_storeu_ps(p.add(8 * i), _mm256_permute2f128_ps::<0x20>(low, high));
                    _mm256_storeu_ps(p.add(8 * (i + 4)), _mm256_permute2f128_ps::<0x31>(low, high));
                }
            }
            #[inline(always)]
            unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
                _mm256_and_si256(a, b)
            }
            #[inline(always)]
            unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
                _mm256_or_si256(a, b)
            }
            #[inline(always)]
            unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
                _mm256_xor_si256(a, b)
            }
            #[inline(always)]
            unsafe fn splat_byte(v: u8) -> __m256i {
                _mm256_set1_epi8(v as i8)
            }
            #[inline(always)]
            unsafe fn look_up(table: &[u8; 16], codes: __m256i) -> __m256i {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, codes)
            }
            #[inline(always)]
            unsafe fn one_block(v: __m256i) -> __m256i {
                v
            }
            #[inline(always)]
            unsafe fn load_blocks(p: *const u8, _: usize) -> __m256i {
                _mm256_loadu_si256(p.cast())
            }
            #[inline(always)]
            unsafe fn load_two_blocks(first: *const u8, _: *const u8) -> __m256i {
                _mm256_loadu_si256(first.cast())
            }
            #[inline(always)]
            unsafe fn load_nibbles(p: *const u8, _: usize) -> __m256i {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
                _mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4))
            }
            #[inline(always)]
            unsafe fn load_nibbles_of_8(p: *const u8) -> __m256i {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
                let twice = _mm256_permute4x64_epi64::<0b01_01_00_00>(both);
                _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 4, 0, 4))
            }
            #[inline(always)]
            unsafe fn from_qwords(words: [u64; 8]) -> __m256i {
                let w = words.map(|w| w as i64);
                _mm256_setr_epi64x(w[0], w[1], w[2], w[3])
            }
            #[inline(always)]
            unsafe fn gather(table: *const u32, i: __m256i) -> __m256i {
                _mm256_i32gather_epi32::<4>(table.cast(), i)
            }
            #[inline(always)]
            unsafe fn gather_qwords(table: *const u64, i: __m128i) -> __m256i {
                _mm256_i32gather_epi64::<8>(table.cast(), i)
            }
            #[inline(always)]
            unsafe fn indices_of_bytes(p: *const u8) -> __m128i {
                _mm_cvtepu8_epi32(_mm_loadu_si32(p))
            }
            #[inline(always)]
            unsafe fn indices_of_low_bytes(p: *const u8) -> __m128i {
                _mm_cvtepu8_epi32(_mm_loadu_si32(p))
            }
            #[inline(always)]
            unsafe fn indices_of_words(p: *const u8, bits: u32) -> __m128i {
                _mm_and_si128(_mm_cvtepu16_epi32(_mm_loadl_epi64(p.cast())), _mm_set1_epi32((1 << bits) - 1))
            }
            #[inline(always)]
            unsafe fn add_high(i: __m128i, fields: u32, width: u32, bits: u32) -> __m128i {
                let w = width as i32;
                let fields =
                    _mm_srlv_epi32(_mm_set1_epi32(fields as i32), _mm_setr_epi32(0, w, 2 * w, 3 * w));
                let high = _mm_and_si128(fields, _mm_set1_epi32((1 << bits) - 1));
                _mm_or_si128(i, _mm_slli_epi32::<8>(high))
            }
            #[inline(always)]
            unsafe fn lanes_of_bits(bits: u32, value: i32) -> __m256i {
                let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
                let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), lanes), lanes);
                _mm256_and_si256(set, _mm256_set1_epi32(value))
            }
            #[inline(always)]
            unsafe fn add_bytes(a: __m256i, b: __m256i) -> __m256i {
                _mm256_add_epi8(a, b)
            }
            #[inline(always)]
            unsafe fn sub_bytes(a: __m256i, b: __m256i) -> __m256i {
                _mm256_sub_epi8(a, b)
            }
            #[inline(always)]
            unsafe fn load_same(p: *const u8) -> __m256i {
                _mm256_loadu_si256(p.cast())
            }
            #[inline(always)]
            unsafe fn field(v: __m256i, first: usize, _: usize, to: usize) -> __m256i {
                if to >= first {
                    _mm256_sll_epi64(v, count(to - first))
                } else {
                    _mm256_srl_epi64(v, count(first - to))
                }
            }
            #[inline(always)]
            unsafe fn bytes_of_bits(bits: u64, value: u8) -> __m256i {
                _mm256_and_si256(mask_of_bits(bits), _mm256_set1_epi8(value as i8))
            }
            #[inline(always)]
            unsafe fn reflect(v: __m256i, bits: u64, twice: u8) -> __m256i {
                let mirrored = _mm256_sub_epi8(_mm256_set1_epi8(twice as i8), v);
                _mm256_blendv_epi8(v, mirrored, mask_of_bits(bits))
            }
        }
    };
}

/// Pairs of products in 16 bits (at most 2 * 128 * 127), then their sums in 32.
#[inline(always)]
unsafe fn dot_by_16(acc: __m256i, codes: __m256i, a: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(codes, a);
    _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// The magnitude of a weight of 8 bits is at most 128; its sign goes to the activation.
#[inline(always)]
unsafe fn dot_by_16_wide(acc: __m256i, codes: __m256i, a: __m256i) -> __m256i {
    let w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    dot_by_16(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
}

#[inline(always)]
unsafe fn dot_by_vnni(acc: __m256i, codes: __m256i, a: __m256i) -> __m256i {
    _mm256_dpbusd_avx_epi32(acc, codes, a)
}

vector_256!(Avx2, gathers false, wide false, dot_by_16, dot_by_16_wide);
vector_256!(AvxVnni, gathers true, wide true, dot_by_vnni, dot_by_vnni);
