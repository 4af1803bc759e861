//! Token embedding: a row of the table, once per residual stream.

use strata_backend::{BackendError, Buffer, Weight};
use strata_quant::Matrix;

use crate::backend::CpuBackend;
use crate::bench::Spread;
use crate::failed;
use crate::shared::Grid;

impl CpuBackend {
    /// `x[t, s] = table[tokens[t]]`; returns the bytes read.
    pub(crate) fn embed(&mut self, table: Weight, tokens: &[u32], x: Buffer) -> Result<usize, BackendError> {
        let (d, vocab) = (self.spec.shape.hidden, self.spec.shape.vocab);
        let wide = self.spec.shape.streams * d;
        let table = self.weights.matrix(table, vocab, d)?;
        check_tokens(tokens, &table)?;
        let [x] = self.buffers.get([(x, tokens.len(), wide)])?;
        let team = self.crew.team();
        let by = Spread::new(team, tokens.len(), 0);
        let split = Grid::rows(x, wide, by.grain);
        by.run(&mut self.bench, split, |_, rows, x, _| {
            for (&token, x) in tokens[rows].iter().zip(x.into_slice().chunks_exact_mut(wide)) {
                table.dequantise_row(token as usize, &mut x[..d]);
                for s in 1..wide / d {
                    x.copy_within(..d, s * d);
                }
            }
        });
        Ok(tokens.len() * table.row(0).len())
    }
}

/// Whether the table has a row for every token.
pub(crate) fn check_tokens(tokens: &[u32], table: &Matrix<'_>) -> Result<(), BackendError> {
    match tokens.iter().find(|&&token| token as usize >= table.rows()) {
        Some(token) => Err(failed(format!("token {token} of a vocabulary of {}", table.rows()))),
        None => Ok(()),
    }
}
