//! The rotation of half-split pairs `(i, i + rotary / 2)` by a row of the rotary table: docs/qwen4exp.md, section 2.3, for text (all three
//! axes equal).

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
