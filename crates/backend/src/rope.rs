//! Rotary positions: one table of cosines and sines, made once on the host, the same for every backend.
//!
//! Contract: the angle is `f32(position) * f32(inverse frequency)`, rounded; its cosine and sine are those of f64, rounded.

use crate::QsaShape;

/// Floats of the table for `context` positions: `[position][cos, sin][rotary / 2]`.
pub fn floats(shape: &QsaShape, context: usize) -> usize {
    context.saturating_mul(shape.rotary / 2 * 2)
}

/// Fills the table's part that starts at position `first`.
pub fn fill(shape: &QsaShape, first: usize, table: &mut [f32]) {
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
