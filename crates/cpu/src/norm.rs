//! Root mean square norms, plain, grouped and per head.
//!
//! Owns their one definition: `x * rsqrt(sum of squares / n + eps) * gamma`, the sum over 32 lanes.

use strata_quant::{dispatch, lanes, math};

/// The norm of one group, of the length of `gamma` and `out`.
#[inline(always)]
pub(crate) fn rms(x: &[f32], gamma: &[f32], eps: f32, out: &mut [f32]) {
    let scale = math::rsqrt(lanes::sum_of_squares(x) / x.len() as f32 + eps);
    for ((out, &x), &gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = x * scale * gamma;
    }
}

dispatch! {
    /// The norm of every group of `width` values of `x`; gammas repeat where there are fewer than values.
    pub(crate) fn grouped(isa, x: &[f32], gamma: &[f32], width: usize, eps: f32, out: &mut [f32]) {
        let groups = gamma.len() / width;
        for (i, (x, out)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
            rms(x, &gamma[i % groups * width..][..width], eps, out);
        }
    }
}
