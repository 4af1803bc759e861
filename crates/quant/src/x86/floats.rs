//! Products with float weights: F32, F16, BF16, widened exactly, against f32 columns.
//!
//! The contract's 32 lanes are accumulated for a tile of rows and columns at a time, a vector's width of
//! lanes per pass over the row. Lanes 16 and up (and 8 and up) are added as soon as a tile is done; the rest
//! of the fold is done for a whole strip of rows at once, so that its result has a lane for each row.
//!
//! Invariant: the bits of [`lanes::dot`](crate::lanes::dot()).

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::vector::{Lanes, Vector};
use super::{Rows, fetch};

/// Weights that are f32, or widen to it.
pub(super) trait Weight {
    /// Bytes of one.
    const BYTES: usize;

    /// Reads `V::LANES` weights.
    unsafe fn load<V: Vector>(p: *const u8) -> V::F;
}

/// F32.
pub(super) struct F32;
/// F16.
pub(super) struct F16;
/// BF16.
pub(super) struct Bf16;

impl Weight for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const u8) -> V::F {
        V::load_f(p.cast())
    }
}

impl Weight for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const u8) -> V::F {
        V::load_halves(p.cast())
    }
}

impl Weight for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const u8) -> V::F {
        V::as_f(V::shl(V::load_words(p.cast()), 16))
    }
}

/// Rows in a tile.
const TILE: usize = 4;
/// Most columns in a tile.
const COLS: usize = 6;

/// Values of a row that a tile goes over before the next tile does: as many as leave the columns in the first
/// cache.
const DEPTH: usize = 512;

/// Partial sums of a strip, in vectors of lanes: `[column][part][row]`. The lanes of part `p` are `p *
/// V::LANES` and up.
#[repr(C, align(64))]
struct Partial([[[[f32; 16]; 16]; 2]; COLS]);

/// All rows of `w` times `cols` columns of `w.k` values at `x`. `w.k` is a multiple of 32.
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, and the processor has `V`'s features. `MANY`
/// is the most columns of a tile that leave it in registers, at most [`COLS`].
#[inline(always)]
pub(super) unsafe fn product<V: Vector, W: Weight, const MANY: usize>(w: &Rows, x: *const f32, cols: usize) {
    let mut partial = MaybeUninit::<Partial>::uninit();
    let partial = partial.as_mut_ptr();
    let mut row = 0;
    while row < w.rows {
        let rows = (w.rows - row).min(V::LANES);
        if rows < V::LANES {
            // Folded like the others.
            partial.write_bytes(0, 1);
        }
        let mut col = 0;
        while col < cols {
            let x = x.add(col * w.k);
            let taken = match cols - col {
                1 => strip_sums::<V, W, 1>(w, row, rows, x, partial),
                n if n < MANY => strip_sums::<V, W, 2>(w, row, rows, x, partial),
                _ => strip_sums::<V, W, MANY>(w, row, rows, x, partial),
            };
            for c in 0..taken {
                let mut sums = [0.0f32; 16];
                V::store_f(sums.as_mut_ptr(), V::fold(&Folded::<V> { partial, col: c, vector: PhantomData }));
                w.out.write(w.first + row, col + c, &sums[..rows], w.tensor_scale);
            }
            col += taken;
        }
        row += V::LANES;
    }
}

/// Where part `part` of row `row` and column `col` is.
#[inline(always)]
unsafe fn vector<V: Vector>(partial: *mut Partial, col: usize, part: usize, row: usize) -> *mut f32 {
    partial.cast::<f32>().add(((col * 32 / V::LANES + part) * V::LANES + row) * V::LANES)
}

/// A column's partial sums, folded by 16, then by 8, to a vector for each row.
struct Folded<V> {
    partial: *mut Partial,
    col: usize,
    vector: PhantomData<V>,
}

impl<V: Vector> Lanes<V::F> for Folded<V> {
    #[inline(always)]
    unsafe fn lane(&self, row: usize) -> V::F {
        let part = |part| V::load_f(vector::<V>(self.partial, self.col, part, row));
        if V::LANES == 16 {
            V::add_f(part(0), part(1))
        } else {
            V::add_f(V::add_f(part(0), part(2)), V::add_f(part(1), part(3)))
        }
    }
}

/// The partial sums of `rows` rows from `first` on with `C` columns; returns `C`.
#[inline(always)]
unsafe fn strip_sums<V: Vector, W: Weight, const C: usize>(
    w: &Rows,
    first: usize,
    rows: usize,
    x: *const f32,
    to: *mut Partial,
) -> usize {
    let depth = if C > 2 { DEPTH } else { w.k };
    let strip = w.bytes.add(first * w.row_bytes);
    let mut k = 0;
    while k < w.k {
        let ks = k..(k + depth).min(w.k);
        let mut row = 0;
        while row < rows {
            // Beyond the last row, the last one again.
            let mut p = [strip; TILE];
            for (r, p) in p.iter_mut().enumerate() {
                *p = strip.add((row + r).min(rows - 1) * w.row_bytes);
            }
            let ahead = w.ahead(first + row..first + row + TILE);
            for part in 0..32 / V::LANES {
                // Through memory, so that no sum of another part takes a register from this one's.
                let mut sums = [[V::splat_f(0.0); C]; TILE];
                if k > 0 {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        for (c, sum) in sums.iter_mut().enumerate() {
                            *sum = V::load_f(vector::<V>(to, c, part, row + r));
                        }
                    }
                }
                tile::<V, W, C>(&p, x, w.k, ks.clone(), part, ahead, &mut sums);
                for (r, sums) in sums.iter().enumerate() {
                    for (c, &sum) in sums.iter().enumerate() {
                        V::store_f(vector::<V>(to, c, part, row + r), sum);
                    }
                }
            }
            row += TILE;
        }
        k = ks.end;
    }
    C
}

/// Adds the products of lanes `part * V::LANES ..` of each row with each column, over the values `ks`.
/// Meanwhile the values `ahead` bytes on are fetched.
#[inline(always)]
unsafe fn tile<V: Vector, W: Weight, const C: usize>(
    rows: &[*const u8; TILE],
    x: *const f32,
    k: usize,
    ks: Range<usize>,
    part: usize,
    ahead: usize,
    sums: &mut [[V::F; C]; TILE],
) {
    let mut acc = *sums;
    let mut i = ks.start + part * V::LANES;
    while i < ks.end {
        let mut a = [V::splat_f(0.0); C];
        for (c, a) in a.iter_mut().enumerate() {
            *a = V::load_f(x.add(c * k + i));
        }
        for (acc, row) in acc.iter_mut().zip(rows) {
            let at = row.add(i * W::BYTES);
            // More columns leave memory enough time.
            if C == 1 {
                fetch(at.wrapping_add(ahead), V::LANES * W::BYTES);
            }
            let w = W::load::<V>(at);
            for (acc, &a) in acc.iter_mut().zip(&a) {
                *acc = V::fma(w, a, *acc);
            }
        }
        i += 32;
    }
    *sums = acc;
}
