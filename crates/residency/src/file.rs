//! The file tier: experts that memory has no room for are read from the file when a window has chosen them.
//!
//! Memory is cut into slots once ([`Slots`]); which expert is in which changes. A window's experts of a layer are a *tour*: the tour
//! says which of them are in memory next, in their order, while those behind are being read. Whatever a window asks for, memory stays what
//! was planned: experts for which no slot is free wait until those before them are done with.
//!
//! Which expert goes out of a slot: the one that decode steps have used least lately ([`Heat`]), of equals the one that came last. So a
//! prompt, which uses nearly all experts once, passes through few slots, and leaves those that steps use.
//!
//! Owns the slots' accounting, the memory of those that hold no expert, and the reader. Copies of experts are the store's, which gives
//! and takes them ([`ExpertStore::take`], [`ExpertStore::put`]): so an expert that is being computed with can't go. Experts may have copies that are in
//! none of the slots: they are there on every tour, and stay.
//!
//! Invariant: a slot's memory is with the store (the slot holds an expert), with the reader (one is coming), or here (it is empty).
//! An error leaves it so: what was being read lands, or its slot is empty; between tours nothing is under way.

use std::cmp::Reverse;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::sync::MutexGuard;
use std::thread;
use std::time::Instant;

use strata_plan::Block;

use crate::reads::{Done, Files, MOST_PIECES, Piece, ReadError, Reader};
use crate::slots::Content;
use crate::{ExpertId, ExpertStore, Heat, Move, Progress, Ranking, Roster, SlotId, Slots, StoreError, Tier};

/// Routed experts that were read from files because memory has no room for all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct FileCount {
    /// Experts that windows used: each once a window, whatever rows shared it. Beside a device, those that were taken out of the store for it.
    pub used: u64,
    /// Those of them that had to be read.
    pub read: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time that computing slept for them on tours, nanoseconds.
    pub waited: u64,
}

impl FileCount {
    /// Adds what was counted elsewhere or at another time.
    pub fn merge(&mut self, other: FileCount) {
        self.used += other.used;
        self.read += other.read;
        self.bytes += other.bytes;
        self.waited += other.waited;
    }
}

/// Who goes out first: those that the tour doesn't come to, the least used, the latest.
type Rank = (bool, u64, Reverse<u64>, SlotId);

/// The tier.
pub struct FileTier {
    reader: Reader,
    slots: Slots,
    heat: Heat,
    /// The memory of slots that hold no expert and to which none is coming.
    empty: Vec<Option<Block<u8>>>,
    /// When each slot got or lent its expert last, by a count of such events.
    touched: Vec<u64>,
    now: u64,
    /// By number of expert: the last tour that has it, and where that comes to it first.
    toured: Vec<(u64, usize)>,
    tour: u64,
    /// Experts that may be on their way for one part of a tour.
    most: usize,
    /// The layer of the step's tour before.
    stepped: Option<u16>,
    ranks: Vec<Rank>,
    count: FileCount,
    /// A read that failed, and of which expert.
    failed: Option<StoreError>,
}

impl fmt::Debug for FileTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileTier")
            .field("reader", &self.reader)
            .field("slots", &self.empty.len())
            .finish_non_exhaustive()
    }
}

impl FileTier {
    /// A tier of these slots, each with the memory of its number, which starts at a page. Up to `most` experts are read at once, for which the
    /// reader must have been made; there should be twice as many slots for the longest of them, so that reading goes on behind computing. `heat`
    /// is what is known of experts' use.
    ///
    /// # Panics
    /// There isn't memory of its length for each slot.
    pub fn new(slots: Slots, memory: Vec<Block<u8>>, reader: Reader, heat: Heat, most: usize) -> FileTier {
        let lengths = memory.iter().map(|block| block.len() as u64);
        assert!(slots.ids().map(|slot| slots.bytes(slot)).eq(lengths), "memory for each slot");
        let experts = slots.roster().len();
        FileTier {
            reader,
            heat,
            touched: vec![0; memory.len()],
            ranks: Vec::with_capacity(memory.len()),
            empty: memory.into_iter().map(Some).collect(),
            slots,
            now: 0,
            toured: vec![(0, 0); experts],
            tour: 0,
            most: most.max(1),
            stepped: None,
            count: FileCount::default(),
            failed: None,
        }
    }

    /// What a tier of these slots takes beside their memory, bytes.
    pub fn bytes(slots: &Slots) -> u64 {
        let (slots, experts) = (slots.ids().count(), slots.roster().len());
        let slot = size_of::<Option<Block<u8>>>()
            + size_of::<u64>()
            + size_of::<Rank>()
            + 2 * size_of::<u64>()
            + size_of::<Content>();
        // The heat's counts, the tours, and the slots of experts.
        let expert =
            3 * size_of::<u32>() + size_of::<u64>() + size_of::<(u64, usize)>() + size_of::<Option<SlotId>>();
        (slots * slot + experts * expert) as u64
    }

    /// What was learned of experts' use, if there were steps.
    pub(crate) fn learned(&self, now: u64) -> Option<Ranking> {
        self.stepped.map(|_| Ranking::of(&self.heat, now))
    }

    fn roster(&self) -> &Roster {
        self.slots.roster()
    }

    /// What the reader reads, for whoever does it aside.
    pub(crate) fn files(&self) -> Files {
        self.reader.files()
    }

    /// Where an expert is: in memory, in a slot or as a copy that is none of the tier's business; or on its way; or neither.
    fn place_of(&self, store: &ExpertStore, id: ExpertId) -> Option<Content> {
        match self.slots.slot_of(id) {
            Some(slot) => Some(self.slots.content(slot)),
            None => store.tier(id).is_ok_and(|tier| tier == Tier::Heap).then_some(Content::Holds(id)),
        }
    }

    /// Begins to read an expert into a slot.
    fn begin(&mut self, store: &ExpertStore, planned: Move) -> Result<(), StoreError> {
        let Move { slot, evict, load } = planned;
        let pieces = pieces(store, load)?;
        let block = match evict {
            None => self.empty[slot.index()].take(),
            Some(out) => store.take(out)?.and_then(crate::HeapSlot::into_block),
        };
        let Some(block) = block else { return Err(StoreError::NoSlot { layer: load.layer }) };
        if let Err(changed) = self.slots.begin(planned) {
            // It can't be: what the slot holds was looked up just before.
            self.empty[slot.index()] = Some(block);
            return Err(StoreError::Accounting(changed));
        }
        if let Err((why, block)) = self.reader.begin(slot.index() as u32, block, &pieces) {
            self.empty[slot.index()] = Some(block);
            let _ = self.slots.give_up(slot);
            return Err(StoreError::Read { id: load, reason: why.to_string() });
        }
        Ok(())
    }

    /// Sleeps until one of the experts that are coming is there, or isn't to be had: that is noted.
    fn land(&mut self, store: &ExpertStore) -> Result<(), StoreError> {
        let slept = Instant::now();
        let done = self.reader.finish();
        self.count.waited += slept.elapsed().as_nanos() as u64;
        let done = done.map_err(|why| StoreError::Reader { reason: why.to_string() })?;
        let Some(Done { tag, block, outcome }) = done else { return Ok(()) };
        let (slot, id) = match self.slots.id(tag as usize).map(|slot| (slot, self.slots.content(slot))) {
            Some((slot, Content::Coming(id))) => (slot, id),
            _ => {
                return Err(StoreError::Reader {
                    reason: format!("a read for slot {tag}, which nobody asked for"),
                });
            }
        };
        let put = match outcome {
            Ok(()) => put(store, id, block),
            Err((piece, why)) => {
                Err((StoreError::Read { id, reason: read_failed(store, id, piece, &why) }, Some(block)))
            }
        };
        match put {
            Ok(()) => {
                self.slots.land(slot).map_err(StoreError::Accounting)?;
                self.touch(slot);
                self.count.read += 1;
                self.count.bytes += store.home(id)?.expert_bytes() as u64;
            }
            Err((why, block)) => {
                self.empty[slot.index()] = block;
                self.slots.give_up(slot).map_err(StoreError::Accounting)?;
                self.failed.get_or_insert(why);
            }
        }
        Ok(())
    }

    fn touch(&mut self, slot: SlotId) {
        self.now += 1;
        self.touched[slot.index()] = self.now;
    }

    /// Fills the slots with the most used experts. Whoever is told of the progress and of all bytes may end it: then it says false.
    pub(crate) fn fill(
        &mut self,
        store: &ExpertStore,
        mut progress: impl FnMut(Progress, u64) -> ControlFlow<()>,
    ) -> Result<bool, StoreError> {
        let mut loads = self.slots.first_loads(&self.heat);
        loads.retain(|load| self.place_of(store, load.load).is_none());
        // In the file's order.
        loads.sort_by_key(|load| load.load);
        let bytes = |id: ExpertId| store.home(id).map_or(0, |home| home.expert_bytes() as u64);
        let of: u64 = loads.iter().map(|load| bytes(load.load)).sum();
        let mut loads = loads.into_iter().peekable();
        let mut going = ControlFlow::Continue(());
        loop {
            while going.is_continue() && self.reader.under_way() < self.most {
                let Some(load) = loads.next() else { break };
                self.begin(store, load)?;
            }
            if self.reader.under_way() == 0 {
                break;
            }
            self.reader.send();
            self.land(store)?;
            if let Some(why) = self.failed.take() {
                return Err(why);
            }
            let done = Progress { experts: self.count.read as usize, bytes: self.count.bytes };
            if going.is_continue() {
                going = progress(done, of);
            }
        }
        self.count = FileCount::default();
        Ok(going.is_continue())
    }
}

/// Gives an expert's copy to the store. Others may look where the expert is, for a moment: nobody keeps one that has no copy.
fn put(store: &ExpertStore, id: ExpertId, block: Block<u8>) -> Result<(), (StoreError, Option<Block<u8>>)> {
    let mut slot = store.lend(block);
    loop {
        match store.put(id, slot) {
            Ok(()) => return Ok(()),
            Err((StoreError::Pinned { .. }, back)) => slot = back,
            Err((why, back)) => return Err((why, back.into_block())),
        }
        thread::yield_now();
    }
}

/// What brings an expert, and where it goes.
pub(crate) fn pieces(store: &ExpertStore, id: ExpertId) -> Result<[Piece; MOST_PIECES], StoreError> {
    let home = store.home(id)?;
    let pieces = home.pieces(id.expert).ok_or(StoreError::NoFile { layer: id.layer })?;
    Ok(pieces.map(|(piece, _)| piece))
}

/// Why an expert isn't to be had.
pub(crate) fn read_failed(store: &ExpertStore, id: ExpertId, piece: usize, why: &ReadError) -> String {
    let pieces = store.home(id).ok().and_then(|home| home.pieces(id.expert));
    let tensor = pieces.and_then(|pieces| pieces.get(piece).map(|(_, place)| place.name.clone()));
    tensor.map_or(why.to_string(), |name| format!("tensor `{name}`: {why}"))
}

/// A window's experts of a layer, as they come to memory. Made by [`ExpertStore::tour`]; one at a time.
pub struct Tour<'a> {
    store: &'a ExpertStore,
    tier: Option<MutexGuard<'a, FileTier>>,
    layer: u16,
    experts: &'a [u32],
    /// Those handed out, and those that are in memory or on their way: how many from the first on.
    given: usize,
    asked: usize,
}

impl ExpertStore {
    /// Goes through experts of a layer, in the order given, in which equal ones follow each other: the tour says which are in memory. An order in which
    /// those that are come first has the others read meanwhile.
    /// Where the store has no file tier, all are, at once. Nobody may keep an expert that has no copy meanwhile, for the tour waits until it can give it one. `step` says that this is a part of a decode step, of which experts' use is learned.
    ///
    /// Another thread's tour is waited for.
    pub fn tour<'a>(&'a self, layer: u16, experts: &'a [u32], step: bool) -> Result<Tour<'a>, StoreError> {
        let mut tour = Tour { store: self, tier: self.file(), layer, experts, given: 0, asked: 0 };
        tour.begin(step)?;
        Ok(tour)
    }
}

impl Tour<'_> {
    fn id(&self, at: usize) -> ExpertId {
        ExpertId { layer: self.layer, expert: self.experts[at] as u16 }
    }

    /// Counts the experts, and knows them.
    fn begin(&mut self, step: bool) -> Result<(), StoreError> {
        let (layer, experts) = (self.layer, self.experts);
        let Some(tier) = self.tier.as_deref_mut() else { return Ok(()) };
        if tier.roster().layers().get(usize::from(layer)).is_none_or(|of| of.experts == 0) {
            return Err(StoreError::NoLayer { layer });
        }
        tier.tour += 1;
        for (at, &expert) in experts.iter().enumerate() {
            let id = ExpertId { layer, expert: expert as u16 };
            let Some(number) = tier.roster().number(id) else {
                let experts = tier.roster().layers()[usize::from(layer)].experts;
                return Err(StoreError::NoExpert { id, experts });
            };
            if tier.toured[number].0 == tier.tour {
                continue;
            }
            tier.toured[number] = (tier.tour, at);
            tier.count.used += 1;
            if let Some(slot) = tier.slots.resident(id) {
                tier.touch(slot);
            }
        }
        if step {
            let FileTier { heat, slots, stepped, .. } = tier;
            if stepped.is_some_and(|before| layer <= before) {
                heat.end_step();
            }
            *stepped = Some(layer);
            let chosen = experts.iter().map(|&expert| ExpertId { layer, expert: expert as u16 });
            heat.choose(slots.roster(), chosen);
        }
        Ok(())
    }

    /// What [`Tour::next`] gives.
    fn advance(&mut self) -> Result<Option<Range<usize>>, StoreError> {
        let first = self.given;
        if first == self.experts.len() {
            return Ok(None);
        }
        if self.tier.is_none() {
            self.given = self.experts.len();
            return Ok(Some(0..self.given));
        }
        while self.asked == first {
            self.ask(first)?;
            if self.asked == first {
                // Every slot that takes them holds an expert that is read elsewhere.
                return Err(StoreError::NoSlot { layer: self.layer });
            }
        }
        let mut end = self.asked;
        if first == 0 {
            // What is there is worth beginning with, while the others are read.
            let there =
                (0..end).take_while(|&at| matches!(self.slot_of(at), Some(Content::Holds(_)))).count();
            end = if there > 0 { there } else { end };
        }
        for at in first..end {
            while self.slot_of(at).is_some_and(|content| matches!(content, Content::Coming(_))) {
                self.land()?;
            }
            if self.slot_of(at).is_none() {
                let id = self.id(at);
                let why = self.tier.as_deref_mut().and_then(|tier| tier.failed.take());
                return Err(why.unwrap_or(StoreError::Stale { id }));
            }
        }
        self.given = end;
        if end == self.asked && end < self.experts.len() {
            self.ask(first)?;
        }
        Ok(Some(first..end))
    }

    /// Where an expert is, if anywhere.
    fn slot_of(&self, at: usize) -> Option<Content> {
        self.tier.as_deref()?.place_of(self.store, self.id(at))
    }

    fn land(&mut self) -> Result<(), StoreError> {
        self.tier.as_deref_mut().map_or(Ok(()), |tier| tier.land(self.store))
    }

    /// Has the next experts behind those asked for be read, as many as there are slots for, but none in place of those from `first` on
    /// that were asked for.
    fn ask(&mut self, first: usize) -> Result<(), StoreError> {
        let (store, layer, experts, from) = (self.store, self.layer, self.experts, self.asked);
        let Some(tier) = self.tier.as_deref_mut() else { return Ok(()) };
        let id = |at: usize| ExpertId { layer, expert: experts[at] as u16 };
        let room = tier.most.saturating_sub(tier.reader.under_way());
        // As far as the misses that may be on their way reach.
        let (mut end, mut misses) = (from, 0);
        while end < experts.len() {
            let number = tier.roster().number(id(end)).unwrap_or(0);
            let repeated = (from..end).contains(&tier.toured[number].1);
            if !repeated && tier.place_of(store, id(end)).is_none() {
                if misses == room {
                    break;
                }
                misses += 1;
            }
            end += 1;
        }
        if misses > 0 {
            tier.rank(layer, first..end, misses);
        }
        let (mut ranked, mut reached) = (0, end);
        for at in from..end {
            if tier.place_of(store, id(at)).is_some() || tier.place(store, id(at), &mut ranked)? {
                continue;
            }
            // Not even one: those behind it may have to go for it, or the few that were ranked are read elsewhere.
            if at == first {
                tier.rank(layer, first..first + 1, usize::MAX);
                let alike = experts[first..].iter().take_while(|&&expert| expert == experts[first]).count();
                reached = first + if tier.place(store, id(first), &mut 0)? { alike } else { 0 };
            } else {
                reached = at;
            }
            break;
        }
        tier.reader.send();
        self.asked = reached;
        Ok(())
    }
}

impl Iterator for Tour<'_> {
    type Item = Result<Range<usize>, StoreError>;

    /// Sleeps until the next experts are in memory, and says which of those given to [`ExpertStore::tour`]; none when all were had. They
    /// stay until the next call, while those behind them are read.
    ///
    /// An error ends the tour: an expert can't be read. The sentence names it, the tensor and the file, and the store is as good as before.
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance();
        if next.is_err() {
            self.given = self.experts.len();
        }
        next.transpose()
    }
}

/// What is still being read lands: between tours nothing is under way.
impl Drop for Tour<'_> {
    fn drop(&mut self) {
        let Some(tier) = self.tier.as_deref_mut() else { return };
        while tier.reader.under_way() > 0 && tier.land(self.store).is_ok() {}
        tier.failed = None;
    }
}

impl FileTier {
    /// Begins to read an expert into the next of the ranked slots whose expert nobody reads. False if there is none.
    fn place(&mut self, store: &ExpertStore, load: ExpertId, ranked: &mut usize) -> Result<bool, StoreError> {
        while let Some(&(.., slot)) = self.ranks.get(*ranked) {
            *ranked += 1;
            let evict = match self.slots.content(slot) {
                Content::Holds(out) => Some(out),
                _ => None,
            };
            match self.begin(store, Move { slot, evict, load }) {
                Err(StoreError::Pinned { .. }) => {}
                other => return other.map(|()| true),
            }
        }
        Ok(false)
    }

    /// Ranks the slots that may take experts of a layer, best first, about as many as are wanted: not those with the experts that the tour comes to
    /// in `kept`.
    fn rank(&mut self, layer: u16, kept: Range<usize>, wanted: usize) {
        let needed = self.roster().layers().get(usize::from(layer)).map_or(0, |of| of.bytes);
        let FileTier { slots, heat, touched, toured, tour, ranks, .. } = self;
        ranks.clear();
        for slot in slots.ids().filter(|&slot| slots.bytes(slot) >= needed) {
            let rank = match slots.content(slot) {
                Content::Coming(_) => continue,
                Content::Empty => (false, 0, Reverse(u64::MAX), slot),
                Content::Holds(id) => {
                    let number = slots.roster().number(id).unwrap_or(0);
                    let (last, at) = toured[number];
                    if last == *tour && kept.contains(&at) {
                        continue;
                    }
                    let behind = last == *tour && at >= kept.end;
                    (behind, heat.uses(number), Reverse(touched[slot.index()]), slot)
                }
            };
            ranks.push(rank);
        }
        if wanted < ranks.len() {
            ranks.select_nth_unstable(wanted);
            // A few more, where somebody reads one of them.
            ranks.truncate(wanted + 1);
        }
        ranks.sort_unstable();
    }

    /// What tours did since this was last asked.
    pub(crate) fn take_count(&mut self) -> FileCount {
        std::mem::take(&mut self.count)
    }
}
