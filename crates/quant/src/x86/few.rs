//! Products with few columns: a lane is a row.
//!
//! For each column, the products of one block (or two) of all rows of a strip are summed by a tree whose
//! result has a lane for each row; from there on everything is done for all rows at once. The weights' bytes
//! are read once, whatever the number of columns.
//!
//! Rows that aren't whole chunks are taken several for one: a lane is then that many rows, one after the
//! other.

use std::mem::MaybeUninit;

use super::chunk::{Block, CHUNK, Class, Decoder, Panel, Scales, Sub, TERMS, Target, WIDTH, accumulate};
use super::vector::{Lanes, Vector};
use super::{Columns, Rows, fetch};
use crate::block::{Minimum, SEGMENT};

/// Most columns that [`few`] takes.
pub(super) const FEW: usize = 7;

/// All rows of `w` times all columns of `x` (at most [`FEW`]).
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, and the processor has `V`'s features.
#[inline(always)]
pub(super) unsafe fn few<V: Vector, K: Class>(w: &Rows, format: &Decoder, x: &Columns) {
    let blocks = w.k / 32;
    let mut panel = MaybeUninit::<Panel<16, TERMS>>::uninit();
    let merge = format.merge(blocks);
    let merged = w.rows - w.rows % (merge * V::LANES);
    let whole = merged == w.rows;
    Panel::prepare(panel.as_mut_ptr(), whole && (merge * blocks).is_multiple_of(TERMS));
    let target = Panel::target(panel.as_mut_ptr(), CHUNK);
    let mut results = MaybeUninit::<Results>::uninit();
    let results = results.as_mut_ptr();
    // There is nothing before the first strip that could be computed meanwhile.
    fetch(w.bytes, (merge * V::LANES).min(w.rows) * w.row_bytes);
    let mut row = 0;
    while row < merged {
        strip::<V, K>(w, format, x, &target, row, V::LANES, merge, results);
        row += merge * V::LANES;
    }
    while row < w.rows {
        let rows = (w.rows - row).min(V::LANES);
        strip::<V, K>(w, format, x, &target, row, rows, 1, results);
        row += rows;
    }
}

/// What a strip's columns have so far.
#[repr(C, align(64))]
struct Results {
    /// Of the segment.
    sums: [[f32; WIDTH]; FEW],
    /// Of the row.
    totals: [[f32; WIDTH]; FEW],
    /// Finished rows: `[column][row of a lane][lane]`, with room to transpose.
    rows: [[[f32; WIDTH]; WIDTH]; FEW],
}

/// `lanes` lanes of `merge` rows each, from row `row` on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn strip<V: Vector, K: Class>(
    w: &Rows,
    format: &Decoder,
    x: &Columns,
    target: &Target,
    row: usize,
    lanes: usize,
    merge: usize,
    results: *mut Results,
) {
    let row_blocks = w.k / 32;
    let (lane_bytes, blocks) = (merge * w.row_bytes, merge * row_blocks);
    let from = w.bytes.add(row * w.row_bytes);
    let ahead = w.ahead(row..row + merge * lanes);
    let (sums, totals) =
        ((&raw mut (*results).sums).cast::<f32>(), (&raw mut (*results).totals).cast::<f32>());
    let rows = (&raw mut (*results).rows).cast::<f32>();
    for col in 0..x.cols {
        V::store_f(sums.add(col * WIDTH), V::splat_f(0.0));
        V::store_f(totals.add(col * WIDTH), V::splat_f(0.0));
    }
    // The next block's place in its row, and the row's in its lane.
    let mut at = (0, 0);
    for c in 0..blocks.div_ceil(TERMS) {
        let terms = (blocks - c * TERMS).min(TERMS);
        let from = from.add(c * format.chunk_bytes);
        (format.decode)(from, lane_bytes, lanes, terms, target, ahead);
        let start = at;
        for col in 0..x.cols {
            let (sums, totals) = (sums.add(col * WIDTH), totals.add(col * WIDTH));
            let rows = rows.add(col * WIDTH * WIDTH);
            let mut state = State::<V> { at: start, sum: V::load_f(sums), total: V::load_f(totals), rows };
            if merge == 1 {
                state.chunk::<K, false>(target, format, terms, x, col, row_blocks);
            } else {
                state.chunk::<K, true>(target, format, terms, x, col, row_blocks);
            }
            V::store_f(sums, state.sum);
            V::store_f(totals, state.total);
            at = state.at;
        }
    }
    for col in 0..x.cols {
        let results = rows.add(col * WIDTH * WIDTH);
        let first = w.first + row;
        if merge == 1 {
            w.out.write(first, col, std::slice::from_raw_parts(results, lanes), w.tensor_scale);
            continue;
        }
        V::transpose(results);
        let out = w.out.rows(first, col, lanes * merge);
        for lane in 0..lanes {
            for i in 0..merge {
                let sum = *results.add(lane * V::LANES + i);
                *out.add(lane * merge + i) = w.tensor_scale.map_or(sum, |scale| sum * scale);
            }
        }
    }
}

/// The running sums of one column.
struct State<V: Vector> {
    /// The next block's place in its row, and the row's in its lane.
    at: (usize, usize),
    /// Of the segment.
    sum: V::F,
    /// Of the row's finished segments.
    total: V::F,
    /// Where finished rows go.
    rows: *mut f32,
}

impl<V: Vector> State<V> {
    /// Adds the products of a chunk of `terms` blocks. Rows end inside of it only if `ROWS_END`, segments
    /// never do.
    #[inline(always)]
    unsafe fn chunk<K: Class, const ROWS_END: bool>(
        &mut self,
        target: &Target,
        format: &Decoder,
        terms: usize,
        x: &Columns,
        col: usize,
        row_blocks: usize,
    ) {
        let q = x.q.add(col * x.q_stride).cast::<u8>();
        let d = x.d.add(col * row_blocks);
        let sums = x.sums.add(col * 2 * row_blocks);
        for step in 0..terms.div_ceil(V::BLOCKS) {
            let a = if ROWS_END {
                let (first, next) = (self.at.0, self.at.0 + 1);
                V::load_two_blocks(q.add(32 * first), q.add(if next == row_blocks { 0 } else { 32 * next }))
            } else {
                V::load(q.add(32 * (self.at.0 + step * V::BLOCKS)).cast())
            };
            let codes = target.codes.add(step * V::LANES * 4);
            let products = Products::<V> { codes, a, signed: format.wide && !V::TAKES_WIDE };
            let i =
                if K::HALVES { V::reduce_halves(&products) } else { V::reduce(&products).map(|i| [i; 2]) };
            for (b, i) in i.into_iter().enumerate().take(V::BLOCKS.min(terms - step * V::BLOCKS)) {
                let t = step * V::BLOCKS + b;
                let k = if ROWS_END { self.at.0 } else { self.at.0 + t };
                let sums = [*sums.add(2 * k), *sums.add(2 * k + 1)];
                let offset = format.offset as i32;
                let i = if K::HALVES {
                    [V::sub(i[0], V::splat(sums[0] * offset)), V::sub(i[1], V::splat(sums[1] * offset))]
                } else {
                    [V::sub(i[0], V::splat((sums[0] + sums[1]) * offset)); 2]
                };
                let block = Block { d: V::splat_f(*d.add(k)), sums: [V::splat(sums[0]), V::splat(sums[1])] };
                let scales = lanes::<V, K>(target, format, t);
                self.sum = accumulate::<V, K>(self.sum, i, &scales, &block);
                if ROWS_END {
                    self.advance(1, row_blocks);
                }
            }
        }
        if !ROWS_END {
            self.advance(terms, row_blocks);
        }
    }

    /// Goes on by `blocks`.
    #[inline(always)]
    unsafe fn advance(&mut self, blocks: usize, row_blocks: usize) {
        self.at.0 += blocks;
        if self.at.0 == row_blocks || self.at.0.is_multiple_of(SEGMENT) {
            self.total = V::add_f(self.total, self.sum);
            self.sum = V::splat_f(0.0);
            if self.at.0 == row_blocks {
                V::store_f(self.rows.add(self.at.1 * V::LANES), self.total);
                self.total = V::splat_f(0.0);
                self.at = (0, self.at.1 + 1);
            }
        }
    }
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
unsafe fn lanes<V: Vector, K: Class>(w: &Target, format: &Decoder, t: usize) -> Scales<V> {
    let zero = V::splat_f(0.0);
    let mut scales = Scales { d: [zero; 2], s: [zero; 2], d_min: zero, m: [zero; 2] };
    let float = t >> format.scale_shift;
    scales.d = if K::SUB == Sub::Float {
        [V::load_f(w.d.add(2 * t * WIDTH)), V::load_f(w.d.add((2 * t + 1) * WIDTH))]
    } else {
        [V::load_f(w.d.add(float * WIDTH)); 2]
    };
    match K::SUB {
        Sub::Block => scales.s = [V::load_f(w.s.add(t * WIDTH)); 2],
        Sub::Half => {
            scales.s = [V::load_f(w.s.add(2 * t * WIDTH)), V::load_f(w.s.add((2 * t + 1) * WIDTH))];
        }
        _ => {}
    }
    if K::MINIMUM != Minimum::None {
        scales.d_min = V::load_f(w.d_min.add(float * WIDTH));
    }
    match (K::MINIMUM, K::SUB) {
        (Minimum::Subtracted, Sub::Half) => {
            scales.m = [V::load_f(w.m.add(2 * t * WIDTH)), V::load_f(w.m.add((2 * t + 1) * WIDTH))];
        }
        (Minimum::Subtracted, _) => scales.m = [V::load_f(w.m.add(t * WIDTH)); 2],
        _ => {}
    }
    scales
}
