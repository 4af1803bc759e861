//! What sequences remember, on the device: recurrent state in two versions, checkpoints of it, positional caches.
//!
//! Owns the memory and the transaction. Everything lies in the order of `Spec`'s byte form, so that saved state is copied as it is:
//! per layer and sequence a version is `[value_heads][value_dim][key_dim]`, the convolution's history, the n-gram history; a cache is
//! `[context][kv_heads][head_dim]` keys, values, `[context][index_dim]` raw indexer keys and `[context / block][index_dim]` pooled ones.
//!
//! Invariant: the committed version of a sequence changes by `commit`, `clear`, `fork`, `restore` and `import` only.

use strata_backend::{BackendError, Checkpoint, Layer, SeqSlot, Span, Spec};
use strata_plan::{Category, Plan, Region};

use crate::driver::{DeviceMemory, DeviceSlice, Stream};
use crate::failed;

/// Regions of one layer.
pub(crate) struct LayerRegions {
    recurrent: Region,
    checkpoints: Region,
    cache: Region,
}

impl LayerRegions {
    /// Lays out layer `index`.
    pub(crate) fn describe(spec: &Spec, index: usize, plan: &mut Plan) -> LayerRegions {
        let layer = &spec.layers[index];
        let floats: usize = spec.recurrent_floats(layer).iter().sum();
        let cache = cache_bytes(spec, index).saturating_mul(spec.sequences);
        LayerRegions {
            recurrent: plan.device(
                Category::Recurrent,
                "state",
                8usize.saturating_mul(floats).saturating_mul(spec.sequences),
            ),
            checkpoints: plan.device(
                Category::Recurrent,
                "checkpoints",
                4usize.saturating_mul(floats).saturating_mul(spec.checkpoints),
            ),
            cache: plan.device(Category::Cache, "keys and values", cache),
        }
    }
}

/// One layer's state, of all sequences.
#[derive(Clone, Copy)]
pub(crate) struct LayerState {
    /// `[sequences][version][floats]`
    pub(crate) recurrent: DeviceSlice<f32>,
    /// Floats of a version.
    pub(crate) floats: usize,
    /// Those of them that are the GDN state, and its convolution's history.
    pub(crate) gdn: [usize; 2],
    checkpoints: DeviceSlice<f32>,
    /// `[sequences]` caches.
    pub(crate) cache: DeviceSlice<u8>,
    /// Bytes of a sequence's cache.
    pub(crate) cache_bytes: usize,
    /// Where its values, raw and pooled indexer keys start; keys do at 0.
    pub(crate) cache_places: [usize; 3],
}

impl LayerState {
    fn version(&self, slot: SeqSlot, version: usize) -> DeviceSlice<f32> {
        let first = (slot.0 as usize * 2 + version) * self.floats;
        self.recurrent.range(first..first + self.floats)
    }

    /// A checkpoint's floats, in the order of a version.
    pub(crate) fn checkpoint(&self, at: Checkpoint) -> DeviceSlice<f32> {
        let first = at.0 as usize * self.floats;
        self.checkpoints.range(first..first + self.floats)
    }

    fn cache(&self, slot: SeqSlot) -> DeviceSlice<u8> {
        let first = slot.0 as usize * self.cache_bytes;
        self.cache.range(first..first + self.cache_bytes)
    }
}

#[derive(Clone, Copy, Default)]
struct Versions {
    committed: usize,
    /// The start and rows of the span that the other version is the state after.
    pending: Option<(usize, usize)>,
}

/// All state.
pub(crate) struct State {
    pub(crate) layers: Vec<LayerState>,
    /// `[layers][sequences]`
    versions: Vec<Versions>,
    sequences: usize,
    checkpoints: usize,
    /// Goes up whenever a committed version changes.
    pub(crate) epoch: u64,
    spec: Spec,
}

impl State {
    /// Takes the memory, and clears all of it.
    pub(crate) fn new(
        spec: &Spec,
        regions: &[LayerRegions],
        memory: &DeviceMemory,
        stream: &Stream,
    ) -> Result<State, BackendError> {
        let layer = |(index, regions): (usize, &LayerRegions)| {
            let floats = spec.recurrent_floats(&spec.layers[index]);
            let [keys, values, raw, _] =
                spec.cached(&spec.layers[index], spec.context).map(|n| n * spec.kv.bytes());
            LayerState {
                recurrent: memory.part(regions.recurrent.offset(), regions.recurrent.bytes() / 4),
                floats: floats.iter().sum(),
                gdn: [floats[0], floats[1]],
                checkpoints: memory.part(regions.checkpoints.offset(), regions.checkpoints.bytes() / 4),
                cache: memory.part(regions.cache.offset(), regions.cache.bytes()),
                cache_bytes: cache_bytes(spec, index),
                cache_places: [keys, keys + values, keys + values + raw],
            }
        };
        let layers: Vec<LayerState> = regions.iter().enumerate().map(layer).collect();
        for layer in &layers {
            stream.fill(layer.recurrent, 0).map_err(failed)?;
            stream.fill(layer.cache, 0).map_err(failed)?;
        }
        let versions = vec![Versions::default(); spec.sequences * layers.len()];
        let (sequences, checkpoints) = (spec.sequences, spec.checkpoints);
        Ok(State { layers, versions, sequences, checkpoints, epoch: 0, spec: spec.clone() })
    }

    /// A layer that an op names.
    pub(crate) fn layer(&self, layer: Layer) -> Result<LayerState, BackendError> {
        let count = self.layers.len();
        let found = self.layers.get(usize::from(layer.0)).copied();
        found.ok_or_else(|| failed(format!("an op names layer {} of {count}", layer.0)))
    }

    /// The committed versions, `[layers][sequences]`; the other one is the pending.
    pub(crate) fn committed(&self) -> impl Iterator<Item = u32> + '_ {
        self.versions.iter().map(|versions| versions.committed as u32)
    }

    /// A sequence's pending state in a layer.
    pub(crate) fn pending(&self, slot: SeqSlot, layer: Layer) -> Result<DeviceSlice<f32>, BackendError> {
        self.check(slot)?;
        let committed = self.versions[self.at(slot, usize::from(layer.0))].committed;
        Ok(self.layer(layer)?.version(slot, committed ^ 1))
    }

    /// Notes that the pending version is the state after each span.
    pub(crate) fn note_pending(&mut self, spans: &[Span], layer: Layer) {
        for span in spans {
            let at = self.at(span.slot, usize::from(layer.0));
            self.versions[at].pending = Some((span.start, span.rows));
        }
    }

    /// Makes the pending state of the spans' sequences their committed one, in the layers that the window touched.
    pub(crate) fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        for span in spans {
            self.check(span.slot)?;
            for layer in 0..self.layers.len() {
                let at = self.at(span.slot, layer);
                let versions = &mut self.versions[at];
                if versions.pending.take() == Some((span.start, span.rows)) {
                    versions.committed ^= 1;
                }
            }
        }
        self.epoch += 1;
        Ok(())
    }

    /// Makes a sequence's state that of zero tokens.
    pub(crate) fn clear(&mut self, stream: &Stream, slot: SeqSlot) -> Result<(), BackendError> {
        self.overwrite(slot, |state, version| stream.fill(state.version(slot, version), 0).map_err(failed))
    }

    /// Copies a committed state of `tokens` tokens.
    pub(crate) fn fork(
        &mut self,
        stream: &Stream,
        from: SeqSlot,
        to: SeqSlot,
        tokens: usize,
    ) -> Result<(), BackendError> {
        self.check(from)?;
        self.check_tokens(tokens)?;
        if from == to {
            return Ok(());
        }
        let committed: Vec<usize> =
            (0..self.layers.len()).map(|layer| self.versions[self.at(from, layer)].committed).collect();
        let (mut layer, spec) = (0, self.spec.clone());
        self.overwrite(to, |state, version| {
            let copy = stream.copy(state.version(from, committed[layer]), state.version(to, version));
            let pieces = pieces(&spec, layer, tokens);
            let caches = pieces.into_iter().try_for_each(|piece| {
                stream.copy(state.cache(from).range(piece.clone()), state.cache(to).range(piece))
            });
            layer += 1;
            copy.and(caches).map_err(failed)
        })
    }

    /// Makes a checkpoint the committed recurrent state of a sequence.
    pub(crate) fn restore(
        &mut self,
        stream: &Stream,
        from: Checkpoint,
        slot: SeqSlot,
    ) -> Result<(), BackendError> {
        self.check_place(from)?;
        self.overwrite(slot, |state, version| {
            stream.copy(state.checkpoint(from), state.version(slot, version)).map_err(failed)
        })
    }

    /// Appends a committed state, in `Spec`'s order.
    pub(crate) fn export(
        &self,
        stream: &Stream,
        slot: SeqSlot,
        tokens: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), BackendError> {
        self.check(slot)?;
        self.check_tokens(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let version = self.versions[self.at(slot, index)].committed;
            let cache = layer.cache(slot);
            let caches = pieces(&self.spec, index, tokens).into_iter().map(|piece| cache.range(piece));
            for from in std::iter::once(layer.version(slot, version).cast()).chain(caches) {
                let at = out.len();
                out.resize(at + from.len(), 0);
                stream.download(from, &mut out[at..]).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// The other way.
    pub(crate) fn import(
        &mut self,
        stream: &Stream,
        slot: SeqSlot,
        tokens: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.check(slot)?;
        self.check_tokens(tokens)?;
        let spec = self.spec.clone();
        let expected = spec.layers.iter().map(|layer| spec.state_bytes(layer, tokens)).sum();
        if bytes.len() != expected {
            return Err(BackendError::StateSize { expected, found: bytes.len() });
        }
        let (mut rest, mut layer) = (bytes, 0);
        self.overwrite(slot, |state, version| {
            let cache = state.cache(slot);
            let caches = pieces(&spec, layer, tokens).into_iter().map(|piece| cache.range(piece));
            for to in std::iter::once(state.version(slot, version).cast()).chain(caches) {
                let (saved, behind) = rest.split_at(to.len());
                stream.upload(saved, to).map_err(failed)?;
                rest = behind;
            }
            layer += 1;
            Ok(())
        })
    }

    /// Calls `f(layer, committed version)` for every layer, to overwrite the committed state.
    fn overwrite(
        &mut self,
        slot: SeqSlot,
        mut f: impl FnMut(&LayerState, usize) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.check(slot)?;
        self.epoch += 1;
        for index in 0..self.layers.len() {
            let at = self.at(slot, index);
            self.versions[at].pending = None;
            f(&self.layers[index], self.versions[at].committed)?;
        }
        Ok(())
    }

    fn at(&self, slot: SeqSlot, layer: usize) -> usize {
        layer * self.sequences + slot.0 as usize
    }

    fn check(&self, slot: SeqSlot) -> Result<(), BackendError> {
        if (slot.0 as usize) < self.sequences {
            return Ok(());
        }
        Err(failed(format!("sequence slot {} of {}", slot.0, self.sequences)))
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), BackendError> {
        let context = self.spec.context;
        if tokens <= context {
            return Ok(());
        }
        Err(failed(format!("the state of {tokens} tokens in a context of {context}")))
    }

    fn check_place(&self, place: Checkpoint) -> Result<(), BackendError> {
        if (place.0 as usize) < self.checkpoints {
            return Ok(());
        }
        Err(failed(format!("checkpoint {} of {}", place.0, self.checkpoints)))
    }
}

/// Bytes of one sequence's cache in a layer.
fn cache_bytes(spec: &Spec, layer: usize) -> usize {
    spec.cached(&spec.layers[layer], spec.context).iter().sum::<usize>() * spec.kv.bytes()
}

/// Where the first `tokens` tokens' keys, values, raw and pooled indexer keys are in a sequence's cache, bytes.
fn pieces(spec: &Spec, layer: usize, tokens: usize) -> Vec<std::ops::Range<usize>> {
    let [all, used] = [spec.context, tokens].map(|tokens| spec.cached(&spec.layers[layer], tokens));
    let mut first = 0;
    let piece = |(all, used): (usize, usize)| {
        let start = first;
        first += all * spec.kv.bytes();
        start..start + used * spec.kv.bytes()
    };
    all.into_iter().zip(used).map(piece).collect()
}
