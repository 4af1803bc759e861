//! Positional caches: keys, values, raw and pooled indexer keys of every token of every sequence.
//!
//! Owns the memory, the stored precision and the layout: per sequence and key/value head the positions follow each other,
//! so that a selected block of tokens is one piece; pooled keys lie in strips of sixteen blocks ([`crate::strip`]). The byte form is `Spec`'s: `[tokens][kv_heads * head_dim]` keys, values,
//! then `[tokens][index_dim]` raw keys and `[tokens / block][index_dim]` pooled ones.
//!
//! Invariant: what is read is what was stored: a value goes through the cache's format even inside the window that appends it.

use strata_backend::{BackendError, KvFormat, LayerState, QsaShape, Spec};
use strata_plan::{Arena, Block, Category, Plan, Region};
use strata_quant::{Isa, float, math};

use crate::failed;
use crate::strip::STRIP;

/// Regions of one layer's caches.
pub(crate) struct CacheRegions {
    keys: Region,
    values: Region,
    raw: Region,
    pooled: Region,
}

impl CacheRegions {
    /// Lays out the caches of layer `index`, if it has any.
    pub(crate) fn describe(spec: &Spec, index: usize, plan: &mut Plan) -> Option<CacheRegions> {
        let layer = &spec.layers[index];
        let (q, _) = attention(spec, layer)?;
        let mut region = |name: &str, each: usize| {
            let bytes = each.saturating_mul(spec.sequences).saturating_mul(spec.kv.bytes());
            plan.heap(Category::Cache, (index, name), bytes)
        };
        let [keys, values, raw, pooled] = spec.cached(layer, spec.context);
        Some(CacheRegions {
            keys: region("keys", keys),
            values: region("values", values),
            raw: region("indexer keys", raw),
            // Whole strips.
            pooled: region("pooled indexer keys", pooled.next_multiple_of(STRIP * q.index_dim)),
        })
    }
}

/// The attention of a layer that has some, and the tokens of its blocks.
pub(crate) fn attention<'s>(spec: &'s Spec, layer: &LayerState) -> Option<(&'s QsaShape, usize)> {
    spec.shape.qsa.as_ref().zip(layer.qsa)
}

/// Stored values, all of one precision.
pub(crate) enum Store {
    F32(Block<f32>),
    F16(Block<u16>),
}

impl Store {
    fn new(kv: KvFormat, region: Region, arena: &mut Arena) -> Result<Store, BackendError> {
        Ok(match kv {
            KvFormat::F32 => Store::F32(arena.take(region).map_err(failed)?),
            KvFormat::F16 => Store::F16(arena.take(region).map_err(failed)?),
        })
    }

    /// Stores values from element `at` on.
    pub(crate) fn put(&mut self, isa: Isa, at: usize, values: &[f32]) {
        match self {
            Store::F32(data) => data[at..at + values.len()].copy_from_slice(values),
            Store::F16(data) => float::narrow_f16(isa, values, &mut data[at..at + values.len()]),
        }
    }

    /// The values from element `at` on, as many as `out` has.
    pub(crate) fn get(&self, isa: Isa, at: usize, out: &mut [f32]) {
        match self {
            Store::F32(data) => out.copy_from_slice(&data[at..at + out.len()]),
            Store::F16(data) => float::widen_f16(isa, &data[at..at + out.len()], out),
        }
    }

    fn copy(&mut self, from: usize, to: usize, len: usize) {
        match self {
            Store::F32(data) => data.copy_within(from..from + len, to),
            Store::F16(data) => data.copy_within(from..from + len, to),
        }
    }

    fn export(&self, at: usize, len: usize, out: &mut Vec<u8>) {
        match self {
            Store::F32(data) => out.extend(data[at..at + len].iter().flat_map(|x| x.to_le_bytes())),
            Store::F16(data) => out.extend(data[at..at + len].iter().flat_map(|x| x.to_le_bytes())),
        }
    }

    fn import<'b>(&mut self, at: usize, len: usize, bytes: &'b [u8]) -> &'b [u8] {
        match self {
            Store::F32(data) => {
                let (saved, rest) = bytes.split_at(len * 4);
                let values = saved.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b));
                data[at..at + len].iter_mut().zip(values).for_each(|(x, value)| *x = value);
                rest
            }
            Store::F16(data) => {
                let (saved, rest) = bytes.split_at(len * 2);
                let values = saved.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b));
                data[at..at + len].iter_mut().zip(values).for_each(|(x, value)| *x = value);
                rest
            }
        }
    }
}

/// One layer's caches.
pub(crate) struct Cache {
    pub(crate) keys: Store,
    pub(crate) values: Store,
    pub(crate) raw: Store,
    pub(crate) pooled: Store,
    shape: QsaShape,
    /// Tokens of a block.
    pub(crate) block: usize,
    context: usize,
    value_bytes: usize,
}

impl Cache {
    /// Takes the memory.
    pub(crate) fn new(
        spec: &Spec,
        index: usize,
        regions: &CacheRegions,
        arena: &mut Arena,
    ) -> Result<Cache, BackendError> {
        let attention = attention(spec, &spec.layers[index]);
        let (shape, block) = attention.ok_or_else(|| failed("a cache without attention"))?;
        Ok(Cache {
            keys: Store::new(spec.kv, regions.keys, arena)?,
            values: Store::new(spec.kv, regions.values, arena)?,
            raw: Store::new(spec.kv, regions.raw, arena)?,
            pooled: Store::new(spec.kv, regions.pooled, arena)?,
            shape: shape.clone(),
            block,
            context: spec.context,
            value_bytes: spec.kv.bytes(),
        })
    }

    /// Where the key or value of a position starts.
    #[inline(always)]
    pub(crate) fn kv_at(&self, slot: usize, head: usize, position: usize) -> usize {
        ((slot * self.shape.kv_heads + head) * self.context + position) * self.shape.head_dim
    }

    /// Where the raw indexer key of a position starts.
    pub(crate) fn raw_at(&self, slot: usize, position: usize) -> usize {
        (slot * self.context + position) * self.shape.index_dim
    }

    /// Where the strip of pooled keys starts that a block is in.
    pub(crate) fn pooled_at(&self, slot: usize, block: usize) -> usize {
        let strips = (self.context / self.block).div_ceil(STRIP);
        (slot * strips + block / STRIP) * STRIP * self.shape.index_dim
    }

    /// Stores a block's pooled key.
    pub(crate) fn put_pooled(&mut self, slot: usize, block: usize, key: &[f32]) {
        let at = self.pooled_at(slot, block) + block % STRIP;
        match &mut self.pooled {
            Store::F32(data) => data[at..].iter_mut().step_by(STRIP).zip(key).for_each(|(x, key)| *x = *key),
            Store::F16(data) => {
                let places = data[at..].iter_mut().step_by(STRIP);
                places.zip(key).for_each(|(x, &key)| *x = math::f32_to_f16(key));
            }
        }
    }

    /// Copies the caches of a sequence's first `tokens` tokens to another's.
    pub(crate) fn copy(&mut self, from: usize, to: usize, tokens: usize) {
        for head in 0..self.shape.kv_heads {
            let (from, to) = (self.kv_at(from, head, 0), self.kv_at(to, head, 0));
            self.keys.copy(from, to, tokens * self.shape.head_dim);
            self.values.copy(from, to, tokens * self.shape.head_dim);
        }
        let [_, _, raw, pooled] = self.shape.cached(self.block, tokens);
        let at = [self.raw_at(from, 0), self.raw_at(to, 0), self.pooled_at(from, 0), self.pooled_at(to, 0)];
        self.raw.copy(at[0], at[1], raw);
        // Whole strips.
        self.pooled.copy(at[2], at[3], pooled.next_multiple_of(STRIP * self.shape.index_dim));
    }

    /// Bytes of the byte form of `tokens` tokens.
    pub(crate) fn exported(&self, tokens: usize) -> usize {
        self.shape.cached(self.block, tokens).iter().sum::<usize>() * self.value_bytes
    }

    /// Appends the byte form of a sequence's first `tokens` tokens.
    pub(crate) fn export(&self, slot: usize, tokens: usize, out: &mut Vec<u8>) {
        for store in [&self.keys, &self.values] {
            for position in 0..tokens {
                for head in 0..self.shape.kv_heads {
                    store.export(self.kv_at(slot, head, position), self.shape.head_dim, out);
                }
            }
        }
        let [_, _, raw, _] = self.shape.cached(self.block, tokens);
        self.raw.export(self.raw_at(slot, 0), raw, out);
        self.pooled_places(slot, tokens).for_each(|at| self.pooled.export(at, 1, out));
    }

    /// The other way; `bytes` are as many as [`Cache::exported`] says.
    pub(crate) fn import(&mut self, slot: usize, tokens: usize, bytes: &[u8]) {
        let mut rest = bytes;
        for values in [false, true] {
            for position in 0..tokens {
                for head in 0..self.shape.kv_heads {
                    let at = self.kv_at(slot, head, position);
                    let store = if values { &mut self.values } else { &mut self.keys };
                    rest = store.import(at, self.shape.head_dim, rest);
                }
            }
        }
        let [_, _, raw, _] = self.shape.cached(self.block, tokens);
        rest = self.raw.import(self.raw_at(slot, 0), raw, rest);
        for at in self.pooled_places(slot, tokens) {
            rest = self.pooled.import(at, 1, rest);
        }
    }

    /// Where the values of the pooled keys of `tokens` tokens are, in the order of the byte form.
    fn pooled_places(&self, slot: usize, tokens: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, dim) = (self.pooled_at(slot, 0), self.shape.index_dim);
        let start = move |block: usize| first + block / STRIP * STRIP * dim + block % STRIP;
        (0..tokens / self.block).flat_map(move |block| (0..dim).map(move |j| start(block) + j * STRIP))
    }
}
