//! The indexer: which blocks of tokens a query attends to. docs/qwen4exp.md, section 2.3.
//!
//! Owns pooled keys, scores and the choice. Blocks are `block` consecutive tokens of the sequence; a block's key is pooled once,
//! when its last key is appended, from the raw keys as the cache stores them, and is stored in the cache's format too.
//!
//! Rounding: the mean is the ascending sum divided by `block`; a score is the sum over index heads, ascending, of
//! `max(dot, 0)`, unscaled (the order is what counts; NaN counts as 0); ties go to the lower block.

use std::ops::Range;

use strata_backend::QsaShape;
use strata_quant::{Isa, dispatch, math};

use crate::bench::Team;
use crate::cache::{Cache, Store};
use crate::strip::{self, STRIP, Strip};
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
fn chooses(q: &QsaShape, block: usize, visible: usize) -> bool {
    visible / block > q.budget / block
}

/// Floats of the room that [`select`] needs in a context, where `block` tokens make a block.
pub(crate) fn floats(q: &QsaShape, block: usize, context: usize) -> usize {
    let blocks = context / block;
    blocks.next_multiple_of(STRIP) + 2 * blocks + q.budget + block + 32
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
        let (q, tokens) = (self.q, cache.block);
        let (mean, key) = room.split_at_mut(q.index_dim);
        for block in blocks {
            let first = block * tokens;
            mean.fill(0.0);
            for position in first..first + tokens {
                cache.raw.get(isa, cache.raw_at(slot, position), key);
                mean.iter_mut().zip(&*key).for_each(|(mean, key)| *mean += key);
            }
            mean.iter_mut().for_each(|mean| *mean /= tokens as f32);
            pooled_key(isa, mean, self.gamma, self.eps, &self.table[first * q.rotary..][..q.rotary], key);
            cache.put_pooled(slot, block, key);
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
    let tokens = cache.block;
    if !chooses(q, tokens, visible) {
        return Keys::All(visible);
    }
    let (blocks, kept) = (visible / tokens, q.budget / tokens);
    let (scores, rest) = room.split_at_mut(blocks.next_multiple_of(STRIP));
    let (ranks, positions) = rest.split_at_mut((2 * blocks).next_multiple_of(16));
    // The last strip's places beyond the last block get a score too, which is not looked at.
    team.rows(scores, STRIP, 4 * STRIP * q.index_heads * q.index_dim, |part, scores| {
        let keys = part.start * STRIP..part.end * STRIP;
        let range = cache.pooled_at(slot, keys.start)..cache.pooled_at(slot, keys.end);
        match &cache.pooled {
            Store::F32(data) => score_f32(team.isa, queries, &data[range], q.index_dim, scores),
            Store::F16(data) => score_f16(team.isa, queries, &data[range], q.index_dim, scores),
        }
    });
    let ranks: &mut [u64] = bytemuck::cast_slice_mut(&mut ranks[..2 * blocks]);
    let positions: &mut [u32] = bytemuck::cast_slice_mut(positions);
    let mut count = 0;
    for block in choose(&scores[..blocks], kept, ranks) {
        for (i, to) in positions[count..count + tokens].iter_mut().enumerate() {
            *to = (block * tokens + i) as u32;
        }
        count += tokens;
    }
    for position in blocks * tokens..visible {
        positions[count] = position as u32;
        count += 1;
    }
    Keys::Some(&positions[..count])
}

/// The `kept` blocks (at least one, fewer than all) with the largest scores, ascending; ties to the lower block.
fn choose<'s>(scores: &'s [f32], kept: usize, ranks: &mut [u64]) -> impl Iterator<Item = usize> + use<'s> {
    // Scores are not negative, so their bits are in their order.
    let rank = |score: f32, block: usize| u64::from(score.to_bits()) << 32 | u64::from(!(block as u32));
    ranks.iter_mut().zip(scores).enumerate().for_each(|(block, (to, &score))| *to = rank(score, block));
    let least = *ranks.select_nth_unstable(scores.len() - kept).1;
    let ranked = scores.iter().enumerate();
    ranked.filter(move |&(block, &score)| rank(score, block) >= least).map(|(block, _)| block)
}

/// Most values of an indexer key.
pub(crate) const MOST_DIM: usize = 256;

dispatch! {
    fn score_f32(isa, queries: &[f32], keys: &[f32], dim: usize, scores: &mut [f32]) {
        let strips = keys.as_chunks::<STRIP>().0.chunks_exact(dim);
        for (strip, scores) in strips.zip(scores.as_chunks_mut().0) {
            *scores = score(queries, strip);
        }
    }
}
dispatch! {
    fn score_f16(isa, queries: &[f32], keys: &[u16], dim: usize, scores: &mut [f32]) {
        let mut wide = [[0.0f32; STRIP]; MOST_DIM];
        let strips = keys.as_chunks::<STRIP>().0.chunks_exact(dim);
        for (strip, scores) in strips.zip(scores.as_chunks_mut().0) {
            for (wide, &key) in wide.as_flattened_mut().iter_mut().zip(strip.as_flattened()) {
                *wide = math::f16_to_f32(key);
            }
            *scores = score(queries, &wide[..dim]);
        }
    }
}

/// The scores of a strip of keys: a sum over heads of what is positive of their dots; `max` of NaN and 0 is 0.
#[inline(always)]
fn score(queries: &[f32], strip: &[Strip]) -> Strip {
    let mut scores = [0.0; STRIP];
    for query in queries.chunks_exact(strip.len()) {
        let dots = strip::dots(strip, query);
        for c in 0..STRIP {
            scores[c] += dots[c].max(0.0);
        }
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: a stable sort by falling score. Zeros, infinities and repeated scores tie.
    #[test]
    fn ties_go_to_the_lower_block() {
        for seed in 0..200u32 {
            let scores: Vec<f32> = (0..2 + seed as usize % 40)
                .map(|i| match (i as u32 * 7 + seed).wrapping_mul(2_654_435_769) >> 28 {
                    0..=5 => 0.0,
                    15 => f32::INFINITY,
                    level => level as f32,
                })
                .collect();
            for kept in 1..scores.len() {
                let mut expected: Vec<usize> = (0..scores.len()).collect();
                expected.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
                expected.truncate(kept);
                expected.sort_unstable();
                let mut ranks = vec![0; scores.len()];
                assert_eq!(
                    choose(&scores, kept, &mut ranks).collect::<Vec<_>>(),
                    expected,
                    "{kept} of {scores:?}"
                );
            }
        }
    }

    /// Oracle: the contract's dots, one by one. NaN counts as nothing.
    #[test]
    fn scores_add_what_is_positive() {
        let (dim, blocks) = (12, 2 * STRIP);
        let value = |i: usize| (i * 7919 % 1009) as f32 / 100.0 - 5.0;
        let mut keys: Vec<f32> = (0..blocks * dim).map(value).collect();
        keys[5] = f32::NAN;
        let queries: Vec<f32> = (0..3 * dim).map(|i| value(31 * i + 5)).collect();
        let mut scores = vec![0.0; blocks];
        score_f32(Isa::Scalar, &queries, &keys, dim, &mut scores);
        for (block, score) in scores.iter().enumerate() {
            let key: Vec<f32> =
                (0..dim).map(|j| keys[(block / STRIP * dim + j) * STRIP + block % STRIP]).collect();
            let dots = queries.chunks(dim).map(|query| strata_quant::lanes::dot(&key, query));
            let expected = dots.fold(0.0, |sum, dot| if dot > 0.0 { sum + dot } else { sum });
            assert_eq!(score.to_bits(), f32::to_bits(expected), "block {block}");
        }
        let halves: Vec<u16> = keys.iter().map(|&x| math::f32_to_f16(x)).collect();
        let widened: Vec<f32> = halves.iter().map(|&x| math::f16_to_f32(x)).collect();
        let mut from_halves = vec![0.0; blocks];
        score_f16(Isa::detect(), &queries, &halves, dim, &mut from_halves);
        score_f32(Isa::detect(), &queries, &widened, dim, &mut scores);
        assert_eq!(from_halves, scores);
    }
}
