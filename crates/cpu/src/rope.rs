//! Rotary positions: one table of cosines and sines, made once on the host.
//!
//! Owns the table and the rotation of half-split pairs `(i, i + rotary / 2)`: docs/qwen4exp.md, section 2.3, for text (all
//! three axes equal). Contract: the angle is `f32(position) * f32(inverse frequency)`, rounded; its cosine and sine are
//! those of f64, rounded.

use strata_backend::QsaShape;

/// Floats of the table for `context` positions: `[position][cos, sin][rotary / 2]`.
pub(crate) fn floats(shape: &QsaShape, context: usize) -> usize {
    context * (shape.rotary / 2) * 2
}

/// Fills the table's part that starts at position `first`.
pub(crate) fn fill(shape: &QsaShape, first: usize, table: &mut [f32]) {
    let half = shape.rotary / 2;
    if half == 0 {
        return;
    }
    for (i, row) in table.chunks_exact_mut(2 * half).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        for (pair, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
            let exponent = -2.0 * pair as f64 / shape.rotary as f64;
            let inverse = f64::from(shape.rope_base).powf(exponent) as f32;
            let angle = f64::from((first + i) as f32 * inverse);
            (*cos, *sin) = (angle.cos() as f32, angle.sin() as f32);
        }
    }
}

/// Rotates one head's first `rotary` values in place; `row` is a position's row of the table, `[2][rotary / 2]`.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], row: &[f32]) {
    let half = row.len() / 2;
    let (cos, sin) = row.split_at(half);
    let (a, b) = head[..2 * half].split_at_mut(half);
    for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (a.mul_add(cos, -(*b * sin)), b.mul_add(cos, *a * sin));
    }
}
