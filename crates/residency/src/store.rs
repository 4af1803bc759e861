//! The expert store: which expert is in which tier, and the only way to its bytes.
//!
//! Built once from the layers' homes; from then on experts are read and moved through `&self` from any thread. Owns
//! the heap tier's slots, which it was given: it allocates nothing.
//!
//! Invariant: a slot of the heap tier holds one expert, is on its way to hold one, or is free.

use std::fmt;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, PoisonError};

use strata_plan::{ALIGNMENT, Block};

use crate::aside::Aside;
use crate::cell::{Cell, Epoch, Pin, Refused};
use crate::copy::FreeSlots;
use crate::file::{FileCount, FileTier};
use crate::{Blob, CopyEngine, CopyError, HeapSlot, LayerSource, Ranking, StoreError};

/// Which expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// The layer.
    pub layer: u16,
    /// The expert in its layer.
    pub expert: u16,
}

/// A tier of memory that an expert can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// A copy in anonymous memory.
    Heap,
    /// Its home, pages of the model file.
    Mapped,
}

/// An expert as it was when the handle was taken. Good until the expert moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertHandle {
    id: ExpertId,
    epoch: Epoch,
}

impl ExpertHandle {
    /// Which expert.
    pub fn id(&self) -> ExpertId {
        self.id
    }
}

/// How far a [`ExpertStore::promote_all`] is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Experts done.
    pub experts: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// An expert's copy; without one it is read from its home. Two of these and a cell's two words fill a cache line.
type Residence = Option<Block<u8>>;

struct Layer {
    source: LayerSource,
    experts: Box<[Cell<Residence>]>,
}

/// Says in one sentence how the file under the mapped tier differs from what was opened.
pub type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Every expert's bytes.
pub struct ExpertStore {
    layers: Vec<Option<Layer>>,
    /// The heap tier's memory.
    spans: Vec<Range<usize>>,
    free: Arc<FreeSlots>,
    /// What reads experts that have no copy, if they are to be read.
    file: Option<std::sync::Mutex<FileTier>>,
    aside: Option<Aside>,
    check: Check,
}

impl fmt::Debug for ExpertStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertStore")
            .field("layers", &self.layers.len())
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}

impl ExpertStore {
    /// A store without layers, whose heap tier has these slots: each holds a copy of exactly its length. `check` watches
    /// the file that the layers are mapped from; it is asked by [`ExpertStore::check`].
    pub fn new(slots: Vec<Block<u8>>, check: Check) -> ExpertStore {
        let mut spans: Vec<Range<usize>> = Vec::new();
        let mut addresses: Vec<Range<usize>> = slots.iter().map(|slot| addresses(slot)).collect();
        addresses.sort_by_key(|slot| slot.start);
        for slot in addresses {
            match spans.last_mut() {
                Some(span) if slot.start - span.end < ALIGNMENT => span.end = slot.end,
                _ => spans.push(slot),
            }
        }
        let free = FreeSlots::default();
        // The last one put is the first one taken.
        slots.into_iter().rev().for_each(|slot| free.put(slot));
        ExpertStore { layers: Vec::new(), spans, free: Arc::new(free), file: None, aside: None, check }
    }

    /// The addresses that the heap tier's slots lie at, those side by side as one: memory for as long as the store lives, whatever moves in it.
    pub fn heap_spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    /// Adds a layer's experts, all in their home.
    pub fn add_layer(&mut self, layer: u16, source: LayerSource) -> Result<(), StoreError> {
        let index = usize::from(layer);
        if self.layers.len() <= index {
            self.layers.resize_with(index + 1, || None);
        }
        let place = &mut self.layers[index];
        if place.is_some() {
            return Err(StoreError::LayerTwice { layer });
        }
        let experts = (0..source.experts()).map(|_| Cell::new(None)).collect();
        *place = Some(Layer { source, experts });
        Ok(())
    }

    /// Has experts without a copy be read from files when a window uses them, and never through their mapping: by [`ExpertStore::tour`], or by a
    /// [`Source`](crate::Source)'s threads, as many at once as there are `rooms`, each of which starts at a page and has room for any expert that is read.
    ///
    /// All layers must have been added, and must be [read from files](LayerSource::read_from). Experts that have a copy, or get one by
    /// [`ExpertStore::promote`], keep it: the tier's slots are for others.
    ///
    /// # Errors
    /// A layer is in no file.
    pub fn read_with(&mut self, tier: FileTier, rooms: Vec<Block<u8>>) -> Result<(), StoreError> {
        let mapped = (0u16..)
            .zip(&self.layers)
            .find(|(_, layer)| layer.as_ref().is_some_and(|layer| !layer.source.is_read()));
        if let Some((layer, _)) = mapped {
            return Err(StoreError::NoFile { layer });
        }
        self.aside = Some(Aside::new(tier.files(), rooms));
        self.file = Some(std::sync::Mutex::new(tier));
        Ok(())
    }

    /// Fills the slots of what reads files with the most used experts. Whoever is told of the progress and of all bytes may end that: then the answer
    /// is false.
    ///
    /// # Errors
    /// An expert can't be read.
    pub fn fill(&self, progress: impl FnMut(Progress, u64) -> ControlFlow<()>) -> Result<bool, StoreError> {
        self.file().map_or(Ok(true), |mut tier| tier.fill(self, progress))
    }

    /// What reads experts from files.
    pub(crate) fn file(&self) -> Option<std::sync::MutexGuard<'_, FileTier>> {
        self.file.as_ref().map(|tier| tier.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What reads them for a [`Source`](crate::Source).
    pub(crate) fn aside(&self) -> Option<&Aside> {
        self.aside.as_ref()
    }

    /// Whether experts without a copy are read from files, by [`ExpertStore::tour`].
    #[inline]
    pub fn reads_files(&self) -> bool {
        self.file.is_some()
    }

    /// What steps taught of experts' use, at a time in seconds since 1970; nothing for a store that reads no files, or without steps.
    pub fn learned(&self, now: u64) -> Option<Ranking> {
        self.file()?.learned(now)
    }

    /// What was read from files since this was last asked; nothing for a store that reads none.
    pub fn take_file_count(&self) -> Option<FileCount> {
        let mut count = self.file()?.take_count();
        count.merge(self.aside()?.take_count());
        Some(count)
    }

    /// Memory that an expert's copy was read to, as a slot.
    pub(crate) fn lend(&self, block: Block<u8>) -> HeapSlot {
        self.free.lend(Some(block))
    }

    /// The expert as it is now.
    #[inline]
    pub fn handle(&self, id: ExpertId) -> Result<ExpertHandle, StoreError> {
        let (_, cell) = self.find(id)?;
        Ok(ExpertHandle { id, epoch: cell.epoch() })
    }

    /// Keeps an expert where it is and gives its bytes. One atomic addition; takes no lock and never waits.
    ///
    /// # Errors
    /// [`StoreError::Stale`] if the expert moved since the handle was taken.
    #[inline]
    pub fn pin(&self, handle: &ExpertHandle) -> Result<Pinned<'_>, StoreError> {
        let id = handle.id;
        let (layer, cell) = self.find(id)?;
        match cell.pin(handle.epoch) {
            Ok(residence) => Ok(Pinned { layer, expert: id.expert, residence }),
            Err(Refused::Stale) => Err(StoreError::Stale { id }),
            Err(Refused::Pinned) => Err(StoreError::TooManyPins { id }),
        }
    }

    /// Pins an expert wherever it is, for a reader who doesn't mind. Starts over only if the expert moved in
    /// between.
    #[inline]
    pub fn pin_current(&self, id: ExpertId) -> Result<Pinned<'_>, StoreError> {
        loop {
            match self.pin(&self.handle(id)?) {
                Err(StoreError::Stale { .. }) => continue,
                other => return other,
            }
        }
    }

    /// The tier an expert is in.
    pub fn tier(&self, id: ExpertId) -> Result<Tier, StoreError> {
        Ok(self.pin_current(id)?.tier())
    }

    /// Copies an expert to the heap tier, where readers find it from then on. Nothing to do if it is there. The expert
    /// can be read while it is copied; several threads may promote at once.
    ///
    /// # Errors
    /// The tier is full, the copy fails, or the expert is pinned when the copy is done. It then stays where it was.
    pub fn promote(&self, id: ExpertId, engine: &impl CopyEngine<Slot = HeapSlot>) -> Result<(), StoreError> {
        let (layer, cell) = self.find(id)?;
        let Some(epoch) = self.epoch_in(id, Tier::Mapped)? else { return Ok(()) };
        let needed = layer.source.copy_layout().bytes;
        let slot = self.free.take(needed).ok_or(StoreError::HeapFull { id, needed })?;
        let copy = engine
            .copy(id, &layer.source, slot)
            .and_then(|fence| engine.wait(fence))
            .and_then(|copy| CopyError::check_length(&layer.source, &copy).map(|()| copy))
            .map_err(|reason| StoreError::Copy { id, reason })?;
        self.replace(id, cell, epoch, copy.into_block())
    }

    /// Promotes experts in the order given, until done or until `progress`, called after each, says to break: what was
    /// promoted then stays. To load in parallel, call it from several threads with their shares of the experts.
    pub fn promote_all(
        &self,
        ids: impl IntoIterator<Item = ExpertId>,
        engine: &impl CopyEngine<Slot = HeapSlot>,
        mut progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Progress, StoreError> {
        let mut done = Progress::default();
        for id in ids {
            self.promote(id, engine)?;
            done.experts += 1;
            done.bytes += self.find(id)?.0.source.expert_bytes() as u64;
            if progress(done).is_break() {
                break;
            }
        }
        Ok(done)
    }

    /// Drops an expert's copy, so that it is read from its home again. Nothing to do if it is there.
    ///
    /// # Errors
    /// The expert is pinned. It then stays where it was.
    pub fn demote(&self, id: ExpertId) -> Result<(), StoreError> {
        let (_, cell) = self.find(id)?;
        let Some(epoch) = self.epoch_in(id, Tier::Heap)? else { return Ok(()) };
        self.replace(id, cell, epoch, None)
    }

    /// Takes an expert's copy out of the heap tier: it is read from its home from then on, and the slot, with the copy still in it, is the
    /// caller's. `None` if it has no copy there.
    ///
    /// # Errors
    /// The expert is pinned. It then stays where it was.
    pub fn take(&self, id: ExpertId) -> Result<Option<HeapSlot>, StoreError> {
        let (_, cell) = self.find(id)?;
        let Some(epoch) = self.epoch_in(id, Tier::Heap)? else { return Ok(None) };
        match cell.replace(epoch, None) {
            Ok(copy) => Ok(copy.map(|block| self.free.lend(Some(block)))),
            // It moved meanwhile, so it has no copy.
            Err((Refused::Stale, _)) => Ok(None),
            Err((Refused::Pinned, _)) => Err(StoreError::Pinned { id }),
        }
    }

    /// Puts a slot that holds an expert's copy, laid out as a [`CopyEngine`] leaves it, or reads of a file, into the heap tier: readers find the expert
    /// there from then on.
    ///
    /// # Errors
    /// The slot is not as long as the copy, the expert has a copy in the tier already, or it is pinned. It then stays where it was, and
    /// the slot comes back.
    pub fn put(&self, id: ExpertId, slot: HeapSlot) -> Result<(), (StoreError, HeapSlot)> {
        let checked = self.find(id).and_then(|(layer, cell)| {
            if !layer.source.fits(slot.len()) {
                let (expected, found) = (layer.source.slot_bytes(), slot.len());
                return Err(StoreError::Copy { id, reason: CopyError::Length { expected, found } });
            }
            match self.epoch_in(id, Tier::Mapped)? {
                Some(epoch) => Ok((cell, epoch)),
                None => Err(StoreError::Held { id }),
            }
        });
        let (cell, epoch) = match checked {
            Ok(found) => found,
            Err(error) => return Err((error, slot)),
        };
        match cell.replace(epoch, slot.into_block()) {
            Ok(_) => Ok(()),
            Err((refused, block)) => {
                let error = match refused {
                    Refused::Stale => StoreError::Held { id },
                    Refused::Pinned => StoreError::Pinned { id },
                };
                Err((error, self.free.lend(block)))
            }
        }
    }

    /// Moves an expert, and frees the slot that holds none afterwards: its old one, or the new one if it can't move.
    fn replace(
        &self,
        id: ExpertId,
        cell: &Cell<Residence>,
        epoch: Epoch,
        new: Residence,
    ) -> Result<(), StoreError> {
        let (moved, unused) = match cell.replace(epoch, new) {
            Ok(old) => (Ok(()), old),
            // It moved meanwhile, so for a moment it was where it should go.
            Err((Refused::Stale, new)) => (Ok(()), new),
            Err((Refused::Pinned, new)) => (Err(StoreError::Pinned { id }), new),
        };
        if let Some(slot) = unused {
            self.free.put(slot);
        }
        moved
    }

    /// Whether the file under the mapped tier is still what was opened. Meant to be asked once per window.
    pub fn check(&self) -> Result<(), StoreError> {
        (self.check)().map_err(|reason| StoreError::Changed { reason })
    }

    /// The expert's epoch if it is in `tier`.
    fn epoch_in(&self, id: ExpertId, tier: Tier) -> Result<Option<Epoch>, StoreError> {
        let pinned = self.pin_current(id)?;
        Ok((pinned.tier() == tier).then(|| pinned.residence.epoch()))
    }

    /// The home of an expert's layer.
    pub(crate) fn home(&self, id: ExpertId) -> Result<&LayerSource, StoreError> {
        Ok(&self.find(id)?.0.source)
    }

    #[inline]
    fn layer(&self, layer: u16) -> Result<&Layer, StoreError> {
        match self.layers.get(usize::from(layer)) {
            Some(Some(found)) => Ok(found),
            _ => Err(StoreError::NoLayer { layer }),
        }
    }

    #[inline]
    fn find(&self, id: ExpertId) -> Result<(&Layer, &Cell<Residence>), StoreError> {
        let layer = self.layer(id.layer)?;
        match layer.experts.get(usize::from(id.expert)) {
            Some(cell) => Ok((layer, cell)),
            None => Err(StoreError::NoExpert { id, experts: layer.source.experts() }),
        }
    }
}

fn addresses(slot: &[u8]) -> Range<usize> {
    let start = slot.as_ptr().expose_provenance();
    start..start + slot.len()
}

/// An expert that can't move while this lives.
pub struct Pinned<'a> {
    layer: &'a Layer,
    expert: u16,
    residence: Pin<'a, Residence>,
}

impl Pinned<'_> {
    /// The expert's bytes.
    #[inline]
    pub fn blob(&self) -> Blob<'_> {
        match &*self.residence {
            None => self.layer.source.blob(self.expert),
            Some(slot) => self.layer.source.cut(self.expert, slot),
        }
    }

    /// Where they are.
    #[inline]
    pub fn tier(&self) -> Tier {
        match &*self.residence {
            None => Tier::Mapped,
            Some(_) => Tier::Heap,
        }
    }
}
