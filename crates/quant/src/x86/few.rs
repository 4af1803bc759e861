//! Products with few columns: a lane is a row.
//!
//! For each column, the products of one block (or two) of all rows of a strip are summed by a tree whose result has a lane for
//! each row; from there on everything is done for all rows at once. The weights' bytes are read once, whatever the
//! number of columns.

use std::mem::MaybeUninit;

use super::chunk::{Block, CHUNK, Chunk, Class, Decoder, Scales, Sub, TERMS, accumulate};
use super::vector::{Lanes, Vector};
use super::{Columns, Rows, SEGMENT_CHUNKS};
use crate::block::Minimum;

/// Most columns that [`few`] takes.
pub(super) const FEW: usize = 8;

/// All rows of `w` times all columns of `x` (at most [`FEW`]).
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, and the processor has `V`'s features.
#[inline(always)]
pub(super) unsafe fn few<V: Vector, K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    let blocks = w.k / 32;
    let mut chunk = MaybeUninit::<Chunk>::uninit();
    let chunk = chunk.as_mut_ptr();
    if !w.rows.is_multiple_of(V::LANES) {
        // The lanes that a last strip lacks are computed too.
        chunk.write_bytes(0, 1);
    }
    let mut row = 0;
    while row < w.rows {
        let rows = (w.rows - row).min(V::LANES);
        let strip = w.bytes.add(row * w.row_bytes);
        // A strip is contiguous, and so is the next one: fetched while this one is computed, at the same pace.
        let ahead = if row + V::LANES < w.rows { V::LANES * w.row_bytes } else { 0 };
        let mut sums = [[0.0f32; 16]; FEW];
        let mut totals = [[0.0f32; 16]; FEW];
        for c in 0..blocks.div_ceil(TERMS) {
            let terms = (blocks - c * TERMS).min(TERMS);
            let from = strip.add(c * format.chunk_bytes);
            if ahead > 0 {
                for r in 0..rows {
                    let next = from.wrapping_add(ahead + r * w.row_bytes);
                    for line in 0..format.chunk_bytes.div_ceil(64) {
                        prefetch(next.wrapping_add(64 * line));
                    }
                }
            }
            (format.decode)(from, w.row_bytes, rows, terms, chunk);
            let ends = (c + 1).is_multiple_of(SEGMENT_CHUNKS) || (c + 1) * TERMS >= blocks;
            for col in 0..x.cols {
                let sum = sums[col].as_mut_ptr();
                let acc = column::<V, K>(chunk, format, terms, x, col, c * TERMS, V::load_f(sum));
                if ends {
                    let total = totals[col].as_mut_ptr();
                    V::store_f(total, V::add_f(V::load_f(total), acc));
                    V::store_f(sum, V::splat_f(0.0));
                } else {
                    V::store_f(sum, acc);
                }
            }
        }
        for (col, total) in totals[..x.cols].iter().enumerate() {
            w.out.write(w.first + row, col, &total[..rows], w.tensor_scale);
        }
        row += V::LANES;
    }
}

/// Adds a chunk's products with one column to `acc`, whose lanes are the chunk's rows.
#[inline(always)]
unsafe fn column<V: Vector, K: Class>(
    chunk: *const Chunk,
    format: &Decoder,
    terms: usize,
    x: &Columns,
    col: usize,
    first_block: usize,
    mut acc: V::F,
) -> V::F {
    let q = x.q.add(col * x.q_stride + first_block * 32);
    let d = x.d.add(col * (x.k / 32) + first_block);
    let sums = x.sums.add(col * (x.k / 16) + 2 * first_block);
    for step in 0..terms.div_ceil(V::BLOCKS) {
        let a = V::load(q.add(step * V::LANES * 4).cast());
        let codes = (&raw const (*chunk).codes).cast::<u8>().add(step * V::LANES * 4);
        let products = Products::<V> { codes, a, signed: format.wide && !V::TAKES_WIDE };
        let i = if K::HALVES { V::reduce_halves(&products) } else { V::reduce(&products).map(|i| [i; 2]) };
        for (b, i) in i.into_iter().enumerate().take(V::BLOCKS.min(terms - step * V::BLOCKS)) {
            let t = step * V::BLOCKS + b;
            let sums = [*sums.add(2 * t), *sums.add(2 * t + 1)];
            let less = |sum: i32, i: V::I| V::sub(i, V::splat(sum * format.offset as i32));
            let i = if K::HALVES {
                [less(sums[0], i[0]), less(sums[1], i[1])]
            } else {
                [less(sums[0] + sums[1], i[0]); 2]
            };
            let block = Block { d: V::splat_f(*d.add(t)), sums: sums.map(|s| V::splat(s)) };
            acc = accumulate::<V, K>(acc, i, &lanes::<V, K>(chunk, format, t), &block);
        }
    }
    acc
}

/// The products of one step of each row with a column.
struct Products<V: Vector> {
    /// The first row's codes.
    codes: *const u8,
    a: V::I,
    /// Whether to multiply by [`Vector::dot_wide`].
    signed: bool,
}

impl<V: Vector> Lanes<V::I> for Products<V> {
    #[inline(always)]
    unsafe fn lane(&self, row: usize) -> V::I {
        let codes = V::load(self.codes.add(row * CHUNK).cast());
        if self.signed { V::dot_wide(V::splat(0), codes, self.a) } else { V::dot(V::splat(0), codes, self.a) }
    }
}

/// The scales of block `t`, a lane for each row.
#[inline(always)]
unsafe fn lanes<V: Vector, K: Class>(chunk: *const Chunk, format: &Decoder, t: usize) -> Scales<V> {
    let zero = V::splat_f(0.0);
    let mut scales = Scales { d: [zero; 2], s: [zero; 2], d_min: zero, m: [zero; 2] };
    let float = t >> format.scale_shift;
    let (d, s) = ((&raw const (*chunk).d).cast::<f32>(), (&raw const (*chunk).s).cast::<f32>());
    let (d_min, m) = ((&raw const (*chunk).d_min).cast::<f32>(), (&raw const (*chunk).m).cast::<f32>());
    scales.d = if K::SUB == Sub::Float {
        [V::load_f(d.add(32 * t)), V::load_f(d.add(32 * t + 16))]
    } else {
        [V::load_f(d.add(16 * float)); 2]
    };
    match K::SUB {
        Sub::Block => scales.s = [V::load_f(s.add(16 * t)); 2],
        Sub::Half => scales.s = [V::load_f(s.add(32 * t)), V::load_f(s.add(32 * t + 16))],
        _ => {}
    }
    if K::MINIMUM != Minimum::None {
        scales.d_min = V::load_f(d_min.add(16 * float));
    }
    match (K::MINIMUM, K::SUB) {
        (Minimum::Subtracted, Sub::Half) => {
            scales.m = [V::load_f(m.add(32 * t)), V::load_f(m.add(32 * t + 16))]
        }
        (Minimum::Subtracted, _) => scales.m = [V::load_f(m.add(16 * t)); 2],
        _ => {}
    }
    scales
}

#[inline(always)]
unsafe fn prefetch(p: *const u8) {
    std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
}
