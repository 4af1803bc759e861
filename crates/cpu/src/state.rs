//! What sequences remember: recurrent state in two versions, checkpoints of it, positional caches.
//!
//! Owns the memory and the transaction: ops read a sequence's committed version and write the pending one; [`State::commit`]
//! makes the pending one the committed one, layer by layer, where it is that of the span. Positional caches ([`Cache`])
//! need no versions: what was written beyond the committed tokens is written again before it is read.
//!
//! Does not know how state is computed.
//!
//! Invariant: the committed version of a sequence changes by `commit`, `clear`, `fork`, `restore` and `import` only.

use strata_backend::{BackendError, Checkpoint, Layer, SeqSlot, Span, Spec};
use strata_plan::{Arena, Block, Category, Plan, Region};

use crate::cache::{Cache, CacheRegions};
use crate::failed;
use crate::recurrent::{Kind, Recurrent};

/// Regions of one layer.
pub(crate) struct LayerRegions {
    gdn: Region,
    conv: Region,
    ngram: Region,
    checkpoints: Region,
    cache: Option<CacheRegions>,
}

impl LayerRegions {
    /// Lays out layer `index`.
    pub(crate) fn describe(spec: &Spec, index: usize, plan: &mut Plan) -> Self {
        let [gdn, conv, ngram] = Recurrent::floats(spec, index);
        let (both, copies) = (2 * spec.sequences, spec.checkpoints);
        let one = gdn + conv + ngram;
        let mut region = |name: &str, floats: usize, copies: usize| {
            let bytes = floats.saturating_mul(copies).saturating_mul(size_of::<f32>());
            plan.heap(Category::Recurrent, (index, name), bytes)
        };
        LayerRegions {
            gdn: region("gdn state", gdn, both),
            conv: region("gdn history", conv, both),
            ngram: region("n-gram history", ngram, both),
            checkpoints: region("checkpoints", one, copies),
            cache: CacheRegions::describe(spec, index, plan),
        }
    }
}

/// One layer's state, of all sequences.
pub(crate) struct LayerMemory {
    pub(crate) recurrent: Recurrent,
    pub(crate) cache: Option<Cache>,
    /// `[checkpoints][floats]`, as the state lies.
    checkpoints: Block<f32>,
    floats: usize,
    /// Those of them that are GDN state.
    gdn_floats: usize,
    /// Bytes of the recurrent state's byte form.
    value_bytes: usize,
}

impl LayerMemory {
    fn new(
        spec: &Spec,
        index: usize,
        regions: &LayerRegions,
        arena: &mut Arena,
    ) -> Result<Self, BackendError> {
        let mut take = |region| arena.take::<f32>(region).map_err(failed);
        let blocks = [take(regions.gdn)?, take(regions.conv)?, take(regions.ngram)?];
        let checkpoints = take(regions.checkpoints)?;
        let floats = Recurrent::floats(spec, index);
        Ok(LayerMemory {
            gdn_floats: floats[0] + floats[1],
            floats: floats.iter().sum(),
            recurrent: Recurrent::new(spec, index, blocks),
            cache: regions
                .cache
                .as_ref()
                .map(|regions| Cache::new(spec, index, regions, arena))
                .transpose()?,
            checkpoints,
            value_bytes: spec.recurrent_floats(&spec.layers[index]).iter().sum::<usize>() * size_of::<f32>(),
        })
    }

    /// Copies one kind of one version of a sequence's recurrent state to a checkpoint.
    pub(crate) fn save(&mut self, slot: usize, version: usize, kind: Kind, to: Checkpoint) {
        let first = if kind == Kind::Gdn { 0 } else { self.gdn_floats };
        let mut rest = &mut self.checkpoints[to.0 as usize * self.floats..][first..self.floats];
        self.recurrent.pieces(slot, version, kind, &mut |piece| {
            let (out, behind) = std::mem::take(&mut rest).split_at_mut(piece.len());
            out.copy_from_slice(piece);
            rest = behind;
        });
    }

    fn load(&mut self, slot: usize, version: usize, from: Checkpoint) {
        let mut rest = &self.checkpoints[from.0 as usize * self.floats..][..self.floats];
        self.recurrent.pieces_mut(slot, version, &mut |piece| {
            let (saved, behind) = rest.split_at(piece.len());
            piece.copy_from_slice(saved);
            rest = behind;
        });
    }
}

/// Which version of a sequence's state in one layer is committed, and what the other one is.
#[derive(Clone, Copy, Default)]
struct Versions {
    committed: usize,
    /// The start and rows of the span that the other version is the state after.
    pending: Option<(usize, usize)>,
}

/// All state.
pub(crate) struct State {
    pub(crate) layers: Vec<LayerMemory>,
    /// `[sequences][layers]`
    versions: Vec<Versions>,
    checkpoints: usize,
    context: usize,
}

impl State {
    /// Takes the memory.
    pub(crate) fn new(
        spec: &Spec,
        regions: &[LayerRegions],
        arena: &mut Arena,
    ) -> Result<Self, BackendError> {
        let layers = regions.iter().enumerate();
        let layers = layers
            .map(|(i, regions)| LayerMemory::new(spec, i, regions, arena))
            .collect::<Result<Vec<_>, _>>()?;
        let versions = vec![Versions::default(); spec.sequences * layers.len()];
        Ok(State { layers, versions, checkpoints: spec.checkpoints, context: spec.context })
    }

    /// A layer that an op names.
    pub(crate) fn layer(&mut self, layer: Layer) -> Result<&mut LayerMemory, BackendError> {
        let layers = self.layers.len();
        self.layers
            .get_mut(usize::from(layer.0))
            .ok_or_else(|| failed(format!("an op names layer {} of {layers}", layer.0)))
    }

    /// The committed version of a sequence's state in a layer; the other one is the pending.
    pub(crate) fn committed(&self, slot: SeqSlot, layer: Layer) -> usize {
        self.versions[self.at(slot, layer)].committed
    }

    /// Notes that the pending version is the state after `span`.
    pub(crate) fn note_pending(&mut self, span: &Span, layer: Layer) {
        let at = self.at(span.slot, layer);
        self.versions[at].pending = Some((span.start, span.rows));
    }

    /// Makes the pending state of the spans' sequences their committed one. A layer that no op of the window touched keeps
    /// what it has.
    pub(crate) fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        for span in spans {
            self.check(span.slot)?;
            for versions in self.of(span.slot) {
                if versions.pending.take() == Some((span.start, span.rows)) {
                    versions.committed ^= 1;
                }
            }
        }
        Ok(())
    }

    /// Makes a sequence's state that of zero tokens.
    pub(crate) fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError> {
        self.each(slot, |memory, slot, version| {
            memory.recurrent.pieces_mut(slot, version, &mut |piece| piece.fill(0.0))
        })
    }

    /// Copies a committed state of `tokens` tokens.
    pub(crate) fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError> {
        self.check(from)?;
        self.check(to)?;
        self.check_tokens(tokens)?;
        if from == to {
            return Ok(());
        }
        let count = self.layers.len();
        for index in 0..count {
            let version = self.committed(from, Layer(index as u16));
            let at = self.at(to, Layer(index as u16));
            self.versions[at].pending = None;
            let to_version = self.versions[at].committed;
            let memory = &mut self.layers[index];
            memory.recurrent.copy((from.0 as usize, version), (to.0 as usize, to_version));
            if let Some(cache) = &mut memory.cache {
                cache.copy(from.0 as usize, to.0 as usize, tokens);
            }
        }
        Ok(())
    }

    /// Makes a checkpoint the committed recurrent state of a sequence.
    pub(crate) fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError> {
        self.check_place(from)?;
        self.each(slot, |memory, slot, version| memory.load(slot, version, from))
    }

    /// Appends a committed state, in [`Spec`]'s order.
    pub(crate) fn export(&self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError> {
        self.check(slot)?;
        self.check_tokens(tokens)?;
        for (index, memory) in self.layers.iter().enumerate() {
            let version = self.committed(slot, Layer(index as u16));
            memory.recurrent.values(slot.0 as usize, version, &mut |x| out.extend(x.to_le_bytes()));
            if let Some(cache) = &memory.cache {
                cache.export(slot.0 as usize, tokens, out);
            }
        }
        Ok(())
    }

    /// The other way.
    pub(crate) fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.check(slot)?;
        self.check_tokens(tokens)?;
        let one = |memory: &LayerMemory| {
            memory.value_bytes + memory.cache.as_ref().map_or(0, |cache| cache.exported(tokens))
        };
        let expected = self.layers.iter().map(one).sum();
        if bytes.len() != expected {
            return Err(BackendError::StateSize { expected, found: bytes.len() });
        }
        let mut rest = bytes;
        self.each(slot, |memory, slot, version| {
            let (saved, behind) = rest.split_at(memory.value_bytes);
            let mut values = saved.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
            memory.recurrent.set_values(slot, version, &mut || values.next().unwrap_or(0.0));
            rest = behind;
            if let Some(cache) = &mut memory.cache {
                let (saved, behind) = rest.split_at(cache.exported(tokens));
                cache.import(slot, tokens, saved);
                rest = behind;
            }
        })
    }

    /// Calls `f(layer, slot, committed version)` for every layer, to overwrite the committed state.
    fn each(
        &mut self,
        slot: SeqSlot,
        mut f: impl FnMut(&mut LayerMemory, usize, usize),
    ) -> Result<(), BackendError> {
        self.check(slot)?;
        let count = self.layers.len();
        let versions = &mut self.versions[slot.0 as usize * count..][..count];
        for (memory, versions) in self.layers.iter_mut().zip(versions) {
            versions.pending = None;
            f(memory, slot.0 as usize, versions.committed);
        }
        Ok(())
    }

    fn at(&self, slot: SeqSlot, layer: Layer) -> usize {
        slot.0 as usize * self.layers.len() + usize::from(layer.0)
    }

    fn of(&mut self, slot: SeqSlot) -> &mut [Versions] {
        let count = self.layers.len();
        &mut self.versions[slot.0 as usize * count..][..count]
    }

    fn check(&self, slot: SeqSlot) -> Result<(), BackendError> {
        let sequences = self.versions.len() / self.layers.len().max(1);
        if (slot.0 as usize) < sequences || self.layers.is_empty() {
            return Ok(());
        }
        Err(failed(format!("sequence slot {} of {sequences}", slot.0)))
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), BackendError> {
        if tokens <= self.context {
            return Ok(());
        }
        Err(failed(format!("the state of {tokens} tokens in a context of {}", self.context)))
    }

    fn check_place(&self, place: Checkpoint) -> Result<(), BackendError> {
        if (place.0 as usize) < self.checkpoints {
            return Ok(());
        }
        Err(failed(format!("checkpoint {} of {}", place.0, self.checkpoints)))
    }
}
