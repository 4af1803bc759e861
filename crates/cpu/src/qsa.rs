//! Block-sparse attention: docs/qwen4exp.md, section 2.3.
//!
//! Owns the order of the op: projections, norms and rotation; appending to the caches; per row the choice of keys
//! ([`crate::select`]) and attention over them ([`crate::attend`]); output gate and projection.

use strata_backend::{BackendError, Buffer, Layer, QsaShape, QsaWeights, Shape, Span, check_spans};
use strata_quant::{dispatch, math};

use crate::attend::{self, Attended, CHUNK};
use crate::backend::CpuBackend;
use crate::bench::{Bench, Scratch, Spread, Team};
use crate::cache::Cache;
use crate::select::{self, Keys, Pooling};
use crate::shared::{Grid, Job, run_on};
use crate::spans::Piece;
use crate::{failed, rope, weights};

/// Floats per row of a piece: queries with gates, keys, values, index queries, index keys, attention.
pub(crate) fn piece_floats(q: &QsaShape) -> usize {
    q.heads * 3 * q.head_dim + 2 * q.kv_heads * q.head_dim + (q.index_heads + 1) * q.index_dim
}

/// Floats besides the rows': one row's choice, and the partial results of all its heads and chunks.
pub(crate) fn row_floats(q: &QsaShape, block: usize, context: usize) -> usize {
    let chunks = q.selected(block, context).div_ceil(CHUNK);
    select::floats(q, block, context) + chunks * q.heads * attend::partial_floats(q) + 2 * q.index_dim
}

/// Floats of a worker: one row's choice, a chunk, and two partial results for the heads of a key/value head.
pub(crate) fn scratch(q: &QsaShape, block: usize, context: usize) -> usize {
    let group = q.heads / q.kv_heads;
    select::floats(q, block, context) + attend::floats(q) + 2 * group * attend::partial_floats(q)
}

/// What rows need to attend.
struct Attention<'a> {
    q: &'a QsaShape,
    cache: &'a Cache,
    piece: &'a Piece,
    /// `[rows][heads][2][head_dim]`
    queries: &'a [f32],
    /// `[rows][index_heads][index_dim]`
    index: &'a [f32],
    /// Tokens a sequence may have.
    context: usize,
}

impl CpuBackend {
    /// `y = qsa(u)`, and the rows' keys and values go to the caches; returns the bytes read.
    pub(crate) fn qsa(
        &mut self,
        layer: Layer,
        w: &QsaWeights,
        spans: &[Span],
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let rows = check_spans(&self.spec, spans).map_err(failed)?;
        let team = self.crew.team();
        let Shape { hidden: d, norm_eps: eps, ref qsa, .. } = self.spec.shape;
        let q = qsa.as_ref().ok_or_else(|| failed("an attention op for a model without attention"))?;
        let (kv, heads, ni, di) = (q.kv_heads * q.head_dim, q.heads * q.head_dim, q.index_heads, q.index_dim);
        let [wq, wk] = [self.weights.matrix(w.q, 2 * heads, d)?, self.weights.matrix(w.k, kv, d)?];
        let [wv, out] = [self.weights.matrix(w.v, kv, d)?, self.weights.matrix(w.out, d, heads)?];
        let q_norm = self.weights.vector(w.q_norm, q.head_dim)?;
        let k_norm = self.weights.vector(w.k_norm, q.head_dim)?;
        let [wiq, wik] =
            [self.weights.matrix(w.index_q, ni * di, d)?, self.weights.matrix(w.index_k, di, d)?];
        let index_q_norm = self.weights.vector(w.index_q_norm, di)?;
        let index_k_norm = self.weights.vector(w.index_k_norm, di)?;
        let in_bytes: usize = [&wq, &wk, &wv, &wiq, &wik].map(weights::bytes).iter().sum();
        let mut bytes = in_bytes + weights::bytes(&out);

        let [u, y] = self.buffers.get([(u, rows, d), (y, rows, d)])?;
        let mut first = 0;
        while self.piece.take(&self.state, layer, spans, first, self.piece_rows) {
            let piece = &self.piece;
            let (range, n) = (piece.rows.clone(), piece.rows.len());
            let mut floats = Scratch { floats: &mut self.piece_floats, acts: &mut [] };
            let (queries, keys, values) =
                (floats.take(n * 2 * heads), floats.take(n * kv), floats.take(n * kv));
            let (index_q, index_k) = (floats.take(n * ni * di), floats.take(n * di));
            let attended = floats.take(n * heads);

            let u = &u[range.start * d..range.end * d];
            let by = Spread::new(team, n, in_bytes);
            let split = (
                Grid::rows(&mut *queries, 2 * heads, by.grain),
                Grid::rows(&mut *keys, kv, by.grain),
                Grid::rows(&mut *values, kv, by.grain),
                Grid::rows(&mut *index_q, ni * di, by.grain),
                Grid::rows(&mut *index_k, di, by.grain),
            );
            let table = &*self.rope;
            by.run(&mut self.bench, split, |team, rows, (qs, ks, vs, iqs, iks), scratch| {
                let (qs, ks, vs) = (qs.into_slice(), ks.into_slice(), vs.into_slice());
                let (iqs, iks) = (iqs.into_slice(), iks.into_slice());
                let x = &u[rows.start * d..rows.end * d];
                let input = team.input(x, d, scratch.acts, &[wq, wk, wv, wiq, wik]);
                team.products(
                    input,
                    &mut [
                        Job::new(wq, qs, 2 * heads),
                        Job::new(wk, ks, kv),
                        Job::new(wv, vs, kv),
                        Job::new(wiq, iqs, ni * di),
                        Job::new(wik, iks, di),
                    ],
                );
                for (i, row) in rows.enumerate() {
                    let position = piece.position(row).1;
                    let table = &table[position * q.rotary..][..q.rotary];
                    let qs = &mut qs[i * 2 * heads..][..2 * heads];
                    norm_and_rotate(team.isa, 2 * q.head_dim, q_norm, eps, table, qs);
                    norm_and_rotate(team.isa, q.head_dim, k_norm, eps, table, &mut ks[i * kv..][..kv]);
                    let iqs = &mut iqs[i * ni * di..][..ni * di];
                    norm_and_rotate(team.isa, di, index_q_norm, eps, table, iqs);
                }
            });

            let cache = self.state.layer(layer)?.cache.as_mut();
            let cache = cache.ok_or_else(|| failed(format!("layer {} has no attention caches", layer.0)))?;
            for portion in &piece.portions {
                for (i, position) in (portion.position..portion.position + portion.rows).enumerate() {
                    let row = portion.row + i;
                    for head in 0..q.kv_heads {
                        let (at, part) =
                            (cache.kv_at(portion.slot, head, position), row * kv + head * q.head_dim);
                        cache.keys.put(team.isa, at, &keys[part..part + q.head_dim]);
                        cache.values.put(team.isa, at, &values[part..part + q.head_dim]);
                    }
                    let at = cache.raw_at(portion.slot, position);
                    cache.raw.put(team.isa, at, &index_k[row * di..][..di]);
                }
                let end = portion.position + portion.rows;
                let blocks = portion.position / cache.block..end / cache.block;
                let pooling = Pooling { q, eps, gamma: index_k_norm, table };
                pooling.run(team.isa, cache, portion.slot, blocks, &mut floats.floats[..2 * di]);
            }

            for portion in &piece.portions {
                let visible = portion.position + portion.rows;
                let one = q.selected(cache.block, visible) * 2 * kv + visible / cache.block * di;
                bytes += one * self.spec.kv.bytes();
            }
            let attention =
                Attention { q, cache, piece, queries, index: index_q, context: self.spec.context };
            attention.run(team, &mut self.bench, floats, attended);

            let y = &mut y[range.start * d..range.end * d];
            let attended = &*attended;
            let by = Spread::new(team, n, weights::bytes(&out));
            let split = Grid::rows(y, d, by.grain);
            by.run(&mut self.bench, split, |team, rows, y, scratch| {
                let x = &attended[rows.start * heads..rows.end * heads];
                let input = team.input(x, heads, scratch.acts, &[out]);
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
    /// Norms and rotates the first `gamma.len()` of every `stride` values of one row.
    fn norm_and_rotate(isa, stride: usize, gamma: &[f32], eps: f32, table: &[f32], row: &mut [f32]) {
        for head in row.chunks_exact_mut(stride) {
            let head = &mut head[..gamma.len()];
            let scale = math::rsqrt(strata_quant::lanes::sum_of_squares(head) / head.len() as f32 + eps);
            head.iter_mut().zip(gamma).for_each(|(x, &gamma)| *x = *x * scale * gamma);
            rope::rotate(head, table);
        }
    }
}

impl Attention<'_> {
    /// Attends all rows of the piece into `out`, `[rows][heads * head_dim]`.
    fn run(&self, team: Team<'_>, bench: &mut Bench, mut floats: Scratch<'_>, out: &mut [f32]) {
        let (q, group) = (self.q, self.group());
        let width = q.heads * q.head_dim;
        let rows = out.len() / width;
        let ends = self.piece.portions.iter().map(|p| p.position + p.rows);
        let keys = ends.map(|end| q.selected(self.cache.block, end)).max().unwrap_or(0);
        let work = keys * width * 8;
        if rows >= 2 * team.threads() || team.tasks(rows * work) == 1 {
            let grain = team.grain(rows, work);
            run_on(team.pool, bench, Grid::rows(out, width, grain), |task, out, scratch| {
                for (i, out) in out.into_slice().chunks_exact_mut(width).enumerate() {
                    let scratch = Scratch { floats: &mut *scratch.floats, acts: &mut [] };
                    self.row(team.alone(), task * grain + i, scratch, out);
                }
            });
            return;
        }
        // Few rows: the tasks are their key/value heads and chunks.
        let choice = floats.take(select::floats(q, self.cache.block, self.context));
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let (slot, keys) = self.keys(team, row, choice);
            let (query, chunks) = (self.query(row), keys.len().div_ceil(CHUNK));
            let partials = &mut floats.floats[..q.kv_heads * chunks * group];
            run_on(team.pool, bench, Grid::rows(partials, group, 1), |task, part, scratch| {
                let attended = self.attended(team, slot, task / chunks, keys, query);
                attended.chunk(task % chunks, scratch.floats, part.into_slice());
            });
            for (kv_head, partials) in partials.chunks_exact_mut(chunks * group).enumerate() {
                let (acc, rest) = partials.split_at_mut(group);
                for part in rest.chunks_exact(group) {
                    self.merge(team, acc, part);
                }
                self.finish(team, query, kv_head, acc, out);
            }
        }
    }

    /// Attends one row, alone.
    fn row(&self, team: Team<'_>, row: usize, mut scratch: Scratch<'_>, out: &mut [f32]) {
        let (q, group) = (self.q, self.group());
        let choice = scratch.take(select::floats(q, self.cache.block, self.context));
        let (room, acc, part) = (scratch.take(attend::floats(q)), scratch.take(group), scratch.take(group));
        let (slot, keys) = self.keys(team, row, choice);
        let query = self.query(row);
        for kv_head in 0..q.kv_heads {
            let attended = self.attended(team, slot, kv_head, keys, query);
            attended.chunk(0, room, acc);
            for index in 1..keys.len().div_ceil(CHUNK) {
                attended.chunk(index, room, part);
                self.merge(team, acc, part);
            }
            self.finish(team, query, kv_head, acc, out);
        }
    }

    /// Floats of the partial results for the query heads of one key/value head.
    fn group(&self) -> usize {
        self.q.heads / self.q.kv_heads * attend::partial_floats(self.q)
    }

    /// A row's queries and gates.
    fn query(&self, row: usize) -> &[f32] {
        let width = 2 * self.q.heads * self.q.head_dim;
        &self.queries[row * width..][..width]
    }

    /// A row's slot and the keys that it attends to.
    fn keys<'r>(&self, team: Team<'_>, row: usize, room: &'r mut [f32]) -> (usize, Keys<'r>) {
        let width = self.q.index_heads * self.q.index_dim;
        let (portion, position) = self.piece.position(row);
        let index = &self.index[row * width..(row + 1) * width];
        (portion.slot, select::select(team, self.q, self.cache, portion.slot, position + 1, index, room))
    }

    fn attended<'k>(
        &'k self,
        team: Team<'_>,
        slot: usize,
        kv_head: usize,
        keys: Keys<'k>,
        query: &'k [f32],
    ) -> Attended<'k> {
        Attended { isa: team.isa, q: self.q, cache: self.cache, slot, kv_head, keys, query }
    }

    fn merge(&self, team: Team<'_>, acc: &mut [f32], part: &[f32]) {
        let partial = attend::partial_floats(self.q);
        for (acc, part) in acc.chunks_exact_mut(partial).zip(part.chunks_exact(partial)) {
            attend::merge(team.isa, acc, part);
        }
    }

    /// Finishes the query heads of one key/value head, into the row's `out`.
    fn finish(&self, team: Team<'_>, query: &[f32], kv_head: usize, acc: &[f32], out: &mut [f32]) {
        let (dim, heads) = (self.q.head_dim, self.q.heads / self.q.kv_heads);
        for (i, acc) in acc.chunks_exact(attend::partial_floats(self.q)).enumerate() {
            let head = kv_head * heads + i;
            let gate = &query[(2 * head + 1) * dim..][..dim];
            attend::finish(team.isa, acc, gate, &mut out[head * dim..][..dim]);
        }
    }
}
