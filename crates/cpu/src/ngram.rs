//! The n-gram block: docs/qwen4exp.md, section 2.5, from the table's rows on.
//!
//! Owns keys, values and gates of the embedded n-grams and the dilated convolution over their normed values. Which rows of
//! the table a token has is the engine's business.
//!
//! Rounding, beyond the contract: the gate's dot is lane-32, then divided by `sqrt(D)`; taps accumulate by FMA from zero,
//! oldest first; `x += gated value + convolved`, that sum first.

use strata_backend::{BackendError, Buffer, Layer, NgramShape, NgramWeights, Shape, Span, check_spans};
use strata_quant::{Format, dequantise, dispatch, lanes, math};

use crate::backend::CpuBackend;
use crate::bench::{Scratch, Spread};
use crate::recurrent::Kind;
use crate::shared::{Grid, Job, run};
use crate::spans::Piece;
use crate::strip::STRIP;
use crate::taps::{Input, Taps, with_taps};
use crate::{failed, norm, weights};

/// Floats per row of a piece: gates, values, normed gated values.
pub(crate) fn piece_floats(shape: &Shape) -> usize {
    shape.streams + shape.hidden + shape.streams * shape.hidden
}

/// Floats of a worker's tile.
pub(crate) fn scratch(shape: &Shape, n: &NgramShape, tile: usize) -> usize {
    tile * (n.heads * n.row + shape.streams * shape.hidden) + 2 * shape.hidden
}

/// The tokens' rows of the n-gram table.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a> {
    pub(crate) format: Format,
    pub(crate) scale: Option<f32>,
    /// `[tokens][heads]` rows.
    pub(crate) rows: &'a [u8],
}

impl CpuBackend {
    /// `x += ngram(x, table rows)`; returns the bytes read.
    pub(crate) fn ngram(
        &mut self,
        layer: Layer,
        w: &NgramWeights,
        Table { format, scale, rows: table_rows }: Table<'_>,
        spans: &[Span],
        x: Buffer,
    ) -> Result<usize, BackendError> {
        let rows = check_spans(&self.spec, spans).map_err(failed)?;
        let team = self.crew.team();
        let Shape { hidden: d, streams: s, norm_eps: eps, .. } = self.spec.shape;
        let g = self.spec.shape.ngram.ok_or_else(|| failed("an n-gram op for a model without n-grams"))?;
        let (wide, embedded) = (s * d, g.heads * g.row);
        let [key, value] =
            [self.weights.matrix(w.key, wide, embedded)?, self.weights.matrix(w.value, d, embedded)?];
        let norm_key = self.weights.vector(w.norm_key, wide)?;
        let norm_query = self.weights.vector(w.norm_query, wide)?;
        let norm_conv = self.weights.vector(w.norm_conv, wide)?;
        let taps = self.weights.taps(w.conv, wide, g.conv_kernel)?;
        let in_bytes = weights::bytes(&key) + weights::bytes(&value);
        let bytes = in_bytes + table_rows.len() + spans.len() * 4 * g.history() * wide;
        let row_bytes = format.row_bytes(g.row).map(|n| n * g.heads);
        let Some(row_bytes) = row_bytes.filter(|n| n * rows == table_rows.len()) else {
            let found = table_rows.len();
            return Err(failed(format!("{found} bytes of n-gram rows in {format} for {rows} tokens")));
        };

        let [x] = self.buffers.get([(x, rows, wide)])?;
        let mut first = 0;
        while self.piece.take(&self.state, layer, spans, first, self.piece_rows) {
            let Piece { rows: range, portions, .. } = &self.piece;
            let n = range.len();
            let x = &mut x[range.start * wide..range.end * wide];
            let table_rows = &table_rows[range.start * row_bytes..range.end * row_bytes];
            let mut floats = Scratch { floats: &mut self.piece_floats, acts: &mut [] };
            let (gates, values, normed) = (floats.take(n * s), floats.take(n * d), floats.take(n * wide));
            let by = Spread::new(team, n, in_bytes);
            let split = (
                Grid::rows(&mut *gates, s, by.grain),
                Grid::rows(&mut *values, d, by.grain),
                Grid::rows(&mut *normed, wide, by.grain),
            );
            let queries = &*x;
            by.run(&mut self.bench, split, |team, rows, (gates, values, normed), mut scratch| {
                let (gates, values, normed) = (gates.into_slice(), values.into_slice(), normed.into_slice());
                let (e, keys) = (scratch.take(rows.len() * embedded), scratch.take(rows.len() * wide));
                team.rows(e, embedded, 4 * embedded, |part, e| {
                    let bytes = &table_rows[(rows.start + part.start) * row_bytes..];
                    let bytes = bytes.chunks_exact(row_bytes / g.heads).take(part.len() * g.heads);
                    bytes.zip(e.chunks_exact_mut(g.row)).for_each(|(bytes, e)| dequantise(format, bytes, e));
                    if let Some(scale) = scale {
                        e.iter_mut().for_each(|e| *e *= scale);
                    }
                });
                let input = team.input(e, embedded, scratch.acts, &[key, value]);
                team.products(input, &mut [Job::new(key, keys, wide), Job::new(value, values, d)]);
                let (key, query) = (scratch.take(d), scratch.take(d));
                for (i, row) in rows.enumerate() {
                    for stream in 0..s {
                        let at = stream * d..(stream + 1) * d;
                        let gamma = [&norm_key[at.clone()], &norm_query[at.clone()], &norm_conv[at.clone()]];
                        gates[i * s + stream] = gated(
                            team.isa,
                            eps,
                            gamma,
                            &keys[i * wide..][at.clone()],
                            &queries[row * wide..][at.clone()],
                            &values[i * d..][..d],
                            [key, query],
                            &mut normed[i * wide..][at],
                        );
                    }
                }
            });

            let history = self.state.layer(layer)?;
            let history = history.recurrent.ngram.as_mut();
            let history = history.ok_or_else(|| failed(format!("layer {} has no n-gram state", layer.0)))?;
            let grain = team.grain(n, 12 * wide);
            let (gates, values, normed, kept, piece) = (&*gates, &*values, &*normed, &*history, &self.piece);
            run(team.pool, Grid::rows(x, wide, grain), |task, x| {
                for (i, x) in x.into_slice().chunks_exact_mut(wide).enumerate() {
                    let row = task * grain + i;
                    let (portion, _) = piece.position(row);
                    let history = kept.get(portion.slot, portion.from);
                    let rows = &normed[portion.row * wide..(portion.row + portion.rows) * wide];
                    let t = row - portion.row;
                    let gated = (&gates[row * s..][..s], &values[row * d..][..d]);
                    let input = Input { history, rows, taps, channels: wide, dilation: g.dilation };
                    convolve(team.isa, input, t, gated, x);
                }
            });
            for portion in portions {
                let new = &normed[portion.row * wide..(portion.row + portion.rows) * wide];
                history.advance(portion.slot, portion.from, portion.to, new);
            }
            for portion in portions {
                if let Some(cut) = portion.cut {
                    self.state.layer(layer)?.save(portion.slot, portion.to, Kind::Ngram, cut);
                }
            }
            first = range.end;
        }
        for span in spans {
            self.state.note_pending(span, layer);
        }
        Ok(bytes)
    }
}

dispatch! {
    /// One stream of one row: the gate, and the norm of the gated value into `normed`.
    fn gated(
        isa,
        eps: f32,
        gamma: [&[f32]; 3],
        key: &[f32],
        query: &[f32],
        value: &[f32],
        room: [&mut [f32]; 2],
        normed: &mut [f32]
    ) -> f32 {
        let [k, q] = room;
        norm::rms(key, gamma[0], eps, k);
        norm::rms(query, gamma[1], eps, q);
        let score = lanes::dot(k, q) / (value.len() as f32).sqrt();
        let root = score.abs().max(1e-6).sqrt();
        let gate = math::sigmoid(if score == 0.0 { 0.0 } else { root.copysign(score) });
        for (k, &value) in k.iter_mut().zip(value) {
            *k = gate * value;
        }
        norm::rms(k, gamma[2], eps, normed);
        gate
    }
}

dispatch! {
    /// Adds the gated value and its convolution to row `t` of the residual; the input is the portion's normed values.
    fn convolve(isa, input: Input<'_>, t: usize, gated: (&[f32], &[f32]), x: &mut [f32]) {
        with_taps!(input.taps.len() / input.channels, convolve_row(input, t, gated, x));
    }
}

#[inline(always)]
fn convolve_row<const K: usize>(input: Input<'_>, t: usize, (gates, value): (&[f32], &[f32]), x: &mut [f32]) {
    let (d, rows) = (value.len(), Taps::<K>::new(input, t));
    for (s, (x, &gate)) in x.chunks_exact_mut(d).zip(gates).enumerate() {
        for (block, (x, value)) in x.chunks_mut(STRIP).zip(value.chunks(STRIP)).enumerate() {
            let mut acc = rows.convolve(s * d + block * STRIP, x.len());
            acc.iter_mut().for_each(|x| *x = math::silu(*x));
            for ((x, &value), &acc) in x.iter_mut().zip(value).zip(&acc) {
                *x += gate * value + acc;
            }
        }
    }
}
