//! Exchanges on the GPU: copies by a stream of their own, and addresses in the residency table.
//!
//! Owns where every expert is, on the device and here; the table on the device says the same to whatever is queued next. What an exchange
//! waits for are points in streams: of its copy in the stream of copies, of its publication in those that read experts.
//!
//! This module is an island of `unsafe`: copies from and to host memory that runs on after the call.

use std::sync::Arc;

use strata_backend::BackendError;
use strata_residency::{ExpertId, HeapSlot, Roster, StoreError};

use super::exchange::{Ask, Given, Link, Seat};
use super::{At, HostMemory};
use crate::driver::{Context, DeviceSlice, DriverError, Event, PinnedMemory, Stream};
use crate::failed;

/// What is known of an exchange.
struct Points {
    /// Behind its last copy.
    copied: Event,
    /// Behind all that was queued for the products, and for the ring, before its last publication.
    passed: [Event; 2],
}

/// Makes exchanges' copies and publications.
pub(super) struct DeviceLink {
    copies: Stream,
    /// Those that read experts: the products', and the ring's copies.
    readers: [Stream; 2],
    points: Vec<Points>,
    /// `[seats][2]`: the addresses that an exchange publishes. One is written again only when the seat's exchange has passed the other.
    words: PinnedMemory<u64>,
    /// `[layers][width]`
    table: DeviceSlice<u64>,
    width: usize,
    roster: Roster,
    /// By number.
    at: Vec<(ExpertId, At)>,
    /// Publications so far.
    changes: u64,
    host: Arc<HostMemory>,
}

impl DeviceLink {
    /// A link for so many exchanges at once, of experts that are where `at` says, as the table does.
    pub(super) fn new(
        context: &Context,
        readers: [Stream; 2],
        (table, width): (DeviceSlice<u64>, usize),
        (roster, at): (Roster, Vec<(ExpertId, At)>),
        host: &Arc<HostMemory>,
        seats: usize,
    ) -> Result<DeviceLink, DriverError> {
        let points = || -> Result<_, DriverError> {
            let passed = [Event::new(context)?, Event::new(context)?];
            Ok(Points { copied: Event::new(context)?, passed })
        };
        Ok(DeviceLink {
            copies: Stream::new(context)?,
            readers,
            points: (0..seats).map(|_| points()).collect::<Result<_, _>>()?,
            words: PinnedMemory::new(context, 2 * seats)?,
            table,
            width,
            roster,
            at,
            changes: 0,
            host: Arc::clone(host),
        })
    }

    /// Where every expert is.
    pub(super) fn experts(&self) -> &[(ExpertId, At)] {
        &self.at
    }

    /// Whether an expert is in the device's own memory.
    pub(super) fn is_resident(&self, id: ExpertId) -> bool {
        matches!(self.find(id), Some(At::Slot(_)))
    }

    /// How often an expert was published somewhere else.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    fn find(&self, id: ExpertId) -> Option<At> {
        Some(self.at[self.roster.number(id)?].1)
    }

    /// Has everything queued from now on find an expert in another place. Again changes nothing.
    fn publish(&mut self, seat: &Seat, word: usize, id: ExpertId, at: At) -> Result<(), BackendError> {
        let number = self.roster.number(id).ok_or_else(|| unknown(id))?;
        let Points { passed, .. } = &self.points[seat.index()];
        for (passed, reader) in passed.iter().zip(&self.readers) {
            passed.record(reader).map_err(failed)?;
        }
        let word = 2 * seat.index() + word;
        self.words[word] = at.entry(&self.host);
        let entry = usize::from(id.layer) * self.width + usize::from(id.expert);
        // SAFETY: pinned. The word is written again by the seat's next exchange, which has then passed a publication behind this copy.
        let queued = unsafe {
            self.readers[0].queue_upload(&self.words[word..=word], self.table.range(entry..entry + 1))
        };
        queued.map_err(failed)?;
        self.at[number].1 = at;
        self.changes += 1;
        Ok(())
    }
}

/// A broken promise of whoever plans moves.
fn unknown(id: ExpertId) -> BackendError {
    failed(format!("expert {} of layer {} is not where its move wants it", id.expert, id.layer))
}

fn reached(event: &Event, ask: Ask) -> Result<bool, BackendError> {
    match ask {
        Ask::Now => event.is_reached(),
        Ask::Wait => event.wait().map(|()| true),
    }
    .map_err(failed)
}

impl Link for DeviceLink {
    type Place = DeviceSlice<u8>;
    type Block = HeapSlot;
    type Failed = BackendError;

    fn bring(&mut self, seat: &Seat, id: ExpertId, to: &mut DeviceSlice<u8>) -> Result<(), BackendError> {
        let Some(At::Host(start)) = self.find(id) else { return Err(unknown(id)) };
        let bytes = self.roster.bytes(id) as usize;
        for (_, piece) in self.host.pieces(start..start + bytes) {
            let to = to.range(piece.start - start..piece.end - start);
            // SAFETY: a piece of one registration, which lives as long as `host`. The block is the expert's until it is published
            // elsewhere, behind this copy. Whoever drops this waits for the copies.
            unsafe { self.copies.queue_registered(piece.start, to) }.map_err(failed)?;
        }
        self.points[seat.index()].copied.record(&self.copies).map_err(failed)
    }

    fn send(&mut self, seat: &Seat, from: &DeviceSlice<u8>, to: &mut HeapSlot) -> Result<(), BackendError> {
        let start = to.as_mut_ptr().expose_provenance();
        for (_, piece) in self.host.pieces(start..start + to.len()) {
            let from = from.range(piece.start - start..piece.end - start);
            // SAFETY: as above. The block is the exchange's alone, which looks at it only when the copy is done.
            unsafe { self.copies.queue_to_registered(from, piece.start) }.map_err(failed)?;
        }
        self.points[seat.index()].copied.record(&self.copies).map_err(failed)
    }

    fn copied(&mut self, seat: &Seat, ask: Ask) -> Result<bool, BackendError> {
        reached(&self.points[seat.index()].copied, ask)
    }

    fn found_in_place(
        &mut self,
        seat: &Seat,
        id: ExpertId,
        at: &DeviceSlice<u8>,
    ) -> Result<Option<HeapSlot>, BackendError> {
        self.publish(seat, 0, id, At::Slot(at.address()))?;
        match self.host.store.take(id) {
            Ok(Some(block)) => Ok(Some(block)),
            Err(StoreError::Pinned { .. }) => Ok(None),
            Ok(None) => Err(unknown(id)),
            Err(error) => Err(error.into()),
        }
    }

    fn found_in_block(
        &mut self,
        seat: &Seat,
        id: ExpertId,
        block: HeapSlot,
    ) -> Given<HeapSlot, BackendError> {
        let start = block.as_ptr().expose_provenance();
        if let Err(error) = self.publish(seat, 1, id, At::Host(start)) {
            return Err((error, block));
        }
        match self.host.store.put(id, block) {
            Ok(()) => Ok(None),
            Err((StoreError::Pinned { .. }, block)) => Ok(Some(block)),
            Err((error, block)) => Err((error.into(), block)),
        }
    }

    fn passed(&mut self, seat: &Seat, ask: Ask) -> Result<bool, BackendError> {
        let [products, ring] = &self.points[seat.index()].passed;
        Ok(reached(products, ask)? && reached(ring, ask)?)
    }
}

impl Drop for DeviceLink {
    fn drop(&mut self) {
        // What fails here has failed before.
        let _ = self.copies.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use strata_plan::{Arena, Category, Plan};
    use strata_residency::{ExpertStore, Heat, HostCopy, LayerExperts, LayerSource, Move, Pace, Slots, Tier};

    use super::super::exchange::{Begun, Exchanger};
    use super::*;
    use crate::driver::{Device, RegisteredMemory, fake};

    const LAYERS: u16 = 2;
    const EXPERTS: u16 = 6;
    /// Bytes of a copy.
    const COPY: usize = 768;

    /// Experts of which the first ones have slots, and a spare place for two exchanges.
    fn start() -> (DeviceLink, Exchanger<DeviceLink>, DeviceSlice<u64>) {
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let roster = Roster::new([LayerExperts { experts: EXPERTS, bytes: COPY as u64 }; LAYERS as usize]);
        let mut slots = Slots::cut(roster.clone(), 4 * COPY as u64, usize::MAX);
        let mut plan = Plan::new();
        let region = plan.heap(Category::Experts, "experts", (roster.len() - 4) * COPY);
        let mut arena = Arena::new(&plan).unwrap();
        let blocks = region.parts(COPY).map(|part| arena.take(part).unwrap()).collect();
        let mut store = ExpertStore::new(blocks, Box::new(|| Ok(())));
        for layer in 0..LAYERS {
            let tensor = |bytes: usize| vec![0u8; bytes * usize::from(EXPERTS)].into();
            let source = LayerSource::split(EXPERTS, tensor(200), tensor(256), tensor(20)).unwrap();
            assert_eq!(source.copy_layout().bytes, COPY);
            store.add_layer(layer, source).unwrap();
        }
        let store = Arc::new(store);
        let memory = DeviceSlice::<u8>::nowhere(1 << 20);
        let mut at = BTreeMap::new();
        let mut places = Vec::new();
        for first in slots.first_loads(&Heat::new(&roster, Pace::default())) {
            slots.begin(first).unwrap();
            slots.land(first.slot).unwrap();
        }
        for slot in slots.ids() {
            let place = memory.range(4096 + COPY * slot.index()..4096 + COPY * (slot.index() + 1));
            places.push(place);
            let strata_residency::Content::Holds(id) = slots.content(slot) else { panic!("an empty slot") };
            at.insert(id, At::Slot(place.address()));
        }
        let copy = HostCopy::new(Box::new(|_, _, _| Ok(())));
        for id in roster.ids().filter(|id| slots.slot_of(*id).is_none()) {
            store.promote(id, &copy).unwrap();
        }
        // Two registrations, which meet inside an expert's copy.
        let span = store.heap_spans()[0].clone();
        let stretches = [span.start..span.start + 1024, span.start + 1024..span.end];
        // SAFETY: the driver is a fake, which touches nothing.
        let stretches = stretches.map(|pages| unsafe { RegisteredMemory::new(&context, pages) }.unwrap());
        let host = Arc::new(HostMemory { stretches: stretches.into(), store: Arc::clone(&store) });
        for id in roster.ids().filter(|id| slots.slot_of(*id).is_none()) {
            at.insert(id, host.find(id, COPY).unwrap());
        }
        let table: DeviceSlice<u64> = memory.range(0..8 * usize::from(LAYERS * EXPERTS)).cast();
        let readers = [Stream::new(&context).unwrap(), Stream::new(&context).unwrap()];
        let (width, at) = (usize::from(EXPERTS), at.into_iter().collect());
        let link = DeviceLink::new(&context, readers, (table, width), (roster, at), &host, 2).unwrap();
        let spares = (10..12).map(|place| memory.range(place * 8192..place * 8192 + COPY)).collect();
        let exchanger = Exchanger::new(slots, places, BTreeMap::from([(COPY as u64, spares)]));
        (link, exchanger, table)
    }

    /// Every expert is in one place; the store, the accounting and the table on the device say which.
    fn check(link: &DeviceLink, exchanger: &Exchanger<DeviceLink>, table: DeviceSlice<u64>) {
        let mut seen = BTreeSet::new();
        for &(id, at) in link.experts() {
            let entry = table.address() + 8 * u64::from(id.layer * EXPERTS + id.expert);
            let published = fake::with(|state| state.words.get(&entry).copied());
            let address = match at {
                At::Slot(address) => {
                    assert!(exchanger.slots().resident(id).is_some());
                    assert_eq!(link.host.store.tier(id).unwrap(), Tier::Mapped);
                    address
                }
                At::Host(start) => {
                    assert_eq!(
                        (exchanger.slots().slot_of(id), link.host.find(id, COPY).unwrap()),
                        (None, At::Host(start))
                    );
                    link.host.device(start)
                }
                At::Staged => panic!("nothing is staged here"),
            };
            assert!(published.is_none_or(|published| published == address), "{id:?}");
            assert!(seen.insert(address), "{id:?}");
        }
        assert_eq!(seen.len(), usize::from(LAYERS * EXPERTS));
    }

    /// What is in each stretch of 256 bytes: which of whose.
    type Memory = BTreeMap<u64, (ExpertId, u64)>;

    /// Makes the copies that the driver was asked for since this was called last.
    fn make_copies(memory: &mut Memory) {
        for (to, from, bytes) in fake::with(|state| std::mem::take(&mut state.copies)) {
            for at in (0..bytes as u64).step_by(256).filter(|_| bytes > 8) {
                match memory.get(&(from + at)).copied() {
                    Some(held) => memory.insert(to + at, held),
                    None => memory.remove(&(to + at)),
                };
            }
        }
    }

    /// Oracle: what the driver was given. Exchanges begin while others end, with copies and points that are late now and then and calls that fail;
    /// settled, everything is in one place and the table says so.
    #[test]
    fn the_table_says_where_experts_are() {
        let (mut link, mut exchanger, table) = start();
        check(&link, &exchanger, table);
        let mut memory = Memory::new();
        for &(id, at) in link.experts() {
            let parts = (0..COPY as u64).step_by(256).map(|part| (at.entry(&link.host) + part, (id, part)));
            memory.extend(parts);
        }
        let (mut state, mut landed, mut failures) = (1u64, 0, 0);
        let mut below = |count: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % count
        };
        for round in 0..600 {
            let slot = exchanger.slots().ids().nth(below(4)).unwrap();
            let load = ExpertId { layer: below(2) as u16, expert: below(6) as u16 };
            if let strata_residency::Content::Holds(evict) = exchanger.slots().content(slot) {
                let _ = exchanger.begin(Move { slot, evict: Some(evict), load }, &mut link);
            }
            let at = below(8) as u64;
            fake::with(|state| {
                state.refuses = (at == 7).then_some(("event_query", 600));
                state.fails = (at < 3).then_some((state.calls + 1 + at, 1, false));
            });
            failures += u32::from(exchanger.advance(&mut link, Ask::Now).is_err());
            fake::with(|state| (state.refuses, state.fails) = (None, None));
            if round % 50 == 49 {
                exchanger.settle(&mut link).unwrap();
                check(&link, &exchanger, table);
                make_copies(&mut memory);
                for &(id, at) in link.experts() {
                    for part in (0..COPY as u64).step_by(256) {
                        assert_eq!(memory.get(&(at.entry(&link.host) + part)), Some(&(id, part)));
                    }
                }
            }
            landed += exchanger.take_landed();
        }
        assert!(landed > 50 && failures > 50 && exchanger.room() == 2, "{landed} landed, {failures} failed");
        drop((link, exchanger));
        assert_eq!(fake::with(|state| state.alive()), (0, 0, 0));
    }

    /// Oracle: the sentence's own words. A reader on the host delays an exchange, and nothing else.
    #[test]
    fn what_the_host_reads_stays_until_it_has_read() {
        let (mut link, mut exchanger, table) = start();
        let slot = exchanger.slots().ids().next().unwrap();
        let load = ExpertId { layer: 1, expert: 5 };
        let evict = Some(ExpertId { layer: 0, expert: 0 });
        assert_eq!(exchanger.begin(Move { slot, evict, load }, &mut link).unwrap(), Begun::Yes);
        let store = Arc::clone(&link.host.store);
        let reads = store.pin_current(load).unwrap();
        exchanger.settle(&mut link).unwrap();
        assert_eq!((exchanger.take_landed(), exchanger.room(), reads.tier()), (0, 1, Tier::Heap));
        drop(reads);
        exchanger.settle(&mut link).unwrap();
        assert_eq!((exchanger.take_landed(), exchanger.room()), (1, 2));
        check(&link, &exchanger, table);
    }
}
