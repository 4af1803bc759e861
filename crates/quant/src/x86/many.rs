//! Products with many columns: a lane is a column.
//!
//! A strip of rows is decoded for one segment (2,048 values), then meets all columns in a kernel that knows
//! no format: four bytes of a row's codes, in every lane, times four values of each column. The columns come
//! packed for this by [`Activations`](crate::Activations).
//!
//! Rows that aren't whole chunks are decoded several for one; a lane of the decoder is then that many rows,
//! one after the other.

use std::mem::MaybeUninit;

use super::chunk::{Block, Class, Decoder, Panel, Scales, Sub, TERMS, Target, WIDTH, accumulate};
use super::vector::Vector;
use super::{Columns, Rows};
use crate::activations::GROUP;
use crate::block::{Minimum, SEGMENT};

/// Lanes of a strip of long rows: as many as leave a decoded segment and some activations in the first cache.
const LANES: usize = 8;
/// Blocks of a lane up to which a strip of 16 lanes leaves as much.
const SHORT: usize = 32;

/// All rows of `w` times all columns of `x`, in tiles of `R` rows (a divisor of [`LANES`]) and twice
/// `V::LANES` columns.
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, the columns are packed, and the processor has
/// `V`'s features.
#[inline(always)]
pub(super) unsafe fn many<V: Vector, K: Class, const R: usize>(w: &Rows, format: &Decoder, x: &Columns) {
    let blocks = w.k / 32;
    let merge = format.merge(blocks);
    let lanes = if merge * blocks <= SHORT { V::LANES } else { LANES };
    let mut panel = MaybeUninit::<Panel<LANES, SEGMENT>>::uninit();
    let mut tiles = MaybeUninit::<[Tile; 2]>::uninit();
    let tiles = tiles.as_mut_ptr().cast::<Tile>();
    // A tile's lanes without a row are multiplied like the others.
    Panel::prepare(panel.as_mut_ptr(), w.rows.is_multiple_of(R));
    let merged = w.rows - w.rows % (merge * lanes);
    let mut row = 0;
    while row < w.rows {
        let (lanes, merge) = if row < merged { (lanes, merge) } else { (lanes.min(w.rows - row), 1) };
        let ahead = w.ahead(row..row + lanes * merge);
        let mut first = 0;
        while first < blocks {
            // Of each row of a lane.
            let terms = (blocks - first).min(SEGMENT);
            let stride = (merge * terms * 32).next_multiple_of(64);
            let target = Panel::target(panel.as_mut_ptr(), stride);
            for c in 0..(merge * terms).div_ceil(TERMS) {
                let from = w.bytes.add(row * w.row_bytes + (first / TERMS + c) * format.chunk_bytes);
                let terms = (merge * terms - c * TERMS).min(TERMS);
                let target = target.after(c * TERMS, format);
                (format.decode)(from, merge * w.row_bytes, lanes, terms, &target, ahead);
            }
            let strip = Strip { target, terms, first, row, lanes, merge, tiles };
            let mut col = 0;
            while col < x.cols {
                col += if x.cols - col > V::LANES {
                    strip.product::<V, K, R, 2>(w, format, x, col)
                } else {
                    strip.product::<V, K, R, 1>(w, format, x, col)
                };
            }
            first += terms;
        }
        row += lanes * merge;
    }
}

/// A decoded strip of rows, for one segment.
struct Strip {
    target: Target,
    /// Blocks of 32 of a row.
    terms: usize,
    /// The segment's first block in its rows.
    first: usize,
    row: usize,
    lanes: usize,
    /// Rows in a lane.
    merge: usize,
    tiles: *mut Tile,
}

/// Sums of a strip's rows with a vector of columns each: `[row][column]`.
#[repr(C, align(64))]
struct Tile([[f32; 16]; 16 * TERMS]);

impl Strip {
    /// Multiplies with `G * V::LANES` columns from `col` on, and adds the results to the output. Returns the
    /// number of columns.
    #[inline(always)]
    unsafe fn product<V: Vector, K: Class, const R: usize, const G: usize>(
        &self,
        w: &Rows,
        format: &Decoder,
        x: &Columns,
        col: usize,
    ) -> usize {
        for i in 0..self.merge {
            let mut lane = 0;
            while lane < self.lanes {
                let sums = self.sums::<V, K, R, G>(i, lane, format, x, col);
                for (r, sums) in sums.iter().enumerate() {
                    let row = (lane + r) * self.merge + i;
                    for (g, &sum) in sums.iter().enumerate() {
                        V::store_f(self.tiles.add(g).cast::<f32>().add(row * V::LANES), sum);
                    }
                }
                lane += R;
            }
        }
        let rows = self.lanes * self.merge;
        for g in 0..G {
            // Transposed like the others.
            let spare = rows.next_multiple_of(V::LANES) - rows;
            self.tiles.add(g).cast::<f32>().add(rows * V::LANES).write_bytes(0, spare * V::LANES);
            let mut row = 0;
            while row < rows {
                let tile = self.tiles.add(g).cast::<f32>().add(row * V::LANES);
                V::transpose(tile);
                let cols = V::LANES.min(x.cols - (col + g * V::LANES));
                self.write::<V>(w, row, V::LANES.min(rows - row), tile, col + g * V::LANES, cols);
                row += V::LANES;
            }
        }
        G * V::LANES
    }

    /// Adds a transposed tile, `[column][row]`, to the output.
    #[inline(always)]
    unsafe fn write<V: Vector>(
        &self,
        w: &Rows,
        row: usize,
        rows: usize,
        tile: *const f32,
        col: usize,
        cols: usize,
    ) {
        let (fresh, last) = (self.first == 0, self.first + self.terms == w.k / 32);
        let scale = if last { w.tensor_scale } else { None };
        for c in 0..cols {
            let sums = tile.add(c * V::LANES);
            let out = w.out.rows(w.first + self.row + row, col + c, rows);
            if scale.is_none() && rows == V::LANES {
                let before = if fresh { V::splat_f(0.0) } else { V::load_f(out) };
                V::store_f(out, V::add_f(before, V::load_f(sums)));
            } else if scale.is_none() && rows == 8 {
                add_8(out, sums, fresh);
            } else {
                for r in 0..rows {
                    let sum = if fresh { 0.0 } else { *out.add(r) } + *sums.add(r);
                    *out.add(r) = scale.map_or(sum, |scale| sum * scale);
                }
            }
        }
    }

    /// The sums over the segment of the `i`-th row of lanes `lane .. lane + R`, with each group of columns
    /// from `col` on.
    #[inline(always)]
    unsafe fn sums<V: Vector, K: Class, const R: usize, const G: usize>(
        &self,
        i: usize,
        lane: usize,
        format: &Decoder,
        x: &Columns,
        col: usize,
    ) -> [[V::F; G]; R] {
        let mut q = [x.packed_q; G];
        let mut d = [x.packed_d; G];
        let mut sums = [x.packed_sums; G];
        for g in 0..G {
            let (group, lane) = ((col + g * V::LANES) / GROUP, (col + g * V::LANES) % GROUP);
            q[g] = q[g].add((group * x.k + self.first * 32) * GROUP + 4 * lane);
            d[g] = d[g].add((group * (x.k / 32) + self.first) * GROUP + lane);
            sums[g] = sums[g].add((group * (x.k / 16) + 2 * self.first) * GROUP + lane);
        }
        let w = self.target.after(i * self.terms, format);
        let codes = w.codes.add(lane * w.stride);
        let mut acc = [[V::splat_f(0.0); G]; R];
        for t in 0..self.terms {
            let mut blocks = [Block::<V> { d: V::splat_f(0.0), sums: [V::splat(0); 2] }; G];
            let mut start = [[V::splat(0); 2]; G];
            for g in 0..G {
                blocks[g].d = V::load_f(d[g].add(t * GROUP));
                let at = sums[g].add(2 * t * GROUP);
                blocks[g].sums = [V::load(at), V::load(at.add(GROUP))];
                start[g] = start_of::<V, K>(blocks[g].sums, format.offset);
            }
            let codes = codes.add(32 * t);
            let (low, high) = if K::HALVES {
                let at = t * 32 * GROUP;
                let low = integers::<V, R, G>(start.map(|s| s[0]), codes, w.stride, &q, at, 4, format.wide);
                let (codes, at) = (codes.add(16), at + 16 * GROUP);
                (low, integers::<V, R, G>(start.map(|s| s[1]), codes, w.stride, &q, at, 4, format.wide))
            } else {
                let at = t * 32 * GROUP;
                let all = integers::<V, R, G>(start.map(|s| s[0]), codes, w.stride, &q, at, 8, format.wide);
                (all, all)
            };
            for r in 0..R {
                let scales = splats::<V, K>(&w, format, t, lane + r);
                for g in 0..G {
                    acc[r][g] = accumulate::<V, K>(acc[r][g], [low[r][g], high[r][g]], &scales, &blocks[g]);
                }
            }
        }
        acc
    }
}

/// Minus `offset` times the sums of activations, of each half or of both: what every row's products start
/// from.
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
    stride: usize,
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
            let w = V::splat(codes.add(r * stride + 4 * quad).cast::<i32>().read_unaligned());
            for (i, &a) in i.iter_mut().zip(&a) {
                *i = if wide && !V::TAKES_WIDE { V::dot_wide(*i, w, a) } else { V::dot(*i, w, a) };
            }
        }
    }
    i
}

/// The scales of block `t` of a lane, the same in every column.
#[inline(always)]
unsafe fn splats<V: Vector, K: Class>(w: &Target, format: &Decoder, t: usize, lane: usize) -> Scales<V> {
    let zero = V::splat_f(0.0);
    let mut scales = Scales { d: [zero; 2], s: [zero; 2], d_min: zero, m: [zero; 2] };
    let float = t >> format.scale_shift;
    scales.d = if K::SUB == Sub::Float {
        [V::splat_f(*w.d.add(2 * t * WIDTH + lane)), V::splat_f(*w.d.add((2 * t + 1) * WIDTH + lane))]
    } else {
        [V::splat_f(*w.d.add(float * WIDTH + lane)); 2]
    };
    match K::SUB {
        Sub::Block => scales.s = [V::splat_f(*w.s.add(t * WIDTH + lane)); 2],
        Sub::Half => {
            scales.s = [
                V::splat_f(*w.s.add(2 * t * WIDTH + lane)),
                V::splat_f(*w.s.add((2 * t + 1) * WIDTH + lane)),
            ];
        }
        _ => {}
    }
    if K::MINIMUM != Minimum::None {
        scales.d_min = V::splat_f(*w.d_min.add(float * WIDTH + lane));
    }
    match (K::MINIMUM, K::SUB) {
        (Minimum::Subtracted, Sub::Half) => {
            scales.m = [
                V::splat_f(*w.m.add(2 * t * WIDTH + lane)),
                V::splat_f(*w.m.add((2 * t + 1) * WIDTH + lane)),
            ];
        }
        (Minimum::Subtracted, _) => scales.m = [V::splat_f(*w.m.add(t * WIDTH + lane)); 2],
        _ => {}
    }
    scales
}

/// Adds the eight floats at `from` to those at `to`, or to zeros if these are `fresh`.
#[inline(always)]
unsafe fn add_8(to: *mut f32, from: *const f32, fresh: bool) {
    use std::arch::x86_64::*;
    let before = if fresh { _mm256_setzero_ps() } else { _mm256_loadu_ps(to) };
    _mm256_storeu_ps(to, _mm256_add_ps(before, _mm256_loadu_ps(from)));
}
