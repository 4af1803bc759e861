//! The draft block's join of the next token's embedding and the trunk's residual: docs/qwen4exp.md, section 2.6.

use strata_backend::{BackendError, Buffer, Shape, Weight};

use crate::backend::CpuBackend;
use crate::bench::Spread;
use crate::embed::check_tokens;
use crate::norm;
use crate::shared::{Grid, Job};
use crate::weights;

/// Floats of a worker's tile of so many columns (rows times streams).
pub(crate) fn scratch(shape: &Shape, columns: usize) -> usize {
    columns * 2 * shape.hidden + shape.hidden
}

/// The join's weights.
#[derive(Clone, Copy)]
pub(crate) struct Join {
    pub(crate) table: Weight,
    pub(crate) eh_proj: Weight,
    pub(crate) e_norm: Weight,
    pub(crate) h_norm: Weight,
}

impl CpuBackend {
    /// `out[t, s] = eh_proj [ rms(table[next[t]]) * e_norm ; gnorm(x[t]; h_norm)_s ]`; returns the bytes read.
    pub(crate) fn draft_join(
        &mut self,
        w: Join,
        next: &[u32],
        x: Buffer,
        out: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams: s, vocab, norm_eps: eps, .. } = self.spec.shape;
        let wide = s * d;
        let team = self.crew.team();
        let table = self.weights.matrix(w.table, vocab, d)?;
        let eh_proj = self.weights.matrix(w.eh_proj, d, 2 * d)?;
        let [e_norm, h_norm] = [self.weights.vector(w.e_norm, d)?, self.weights.vector(w.h_norm, wide)?];
        check_tokens(next, &table)?;
        let [x, out] = self.buffers.get([(x, next.len(), wide), (out, next.len(), wide)])?;
        let (x, bytes) = (&*x, weights::bytes(&eh_proj));
        let by = Spread::of_columns(team, next.len(), s, bytes);
        let split = Grid::rows(out, wide, by.grain);
        by.run(&mut self.bench, split, |team, rows, out, mut scratch| {
            let columns = scratch.take(rows.len() * wide * 2);
            let embedding = scratch.take(d);
            for (row, columns) in rows.zip(columns.chunks_exact_mut(2 * wide)) {
                table.dequantise_row(next[row] as usize, embedding);
                for (stream, column) in columns.chunks_exact_mut(2 * d).enumerate() {
                    let (e, h) = column.split_at_mut(d);
                    let x = &x[row * wide + stream * d..][..d];
                    norm::grouped(team.isa, embedding, e_norm, d, eps, e);
                    norm::grouped(team.isa, x, &h_norm[stream * d..][..d], d, eps, h);
                }
            }
            let input = team.input(columns, 2 * d, scratch.acts, &[eh_proj]);
            team.products(input, &mut [Job::new(eh_proj, out.into_slice(), d)]);
        });
        Ok(bytes + next.len() * table.row(0).len())
    }
}
