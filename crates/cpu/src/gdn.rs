//! Gated DeltaNet: docs/qwen4exp.md, section 2.2.
//!
//! Owns the whole mixer: projections, causal convolution, the delta rule, output gate and projection. The delta rule is the sequential
//! f32 update in prompts too (contract); its parallelism is sequences, key heads and state columns.
//!
//! Rounding, beyond the contract's lane-32 dots: taps accumulate by FMA from zero, oldest first; `q` is scaled by
//! `1 / sqrt(key_dim)` after its norm; a state column is decayed (one product), read, updated by FMA, read again.

use strata_backend::{BackendError, Buffer, GdnShape, GdnWeights, Layer, Shape, Span, check_spans};
use strata_quant::{Isa, dispatch, lanes, math};

use crate::backend::CpuBackend;
use crate::bench::{Scratch, Spread};
use crate::recurrent::{Kind, place, strips};
use crate::shared::{Grid, Job, Picked, Tile, run_on};
use crate::spans::Piece;
use crate::strip::{STRIP, Strip, fold_lanes};
use crate::taps::{Input, Taps, with_taps};
use crate::{failed, norm, weights};

/// Floats per row of a piece: convolution input, gate, decay and write strength, output.
pub(crate) fn piece_floats(g: &GdnShape) -> usize {
    g.channels() + g.value_width() + 2 * g.value_heads + columns(g)
}

/// State columns, with those that fill up strips.
fn columns(g: &GdnShape) -> usize {
    g.value_heads * strips(g) * STRIP
}

/// Floats of a worker: the output stage's tile, or q, k and a strip of v for a piece.
pub(crate) fn scratch(g: &GdnShape, tile: usize, piece: usize) -> usize {
    (tile * g.value_width()).max(piece * (2 * g.key_dim + STRIP))
}

impl CpuBackend {
    /// `y = gdn(u)`; returns the bytes read.
    pub(crate) fn gdn(
        &mut self,
        layer: Layer,
        w: &GdnWeights,
        spans: &[Span],
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let rows = check_spans(&self.spec, spans).map_err(failed)?;
        let team = self.crew.team();
        let Shape { hidden: d, norm_eps: eps, .. } = self.spec.shape;
        let g = self.spec.shape.gdn.ok_or_else(|| failed("a GDN op for a model without GDN layers"))?;
        let (channels, heads, values) = (g.channels(), g.value_heads, g.value_width());

        let [qkv, gate] = [self.weights.matrix(w.qkv, channels, d)?, self.weights.matrix(w.gate, values, d)?];
        let [alpha, beta] = [self.weights.matrix(w.alpha, heads, d)?, self.weights.matrix(w.beta, heads, d)?];
        let out = self.weights.matrix(w.out, d, values)?;
        let taps = self.weights.taps(w.conv, channels, g.conv_kernel)?;
        let [a, dt_bias] = [self.weights.vector(w.a, heads)?, self.weights.vector(w.dt_bias, heads)?];
        let gamma = self.weights.vector(w.norm, g.value_dim)?;
        let in_bytes = [&qkv, &gate, &alpha, &beta].map(weights::bytes).iter().sum();
        let bytes = in_bytes + weights::bytes(&out) + spans.len() * 4 * (g.state_floats() + g.conv_floats());

        let [u, y] = self.buffers.get([(u, rows, d), (y, rows, d)])?;
        let mut first = 0;
        while self.piece.take(&self.state, layer, spans, first, self.piece_rows) {
            let Piece { rows: range, portions, slots, bounds } = &self.piece;
            let n = range.len();
            let mut floats = Scratch { floats: &mut self.piece_floats, acts: &mut [] };
            let (conv, z) = (floats.take(n * channels), floats.take(n * values));
            let (decay, strength) = (floats.take(n * heads), floats.take(n * heads));
            let o = floats.take(n * columns(&g));

            let u = &u[range.start * d..range.end * d];
            let by = Spread::new(team, n, in_bytes);
            let split = (
                Grid::rows(&mut *conv, channels, by.grain),
                Grid::rows(&mut *z, values, by.grain),
                Grid::rows(&mut *decay, heads, by.grain),
                Grid::rows(&mut *strength, heads, by.grain),
            );
            by.run(&mut self.bench, split, |team, rows, (conv, z, decay, strength), scratch| {
                let (decay, strength) = (decay.into_slice(), strength.into_slice());
                let x = &u[rows.start * d..rows.end * d];
                let input = team.input(x, d, scratch.acts, &[qkv, gate, alpha, beta]);
                team.products(
                    input,
                    &mut [
                        Job::new(qkv, conv.into_slice(), channels),
                        Job::new(gate, z.into_slice(), values),
                        Job::new(alpha, decay, heads),
                        Job::new(beta, strength, heads),
                    ],
                );
                gates(team.isa, a, dt_bias, decay, strength);
            });

            let memory = self.state.layer(layer)?;
            let state = memory.recurrent.gdn.as_mut();
            let state = state.ok_or_else(|| failed(format!("layer {} has no GDN state", layer.0)))?;
            // A task has a key head's strips, or an even part of them where that makes too few tasks for the threads.
            let group = columns(&g) / STRIP / g.key_heads;
            let tasks = team.tasks(12 * n * values * g.key_dim);
            let mut own = group;
            while slots.len() * g.key_heads * (group / own) < tasks.min(team.threads())
                && own.is_multiple_of(2)
            {
                own /= 2;
            }
            let (each, parts) = (state.each(), g.key_heads * (group / own));
            let split = (
                Picked::new(&mut state.columns, each, slots, own * 2 * STRIP * g.key_dim),
                Grid::bands(&mut *o, columns(&g), bounds, own * STRIP),
            );
            let (conv, decay, strength, history) = (&*conv, &*decay, &*strength, &state.history);
            let pool = team.pool.filter(|_| tasks > 1);
            run_on(pool, &mut self.bench, split, |task, (strips, o), scratch| {
                let (portion, part) = (&portions[task / parts], task % parts);
                let rows = portion.row..portion.row + portion.rows;
                let part = Part {
                    g,
                    eps,
                    key_head: part * own / group,
                    strip: part * own % group,
                    history: history.get(portion.slot, portion.from),
                    conv: &conv[rows.start * channels..rows.end * channels],
                    taps,
                    decay: &decay[rows.start * heads..rows.end * heads],
                    strength: &strength[rows.start * heads..rows.end * heads],
                    versions: [portion.from, portion.to],
                };
                part.run(team.isa, strips, o, scratch);
            });
            for portion in portions {
                let new = &conv[portion.row * channels..(portion.row + portion.rows) * channels];
                state.history.advance(portion.slot, portion.from, portion.to, new);
            }
            for portion in portions {
                if let Some(cut) = portion.cut {
                    memory.save(portion.slot, portion.to, Kind::Gdn, cut);
                }
            }

            let y = &mut y[range.start * d..range.end * d];
            let (o, z) = (&*o, &*z);
            let by = Spread::new(team, n, weights::bytes(&out));
            let split = Grid::rows(y, d, by.grain);
            by.run(&mut self.bench, split, |team, rows, y, mut scratch| {
                let normed = scratch.take(rows.len() * values);
                team.rows(normed, values, 10 * values, |part, normed| {
                    let part = rows.start + part.start..rows.start + part.end;
                    let (o, z) = (&o[part.start * columns(&g)..], &z[part.start * values..]);
                    gated_norm(team.isa, g, eps, gamma, o, z, normed);
                });
                let input = team.input(normed, values, scratch.acts, &[out]);
                team.products(input, &mut [Job::new(out, y.into_slice(), d)]);
            });
            first = range.end;
        }
        for span in spans {
            self.state.note_pending(span, layer);
        }
        Ok(bytes)
    }
}

dispatch! {
    /// `exp(a * softplus(alpha + dt_bias))` in place of alpha, and `sigmoid(beta)`; rows of one value per head.
    fn gates(isa, a: &[f32], dt_bias: &[f32], alpha: &mut [f32], beta: &mut [f32]) {
        for alpha in alpha.chunks_exact_mut(a.len()) {
            for ((alpha, &a), &bias) in alpha.iter_mut().zip(a).zip(dt_bias) {
                *alpha = math::exp(a * math::softplus(*alpha + bias));
            }
        }
        beta.iter_mut().for_each(|beta| *beta = math::sigmoid(*beta));
    }
}

dispatch! {
    /// `rms(o) * gamma * sigmoid(z)` per value head, for the rows of `out`; `o` is in strips, the heads in the order of
    /// [`place`].
    fn gated_norm(isa, g: GdnShape, eps: f32, gamma: &[f32], o: &[f32], z: &[f32], out: &mut [f32]) {
        let values = g.value_width();
        let width = strips(&g) * STRIP;
        let rows = o.chunks_exact(g.value_heads * width).zip(z.chunks_exact(values));
        for ((o, z), out) in rows.zip(out.chunks_exact_mut(values)) {
            let heads = z.chunks_exact(g.value_dim).zip(out.chunks_exact_mut(g.value_dim));
            for (h, (z, out)) in heads.enumerate() {
                norm::rms(&o[place(&g, h) * width..][..g.value_dim], gamma, eps, out);
                for (out, &z) in out.iter_mut().zip(z) {
                    *out *= math::sigmoid(z);
                }
            }
        }
    }
}

/// The convolution and the delta rule for one portion's rows and some strips of one key head.
struct Part<'a> {
    g: GdnShape,
    eps: f32,
    key_head: usize,
    /// The first strip, among those of the key head.
    strip: usize,
    /// The rows before the portion.
    history: &'a [f32],
    /// The portion's rows of convolution input, `[rows][channels]`.
    conv: &'a [f32],
    /// `[kernel][channels]`
    taps: &'a [f32],
    /// `[rows][value_heads]`
    decay: &'a [f32],
    /// `[rows][value_heads]`
    strength: &'a [f32],
    /// Which version of the state is read, which is written.
    versions: [usize; 2],
}

impl Part<'_> {
    /// `state` is `[strips][version][key_dim][16]`; row `t` of `o` takes the columns' outputs for row `t`.
    fn run(&self, isa: Isa, state: &mut [f32], mut o: Tile<'_, f32>, mut scratch: Scratch<'_>) {
        let g = &self.g;
        let (rows, keys) = (self.conv.len() / g.channels(), g.key_heads * g.key_dim);
        let (q, k) = (scratch.take(rows * g.key_dim), scratch.take(rows * g.key_dim));
        let v = scratch.take(rows * STRIP);
        self.convolve(isa, self.key_head * g.key_dim, g.key_dim, q, g.key_dim);
        self.convolve(isa, keys + self.key_head * g.key_dim, g.key_dim, k, g.key_dim);
        l2_norms(isa, g.key_dim, self.eps, math::rsqrt(g.key_dim as f32), q);
        l2_norms(isa, g.key_dim, self.eps, 1.0, k);
        for (i, state) in state.chunks_exact_mut(2 * STRIP * g.key_dim).enumerate() {
            let (head, first) = ((self.strip + i) / strips(g), (self.strip + i) % strips(g) * STRIP);
            let h = self.key_head + head * g.key_heads;
            let width = STRIP.min(g.value_dim - first);
            v.fill(0.0);
            self.convolve(isa, 2 * keys + h * g.value_dim + first, width, v, STRIP);
            let gates = Gates { decay: self.decay, strength: self.strength, heads: g.value_heads, h };
            delta_rule(isa, self.versions, state, q, k, v, gates, i * STRIP, &mut o);
        }
    }

    /// The convolution and its SiLU for `width` channels from `channel` on, into rows of `stride`.
    fn convolve(&self, isa: Isa, channel: usize, width: usize, out: &mut [f32], stride: usize) {
        let (history, rows, taps) = (self.history, self.conv, self.taps);
        let input = Input { history, rows, taps, channels: self.g.channels(), dilation: 1 };
        convolve(isa, input, channel, width, out, stride);
    }
}

dispatch! {
    fn convolve(isa, input: Input<'_>, first: usize, width: usize, out: &mut [f32], stride: usize) {
        with_taps!(input.taps.len() / input.channels, convolve_rows(input, first, width, out, stride));
    }
}

#[inline(always)]
fn convolve_rows<const K: usize>(
    input: Input<'_>,
    first: usize,
    width: usize,
    out: &mut [f32],
    stride: usize,
) {
    for (t, out) in out.chunks_exact_mut(stride).enumerate() {
        let rows = Taps::<K>::new(input, t);
        for (block, out) in out[..width].chunks_mut(STRIP).enumerate() {
            let mut acc = rows.convolve(first + block * STRIP, out.len());
            acc.iter_mut().for_each(|x| *x = math::silu(*x));
            out.copy_from_slice(&acc[..out.len()]);
        }
    }
}

dispatch! {
    /// `x * rsqrt(sum of squares + eps) * scale` for every `dim` values, in place.
    fn l2_norms(isa, dim: usize, eps: f32, scale: f32, x: &mut [f32]) {
        for x in x.chunks_exact_mut(dim) {
            let norm = math::rsqrt(lanes::sum_of_squares(x) + eps);
            x.iter_mut().for_each(|x| *x = *x * norm * scale);
        }
    }
}

/// Decay and write strength of value head `h`, `[rows][heads]` each.
#[derive(Clone, Copy)]
struct Gates<'a> {
    decay: &'a [f32],
    strength: &'a [f32],
    heads: usize,
    h: usize,
}

dispatch! {
    /// The delta rule for one strip of columns, `[version][dim][16]`, over all rows: `q` and `k` are `[rows][dim]`, normalised, `v` is
    /// `[rows][16]`; row `t` of `o` takes the outputs from column `at` on.
    fn delta_rule(
        isa,
        versions: [usize; 2],
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        gates: Gates<'_>,
        at: usize,
        o: &mut Tile<'_, f32>
    ) {
        let (state, _) = state.as_chunks_mut::<STRIP>();
        let dim = state.len() / 2;
        let [from, to] = versions;
        if from != to {
            state.copy_within(from * dim..(from + 1) * dim, to * dim);
        }
        let state = &mut state[to * dim..(to + 1) * dim];
        let rows = q.chunks_exact(dim).zip(k.chunks_exact(dim)).zip(v.as_chunks::<STRIP>().0);
        for (t, ((q, k), v)) in rows.enumerate() {
            let decay = gates.decay[t * gates.heads + gates.h];
            let strength = gates.strength[t * gates.heads + gates.h];
            let dots = fold_lanes!(decay_and_read(state, k, decay));
            let mut delta = [0.0; STRIP];
            for c in 0..STRIP {
                delta[c] = strength * (v[c] - dots[c]);
            }
            let out = fold_lanes!(write_and_read(state, k, q, &delta));
            o.row(t)[at..at + STRIP].copy_from_slice(&out);
        }
    }
}

/// Decays elements `i`, `i + 32`.. of the columns, and gives lane `i` of their dots with `k`.
#[inline(always)]
fn decay_and_read(state: &mut [Strip], k: &[f32], decay: f32, i: usize) -> Strip {
    let mut acc = [0.0; STRIP];
    let mut j = i;
    while j < k.len() {
        let state = &mut state[j];
        for c in 0..STRIP {
            state[c] *= decay;
            acc[c] = state[c].mul_add(k[j], acc[c]);
        }
        j += 32;
    }
    acc
}

/// Adds `k delta` to elements `i`, `i + 32`.. of the columns, and gives lane `i` of their dots with `q`.
#[inline(always)]
fn write_and_read(state: &mut [Strip], k: &[f32], q: &[f32], delta: &Strip, i: usize) -> Strip {
    let mut acc = [0.0; STRIP];
    let mut j = i;
    while j < k.len() {
        let state = &mut state[j];
        for c in 0..STRIP {
            state[c] = delta[c].mul_add(k[j], state[c]);
            acc[c] = state[c].mul_add(q[j], acc[c]);
        }
        j += 32;
    }
    acc
}
