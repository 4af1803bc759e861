//! Block-format products on x86-64, from AVX2 up.
//!
//! Owns the kernels and the choice between them. All unsafe code of the crate but the output view is in here: its obligations
//! are that the processor has the features a function was compiled for (given by [`Isa`]), and that pointers stay inside the
//! matrix, the columns and the output, whose shapes [`matmul`](crate::matmul()) has checked.
//!
//! The way of a product: [`chunk`] decodes 256 weights of a strip of rows into codes and scales that no longer show the
//! format ([`codes`] has the formats); [`few`] and [`many`] multiply them, depending on the number of columns.
//!
//! Invariant: the bits of [`block::dot`](crate::block::dot). Integers are exact whatever their order; every float operation is
//! the scalar path's, in its order, in a lane.

// Inside `unsafe fn` here, every line is unsafe for the one reason above.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)]

mod avx2;
mod avx512;
mod chunk;
mod codes;
mod few;
mod many;
mod vector;

use std::ops::Range;

use avx2::{Avx2, AvxVnni};
use avx512::Avx512;
use chunk::{Chunk, Class, Coded, Decoder};

use crate::activations::WIDE_FROM;
use crate::block::SEGMENT;
use crate::formats::with_block_format;
use crate::{Activations, Isa, Matrix, Out};

/// Chunks in a segment.
const SEGMENT_CHUNKS: usize = SEGMENT / chunk::TERMS;

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
/// The caller has checked that `rows` are rows of `w`, that `x` has its length, and that `out` holds all results.
pub(crate) fn product(isa: Isa, w: &Matrix<'_>, rows: Range<usize>, x: &Activations, out: &Out<'_>) -> bool {
    let (Isa::Avx2(_) | Isa::AvxVnni(_) | Isa::Avx512(_)) = isa else {
        return false;
    };
    let columns = x.pointers();
    let w_rows = Rows {
        bytes: w.rows_from(rows.start).as_ptr(),
        row_bytes: w.row_bytes(),
        k: w.k(),
        rows: rows.len(),
        first: rows.start,
        tensor_scale: w.tensor_scale(),
        out,
    };
    with_block_format!(w.format(), F => {
        // SAFETY: the value of `isa` proves the features; the shapes are the caller's.
        unsafe {
            match isa {
                Isa::Avx2(_) => avx2_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(avx2_decode::<F>, false), &columns),
                Isa::AvxVnni(_) => avxvnni_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(avx2_decode::<F>, true), &columns),
                _ => avx512_product::<<F as Coded>::Class>(&w_rows, &Decoder::of::<F>(avx512_decode::<F>, true), &columns),
            }
        }
    }, float => unreachable!());
    true
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2_decode<F: Coded>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: *mut Chunk,
) {
    chunk::decode::<Avx2, F>(from, row_bytes, rows, terms, to)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512_decode<F: Coded>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: *mut Chunk,
) {
    chunk::decode::<Avx512, F>(from, row_bytes, rows, terms, to)
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn avx2_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < WIDE_FROM {
        few::few::<Avx2, K>(w, format, x)
    } else {
        many::many::<Avx2, K, 4>(w, format, x)
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]
unsafe fn avxvnni_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < WIDE_FROM {
        few::few::<AvxVnni, K>(w, format, x)
    } else {
        many::many::<AvxVnni, K, 4>(w, format, x)
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512_product<K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    if x.cols < WIDE_FROM {
        few::few::<Avx512, K>(w, format, x)
    } else {
        many::many::<Avx512, K, 8>(w, format, x)
    }
}
