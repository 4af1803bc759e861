//! Experts on their way through device memory: for windows in which nearly every expert has rows, each crosses the link once.
//!
//! The ring is cut into equal places. A layer's experts that have no slot come in chunks, by number, a chunk into a place; which one is known
//! from the start, so that a table of addresses says where kernels find each while it is there. A stream of its own copies ahead, as many
//! chunks as there are places; each place has one event for "it is there" and one for "it has been used", and each stream waits for the
//! other's. No copy waits for the host, but for experts in memory that the GPU can't read: their copies are queued by other threads
//! ([`Staging`]), and a chunk that has such experts can be waited for only when they have been.
//!
//! Invariant: a place is written only behind all work that read what was there before.

use std::ops::Range;
use std::sync::Arc;

use strata_backend::{BackendError, LinkCount};
use strata_plan::DEVICE_ALIGNMENT;
use strata_residency::ExpertId;

use super::staging::{Begins, Piece, Staging, To};
use super::{At, HostMemory, LayerTable, PLACES, find_layer, rows};
use crate::driver::{Context, DeviceSlice, DriverError, Event, Stream, Turns};
use crate::{Failed, failed};

/// Consecutive experts of a layer, whose copies fill a place at most.
pub(super) struct Chunk {
    layer: usize,
    experts: Range<usize>,
    /// What to copy from host memory, each from one registration, and to where.
    pieces: Arc<Vec<Piece>>,
    /// What is to be staged, and to where; and how many experts of chunks before are.
    staged: Vec<(ExpertId, DeviceSlice<u8>)>,
    staged_before: usize,
}

impl Chunk {
    /// Adds an expert's copy; what lies side by side on both sides is one piece.
    fn add(&mut self, host: &HostMemory, from: Range<usize>, to: DeviceSlice<u8>) {
        let first = from.start;
        for (_, from) in host.pieces(from) {
            let to = to.range(from.start - first..from.end - first);
            let pieces = Arc::get_mut(&mut self.pieces).expect("not shared before all are known");
            match pieces.last_mut() {
                Some((before, place))
                    if before.end == from.start
                        && place.address() + place.len() as u64 == to.address()
                        && !host.starts_at(from.start) =>
                {
                    before.end = from.end;
                    *place = place.joined(to);
                }
                _ => pieces.push((from, to)),
            }
        }
    }
}

struct Place {
    arrived: Arc<Event>,
    used: Arc<Event>,
}

/// A chunk's copies: bytes, and between which points in time.
struct Crossing {
    start: Event,
    end: Event,
    bytes: u64,
}

/// The ring.
pub(crate) struct Ring {
    memory: DeviceSlice<u8>,
    /// Where kernels find experts that were fetched, by their number in the layer.
    fetched: DeviceSlice<u64>,
    copies: Stream,
    /// Where some experts have to be staged.
    staging: Option<Staging>,
    /// The chunk that the staging of a window began with.
    begun: usize,
    /// All layers' one after the other. Chunk `i` has place `i` of the ring, counted round and round.
    chunks: Vec<Chunk>,
    places: Vec<Place>,
    /// Where kernels find each expert while it is there.
    layers: Vec<Option<LayerTable>>,
    /// All layers' tables, one behind the other, and how they come there.
    table: DeviceSlice<u64>,
    turns: Turns<u64>,
    /// The chunk that is used next, and the first one whose copies aren't queued. Equal where nothing is under way.
    next: usize,
    ahead: usize,
    lent: bool,
    /// Copies that were queued here and aren't counted yet, and events for more.
    crossings: Vec<Crossing>,
    spare: Vec<Event>,
    /// The end of the copies so far.
    copied: Event,
    /// Whether what is being recorded uses the ring's memory.
    pub(crate) recorded: bool,
    _host: Arc<HostMemory>,
}

/// Cuts all layers into chunks for a ring in `memory`, and the address of each expert while its chunk is there. Experts without a slot may be left out.
pub(super) fn cut(
    memory: DeviceSlice<u8>,
    host: &HostMemory,
    experts: &[(ExpertId, At)],
    bytes: &dyn Fn(ExpertId) -> usize,
    left_out: &dyn Fn(ExpertId) -> bool,
) -> (Vec<Chunk>, Vec<u64>) {
    let room = memory.len() / PLACES / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT;
    let (mut chunks, mut filled, mut addresses, mut staged) = (Vec::<Chunk>::new(), 0, Vec::new(), 0);
    for &(id, at) in experts {
        let (layer, expert) = (usize::from(id.layer), usize::from(id.expert));
        let absent = !matches!(at, At::Slot(_)) && left_out(id);
        let needed = if matches!(at, At::Slot(_)) || absent { 0 } else { bytes(id) };
        if chunks.last().is_none_or(|chunk| chunk.layer != layer || filled + needed > room) {
            chunks.push(Chunk {
                layer,
                experts: expert..expert,
                pieces: Arc::default(),
                staged: Vec::new(),
                staged_before: staged,
            });
            filled = 0;
        }
        let start = (chunks.len() - 1) % PLACES * room + filled;
        let chunk = chunks.last_mut().expect("pushed above");
        chunk.experts.end = expert + 1;
        let to = memory.range(start..start + needed);
        match at {
            _ if absent => {}
            At::Slot(_) => {}
            At::Host(from) => chunk.add(host, from..from + needed, to),
            At::Staged => {
                chunk.staged.push((id, to));
                staged += 1;
            }
        }
        addresses.push(match at {
            _ if absent => 0,
            At::Slot(address) => address,
            _ => to.address(),
        });
        filled += needed;
    }
    (chunks, addresses)
}

impl Ring {
    /// A ring for these chunks, and the table of their experts' addresses, all of it and by layer.
    pub(super) fn new(
        context: &Context,
        (copies, staging): (Stream, Option<Staging>),
        chunks: Vec<Chunk>,
        (table, layers): (DeviceSlice<u64>, Vec<Option<LayerTable>>),
        (memory, fetched): (DeviceSlice<u8>, DeviceSlice<u64>),
        host: &Arc<HostMemory>,
    ) -> Result<Ring, DriverError> {
        let event = || Event::new(context).map(Arc::new);
        let place = || Ok(Place { arrived: event()?, used: event()? });
        let places = (0..PLACES).map(|_| place()).collect::<Result<_, DriverError>>()?;
        Ok(Ring {
            memory,
            fetched,
            copies,
            staging,
            begun: 0,
            chunks,
            places,
            layers,
            table,
            turns: Turns::new(context, table.len())?,
            next: 0,
            ahead: 0,
            lent: false,
            crossings: Vec::new(),
            spare: Vec::new(),
            copied: Event::new(context)?,
            recorded: false,
            _host: Arc::clone(host),
        })
    }

    /// Goes on with other chunks: experts have moved. What is queued finds its experts as before.
    pub(super) fn recut(
        &mut self,
        chunks: Vec<Chunk>,
        experts: &[(ExpertId, At)],
        addresses: &[u64],
        compute: &Stream,
    ) -> Result<(), DriverError> {
        // What is ahead is of the old chunks, whatever comes next.
        self.lent = true;
        let width = self.table.len() / self.layers.len().max(1);
        let rows = rows(self.table.len(), width, experts, addresses);
        self.turns.upload(compute, &rows, self.table)?;
        self.chunks = chunks;
        Ok(())
    }

    /// The stream that reads host memory ahead of the products.
    pub(super) fn copies(&self) -> &Stream {
        &self.copies
    }

    /// A layer's chunks.
    pub(crate) fn chunks(&self, layer: u16) -> Range<usize> {
        let layer = usize::from(layer);
        let first = |layer| self.chunks.partition_point(|chunk| chunk.layer < layer);
        first(layer)..first(layer + 1)
    }

    /// Which experts a chunk has.
    pub(crate) fn experts(&self, chunk: usize) -> Range<usize> {
        self.chunks[chunk].experts.clone()
    }

    /// Where a layer's experts are while their chunk is there.
    pub(crate) fn layer(&self, layer: u16) -> Result<LayerTable, BackendError> {
        find_layer(&self.layers, layer)
    }

    /// Starts over with the first layer: a window begins. What an earlier one left unused is forgotten.
    pub(crate) fn start(&mut self, compute: &Stream) -> Result<(), Failed> {
        self.start_at(0, compute)?;
        self.feed()
    }

    /// Has what is queued next wait for a chunk.
    pub(crate) fn arrive(&mut self, chunk: usize, compute: &Stream) -> Result<(), Failed> {
        if chunk != self.next || self.lent {
            self.start_at(chunk, compute)?;
        }
        self.feed()?;
        let Chunk { staged, staged_before, .. } = &self.chunks[chunk];
        if let Some(staging) = self.staging.as_mut().filter(|_| !staged.is_empty()) {
            let first = staged_before - self.chunks[self.begun].staged_before;
            staging.issued(first..first + staged.len()).map_err(Failed)?;
        }
        Ok(self.places[chunk % PLACES].arrived.hold(compute)?)
    }

    /// A chunk has been used by all that is queued: another may take its place.
    pub(crate) fn used(&mut self, chunk: usize, compute: &Stream) -> Result<(), Failed> {
        self.places[chunk % PLACES].used.record(compute)?;
        self.next = chunk + 1;
        self.feed()
    }

    /// Lends the ring to what is queued next, until the next window begins or goes on: copies that are under way end first, and will be made again.
    pub(crate) fn lend(&mut self, compute: &Stream) -> Result<(), DriverError> {
        if let Some(staging) = &mut self.staging {
            staging.give_up();
        }
        self.copied.record(&self.copies)?;
        self.copied.hold(compute)?;
        self.lent = true;
        Ok(())
    }

    /// The ring's memory, and a table of addresses, for whom it was lent to.
    pub(crate) fn room(&self) -> (DeviceSlice<u8>, DeviceSlice<u64>) {
        (self.memory, self.fetched)
    }

    /// Whether some experts can't be read by the GPU.
    pub(crate) fn stages(&self) -> bool {
        self.staging.is_some()
    }

    /// Brings experts that the GPU can't read, of `bytes` bytes each, to these places of the ring, which was lent, and sleeps until they are there.
    pub(super) fn bring(
        &mut self,
        experts: impl Iterator<Item = (ExpertId, usize)> + Clone,
        bytes: usize,
    ) -> Result<(), BackendError> {
        let (memory, most) = (self.memory, self.memory.len() / bytes.max(1));
        // What a GPU says that went wrong.
        if let Some((_, place)) = experts.clone().find(|&(_, place)| place >= most) {
            return Err(failed(format!("it wants an expert at place {place} of {most}")));
        }
        let to = |place: usize| memory.range(place * bytes..(place + 1) * bytes);
        let experts =
            experts.map(|(id, place)| (id, To { at: to(place), chunk: None, begins: None, arrived: None }));
        let staging = self.staging.as_mut().ok_or_else(|| failed("it wants experts that it can read"))?;
        staging.bring(experts)
    }

    /// Goes on with another chunk than the next one: whatever was queued may still read any place.
    fn start_at(&mut self, chunk: usize, compute: &Stream) -> Result<(), Failed> {
        if let Some(staging) = &mut self.staging {
            staging.give_up();
        }
        self.places.iter().try_for_each(|place| place.used.record(compute))?;
        (self.next, self.ahead, self.lent) = (chunk, chunk, false);
        self.begun = chunk;
        let Ring { staging: Some(staging), chunks, places, .. } = self else { return Ok(()) };
        let experts = chunks.iter().enumerate().skip(chunk).flat_map(|(number, chunk)| {
            let (last, place) = (chunk.staged.len().wrapping_sub(1), &places[number % PLACES]);
            chunk.staged.iter().enumerate().map(move |(i, &(id, at))| {
                let begins = || Begins { used: Arc::clone(&place.used), pieces: Arc::clone(&chunk.pieces) };
                let arrived = (i == last).then(|| Arc::clone(&place.arrived));
                (id, To { at, chunk: Some(number), begins: (i == 0).then(begins), arrived })
            })
        });
        staging.begin(experts, chunk).map_err(Failed)
    }

    /// Queues copies for as many chunks as there are places.
    fn feed(&mut self) -> Result<(), Failed> {
        while self.ahead < self.chunks.len().min(self.next + PLACES) {
            let (chunk, place) = (&self.chunks[self.ahead], &self.places[self.ahead % PLACES]);
            self.ahead += 1;
            if let Some(staging) = self.staging.as_ref().filter(|_| !chunk.staged.is_empty()) {
                // Its issuer queues all of it.
                staging.open(self.ahead);
                continue;
            }
            place.used.hold(&self.copies)?;
            if chunk.pieces.is_empty() {
                place.arrived.record(&self.copies)?;
                continue;
            }
            let mut event = || self.spare.pop().map_or_else(|| Event::new(self.copies.context()), Ok);
            let (start, end) = (event()?, event()?);
            start.record(&self.copies)?;
            for (from, to) in chunk.pieces.iter() {
                // SAFETY: a piece of one registration, which lives as long as `_host`; copies of experts don't change there. Whoever drops
                // this waits for the copies.
                unsafe { self.copies.queue_registered(from.start, *to)? };
            }
            end.record(&self.copies)?;
            place.arrived.record(&self.copies)?;
            let bytes = chunk.pieces.iter().map(|(from, _)| from.len() as u64).sum();
            self.crossings.push(Crossing { start, end, bytes });
        }
        Ok(())
    }

    /// Hands over what was copied since, as far as it is over. What stagers copy isn't counted.
    pub(crate) fn take_count(&mut self) -> Result<LinkCount, DriverError> {
        let mut count = LinkCount::default();
        for crossing in std::mem::take(&mut self.crossings) {
            if !crossing.end.is_reached()? {
                self.crossings.push(crossing);
                continue;
            }
            let Crossing { start, end, bytes } = crossing;
            let nanos = (f64::from(end.milliseconds_since(&start)?) * 1e6) as u64;
            count.merge(LinkCount { bytes, nanos });
            self.spare.extend([start, end]);
        }
        Ok(count)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Nothing is queued behind this. What fails here has failed before.
        self.staging = None;
        let _ = self.copies.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use strata_residency::ExpertStore;

    use super::*;
    use crate::driver::{Device, RegisteredMemory, fake};

    /// Oracle: simulated copies. Every expert without a slot is copied whole to where the table says it is, by its layer's chunk, into that
    /// chunk's place; those left out by none; no copy spans two registrations; experts with a slot are copied nowhere, and those that can't be read are staged to there, in their
    /// order.
    #[test]
    fn chunks_bring_every_expert_to_its_address() {
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let start = 1 << 30;
        // SAFETY: the driver is a fake, which touches nothing.
        let stretch = |range| unsafe { RegisteredMemory::new(&context, range) }.unwrap();
        let stretches = [start..start + 100_000, start + 100_000..start + (1 << 24)].map(stretch);
        let store = Arc::new(ExpertStore::new(vec![], Box::new(|| Ok(()))));
        let host = HostMemory { stretches: stretches.into(), store };
        let memory = DeviceSlice::nowhere(PLACES * 4096 + 100);
        for with_slots in [0, 3, 1000] {
            // Lengths differ from layer to layer; every so many experts have a slot.
            let bytes = |id: ExpertId| 256 * (1 + usize::from(id.layer % 5));
            let (mut experts, mut end) = (Vec::new(), start + 512);
            for (layer, expert) in (0..12u16).flat_map(|layer| (0..20u16).map(move |expert| (layer, expert)))
            {
                let id = ExpertId { layer: 2 * layer, expert };
                let slot = with_slots > 0 && (experts.len() % with_slots == 0 || with_slots == 1000);
                let at = if experts.len() % 7 == 2 { At::Staged } else { At::Host(end) };
                experts.push((id, if slot { At::Slot(7 << 40) } else { at }));
                end += bytes(id);
            }
            let left_out = |id: ExpertId| id.layer >= 10 && id.expert >= 15;
            let (chunks, addresses) = cut(memory, &host, &experts, &bytes, &left_out);
            let mut order = Vec::new();
            for ((id, at), address) in experts.iter().zip(&addresses) {
                let holds = |(_, chunk): &(usize, &Chunk)| {
                    chunk.layer == usize::from(id.layer) && chunk.experts.contains(&usize::from(id.expert))
                };
                let mut of = chunks.iter().enumerate().filter(holds);
                let ((number, chunk), None) = (of.next().unwrap(), of.next()) else {
                    panic!("{id:?} is in two chunks")
                };
                if let At::Slot(slot) = *at {
                    assert_eq!(*address, slot);
                    continue;
                }
                if left_out(*id) {
                    assert_eq!(*address, 0);
                    assert!(chunk.staged.iter().all(|(staged, _)| staged != id));
                    continue;
                }
                let place = memory.address() + (number % PLACES * 4096) as u64;
                assert!((place..=place + 4096 - bytes(*id) as u64).contains(address), "{id:?}");
                let At::Host(from) = *at else {
                    let staged = chunk.staged.iter().position(|(staged, _)| staged == id).unwrap();
                    order.push(chunk.staged_before + staged);
                    let to = chunk.staged[staged].1;
                    assert_eq!((to.address(), to.len()), (*address, bytes(*id)), "{id:?}");
                    continue;
                };
                let copied: usize = chunk
                    .pieces
                    .iter()
                    .map(|(piece, to)| {
                        let inside = piece.start.max(from)..piece.end.min(from + bytes(*id));
                        let arrives = to.address() + (inside.start - piece.start) as u64;
                        assert!(
                            inside.is_empty() || arrives == address + (inside.start - from) as u64,
                            "{id:?}"
                        );
                        inside.len()
                    })
                    .sum();
                assert_eq!(copied, bytes(*id), "{id:?}");
            }
            assert_eq!(order, (0..order.len()).collect::<Vec<_>>());
            assert_eq!(order.is_empty(), with_slots == 1000);
            let all: usize = chunks
                .iter()
                .flat_map(|chunk| chunk.pieces.iter())
                .map(|(piece, to)| {
                    assert!(
                        piece.len() == to.len()
                            && !(piece.start < start + 100_000 && start + 100_000 < piece.end)
                    );
                    piece.len()
                })
                .sum();
            let host = |(id, at): &&(ExpertId, At)| matches!(at, At::Host(_)) && !left_out(*id);
            let wanted = experts.iter().filter(host).map(|(id, _)| bytes(*id));
            assert_eq!(all, wanted.sum::<usize>());
        }
    }

    /// Oracle: the driver's calls. When experts have moved, nothing that was copied ahead is taken for what is wanted, also where the next chunk has
    /// the same number.
    #[test]
    fn a_ring_that_is_cut_anew_starts_over() {
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let start = 1 << 30;
        // SAFETY: the driver is a fake, which touches nothing.
        let stretches = vec![unsafe { RegisteredMemory::new(&context, start..start + (1 << 24)) }.unwrap()];
        let store = Arc::new(ExpertStore::new(vec![], Box::new(|| Ok(()))));
        let host = Arc::new(HostMemory { stretches, store });
        let memory = DeviceSlice::nowhere(PLACES * 1024);
        // Four experts a chunk.
        let mut experts: Vec<(ExpertId, At)> = (0..80u16)
            .map(|expert| (ExpertId { layer: 0, expert }, At::Host(start + 256 * usize::from(expert))))
            .collect();
        let (chunks, _) = cut(memory, &host, &experts, &|_| 256, &|_| false);
        let table = DeviceSlice::nowhere(80);
        let room = (memory, DeviceSlice::nowhere(80));
        let copies = Stream::new(&context).unwrap();
        let mut ring = Ring::new(&context, (copies, None), chunks, (table, vec![None]), room, &host).unwrap();
        let compute = Stream::new(&context).unwrap();
        ring.start(&compute).unwrap();
        ring.arrive(0, &compute).unwrap();
        ring.used(0, &compute).unwrap();
        experts[5].1 = At::Slot(7 << 40);
        let (chunks, addresses) = cut(memory, &host, &experts, &|_| 256, &|_| false);
        ring.recut(chunks, &experts, &addresses, &compute).unwrap();
        let calls = || fake::with(|state| state.calls);
        let before = calls();
        ring.arrive(1, &compute).unwrap();
        // Every place is waited for, filled and noted anew.
        assert!(calls() - before >= 3 * PLACES as u64, "{} calls", calls() - before);
        assert_eq!((ring.next, ring.ahead, ring.experts(1)), (1, 1 + PLACES, 4..9));
    }
}
