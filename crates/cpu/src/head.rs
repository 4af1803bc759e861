//! The final mixer and the vocabulary head, for some rows.

use strata_backend::{BackendError, Buffer, MixerWeights, Shape, Weight};

use crate::backend::CpuBackend;
use crate::bench::{Scratch, Spread};
use crate::mixer::{self, Mixer};
use crate::shared::{Grid, Job};
use crate::weights;

/// Floats of a worker's tile.
pub(crate) fn scratch(shape: &Shape, tile: usize) -> usize {
    tile * shape.hidden + mixer::scratch(shape, tile)
}

impl CpuBackend {
    /// `logits[i] = output . mixer(x[rows[i]])`; returns the bytes read.
    pub(crate) fn head(
        &mut self,
        w: &MixerWeights,
        output: Weight,
        rows: &[u32],
        x: Buffer,
        logits: Buffer,
    ) -> Result<usize, BackendError> {
        let shape = &self.spec.shape;
        let Shape { hidden: d, streams, vocab, .. } = *shape;
        let (wide, last) = (streams * d, rows.iter().max().map_or(0, |&row| row as usize + 1));
        let team = self.crew.team();
        let mixer = Mixer::new(&self.weights, shape, w, false)?;
        let output = self.weights.matrix(output, vocab, d)?;
        let bytes = weights::bytes(&output) + mixer.bytes();
        let [x, logits] = self.buffers.get([(x, last, wide), (logits, rows.len(), vocab)])?;
        let x = &*x;
        let by = Spread::new(team, rows.len(), bytes);
        let split = Grid::rows(logits, vocab, by.grain);
        by.run(&mut self.bench, split, |team, part, logits, mut scratch| {
            let u = scratch.take(part.len() * d);
            let rows = &rows[part];
            let wide_row = |i: usize| &x[rows[i] as usize * wide..][..wide];
            let Scratch { floats, acts } = scratch;
            mixer::read(team, shape, mixer, wide_row, Scratch { floats, acts: &mut *acts }, u, &mut []);
            let input = team.input(u, d, acts, &[output]);
            team.products(input, &mut [Job::new(output, logits.into_slice(), vocab)]);
        });
        Ok(bytes)
    }
}
