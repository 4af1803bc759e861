//! The hyper-connection mixers: docs/qwen4exp.md, section 2.1.
//!
//! Owns the read ([`read`]: norm, low-rank gates, mean, inject weights) and the write back to all streams.
//!
//! Rounding: the mean accumulates by FMA from zero over ascending streams and is divided by S.

use strata_backend::{BackendError, Buffer, MixerWeights, Shape};
use strata_quant::{Matrix, dispatch, lanes, math};

use crate::backend::CpuBackend;
use crate::bench::{Scratch, Spread, Team};
use crate::shared::{Grid, Job, Tile};
use crate::weights::Weights;
use crate::{norm, weights};

/// A mixer's weights, ready to use.
#[derive(Clone, Copy)]
pub(crate) struct Mixer<'a> {
    pub(crate) norm: &'a [f32],
    pub(crate) down: Matrix<'a>,
    pub(crate) up: Matrix<'a>,
    pub(crate) inject: Option<Matrix<'a>>,
}

impl<'a> Mixer<'a> {
    /// A mixer's weights; its inject weights too, if it shall have them.
    pub(crate) fn new(
        weights: &'a Weights,
        shape: &Shape,
        w: &MixerWeights,
        injects: bool,
    ) -> Result<Self, BackendError> {
        let Shape { hidden, streams, mixer_rank, .. } = *shape;
        let wide = streams * hidden;
        let inject = w.inject.filter(|_| injects).map(|w| weights.matrix(w, streams, wide));
        Ok(Mixer {
            norm: weights.vector(w.norm, wide)?,
            down: weights.matrix(w.down, mixer_rank, wide)?,
            up: weights.matrix(w.up, wide, mixer_rank)?,
            inject: inject.transpose()?,
        })
    }

    /// Bytes of the matrices.
    pub(crate) fn bytes(&self) -> usize {
        weights::bytes(&self.down) + weights::bytes(&self.up) + self.inject.as_ref().map_or(0, weights::bytes)
    }
}

/// Floats of a worker's tile.
pub(crate) fn scratch(shape: &Shape, tile: usize) -> usize {
    tile * (2 * shape.streams * shape.hidden + shape.mixer_rank)
}

impl CpuBackend {
    /// `u` and the inject weights of a mixer; returns the bytes read.
    pub(crate) fn mixer_read(
        &mut self,
        w: &MixerWeights,
        rows: usize,
        x: Buffer,
        u: Buffer,
        inject: Buffer,
    ) -> Result<usize, BackendError> {
        let shape = &self.spec.shape;
        let (d, s) = (shape.hidden, shape.streams);
        let team = self.crew.team();
        let mixer = Mixer::new(&self.weights, shape, w, true)?;
        let [x, u, inject] = self.buffers.get([(x, rows, s * d), (u, rows, d), (inject, rows, s)])?;
        let x = &*x;
        let by = Spread::new(team, rows, mixer.bytes());
        let split = (Grid::rows(u, d, by.grain), Grid::rows(inject, s, by.grain));
        by.run(&mut self.bench, split, |team, rows, (u, inject), scratch| {
            let row = |i: usize| &x[(rows.start + i) * s * d..][..s * d];
            read(team, shape, mixer, row, scratch, u.into_slice(), inject.into_slice());
        });
        Ok(mixer.bytes())
    }

    /// Adds `y` to every stream, weighed.
    pub(crate) fn mixer_write(
        &mut self,
        rows: usize,
        y: Buffer,
        inject: Buffer,
        x: Buffer,
    ) -> Result<usize, BackendError> {
        let (d, s) = (self.spec.shape.hidden, self.spec.shape.streams);
        let team = self.crew.team();
        let [y, inject, x] = self.buffers.get([(y, rows, d), (inject, rows, s), (x, rows, s * d)])?;
        team.rows(x, s * d, s * d, |range, x| {
            let rows = (&y[range.start * d..range.end * d], &inject[range.start * s..range.end * s]);
            scatter(team.isa, d, s, rows.0, rows.1, x);
        });
        Ok(0)
    }
}

/// Reads the mixer for some rows: `x(i)` is row `i`'s wide residual, `u` is `[rows][D]`, `inject` `[rows][S]` (empty for a
/// mixer without inject weights).
pub(crate) fn read<'x>(
    team: Team<'_>,
    shape: &Shape,
    mixer: Mixer<'_>,
    x: impl Fn(usize) -> &'x [f32] + Sync,
    mut scratch: Scratch<'_>,
    u: &mut [f32],
    inject: &mut [f32],
) {
    let (d, s, rank, isa) = (shape.hidden, shape.streams, shape.mixer_rank, team.isa);
    let (rows, wide) = (u.len() / d, s * d);
    let (normed, low, gates) =
        (scratch.take(rows * wide), scratch.take(rows * rank), scratch.take(rows * wide));

    team.rows(normed, d, 2 * d, |groups, out| {
        for (group, out) in groups.zip(out.chunks_exact_mut(d)) {
            let stream = group % s * d..(group % s + 1) * d;
            let x = &x(group / s)[stream.clone()];
            norm::grouped(isa, x, &mixer.norm[stream], d, shape.norm_eps, out);
        }
    });
    let input = team.input(normed, wide, scratch.acts, &[mixer.down, mixer.inject.unwrap_or(mixer.down)]);
    match mixer.inject {
        Some(w) => {
            team.products(input, &mut [Job::new(mixer.down, low, rank), Job::new(w, inject, s)]);
            inject_weights(isa, s as f32, inject);
        }
        None => team.products(input, &mut [Job::new(mixer.down, low, rank)]),
    }
    scaled_silu(isa, s as f32, low);
    let input = team.input(low, rank, scratch.acts, &[mixer.up]);
    team.products(input, &mut [Job::new(mixer.up, gates, wide)]);
    team.tiles(u, d, 10 * wide, |mut u| mix(isa, d, s, gates, normed, &mut u));
}

dispatch! {
    /// `silu(x / streams)`, in place.
    fn scaled_silu(isa, streams: f32, x: &mut [f32]) {
        for x in x {
            *x = math::silu(*x / streams);
        }
    }
}
dispatch! {
    /// `2 sigmoid(x / streams)`, in place.
    fn inject_weights(isa, streams: f32, x: &mut [f32]) {
        for x in x {
            *x = 2.0 * math::sigmoid(*x / streams);
        }
    }
}
dispatch! {
    /// `u[d] = (sum over streams, ascending, of sigmoid(gate) * normed) / S`, for every element of a tile of `u`.
    fn mix(isa, d: usize, s: usize, gates: &[f32], normed: &[f32], u: &mut Tile<'_, f32>) {
        let (top, first) = u.place();
        for row in 0..u.rows() {
            let u = u.row(row);
            u.fill(0.0);
            for stream in 0..s {
                let at = ((top + row) * s + stream) * d + first;
                let streams = gates[at..at + u.len()].iter().zip(&normed[at..at + u.len()]);
                for (u, (&gate, &normed)) in u.iter_mut().zip(streams) {
                    *u = math::sigmoid(gate).mul_add(normed, *u);
                }
            }
            u.iter_mut().for_each(|u| *u /= s as f32);
        }
    }
}

dispatch! {
    /// `x[t, s] = fma(inject[t, s], y[t], x[t, s])`, for all rows of `x`, `[rows][S][D]`.
    fn scatter(isa, d: usize, s: usize, y: &[f32], inject: &[f32], x: &mut [f32]) {
        for ((y, inject), x) in y.chunks_exact(d).zip(inject.chunks_exact(s)).zip(x.chunks_exact_mut(s * d)) {
            for (&inject, x) in inject.iter().zip(x.chunks_exact_mut(d)) {
                lanes::axpy(inject, y, x);
            }
        }
    }
}
