//! Block-format products on x86-64, from AVX2 up.
//!
//! Owns the kernels and the choice between them. All unsafe code of the crate but the output view is in here:
//! its obligations are that the processor has the features a function was compiled for (given by [`Isa`]),
//! and that pointers stay inside the matrix, the columns and the output, whose shapes
//! [`matmul`](crate::matmul()) has checked.
//!
//! The way of a product: [`chunk`] decodes 256 weights of a strip of rows into codes and scales that no
//! longer show the format ([`codes`] has the formats); [`few`] and [`many`] multiply them, depending on the
//! number of columns.
//!
//! Invariant: the bits of [`block::dot`](crate::block::dot). Integers are exact whatever their order; every
//! float operation is the scalar path's, in its order, in a lane.

// Inside `unsafe fn` here, every line is unsafe for the one reason above.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)]

mod avx2;
mod avx512;
mod chunk;
mod codes;
mod columns;
mod few;
mod floats;
mod many;
mod vector;

use std::ops::Range;

use avx2::{Avx2, AvxVnni};
use avx512::Avx512;
use chunk::{Class, Coded, Decoder, Target};
use floats::{Bf16, F16, F32, Weight};

use crate::activations::{GROUP, WIDE_FROM};
use crate::formats::with_block_format;
use crate::{Activations, Format, Isa, Matrix, Out};

/// Rows of a matrix.
struct Rows<'a, 'o> {
    /// The first row's bytes.
    bytes: *const u8,
    /// From a row to the next.
    row_bytes: usize,
    /// Values in a row.
    k: usize,
    /// Number of rows.
    rows: usize,
    /// The first row's number in the output.
    first: usize,
    tensor_scale: Option<f32>,
    out: &'a Out<'o>,
}

impl<'a, 'o> Rows<'a, 'o> {
    fn of(w: &Matrix<'_>, rows: Range<usize>, out: &'a Out<'o>) -> Rows<'a, 'o> {
        Rows {
            bytes: w.rows_from(rows.start).as_ptr(),
            row_bytes: w.row_bytes(),
            k: w.k(),
            rows: rows.len(),
            first: rows.start,
            tensor_scale: w.tensor_scale(),
            out,
        }
    }

    /// From rows that are computed to the same number of rows after them, which are fetched meanwhile: in
    /// bytes. Where no rows follow it is 0: what is being read is fetched again, at no cost but the instructions.
    fn ahead(&self, rows: Range<usize>) -> usize {
        if rows.end < self.rows { rows.len() * self.row_bytes } else { 0 }
    }
}

/// Quantised columns; see [`Activations`] for the layouts.
pub(crate) struct Columns {
    pub(crate) k: usize,
    pub(crate) cols: usize,
    pub(crate) q: *const i8,
    pub(crate) q_stride: usize,
    pub(crate) d: *const f32,
    pub(crate) sums: *const i32,
    pub(crate) packed_q: *const i8,
    pub(crate) packed_d: *const f32,
    pub(crate) packed_sums: *const i32,
}

/// The product, if `isa` has vector paths; otherwise false, and nothing is done.
///
/// The caller has checked that `rows` are rows of `w`, that `x` has its length, and that `out` holds all
/// results.
pub(crate) fn product(isa: Isa, w: &Matrix<'_>, rows: Range<usize>, x: &Activations, out: &Out<'_>) -> bool {
    let (Isa::Avx2(_) | Isa::AvxVnni(_) | Isa::Avx512(_)) = isa else {
        return false;
    };
    let columns = x.pointers();
    let w_rows = Rows::of(w, rows, out);
    let gathers = gathers();
    with_block_format!(w.format(), F => {
        // SAFETY: the value of `isa` proves the features; the shapes are the caller's.
        unsafe {
            match isa {
                Isa::Avx2(_) => {
                    avx2_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(avx2_decode::<F>, false), &columns);
                }
                Isa::AvxVnni(_) => {
                    let decode = if gathers { avxvnni_decode::<F> } else { avx2_decode::<F> };
                    avxvnni_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(decode, true), &columns);
                }
                _ => {
                    let decode = if gathers { avx512_decode::<F, true> } else { avx512_decode::<F, false> };
                    avx512_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(decode, true), &columns);
                }
            }
        }
    }, float => unreachable!());
    true
}

/// Quantises blocks of 32, if `isa` has vector paths; otherwise false, and nothing is done.
pub(crate) fn quantise(isa: Isa, x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) -> bool {
    let blocks = d.len();
    assert!(x.len() == 32 * blocks && q.len() == 32 * blocks && sums.len() == 2 * blocks);
    if isa == Isa::Scalar {
        return false;
    }
    // SAFETY: the value of `isa` proves AVX2; the lengths are right.
    unsafe { columns::quantise(x, q, d, sums) };
    true
}

/// Packs `members` columns of `stride` elements, of which `len` count, in lanes, if there is AVX2; otherwise
/// false, and nothing is done.
pub(crate) fn pack(columns: &[u32], stride: usize, members: usize, len: usize, to: &mut [u32]) -> bool {
    assert!(
        len <= stride && columns.len() == members * stride && to.len() == len * GROUP && members <= GROUP
    );
    if !is_x86_feature_detected!("avx2") {
        return false;
    }
    // SAFETY: there is AVX2; the lengths are right.
    unsafe { columns::pack(columns.as_ptr(), stride, members, len, to.as_mut_ptr()) };
    true
}

/// The product with float weights, if `isa` has vector paths and rows are whole sets of lanes; otherwise
/// false, and nothing is done.
///
/// The caller has checked that `rows` are rows of `w`, that `x` is whole columns, and that `out` holds all
/// results.
pub(crate) fn float_product(isa: Isa, w: &Matrix<'_>, rows: Range<usize>, x: &[f32], out: &Out<'_>) -> bool {
    if isa == Isa::Scalar || !w.k().is_multiple_of(crate::lanes::LANES) {
        return false;
    }
    let cols = x.len() / w.k();
    let (x, w_rows) = (x.as_ptr(), Rows::of(w, rows, out));
    // SAFETY: the value of `isa` proves the features; the shapes are the caller's.
    unsafe {
        match (isa, w.format()) {
            (Isa::Avx512(_), Format::F32) => avx512_floats::<F32>(&w_rows, x, cols),
            (Isa::Avx512(_), Format::F16) => avx512_floats::<F16>(&w_rows, x, cols),
            (Isa::Avx512(_), _) => avx512_floats::<Bf16>(&w_rows, x, cols),
            (_, Format::F32) => avx2_floats::<F32>(&w_rows, x, cols),
            (_, Format::F16) => avx2_floats::<F16>(&w_rows, x, cols),
            _ => avx2_floats::<Bf16>(&w_rows, x, cols),
        }
    }
    true
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2_floats<W: Weight>(w: &Rows, x: *const f32, cols: usize) {
    floats::product::<Avx2, W, 3>(w, x, cols)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn avx512_floats<W: Weight>(w: &Rows, x: *const f32, cols: usize) {
    floats::product::<Avx512<false>, W, 6>(w, x, cols)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2_decode<F: Coded>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: &Target,
    ahead: usize,
) {
    chunk::decode::<Avx2, F>(from, row_bytes, rows, terms, to, ahead)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]
unsafe fn avxvnni_decode<F: Coded>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: &Target,
    ahead: usize,
) {
    chunk::decode::<AvxVnni, F>(from, row_bytes, rows, terms, to, ahead)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512_decode<F: Coded, const GATHERS: bool>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: &Target,
    ahead: usize,
) {
    chunk::decode::<Avx512<GATHERS>, F>(from, row_bytes, rows, terms, to, ahead)
}

/// Asks for `bytes` bytes to come to the second cache. The addresses need not exist.
///
/// The first cache is too small for what is fetched long before its use, and has fewer requests under way at
/// once. Requests beyond what the second has are lost, so they must not come in bursts: each row that is read
/// asks for as much as it has.
#[inline(always)]
unsafe fn fetch(from: *const u8, bytes: usize) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    let mut at = 0;
    while at < bytes {
        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast());
        at += 64;
    }
}

// From how many columns on a lane is better a column than a row: measured.
const AVX2_MANY: usize = 8;
const AVXVNNI_MANY: usize = 6;
const AVX512_MANY: usize = 8;
const _: () = assert!(AVX2_MANY >= WIDE_FROM && AVXVNNI_MANY >= WIDE_FROM && AVX512_MANY >= WIDE_FROM);
const _: () =
    assert!(AVX2_MANY <= few::FEW + 1 && AVXVNNI_MANY <= few::FEW + 1 && AVX512_MANY <= few::FEW + 1);

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < AVX2_MANY {
        few::few::<Avx2, K>(w, format, x)
    } else {
        many::many::<Avx2, K, 4>(w, format, x)
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]
unsafe fn avxvnni_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < AVXVNNI_MANY {
        few::few::<AvxVnni, K>(w, format, x)
    } else {
        many::many::<AvxVnni, K, 4>(w, format, x)
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < AVX512_MANY {
        few::few::<Avx512<false>, K>(w, format, x)
    } else {
        many::many::<Avx512<false>, K, 8>(w, format, x)
    }
}

/// Whether gathering from small tables is fast: on Intel's processors without the flaw whose mitigation makes
/// it slow, which are about those with AVX-VNNI; AMD's assemble a vector from loads faster.
fn gathers() -> bool {
    use std::sync::OnceLock;
    static GATHERS: OnceLock<bool> = OnceLock::new();
    *GATHERS.get_or_init(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        let intel =
            [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel";
        intel && is_x86_feature_detected!("avxvnni")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{Minimum, Term};
    use chunk::{Decode, Panel, Sub, TERMS, WIDTH};

    /// All decoders of a format that this processor can run, also those that [`gathers`] doesn't choose.
    fn decoders<F: Coded>() -> Vec<(&'static str, Decode)> {
        let mut all: Vec<(&'static str, Decode)> = Vec::new();
        for isa in Isa::available() {
            match isa {
                Isa::Scalar => {}
                Isa::Avx2(_) => all.push(("avx2", avx2_decode::<F>)),
                Isa::AvxVnni(_) => all.push(("avxvnni", avxvnni_decode::<F>)),
                Isa::Avx512(_) => {
                    all.push(("avx512", avx512_decode::<F, false>));
                    all.push(("avx512, gathering", avx512_decode::<F, true>));
                }
            }
        }
        all
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    /// What lane `lane` says of block `t`, as a term.
    ///
    /// # Safety
    /// That block of that lane has been decoded to `chunk`.
    unsafe fn term_of<F: Coded>(chunk: &Target, lane: usize, t: usize) -> Term {
        let at = |p: *const f32, i: usize| *p.add(i * WIDTH + lane);
        let class = <F::Class as Class>::SUB;
        let float = t * 32 / F::LEN;
        let integers = |p: *const f32| match class {
            Sub::Half => [at(p, 2 * t) as i32, at(p, 2 * t + 1) as i32],
            _ => [at(p, t) as i32; 2],
        };
        let code = |i: usize| i32::from(*chunk.codes.add(lane * chunk.stride + 32 * t + i));
        Term {
            w: std::array::from_fn(|i| (code(i) - F::OFFSET as i32) as i8),
            s: if matches!(class, Sub::Block | Sub::Half) { integers(chunk.s) } else { [1; 2] },
            d: if F::SPLIT { [at(chunk.d, 2 * t), at(chunk.d, 2 * t + 1)] } else { [at(chunk.d, float); 2] },
            m: match F::MINIMUM {
                Minimum::None => [0; 2],
                Minimum::Added => [1; 2],
                Minimum::Subtracted => integers(chunk.m),
            },
            d_min: if F::MINIMUM == Minimum::None { 0.0 } else { at(chunk.d_min, float) },
        }
    }

    fn check<F: Coded>(format: Format) {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for terms in (1..=TERMS).filter(|terms| (terms * 32).is_multiple_of(F::LEN)) {
            let row_bytes = terms * 32 / F::LEN * F::BYTES;
            for rows in [1, 7, 8] {
                let bytes: Vec<u8> = (0..rows * row_bytes).map(|_| next()).collect();
                for (name, decode) in decoders::<F>() {
                    let mut panel = Box::<Panel<16, TERMS>>::new_uninit();
                    for (row, t) in (0..rows).flat_map(|row| (0..terms).map(move |t| (row, t))) {
                        let block = &bytes[row * row_bytes + t * 32 / F::LEN * F::BYTES..][..F::BYTES];
                        let want = F::term(block, t % (F::LEN / 32));
                        // SAFETY: the bytes are `rows` rows of `terms` blocks, and the path is available.
                        let got = unsafe {
                            Panel::prepare(panel.as_mut_ptr(), false);
                            let target = Panel::target(panel.as_mut_ptr(), chunk::CHUNK);
                            decode(bytes.as_ptr(), row_bytes, rows, terms, &target, 0);
                            term_of::<F>(&target, row, t)
                        };
                        let floats = |t: &Term| [t.d[0], t.d[1], t.d_min];
                        let alike = floats(&got).iter().zip(floats(&want)).all(|(&a, b)| same(a, b));
                        assert!(
                            alike && (got.w, got.s, got.m) == (want.w, want.s, want.m),
                            "{format} {name}, row {row}, block {t} of {terms}:\n{got:?}, not\n{want:?}"
                        );
                    }
                }
            }
        }
    }

    /// Oracle: the formats' terms, on random chunks of every length.
    #[test]
    fn decoders_agree_with_the_terms() {
        for format in Format::ALL {
            with_block_format!(format, F => check::<F>(format), float => {});
        }
    }
}
