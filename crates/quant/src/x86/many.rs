//! Products with many columns: a lane is a column.
//!
//! A strip of rows is decoded for one segment (2,048 values), then meets all columns in a kernel that knows no format: four
//! bytes of a row's codes, in every lane, times four values of each column. The columns come packed for this by
//! [`Activations`](crate::Activations).

use std::mem::MaybeUninit;

use super::chunk::{Block, CHUNK, Chunk, Class, Decoder, Scales, Sub, TERMS, accumulate};
use super::vector::Vector;
use super::{Columns, Rows, SEGMENT_CHUNKS};
use crate::activations::GROUP;
use crate::block::Minimum;

/// Rows in a strip: as many as leave a decoded segment and some activations in the first cache.
const STRIP: usize = 8;

/// All rows of `w` times all columns of `x`, in tiles of `R` rows (a divisor of [`STRIP`]) and twice `V::LANES` columns.
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, the columns are packed, and the processor has `V`'s features.
#[inline(always)]
pub(super) unsafe fn many<V: Vector, K: Class, const R: usize>(w: &Rows, format: &Decoder, x: &Columns) {
    let blocks = w.k / 32;
    let mut chunks = MaybeUninit::<[Chunk; SEGMENT_CHUNKS]>::uninit();
    let chunks = chunks.as_mut_ptr().cast::<Chunk>();
    if !w.rows.is_multiple_of(STRIP) {
        // The rows that a last strip lacks are multiplied too.
        chunks.write_bytes(0, SEGMENT_CHUNKS);
    }
    let mut row = 0;
    while row < w.rows {
        let rows = (w.rows - row).min(STRIP);
        let mut first_block = 0;
        while first_block < blocks {
            let terms = (blocks - first_block).min(SEGMENT_CHUNKS * TERMS);
            for c in 0..terms.div_ceil(TERMS) {
                let at = (first_block / TERMS + c) * format.chunk_bytes;
                let from = w.bytes.add(row * w.row_bytes + at);
                (format.decode)(from, w.row_bytes, rows, (terms - c * TERMS).min(TERMS), chunks.add(c));
            }
            let mut col = 0;
            while col < x.cols {
                let segment = Segment { chunks, terms, first_block, row, rows, col };
                col += if x.cols - col > V::LANES {
                    segment.product::<V, K, R, 2>(w, format, x)
                } else {
                    segment.product::<V, K, R, 1>(w, format, x)
                };
            }
            first_block += terms;
        }
        row += STRIP;
    }
}

/// A decoded strip of rows, for one segment, and the columns it meets.
struct Segment {
    chunks: *const Chunk,
    /// Blocks of 32.
    terms: usize,
    /// The segment's first block in its rows.
    first_block: usize,
    row: usize,
    rows: usize,
    col: usize,
}

/// Sums of [`STRIP`] rows with a vector of columns each.
#[repr(C, align(64))]
struct Tile([f32; 256]);

impl Segment {
    /// Multiplies with `G * V::LANES` columns, and adds the results to the output. Returns the number of columns.
    #[inline(always)]
    unsafe fn product<V: Vector, K: Class, const R: usize, const G: usize>(
        &self,
        w: &Rows,
        format: &Decoder,
        x: &Columns,
    ) -> usize {
        let mut tiles = [const { MaybeUninit::<Tile>::uninit() }; G];
        if STRIP < V::LANES {
            // Transposed along, then dropped.
            tiles.as_mut_ptr().write_bytes(0, G);
        }
        let mut row = 0;
        while row < self.rows {
            let sums = self.sums::<V, K, R, G>(row, format, x);
            for (r, sums) in sums.iter().enumerate() {
                for (tile, &sum) in tiles.iter_mut().zip(sums) {
                    V::store_f(tile.as_mut_ptr().cast::<f32>().add((row + r) * V::LANES), sum);
                }
            }
            row += R;
        }
        let last = self.first_block + self.terms == w.k / 32;
        let scale = if last { w.tensor_scale } else { None };
        for (g, tile) in tiles.iter_mut().enumerate() {
            let tile = tile.as_mut_ptr().cast::<f32>();
            V::transpose(tile);
            let col = self.col + g * V::LANES;
            for c in 0..V::LANES.min(x.cols - col) {
                let sums = tile.add(c * V::LANES);
                let out = w.out.rows(w.first + self.row, col + c, self.rows);
                if self.rows == STRIP && scale.is_none() {
                    V::add_8(out, sums, self.first_block == 0);
                    continue;
                }
                for r in 0..self.rows {
                    let before = if self.first_block == 0 { 0.0 } else { *out.add(r) };
                    let sum = before + *sums.add(r);
                    *out.add(r) = scale.map_or(sum, |scale| sum * scale);
                }
            }
        }
        G * V::LANES
    }

    /// The sums over the segment of rows `row .. row + R` of the strip, with each group of columns.
    #[inline(always)]
    unsafe fn sums<V: Vector, K: Class, const R: usize, const G: usize>(
        &self,
        row: usize,
        format: &Decoder,
        x: &Columns,
    ) -> [[V::F; G]; R] {
        let mut q = [x.packed_q; G];
        let mut d = [x.packed_d; G];
        let mut sums = [x.packed_sums; G];
        for g in 0..G {
            let (group, lane) = ((self.col + g * V::LANES) / GROUP, (self.col + g * V::LANES) % GROUP);
            q[g] = q[g].add((group * x.k + self.first_block * 32) * GROUP + 4 * lane);
            d[g] = d[g].add((group * (x.k / 32) + self.first_block) * GROUP + lane);
            sums[g] = sums[g].add((group * (x.k / 16) + 2 * self.first_block) * GROUP + lane);
        }
        let mut acc = [[V::splat_f(0.0); G]; R];
        for t in 0..self.terms {
            let chunk = self.chunks.add(t / TERMS);
            let codes = (&raw const (*chunk).codes).cast::<u8>().add(row * CHUNK + t % TERMS * 32);
            let mut blocks = [Block::<V> { d: V::splat_f(0.0), sums: [V::splat(0); 2] }; G];
            let mut start = [[V::splat(0); 2]; G];
            for g in 0..G {
                blocks[g].d = V::load_f(d[g].add(t * GROUP));
                let at = sums[g].add(2 * t * GROUP);
                blocks[g].sums = [V::load(at), V::load(at.add(GROUP))];
                start[g] = start_of::<V, K>(blocks[g].sums, format.offset);
            }
            let (low, high) = if K::HALVES {
                let low = integers::<V, R, G>(start.map(|s| s[0]), codes, &q, t * 32 * GROUP, 4, format.wide);
                let high = integers::<V, R, G>(
                    start.map(|s| s[1]),
                    codes.add(16),
                    &q,
                    (t * 32 + 16) * GROUP,
                    4,
                    format.wide,
                );
                (low, high)
            } else {
                let all = integers::<V, R, G>(start.map(|s| s[0]), codes, &q, t * 32 * GROUP, 8, format.wide);
                (all, all)
            };
            for r in 0..R {
                let scales = splats::<V, K>(chunk, format, t % TERMS, row + r);
                for g in 0..G {
                    acc[r][g] = accumulate::<V, K>(acc[r][g], [low[r][g], high[r][g]], &scales, &blocks[g]);
                }
            }
        }
        acc
    }
}

/// Minus `offset` times the sums of activations, of each half or of both: what every row's products start from.
#[inline(always)]
unsafe fn start_of<V: Vector, K: Class>(sums: [V::I; 2], offset: u32) -> [V::I; 2] {
    let zero = V::splat(0);
    if offset == 0 {
        return [zero; 2];
    }
    let bits = offset.trailing_zeros();
    if K::HALVES {
        [V::sub(zero, V::shl(sums[0], bits)), V::sub(zero, V::shl(sums[1], bits))]
    } else {
        [V::sub(zero, V::shl(V::add(sums[0], sums[1]), bits)); 2]
    }
}

/// The integer products of `4 * quads` codes of `R` rows with the columns at `q + at`, added to `start`.
#[inline(always)]
unsafe fn integers<V: Vector, const R: usize, const G: usize>(
    start: [V::I; G],
    codes: *const u8,
    q: &[*const i8; G],
    at: usize,
    quads: usize,
    wide: bool,
) -> [[V::I; G]; R] {
    let mut i = [start; R];
    for quad in 0..quads {
        let mut a = [V::splat(0); G];
        for (a, q) in a.iter_mut().zip(q) {
            *a = V::load(q.add(at + quad * 4 * GROUP).cast());
        }
        for (r, i) in i.iter_mut().enumerate() {
            let w = V::splat(codes.add(r * CHUNK + 4 * quad).cast::<i32>().read_unaligned());
            for (i, &a) in i.iter_mut().zip(&a) {
                *i = if wide && !V::TAKES_WIDE { V::dot_wide(*i, w, a) } else { V::dot(*i, w, a) };
            }
        }
    }
    i
}

/// The scales of block `t` of a row, the same in every lane.
#[inline(always)]
unsafe fn splats<V: Vector, K: Class>(
    chunk: *const Chunk,
    format: &Decoder,
    t: usize,
    row: usize,
) -> Scales<V> {
    let zero = V::splat_f(0.0);
    let mut scales = Scales { d: [zero; 2], s: [zero; 2], d_min: zero, m: [zero; 2] };
    let float = t >> format.scale_shift;
    scales.d = if K::SUB == Sub::Float {
        [V::splat_f((*chunk).d[2 * t][row]), V::splat_f((*chunk).d[2 * t + 1][row])]
    } else {
        [V::splat_f((*chunk).d[float][row]); 2]
    };
    match K::SUB {
        Sub::Block => scales.s = [V::splat_f((*chunk).s[t][row]); 2],
        Sub::Half => scales.s = [V::splat_f((*chunk).s[2 * t][row]), V::splat_f((*chunk).s[2 * t + 1][row])],
        _ => {}
    }
    if K::MINIMUM != Minimum::None {
        scales.d_min = V::splat_f((*chunk).d_min[float][row]);
    }
    match (K::MINIMUM, K::SUB) {
        (Minimum::Subtracted, Sub::Half) => {
            scales.m = [V::splat_f((*chunk).m[2 * t][row]), V::splat_f((*chunk).m[2 * t + 1][row])];
        }
        (Minimum::Subtracted, _) => scales.m = [V::splat_f((*chunk).m[t][row]); 2],
        _ => {}
    }
    scales
}
