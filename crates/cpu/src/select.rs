//! The indexer: which blocks of tokens a query attends to. spec/qwen4exp.md, section 2.3.
//!
//! Owns pooled keys, scores and the choice. Blocks are `block` consecutive tokens of the sequence; a block's key is pooled once,
//! when its last key is appended, from the raw keys as the cache stores them, and is stored in the cache's format too.
//!
//! Rounding: the mean is the ascending sum divided by `block`; a score is the sum over index heads, ascending, of
//! `max(dot, 0)`, unscaled (the order is what counts; NaN counts as 0); ties go to the lower block.

use std::ops::Range;

use strata_backend::QsaShape;
use strata_quant::{Isa, dispatch, lanes};

use crate::bench::Team;
use crate::cache::{Cache, Store};
use crate::{norm, rope};

/// Which keys a query attends to, ascending.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// Positions below it.
    All(usize),
    /// These positions.
    Some(&'a [u32]),
}

impl Keys<'_> {
    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self {
            Keys::All(n) => *n,
            Keys::Some(positions) => positions.len(),
        }
    }
}

/// Whether a query that sees `visible` tokens chooses among them.
pub(crate) fn chooses(q: &QsaShape, visible: usize) -> bool {
    q.block > 0 && visible / q.block > q.budget / q.block
}

/// Floats of the room that [`select`] needs in a context.
pub(crate) fn floats(q: &QsaShape, context: usize) -> usize {
    let blocks = context.checked_div(q.block).unwrap_or(0);
    3 * blocks + q.budget + q.block + 32
}

/// How block keys are pooled.
pub(crate) struct Pooling<'a> {
    pub(crate) q: &'a QsaShape,
    pub(crate) eps: f32,
    pub(crate) gamma: &'a [f32],
    /// The rotary table.
    pub(crate) table: &'a [f32],
}

impl Pooling<'_> {
    /// Pools the keys of blocks of a sequence whose raw keys are all stored. `room` is two keys long.
    pub(crate) fn run(
        &self,
        isa: Isa,
        cache: &mut Cache,
        slot: usize,
        blocks: Range<usize>,
        room: &mut [f32],
    ) {
        let q = self.q;
        let (mean, key) = room.split_at_mut(q.index_dim);
        for block in blocks {
            let first = block * q.block;
            mean.fill(0.0);
            for position in first..first + q.block {
                cache.raw.get(isa, cache.raw_at(slot, position), key);
                mean.iter_mut().zip(&*key).for_each(|(mean, key)| *mean += key);
            }
            mean.iter_mut().for_each(|mean| *mean /= q.block as f32);
            pooled_key(isa, mean, self.gamma, self.eps, &self.table[first * q.rotary..][..q.rotary], key);
            let at = cache.pooled_at(slot, block);
            cache.pooled.put(isa, at, key);
        }
    }
}

dispatch! {
    fn pooled_key(isa, mean: &[f32], gamma: &[f32], eps: f32, row: &[f32], key: &mut [f32]) {
        norm::rms(mean, gamma, eps, key);
        rope::rotate(key, row);
    }
}

/// The positions that a query attends to, out of `visible` ones, into `room`. `queries` is `[index_heads][index_dim]`.
pub(crate) fn select<'r>(
    team: Team<'_>,
    q: &QsaShape,
    cache: &Cache,
    slot: usize,
    visible: usize,
    queries: &[f32],
    room: &'r mut [f32],
) -> Keys<'r> {
    if !chooses(q, visible) {
        return Keys::All(visible);
    }
    let (blocks, kept) = (visible / q.block, q.budget / q.block);
    let (scores, rest) = room.split_at_mut(blocks.next_multiple_of(16));
    let (ranks, positions) = rest.split_at_mut((2 * blocks).next_multiple_of(16));
    let (scores, ranks) = (&mut scores[..blocks], &mut ranks[..2 * blocks]);
    team.rows(scores, 1, 8 * q.index_heads * q.index_dim, |part, scores| {
        let at = cache.pooled_at(slot, part.start);
        let len = scores.len() * q.index_dim;
        match &cache.pooled {
            Store::F32(keys) => score_f32(team.isa, queries, &keys[at..at + len], q.index_dim, scores),
            Store::F16(keys) => score_f16(team.isa, queries, &keys[at..at + len], q.index_dim, scores),
        }
    });
    // Scores are not negative, so their bits are in their order; below a score, the lower block ranks higher.
    let rank = |score: f32, block: usize| u64::from(score.to_bits()) << 32 | u64::from(!(block as u32));
    let ranks: &mut [u64] = bytemuck::cast_slice_mut(ranks);
    ranks.iter_mut().zip(&*scores).enumerate().for_each(|(block, (to, &score))| *to = rank(score, block));
    let least = *ranks.select_nth_unstable(blocks - kept).1;
    let positions: &mut [u32] = bytemuck::cast_slice_mut(positions);
    let mut count = 0;
    for (block, &score) in scores.iter().enumerate() {
        if rank(score, block) >= least {
            for (i, to) in positions[count..count + q.block].iter_mut().enumerate() {
                *to = (block * q.block + i) as u32;
            }
            count += q.block;
        }
    }
    for position in blocks * q.block..visible {
        positions[count] = position as u32;
        count += 1;
    }
    Keys::Some(&positions[..count])
}

/// A sum over heads of what is positive of a dot; `x.max(0.0)` of NaN is 0.
macro_rules! score {
    ($name:ident, $key:ty, $dot:path) => {
        dispatch! {
            fn $name(isa, queries: &[f32], keys: &[$key], dim: usize, scores: &mut [f32]) {
                for (key, score) in keys.chunks_exact(dim).zip(scores) {
                    *score = 0.0;
                    for query in queries.chunks_exact(dim) {
                        *score += $dot(key, query).max(0.0);
                    }
                }
            }
        }
    };
}
score!(score_f32, f32, lanes::dot);
score!(score_f16, u16, lanes::dot_f16);
