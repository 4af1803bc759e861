//! [`Vector`] in 512 bits, with VNNI.
//!
//! Safety: as [`vector`](super::vector) says.

use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::vector::{Lanes, Vector};

/// AVX-512 F, BW, VL, DQ, VNNI; `GATHERS` as in [`Vector`].
#[derive(Clone, Copy)]
pub(super) struct Avx512<const GATHERS: bool>;

/// Four vectors, one for each of four rows: their sums over each 128-bit lane, as `[row 0, 1, 2, 3]` in that
/// lane.
#[inline(always)]
unsafe fn reduce_four(v: &impl Lanes<__m512i>, first: usize) -> __m512i {
    let (a, b) = (v.lane(first), v.lane(first + 1));
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (c, d) = (v.lane(first + 2), v.lane(first + 3));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// 128-bit lanes `0, 2` and `1, 3` of all four, as `[a0 a2 b0 b2], [c0 c2 d0 d2], [a1 a3 b1 b3], [c1 c3 d1
/// d3]`.
#[inline(always)]
unsafe fn evens_and_odds(v: &impl Lanes<__m512i>) -> [__m512i; 4] {
    let (a, b) = (reduce_four(v, 0), reduce_four(v, 4));
    let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
    let (c, d) = (reduce_four(v, 8), reduce_four(v, 12));
    let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
    [ab_even, cd_even, ab_odd, cd_odd]
}

/// The first (0) or second (1) pairs of each 128 bits of both.
#[inline(always)]
unsafe fn halves_pd<const SECOND: i32>(a: __m512, b: __m512) -> __m512 {
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    _mm512_castpd_ps(if SECOND == 1 { _mm512_unpackhi_pd(a, b) } else { _mm512_unpacklo_pd(a, b) })
}

/// The sums of vectors `i`, `i + 4`, `i + 8`, `i + 12`, folded to four lanes each, in this order.
#[inline(always)]
unsafe fn fold_four(v: &impl Lanes<__m512>, i: usize) -> __m512 {
    let (a, b) = (v.lane(i), v.lane(i + 4));
    let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let (c, d) = (v.lane(i + 8), v.lane(i + 12));
    let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd))
}

/// Of four rows of 16 at `p`: columns `i`, `4 + i`, `8 + i`, `12 + i`, in 128 bits each.
#[inline(always)]
unsafe fn transpose_four(p: *const f32) -> [__m512; 4] {
    let (a, b) = (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)));
    let (c, d) = (_mm512_loadu_ps(p.add(32)), _mm512_loadu_ps(p.add(48)));
    let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    [
        _mm512_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
        _mm512_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
        _mm512_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
        _mm512_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
    ]
}

impl<const GATHERS: bool> Vector for Avx512<GATHERS> {
    const LANES: usize = 16;
    const GATHERS: bool = GATHERS;
    const TAKES_WIDE: bool = true;
    type I = __m512i;
    type F = __m512;
    type Indices = __m256i;
    type Block = Avx2;

    #[inline(always)]
    unsafe fn load(p: *const i32) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn store(p: *mut i32, v: __m512i) {
        _mm512_storeu_si512(p.cast(), v)
    }
    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v)
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> __m512i {
        _mm512_set1_epi32(v)
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> __m512 {
        _mm512_set1_ps(v)
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const u64) -> [__m512i; 2] {
        let (a, b) = (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(8).cast()));
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
    }
    #[inline(always)]
    unsafe fn halves(v: __m512i) -> __m512 {
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v))
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_words(p: *const u16) -> __m512i {
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512i, b: __m512i) -> __m512i {
        _mm512_sub_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn shl(v: __m512i, bits: u32) -> __m512i {
        _mm512_sll_epi32(v, _mm_cvtsi32_si128(bits as i32))
    }
    #[inline(always)]
    unsafe fn shr(v: __m512i, bits: u32) -> __m512i {
        _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32))
    }
    #[inline(always)]
    unsafe fn signed_byte(v: __m512i, byte: usize) -> __m512i {
        _mm512_srai_epi32::<24>(_mm512_sll_epi32(v, _mm_cvtsi32_si128(24 - 8 * byte as i32)))
    }
    #[inline(always)]
    unsafe fn to_f(v: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(v)
    }
    #[inline(always)]
    unsafe fn as_f(v: __m512i) -> __m512 {
        _mm512_castsi512_ps(v)
    }
    #[inline(always)]
    unsafe fn add_f(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fnmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn dot(acc: __m512i, codes: __m512i, a: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(acc, codes, a)
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m512i, codes: __m512i, a: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(acc, codes, a)
    }
    #[inline(always)]
    unsafe fn reduce_halves(v: &impl Lanes<__m512i>) -> [[__m512i; 2]; 2] {
        let [ab_even, cd_even, ab_odd, cd_odd] = evens_and_odds(v);
        [
            [_mm512_shuffle_i32x4::<0x88>(ab_even, cd_even), _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd)],
            [_mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even), _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd)],
        ]
    }
    #[inline(always)]
    unsafe fn reduce(v: &impl Lanes<__m512i>) -> [__m512i; 2] {
        let [ab_even, cd_even, ab_odd, cd_odd] = evens_and_odds(v);
        let (ab, cd) = (_mm512_add_epi32(ab_even, ab_odd), _mm512_add_epi32(cd_even, cd_odd));
        [_mm512_shuffle_i32x4::<0x88>(ab, cd), _mm512_shuffle_i32x4::<0xdd>(ab, cd)]
    }
    #[inline(always)]
    unsafe fn fold(v: &impl Lanes<__m512>) -> __m512 {
        let (a, b) = (fold_four(v, 0), fold_four(v, 1));
        let low = _mm512_add_ps(halves_pd::<0>(a, b), halves_pd::<1>(a, b));
        let (c, d) = (fold_four(v, 2), fold_four(v, 3));
        let high = _mm512_add_ps(halves_pd::<0>(c, d), halves_pd::<1>(c, d));
        _mm512_add_ps(
            _mm512_shuffle_ps::<0b10_00_10_00>(low, high),
            _mm512_shuffle_ps::<0b11_01_11_01>(low, high),
        )
    }
    #[inline(always)]
    unsafe fn transpose(p: *mut f32) {
        let quads = [
            transpose_four(p),
            transpose_four(p.add(64)),
            transpose_four(p.add(128)),
            transpose_four(p.add(192)),
        ];
        for i in 0..4 {
            let [a, b, c, d] = [&quads[0], &quads[1], &quads[2], &quads[3]].map(|quad| quad[i]);
            let (ab_even, ab_odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            let (cd_even, cd_odd) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
            _mm512_storeu_ps(p.add(16 * i), _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even));
            _mm512_storeu_ps(p.add(16 * (4 + i)), _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd));
            _mm512_storeu_ps(p.add(16 * (8 + i)), _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even));
            _mm512_storeu_ps(p.add(16 * (12 + i)), _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd));
        }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }
    #[inline(always)]
    unsafe fn splat_byte(v: u8) -> __m512i {
        _mm512_set1_epi8(v as i8)
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], codes: __m512i) -> __m512i {
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes)
    }
    #[inline(always)]
    unsafe fn one_block(v: __m256i) -> __m512i {
        _mm512_zextsi256_si512(v)
    }
    #[inline(always)]
    unsafe fn load_blocks(p: *const u8, stride: usize) -> __m512i {
        Self::load_two_blocks(p, p.add(stride))
    }
    #[inline(always)]
    unsafe fn load_two_blocks(first: *const u8, second: *const u8) -> __m512i {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(second.cast()))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8, stride: usize) -> __m512i {
        let first = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
        let both = _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_loadu_si128(p.add(stride).cast()));
        _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4))
    }
    #[inline(always)]
    unsafe fn load_nibbles_of_8(p: *const u8) -> __m512i {
        let both = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        let twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), both);
        _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4))
    }
    #[inline(always)]
    unsafe fn from_qwords(words: [u64; 8]) -> __m512i {
        let w = words.map(|w| w as i64);
        _mm512_setr_epi64(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
    }
    #[inline(always)]
    unsafe fn gather(table: *const u32, i: __m512i) -> __m512i {
        _mm512_i32gather_epi32::<4>(i, table.cast())
    }
    #[inline(always)]
    unsafe fn gather_qwords(table: *const u64, i: __m256i) -> __m512i {
        _mm512_i32gather_epi64::<8>(i, table.cast())
    }
    #[inline(always)]
    unsafe fn indices_of_bytes(p: *const u8) -> __m256i {
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))
    }
    #[inline(always)]
    unsafe fn indices_of_low_bytes(p: *const u8) -> __m256i {
        _mm256_cvtepu8_epi32(_mm_shuffle_epi32::<0b11_01_10_00>(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn indices_of_words(p: *const u8, bits: u32) -> __m256i {
        _mm256_and_si256(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())), _mm256_set1_epi32((1 << bits) - 1))
    }
    #[inline(always)]
    unsafe fn add_high(i: __m256i, fields: u32, width: u32, bits: u32) -> __m256i {
        let w = width as i32;
        // Blocks may begin at whole words: those of 3 bits do, and leave the 16th unused.
        let second = if width == 3 { 16 } else { 4 * w };
        let counts =
            _mm256_setr_epi32(0, w, 2 * w, 3 * w, second, second + w, second + 2 * w, second + 3 * w);
        let fields = _mm256_srlv_epi32(_mm256_set1_epi32(fields as i32), counts);
        let high = _mm256_and_si256(fields, _mm256_set1_epi32((1 << bits) - 1));
        _mm256_or_si256(i, _mm256_slli_epi32::<8>(high))
    }
    #[inline(always)]
    unsafe fn lanes_of_bits(bits: u32, value: i32) -> __m512i {
        _mm512_maskz_set1_epi32(bits as u16, value)
    }
    #[inline(always)]
    unsafe fn add_bytes(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi8(a, b)
    }
    #[inline(always)]
    unsafe fn sub_bytes(a: __m512i, b: __m512i) -> __m512i {
        _mm512_sub_epi8(a, b)
    }
    #[inline(always)]
    unsafe fn load_same(p: *const u8) -> __m512i {
        _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn field(v: __m512i, first: usize, step: usize, to: usize) -> __m512i {
        let (a, b) = ((64 + to - first) as i64 % 64, (64 + to - first - step) as i64 % 64);
        _mm512_rolv_epi64(v, _mm512_setr_epi64(a, a, a, a, b, b, b, b))
    }
    #[inline(always)]
    unsafe fn bytes_of_bits(bits: u64, value: u8) -> __m512i {
        _mm512_maskz_set1_epi8(bits, value as i8)
    }
    #[inline(always)]
    unsafe fn reflect(v: __m512i, bits: u64, twice: u8) -> __m512i {
        _mm512_mask_sub_epi8(v, bits, _mm512_set1_epi8(twice as i8), v)
    }
}
