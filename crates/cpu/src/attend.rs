//! Attention of one query row over the keys chosen for it.
//!
//! Owns the softmax in chunks and their merge. Contract: the chosen keys, ascending, are cut every [`CHUNK`]; in a chunk the scores are lane-32
//! dots times `1 / sqrt(head_dim)`, less the chunk's largest, exponentiated, summed lane-32, and the values accumulate by FMA
//! from zero, ascending; chunks merge in order: with `m` the larger maximum, `a = exp(m_acc - m)`, `b = exp(m_chunk - m)`,
//! sum `fma(sum, a, sum_chunk * b)`, values `fma(acc, a, chunk * b)`. The result is `acc / sum * sigmoid(gate)`.

use std::ops::Range;

use strata_backend::QsaShape;
use strata_quant::{Isa, dispatch, lanes, math};

use crate::cache::{Cache, Store};
use crate::select::Keys;

/// Keys whose scores share a maximum.
pub(crate) const CHUNK: usize = 256;

/// Values that accumulate in registers.
const BLOCK: usize = 64;

/// What a head has of some keys: the largest score, the sum of exponentials, `head_dim` values.
pub(crate) fn partial_floats(q: &QsaShape) -> usize {
    q.head_dim + 2
}

/// Floats of the room that [`chunk`] needs: keys, values, scores.
pub(crate) fn floats(q: &QsaShape) -> usize {
    2 * CHUNK * q.head_dim + CHUNK
}

/// What the query heads of one key/value head attend to, for one row.
#[derive(Clone, Copy)]
pub(crate) struct Attended<'a> {
    pub(crate) isa: Isa,
    pub(crate) q: &'a QsaShape,
    pub(crate) cache: &'a Cache,
    pub(crate) slot: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Keys<'a>,
    /// The row's `[heads][2][head_dim]`: per head the query, then the gate.
    pub(crate) query: &'a [f32],
}

impl Attended<'_> {
    /// Attends to chunk `index` of the keys; `out` takes a partial result for each query head.
    pub(crate) fn chunk(&self, index: usize, room: &mut [f32], out: &mut [f32]) {
        let dim = self.q.head_dim;
        let range = index * CHUNK..self.keys.len().min((index + 1) * CHUNK);
        let (k_room, rest) = room.split_at_mut(CHUNK * dim);
        let (v_room, scores) = rest.split_at_mut(CHUNK * dim);
        let k = self.gather(&self.cache.keys, range.clone(), k_room);
        let v = self.gather(&self.cache.values, range.clone(), v_room);
        let group = self.q.heads / self.q.kv_heads;
        let queries = self.query[self.kv_head * group * 2 * dim..].chunks_exact(2 * dim);
        for (query, out) in queries.zip(out.chunks_exact_mut(partial_floats(self.q))) {
            attend(self.isa, &query[..dim], k, v, &mut scores[..range.len()], out);
        }
    }

    /// The stored rows of some of the keys as f32: in place where they are that already, else copied to `to`.
    fn gather<'k>(&self, store: &'k Store, range: Range<usize>, to: &'k mut [f32]) -> &'k [f32] {
        let dim = self.q.head_dim;
        let at = |position| self.cache.kv_at(self.slot, self.kv_head, position);
        let to = &mut to[..range.len() * dim];
        match (self.keys, store) {
            (Keys::All(_), Store::F32(data)) => return &data[at(range.start)..][..range.len() * dim],
            (Keys::All(_), Store::F16(_)) => store.get(self.isa, at(range.start), to),
            (Keys::Some(positions), _) => {
                // Positions that follow each other are one piece.
                let (positions, mut done) = (&positions[range], 0);
                while done < positions.len() {
                    let first = positions[done];
                    let run = positions[done..].iter().zip(first..).take_while(|&(&a, b)| a == b).count();
                    store.get(self.isa, at(first as usize), &mut to[done * dim..(done + run) * dim]);
                    done += run;
                }
            }
        }
        to
    }
}

dispatch! {
    fn attend(isa, query: &[f32], k: &[f32], v: &[f32], scores: &mut [f32], out: &mut [f32]) {
        let dim = query.len();
        let scale = math::rsqrt(dim as f32);
        for (score, k) in scores.iter_mut().zip(k.chunks_exact(dim)) {
            *score = lanes::dot(k, query) * scale;
        }
        let largest = lanes::max(scores);
        scores.iter_mut().for_each(|score| *score = math::exp(*score - largest));
        let (head, acc) = out.split_at_mut(2);
        (head[0], head[1]) = (largest, lanes::sum(scores));
        // Blocks that stay in registers.
        for (block, acc) in acc.chunks_mut(BLOCK).enumerate() {
            let mut sums = [0.0f32; BLOCK];
            for (&p, v) in scores.iter().zip(v.chunks_exact(dim)) {
                let v = &v[block * BLOCK..][..acc.len()];
                match v.first_chunk::<BLOCK>() {
                    Some(v) => {
                        for c in 0..BLOCK {
                            sums[c] = p.mul_add(v[c], sums[c]);
                        }
                    }
                    None => lanes::axpy(p, v, &mut sums[..v.len()]),
                }
            }
            acc.copy_from_slice(&sums[..acc.len()]);
        }
    }
}

dispatch! {
    /// Merges the partial result of the next chunk into that of those before.
    pub(crate) fn merge(isa, acc: &mut [f32], chunk: &[f32]) {
        let largest = if chunk[0] > acc[0] { chunk[0] } else { acc[0] };
        let (a, b) = (math::exp(acc[0] - largest), math::exp(chunk[0] - largest));
        acc[0] = largest;
        acc[1] = acc[1].mul_add(a, chunk[1] * b);
        for (acc, &chunk) in acc[2..].iter_mut().zip(&chunk[2..]) {
            *acc = acc.mul_add(a, chunk * b);
        }
    }
}

dispatch! {
    /// The finished head: `acc / sum * sigmoid(gate)`.
    pub(crate) fn finish(isa, acc: &[f32], gate: &[f32], out: &mut [f32]) {
        for ((out, &x), &gate) in out.iter_mut().zip(&acc[2..]).zip(gate) {
            *out = x / acc[1] * math::sigmoid(gate);
        }
    }
}
