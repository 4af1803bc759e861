//! Ready-made loops over f32 slices, one instance per instruction set: reductions, functions, conversions.
//!
//! Owns no arithmetic of its own: orders are [`lanes`]', functions are [`math`]'s. For a loop that isn't
//! here, or to spare the dispatch in an inner loop, write it with [`dispatch!`](crate::dispatch).

use crate::{Format, Isa, dispatch, lanes, math};

dispatch! {
    /// The dot product of `w` and `x`, of one length. Contract: "Float weights".
    pub fn dot(isa, w: &[f32], x: &[f32]) -> f32 { lanes::dot(w, x) }
}
dispatch! {
    /// The sum of `x` over 32 lanes.
    pub fn sum(isa, x: &[f32]) -> f32 { lanes::sum(x) }
}
dispatch! {
    /// The sum of squares of `x` over 32 lanes.
    pub fn sum_of_squares(isa, x: &[f32]) -> f32 { lanes::sum_of_squares(x) }
}
dispatch! {
    /// The largest element of `x`; see [`lanes::max`].
    pub fn max(isa, x: &[f32]) -> f32 { lanes::max(x) }
}
dispatch! {
    /// `acc = fma(p, y, acc)` for every element; of one length.
    pub fn axpy(isa, p: f32, y: &[f32], acc: &mut [f32]) { lanes::axpy(p, y, acc) }
}
dispatch! {
    /// [`math::swiglu`] of every pair, into `out`; all of one length.
    pub fn swiglu(isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len());
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = math::swiglu(gate, up);
        }
    }
}
dispatch! {
    /// [`math::exp`] of every element, in place.
    pub fn exp(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::exp(*x)) }
}
dispatch! {
    /// [`math::sigmoid`] of every element, in place.
    pub fn sigmoid(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::sigmoid(*x)) }
}
dispatch! {
    /// [`math::silu`] of every element, in place.
    pub fn silu(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::silu(*x)) }
}
dispatch! {
    /// [`math::softplus`] of every element, in place.
    pub fn softplus(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::softplus(*x)) }
}
dispatch! {
    /// [`math::log1p`] of every element, in place.
    pub fn log1p(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::log1p(*x)) }
}
dispatch! {
    /// [`math::rsqrt`] of every element, in place.
    pub fn rsqrt(isa, x: &mut [f32]) { x.iter_mut().for_each(|x| *x = math::rsqrt(*x)) }
}
dispatch! {
    /// [`math::f16_to_f32`] of every element; of one length.
    pub fn widen_f16(isa, from: &[u16], to: &mut [f32]) {
        assert_eq!(from.len(), to.len());
        for (to, &from) in to.iter_mut().zip(from) {
            *to = math::f16_to_f32(from);
        }
    }
}
dispatch! {
    /// [`math::f32_to_f16`] of every element; of one length.
    pub fn narrow_f16(isa, from: &[f32], to: &mut [u16]) {
        assert_eq!(from.len(), to.len());
        for (to, &from) in to.iter_mut().zip(from) {
            *to = math::f32_to_f16(from);
        }
    }
}
dispatch! {
    /// [`lanes::dot`] of f16 weights, such as cached keys, and f32 values; of one length.
    pub fn dot_f16(isa, w: &[u16], x: &[f32]) -> f32 { lanes::dot_f16(w, x) }
}
dispatch! {
    /// [`lanes::axpy`] with an f16 `y`, such as cached values; of one length.
    pub fn axpy_f16(isa, p: f32, y: &[u16], acc: &mut [f32]) { lanes::axpy_f16(p, y, acc) }
}

dispatch! {
    fn dot_f32_bytes(isa, w: &[u8], x: &[f32]) -> f32 {
        lanes::dot_with(w.as_chunks().0, x, f32::from_le_bytes)
    }
}
dispatch! {
    fn dot_f16_bytes(isa, w: &[u8], x: &[f32]) -> f32 {
        lanes::dot_with(w.as_chunks().0, x, |w| math::f16_to_f32(u16::from_le_bytes(w)))
    }
}
dispatch! {
    fn dot_bf16_bytes(isa, w: &[u8], x: &[f32]) -> f32 {
        lanes::dot_with(w.as_chunks().0, x, |w| math::bf16_to_f32(u16::from_le_bytes(w)))
    }
}

/// The dot product of a row of float weights as they lie in a file, and `x`.
pub(crate) fn dot_bytes(isa: Isa, format: Format, w: &[u8], x: &[f32]) -> f32 {
    match format {
        Format::F32 => dot_f32_bytes(isa, w, x),
        Format::F16 => dot_f16_bytes(isa, w, x),
        _ => dot_bf16_bytes(isa, w, x),
    }
}

/// Float weights as they lie in a file, as f32.
pub(crate) fn widen(format: Format, bytes: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => {
            for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(b);
            }
        }
        Format::F16 => {
            for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = math::f16_to_f32(u16::from_le_bytes(b));
            }
        }
        _ => {
            for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = math::bf16_to_f32(u16::from_le_bytes(b));
            }
        }
    }
}
