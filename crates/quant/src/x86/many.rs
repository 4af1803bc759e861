//! Products with many columns: a lane is a column.
//!
//! A strip of rows is decoded for one segment (2,048 values), then meets all columns, 16 at a time, in a kernel that knows no
//! format: four bytes of a row's codes, in every lane, times four values of each column. The columns come packed
//! for this by [`Activations`](crate::Activations).

use super::chunk::{Block, CHUNK, Chunk, Class, Decoder, Scales, Sub, TERMS, accumulate};
use super::vector::Vector;
use super::{Columns, Rows, SEGMENT_CHUNKS};
use crate::block::Minimum;

/// Columns in a packed group.
const GROUP: usize = crate::activations::GROUP;

/// All rows of `w` times all columns of `x`.
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, the columns are packed, and the processor has `V`'s features.
#[inline(always)]
pub(super) unsafe fn many<V: Vector, K: Class, const R: usize>(w: &Rows, format: &Decoder, x: &Columns) {
    let blocks = w.k / 32;
    let mut chunks = [Chunk::ZERO; SEGMENT_CHUNKS];
    let mut row = 0;
    while row < w.rows {
        let rows = (w.rows - row).min(V::LANES);
        let mut first_block = 0;
        while first_block < blocks {
            let terms = (blocks - first_block).min(SEGMENT_CHUNKS * TERMS);
            for (c, chunk) in chunks.iter_mut().enumerate().take(terms.div_ceil(TERMS)) {
                let at = (first_block / TERMS + c) * format.chunk_bytes;
                let from = w.bytes.add(row * w.row_bytes + at);
                (format.decode)(from, w.row_bytes, rows, (terms - c * TERMS).min(TERMS), chunk);
            }
            let last = first_block + terms == blocks;
            let mut col = 0;
            while col < x.cols {
                let mut tile = Tile([[0.0; 16]; 16]);
                let tile = tile.0.as_mut_ptr().cast::<f32>();
                let mut r = 0;
                while r < rows {
                    product::<V, K, R>(
                        &chunks,
                        format,
                        r,
                        terms,
                        x,
                        col,
                        first_block,
                        tile.add(r * V::LANES),
                    );
                    r += R;
                }
                V::transpose(tile);
                for c in 0..V::LANES.min(x.cols - col) {
                    let sums = std::slice::from_raw_parts(tile.add(c * V::LANES), rows);
                    let scale = if last { w.tensor_scale } else { None };
                    if first_block == 0 {
                        w.out.write(w.first + row, col + c, sums, scale);
                    } else {
                        w.out.add(w.first + row, col + c, sums, scale);
                    }
                }
                col += V::LANES;
            }
            first_block += terms;
        }
        row += V::LANES;
    }
}

#[repr(C, align(64))]
struct Tile([[f32; 16]; 16]);

/// The sums over one segment of rows `row .. row + R` with `V::LANES` columns from `col` on, to `[R][V::LANES]` at `to`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn product<V: Vector, K: Class, const R: usize>(
    chunks: &[Chunk; SEGMENT_CHUNKS],
    format: &Decoder,
    row: usize,
    terms: usize,
    x: &Columns,
    col: usize,
    first_block: usize,
    to: *mut f32,
) {
    let (group, lane) = (col / GROUP, col % GROUP);
    let q = x.packed_q.add(group * x.k * GROUP + first_block * 32 * GROUP + 4 * lane);
    let d = x.packed_d.add((group * (x.k / 32) + first_block) * GROUP + lane);
    let sums = x.packed_sums.add((group * (x.k / 16) + 2 * first_block) * GROUP + lane);
    let mut acc = [V::splat_f(0.0); R];
    for t in 0..terms {
        let chunk = chunks.get_unchecked(t / TERMS);
        let codes = chunk.codes.as_ptr().cast::<u8>().add(row * CHUNK + t % TERMS * 32);
        let q = q.add(t * 32 * GROUP);
        let block = Block::<V> {
            d: V::load_f(d.add(t * GROUP)),
            sums: [V::load(sums.add(2 * t * GROUP)), V::load(sums.add((2 * t + 1) * GROUP))],
        };
        // Minus `offset` times the sum of activations: what every row's accumulator starts from.
        let start = |sum: V::I| match format.offset {
            0 => V::splat(0),
            offset => V::sub(V::splat(0), V::shl(sum, offset.trailing_zeros())),
        };
        let i = if K::HALVES {
            let low = integers::<V, R>(start(block.sums[0]), codes, q, 4, format.wide);
            let high =
                integers::<V, R>(start(block.sums[1]), codes.add(16), q.add(16 * GROUP), 4, format.wide);
            [low, high]
        } else {
            [integers::<V, R>(start(V::add(block.sums[0], block.sums[1])), codes, q, 8, format.wide); 2]
        };
        for r in 0..R {
            let scales = splats::<V, K>(chunk, format, t % TERMS, row + r);
            acc[r] = accumulate::<V, K>(acc[r], [i[0][r], i[1][r]], &scales, &block);
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        V::store_f(to.add(r * V::LANES), acc);
    }
}

/// The integer products of `4 * quads` codes of `R` rows with the columns at `q`, added to `start`.
#[inline(always)]
unsafe fn integers<V: Vector, const R: usize>(
    start: V::I,
    codes: *const u8,
    q: *const i8,
    quads: usize,
    wide: bool,
) -> [V::I; R] {
    let mut i = [start; R];
    for quad in 0..quads {
        let a = V::load(q.add(quad * 4 * GROUP).cast());
        for (r, i) in i.iter_mut().enumerate() {
            let w = V::splat(codes.add(r * CHUNK + 4 * quad).cast::<i32>().read_unaligned());
            *i = if wide && !V::TAKES_WIDE { V::dot_wide(*i, w, a) } else { V::dot(*i, w, a) };
        }
    }
    i
}

/// The scales of block `t` of a row, the same in every lane.
#[inline(always)]
unsafe fn splats<V: Vector, K: Class>(chunk: &Chunk, format: &Decoder, t: usize, row: usize) -> Scales<V> {
    let zero = V::splat_f(0.0);
    let splat = |a: &[f32; 16]| V::splat_f(*a.get_unchecked(row));
    let per_half = |a: &[[f32; 16]; 16]| [splat(a.get_unchecked(2 * t)), splat(a.get_unchecked(2 * t + 1))];
    Scales {
        d: if K::SUB == Sub::Float {
            per_half(&chunk.d)
        } else {
            [splat(chunk.d.get_unchecked(t >> format.scale_shift)); 2]
        },
        s: match K::SUB {
            Sub::Block => [splat(chunk.s.get_unchecked(t)); 2],
            Sub::Half => per_half(&chunk.s),
            _ => [zero; 2],
        },
        d_min: if K::MINIMUM == Minimum::None {
            zero
        } else {
            splat(chunk.d_min.get_unchecked(t >> format.scale_shift))
        },
        m: match (K::MINIMUM, K::SUB) {
            (Minimum::Subtracted, Sub::Half) => per_half(&chunk.m),
            (Minimum::Subtracted, _) => [splat(chunk.m.get_unchecked(t)); 2],
            _ => [zero; 2],
        },
    }
}
