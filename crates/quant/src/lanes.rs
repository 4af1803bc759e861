//! Reductions over slices in the order of the arithmetic contract: 32 lanes, then a fold.
//!
//! Owns the order. These functions know no instruction set: they are always inlined, to be called inside
//! [`dispatch!`](crate::dispatch) functions; [`float`](crate::float) has them ready-made.
//!
//! Invariant: element `j` enters lane `j mod 32`, ascending; lanes start from the operation's neutral value
//! and fold 16, 8, 4, 2, 1 (lane `i` takes lane `i + width`).

use crate::math;

/// Number of lanes.
pub const LANES: usize = 32;

/// Adds the lanes: 16, 8, 4, 2, 1.
#[inline(always)]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `x`.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    fold(lanes)
}

/// The sum of squares of `x`, by FMA.
#[inline(always)]
pub fn sum_of_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

/// The dot product of `w` and `x`, of one length, by FMA.
#[inline(always)]
pub fn dot(w: &[f32], x: &[f32]) -> f32 {
    dot_with(w, x, |w| w)
}

/// The dot product of weights that `widen` turns into f32 exactly, and `x`, of one length, by FMA.
#[inline(always)]
pub(crate) fn dot_with<T: Copy>(w: &[T], x: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    assert_eq!(w.len(), x.len());
    let mut lanes = [0.0f32; LANES];
    let ((w, w_rest), (x, x_rest)) = (w.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    for (w, x) in w.iter().zip(x) {
        for j in 0..LANES {
            lanes[j] = widen(w[j]).mul_add(x[j], lanes[j]);
        }
    }
    for (lane, (&w, &x)) in lanes.iter_mut().zip(w_rest.iter().zip(x_rest)) {
        *lane = widen(w).mul_add(x, *lane);
    }
    fold(lanes)
}

/// The largest element; NaN is passed over, and an empty slice gives -inf.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for j in 0..LANES {
            lanes[j] = larger(lanes[j], chunk[j]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = larger(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `acc = fma(p, y, acc)` for every element; of one length. The sum over experts is made of these.
#[inline(always)]
pub fn axpy(p: f32, y: &[f32], acc: &mut [f32]) {
    assert_eq!(y.len(), acc.len());
    for (acc, &y) in acc.iter_mut().zip(y) {
        *acc = p.mul_add(y, *acc);
    }
}

/// [`dot`] of f16 weights, widened exactly.
#[inline(always)]
pub fn dot_f16(w: &[u16], x: &[f32]) -> f32 {
    dot_with(w, x, math::f16_to_f32)
}

/// [`axpy`] with an f16 `y`, widened exactly.
#[inline(always)]
pub fn axpy_f16(p: f32, y: &[u16], acc: &mut [f32]) {
    assert_eq!(y.len(), acc.len());
    for (acc, &y) in acc.iter_mut().zip(y) {
        *acc = p.mul_add(math::f16_to_f32(y), *acc);
    }
}
