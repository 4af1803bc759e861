//! Products with float weights: F32, F16, BF16, widened exactly, against f32 columns.
//!
//! The contract's 32 lanes are accumulated for a tile of rows and columns at a time, a vector's width of lanes per pass over the
//! row. Lanes 16 and up (and 8 and up) are added as soon as a tile is done; the rest of the fold is done for a
//! whole strip of rows at once, so that its result has a lane for each row.
//!
//! Invariant: the bits of [`lanes::dot`](crate::lanes::dot()).

use super::Rows;
use super::vector::{Lanes, Vector};

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

/// Partial sums of a strip: for each column and row, a vector of lanes.
#[repr(C, align(64))]
struct Partial([[[f32; 16]; 16]; COLS]);

/// All rows of `w` times `cols` columns of `w.k` values at `x`. `w.k` is a multiple of 32.
///
/// # Safety
/// The pointers in `w` and `x` are valid for the shapes there, and the processor has `V`'s features. `MANY` is the most
/// columns of a tile that leave it in registers, at most [`COLS`].
#[inline(always)]
pub(super) unsafe fn product<V: Vector, W: Weight, const MANY: usize>(w: &Rows, x: *const f32, cols: usize) {
    let mut partial = Partial([[[0.0; 16]; 16]; COLS]);
    let mut row = 0;
    while row < w.rows {
        let rows = (w.rows - row).min(V::LANES);
        let strip = w.bytes.add(row * w.row_bytes);
        let mut col = 0;
        while col < cols {
            let x = x.add(col * w.k);
            let taken = match cols - col {
                1 => strip_sums::<V, W, 1>(strip, w, rows, x, &mut partial),
                n if n < MANY => strip_sums::<V, W, 2>(strip, w, rows, x, &mut partial),
                _ => strip_sums::<V, W, MANY>(strip, w, rows, x, &mut partial),
            };
            for c in 0..taken {
                let mut sums = [0.0f32; 16];
                let lanes = Vectors { first: partial.0[c].as_ptr().cast() };
                V::store_f(sums.as_mut_ptr(), V::fold(&lanes));
                w.out.write(w.first + row, col + c, &sums[..rows], w.tensor_scale);
            }
            col += taken;
        }
        row += V::LANES;
    }
}

/// Vectors of 16 floats' stride.
struct Vectors {
    first: *const f32,
}

impl<F> Lanes<F> for Vectors
where
    F: Copy,
{
    #[inline(always)]
    unsafe fn lane(&self, i: usize) -> F {
        self.first.add(16 * i).cast::<F>().read_unaligned()
    }
}

/// The partial sums of `rows` rows with `C` columns; returns `C`.
#[inline(always)]
unsafe fn strip_sums<V: Vector, W: Weight, const C: usize>(
    strip: *const u8,
    w: &Rows,
    rows: usize,
    x: *const f32,
    to: &mut Partial,
) -> usize {
    let mut row = 0;
    while row < rows {
        // Beyond the last row, the last one again: computed and dropped.
        let mut p = [strip; TILE];
        for (r, p) in p.iter_mut().enumerate() {
            *p = strip.add((row + r).min(rows - 1) * w.row_bytes);
        }
        // Lanes `part * V::LANES ..` in the order that folds them by 16, then by 8.
        let mut sums = tile::<V, W, C>(&p, x, w.k, 0);
        if V::LANES == 16 {
            add::<V, C>(&mut sums, &tile::<V, W, C>(&p, x, w.k, 1));
        } else {
            add::<V, C>(&mut sums, &tile::<V, W, C>(&p, x, w.k, 2));
            let mut upper = tile::<V, W, C>(&p, x, w.k, 1);
            add::<V, C>(&mut upper, &tile::<V, W, C>(&p, x, w.k, 3));
            add::<V, C>(&mut sums, &upper);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                V::store_f(to.0[c].as_mut_ptr().add(row + r).cast(), sum);
            }
        }
        row += TILE;
    }
    C
}

#[inline(always)]
unsafe fn add<V: Vector, const C: usize>(to: &mut [[V::F; C]; TILE], other: &[[V::F; C]; TILE]) {
    for (to, other) in to.iter_mut().zip(other) {
        for (to, &other) in to.iter_mut().zip(other) {
            *to = V::add_f(*to, other);
        }
    }
}

/// Lanes `part * V::LANES ..` of each row with each column.
#[inline(always)]
unsafe fn tile<V: Vector, W: Weight, const C: usize>(
    rows: &[*const u8; TILE],
    x: *const f32,
    k: usize,
    part: usize,
) -> [[V::F; C]; TILE] {
    let mut acc = [[V::splat_f(0.0); C]; TILE];
    let mut i = part * V::LANES;
    while i < k {
        let mut a = [V::splat_f(0.0); C];
        for (c, a) in a.iter_mut().enumerate() {
            *a = V::load_f(x.add(c * k + i));
        }
        for (acc, row) in acc.iter_mut().zip(rows) {
            let w = W::load::<V>(row.add(i * W::BYTES));
            for (acc, &a) in acc.iter_mut().zip(&a) {
                *acc = V::fma(w, a, *acc);
            }
        }
        i += 32;
    }
    acc
}
