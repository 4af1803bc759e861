//! A tier's places: which expert is in which.
//!
//! A budget of bytes is cut into slots once, and after that only what they hold changes: nothing is allocated late and
//! nothing is fragmented. A slot belongs to no layer: it takes any expert that is not longer than it.
//!
//! Owns the accounting, not the bytes. An expert on its way into a slot is in it for the accounting, and readers don't
//! find it until [`Slots::land`].
//!
//! Invariants: the slots' bytes never exceed the budget; an expert is in at most one slot, and not longer than it.

use crate::moves::Move;
use crate::{ExpertId, Heat, Roster};

/// A place in the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u32);

impl SlotId {
    /// Its number, from zero.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Nothing.
    Empty,
    /// An expert that is still being copied.
    Coming(ExpertId),
    /// An expert.
    Holds(ExpertId),
}

/// Why the accounting refused a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// There is no such slot, or not what the change expects is in it.
    #[error("slot {} does not hold what this move expects; plan the move again", .0.0)]
    Changed(SlotId),
    /// The expert is in a slot already.
    #[error("expert {} of layer {} has a slot already", .0.expert, .0.layer)]
    Twice(ExpertId),
    /// The expert is longer than the slot, or the model has no such expert.
    #[error("expert {} of layer {} does not fit into slot {}", .0.expert, .0.layer, .1.0)]
    TooLong(ExpertId, SlotId),
}

/// All slots of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slots {
    roster: Roster,
    bytes: Vec<u64>,
    /// Where each starts if they lie one behind the other.
    starts: Vec<u64>,
    content: Vec<Content>,
    /// The slot of each expert, by number.
    place: Vec<Option<SlotId>>,
    /// Experts that readers find, per layer.
    held: Vec<usize>,
}

impl Slots {
    /// Cuts `budget` bytes into at most `most` empty slots, of which every layer gets equally many bytes, for experts of its length: the
    /// next slot is always for the layer with the fewest bytes so far, the lower one of equals, that has experts without
    /// a slot and whose length still fits.
    pub fn cut(roster: Roster, budget: u64, most: usize) -> Slots {
        let (mut left, mut given) = (budget, vec![0u64; roster.layers().len()]);
        let mut bytes = Vec::new();
        while bytes.len() < most {
            let wanting = roster.layers().iter().zip(&given).enumerate().filter(|(_, (layer, given))| {
                layer.bytes > 0 && layer.bytes <= left && **given < u64::from(layer.experts) * layer.bytes
            });
            let Some((next, _)) = wanting.min_by_key(|&(_, (_, given))| *given) else { break };
            let length = roster.layers()[next].bytes;
            bytes.push(length);
            given[next] += length;
            left -= length;
        }
        Slots::of(roster, bytes)
    }

    /// As many more empty slots, for the longest experts, behind the others.
    pub fn with_spare(self, spare: usize) -> Slots {
        let longest = self.roster.layers().iter().map(|layer| layer.bytes).max().unwrap_or(0);
        let mut bytes = self.bytes;
        bytes.extend(std::iter::repeat_n(longest, spare));
        Slots::of(self.roster, bytes)
    }

    /// Empty slots of these lengths.
    fn of(roster: Roster, bytes: Vec<u64>) -> Slots {
        let (slots, experts, layers) = (bytes.len(), roster.len(), roster.layers().len());
        let starts = bytes.iter().scan(0, |end, bytes| {
            *end += bytes;
            Some(*end - bytes)
        });
        Slots {
            roster,
            starts: starts.collect(),
            bytes,
            content: vec![Content::Empty; slots],
            place: vec![None; experts],
            held: vec![0; layers],
        }
    }

    /// What to load into empty slots at the start: the most used experts, each into the shortest slot that takes it. Where
    /// nothing is known all are equal, and of equals every layer's first experts come first, so that layers get the
    /// bytes that the budget was cut for.
    pub fn first_loads(&self, heat: &Heat) -> Vec<Move> {
        let mut wanted = self.roster.by_use(heat);
        wanted.retain(|&id| self.slot_of(id).is_none());
        let mut free: Vec<SlotId> = self.ids().filter(|&slot| self.content(slot) == Content::Empty).collect();
        free.sort_by_key(|slot| (self.bytes[slot.index()], *slot));
        // Per length of slots, those not given yet, the lowest number last.
        let mut by_length: std::collections::BTreeMap<u64, Vec<SlotId>> = Default::default();
        for slot in free.into_iter().rev() {
            by_length.entry(self.bytes[slot.index()]).or_default().push(slot);
        }
        let mut loads = Vec::new();
        for load in wanted {
            let Some((&length, slots)) = by_length.range_mut(self.roster.bytes(load)..).next() else {
                continue;
            };
            if let Some(slot) = slots.pop() {
                loads.push(Move { slot, evict: None, load });
            }
            if slots.is_empty() {
                by_length.remove(&length);
            }
        }
        loads
    }

    /// The experts that it is about.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// All slots.
    pub fn ids(&self) -> impl Iterator<Item = SlotId> + use<> {
        (0..self.bytes.len() as u32).map(SlotId)
    }

    /// The slot of a number.
    pub(crate) fn id(&self, index: usize) -> Option<SlotId> {
        (index < self.bytes.len()).then_some(SlotId(index as u32))
    }

    /// Bytes of all slots.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Bytes of a slot.
    pub fn bytes(&self, slot: SlotId) -> u64 {
        self.bytes[slot.index()]
    }

    /// Where a slot starts, if all lie one behind the other.
    pub fn start(&self, slot: SlotId) -> u64 {
        self.starts[slot.index()]
    }

    /// What a slot holds.
    pub fn content(&self, slot: SlotId) -> Content {
        self.content[slot.index()]
    }

    /// The slot that an expert is in, or on its way into.
    #[inline]
    pub fn slot_of(&self, id: ExpertId) -> Option<SlotId> {
        self.place[self.roster.number(id)?]
    }

    /// The slot in which readers find an expert.
    #[inline]
    pub fn resident(&self, id: ExpertId) -> Option<SlotId> {
        self.slot_of(id).filter(|slot| self.content(*slot) == Content::Holds(id))
    }

    /// How many experts of a layer readers find.
    pub fn layer_count(&self, layer: u16) -> usize {
        self.held.get(usize::from(layer)).copied().unwrap_or(0)
    }

    /// Begins a move: what is evicted is out, what is loaded is on its way.
    ///
    /// # Errors
    /// The slots changed since it was planned. Nothing changes.
    pub fn begin(&mut self, planned: Move) -> Result<(), SlotError> {
        let Move { slot, evict, load } = planned;
        let before = evict.map_or(Content::Empty, Content::Holds);
        if self.content.get(slot.index()) != Some(&before) {
            return Err(SlotError::Changed(slot));
        }
        let number = self.roster.number(load).filter(|_| self.roster.bytes(load) <= self.bytes(slot));
        let number = number.ok_or(SlotError::TooLong(load, slot))?;
        if self.place[number].is_some() {
            return Err(SlotError::Twice(load));
        }
        if let Some(out) = evict {
            self.held[usize::from(out.layer)] -= 1;
            self.forget(out);
        }
        self.place[number] = Some(slot);
        self.content[slot.index()] = Content::Coming(load);
        Ok(())
    }

    /// Ends a move whose bytes have arrived: readers find the expert.
    ///
    /// # Errors
    /// Nothing is on its way into this slot.
    pub fn land(&mut self, slot: SlotId) -> Result<ExpertId, SlotError> {
        let id = self.coming(slot)?;
        self.content[slot.index()] = Content::Holds(id);
        self.held[usize::from(id.layer)] += 1;
        Ok(id)
    }

    /// Ends a move whose bytes won't arrive: the slot is empty.
    ///
    /// # Errors
    /// Nothing is on its way into this slot.
    pub fn give_up(&mut self, slot: SlotId) -> Result<ExpertId, SlotError> {
        let id = self.coming(slot)?;
        self.content[slot.index()] = Content::Empty;
        self.forget(id);
        Ok(id)
    }

    fn coming(&self, slot: SlotId) -> Result<ExpertId, SlotError> {
        match self.content.get(slot.index()) {
            Some(&Content::Coming(id)) => Ok(id),
            _ => Err(SlotError::Changed(slot)),
        }
    }

    fn forget(&mut self, id: ExpertId) {
        if let Some(number) = self.roster.number(id) {
            self.place[number] = None;
        }
    }
}
