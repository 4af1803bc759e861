//! Exchanges under arbitrary orders of events: steps and reads of the ring that end late, copies that are made late, calls that fail, readers on
//! the host, all as data and in one thread.
//!
//! Memory is poisoned: a place holds an expert whole, or is torn from when a copy to it is queued until it has been made. What a step finds is
//! looked at from when it is begun until it is done.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use strata_residency::{Content, ExpertId, Heat, LayerExperts, Move, Pace, Roster, Slots};

use super::{Ask, Begun, Exchanger, Given, Link, Seat, Sound, Variant};

/// Something that happens. Numbers choose among what is there.
#[derive(Debug, Clone)]
enum Event {
    BeginStep,
    EndStep,
    BeginRing,
    EndRing,
    /// A copy is made.
    Copy,
    /// Before a step.
    Advance,
    Exchange(prop::sample::Index, prop::sample::Index),
    /// The call after so many others fails.
    Fail(u8),
    /// The host reads experts, or does not.
    Pin(bool),
    Settle,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let index = any::<prop::sample::Index>;
    let event = prop_oneof![
        4 => Just(Event::BeginStep),
        4 => Just(Event::EndStep),
        1 => Just(Event::BeginRing),
        1 => Just(Event::EndRing),
        5 => Just(Event::Copy),
        6 => Just(Event::Advance),
        5 => (index(), index()).prop_map(|(slot, load)| Event::Exchange(slot, load)),
        1 => (0u8..4).prop_map(Event::Fail),
        1 => any::<bool>().prop_map(Event::Pin),
        1 => Just(Event::Settle),
    ];
    prop::collection::vec(event, 0..150)
}

/// A piece of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cell {
    Whole(ExpertId),
    Torn,
}

/// Where each expert is found.
type Table = BTreeMap<ExpertId, usize>;

/// A stream, whose work is done in order: what was queued, and how much of it is done.
#[derive(Default)]
struct Queue<T> {
    left: VecDeque<T>,
    done: usize,
}

impl<T> Queue<T> {
    fn queued(&self) -> usize {
        self.done + self.left.len()
    }

    fn pop(&mut self) -> Option<T> {
        let first = self.left.pop_front()?;
        self.done += 1;
        Some(first)
    }
}

/// Memory, and a GPU that is late.
struct World {
    cells: Vec<Cell>,
    lengths: Vec<u64>,
    roster: Roster,
    table: Table,
    /// The block of each expert that the host finds in one.
    store: Table,
    /// From, to, and whether all of it was queued.
    copies: Queue<(usize, usize, bool)>,
    steps: Queue<Table>,
    ring: Queue<Table>,
    /// Of each seat, what its last copy and its last publication are behind.
    copied: Vec<usize>,
    passed: Vec<[usize; 2]>,
    fails: Option<u8>,
    pinned: bool,
}

/// What a call that fails says.
#[derive(Debug)]
struct Failed;

struct Place(usize);
struct Block(usize);

impl World {
    fn call(&mut self) -> Result<(), Failed> {
        match self.fails {
            Some(0) => {
                self.fails = None;
                Err(Failed)
            }
            Some(after) => {
                self.fails = Some(after - 1);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// A copy that fails may be queued in part.
    fn copy(&mut self, seat: &Seat, from: usize, to: usize) -> Result<(), Failed> {
        let queued = self.call();
        self.cells[to] = Cell::Torn;
        self.copies.left.push_back((from, to, queued.is_ok()));
        queued?;
        self.copied[seat.index()] = self.copies.queued();
        Ok(())
    }

    fn make_copy(&mut self) {
        if let Some((from, to, all)) = self.copies.pop() {
            self.cells[to] = if all { self.cells[from] } else { Cell::Torn };
        }
    }

    fn publish(&mut self, seat: &Seat, id: ExpertId, at: usize) {
        self.passed[seat.index()] = [self.steps.queued(), self.ring.queued()];
        self.table.insert(id, at);
    }

    /// What is read just now is whole.
    fn look(&self) -> Result<(), TestCaseError> {
        for (id, at) in self.steps.left.iter().chain(&self.ring.left).flatten() {
            prop_assert_eq!(self.cells[*at], Cell::Whole(*id), "what a step reads of expert {:?}", id);
        }
        Ok(())
    }
}

impl Link for World {
    type Place = Place;
    type Block = Block;
    type Failed = Failed;

    fn bring(&mut self, seat: &Seat, id: ExpertId, to: &mut Place) -> Result<(), Failed> {
        assert!(self.lengths[to.0] >= self.roster.bytes(id));
        self.copy(seat, self.store[&id], to.0)
    }

    fn send(&mut self, seat: &Seat, from: &Place, to: &mut Block) -> Result<(), Failed> {
        if let Cell::Whole(id) = self.cells[from.0] {
            assert_eq!(self.lengths[to.0], self.roster.bytes(id));
        }
        self.copy(seat, from.0, to.0)
    }

    fn copied(&mut self, seat: &Seat, ask: Ask) -> Result<bool, Failed> {
        self.call()?;
        while ask == Ask::Wait && self.copies.done < self.copied[seat.index()] {
            self.make_copy();
        }
        Ok(self.copies.done >= self.copied[seat.index()])
    }

    fn found_in_place(&mut self, seat: &Seat, id: ExpertId, at: &Place) -> Result<Option<Block>, Failed> {
        self.call()?;
        // It is published whether somebody reads the block or not, and once more when it is asked again.
        self.publish(seat, id, at.0);
        if self.pinned {
            return Ok(None);
        }
        Ok(Some(Block(self.store.remove(&id).expect("it was in host memory"))))
    }

    fn found_in_block(&mut self, seat: &Seat, id: ExpertId, block: Block) -> Given<Block, Failed> {
        if self.call().is_err() {
            return Err((Failed, block));
        }
        self.publish(seat, id, block.0);
        if self.pinned {
            return Ok(Some(block));
        }
        assert_eq!(self.store.insert(id, block.0), None);
        Ok(None)
    }

    fn passed(&mut self, seat: &Seat, ask: Ask) -> Result<bool, Failed> {
        self.call()?;
        let [step, ring] = self.passed[seat.index()];
        while ask == Ask::Wait && self.steps.done < step {
            self.steps.pop();
        }
        while ask == Ask::Wait && self.ring.done < ring {
            self.ring.pop();
        }
        Ok(self.steps.done >= step && self.ring.done >= ring)
    }
}

/// Experts of two lengths; how many slots and spare places there are.
fn start<V: Variant>(slots: u64, spares: usize) -> (World, Exchanger<World, V>) {
    let layer = |bytes| LayerExperts { experts: 5, bytes };
    let roster = Roster::new([layer(256), layer(512), layer(256)]);
    let mut slots = Slots::cut(roster.clone(), 256 * slots, usize::MAX);
    for first in slots.first_loads(&Heat::new(&roster, Pace::default())) {
        slots.begin(first).unwrap();
        slots.land(first.slot).unwrap();
    }
    let (mut cells, mut lengths, mut table, mut store) = (vec![], vec![], Table::new(), Table::new());
    let mut places = Vec::new();
    for slot in slots.ids() {
        let Content::Holds(id) = slots.content(slot) else { panic!("an empty slot") };
        table.insert(id, cells.len());
        places.push(Place(cells.len()));
        cells.push(Cell::Whole(id));
        lengths.push(slots.bytes(slot));
    }
    for id in roster.ids().filter(|id| slots.slot_of(*id).is_none()) {
        table.insert(id, cells.len());
        store.insert(id, cells.len());
        cells.push(Cell::Whole(id));
        lengths.push(roster.bytes(id));
    }
    let mut of = BTreeMap::new();
    for bytes in [256, 512] {
        let places = (0..spares).map(|_| {
            cells.push(Cell::Torn);
            lengths.push(bytes);
            Place(cells.len() - 1)
        });
        of.insert(bytes, places.collect());
    }
    let world = World {
        cells,
        lengths,
        roster,
        table,
        store,
        copies: Queue::default(),
        steps: Queue::default(),
        ring: Queue::default(),
        copied: vec![0; 2 * spares],
        passed: vec![[0; 2]; 2 * spares],
        fails: None,
        pinned: false,
    };
    (world, Exchanger::new(slots, places, of))
}

/// What happens; a call's failure is nobody's mistake.
fn happen<V: Variant>(
    world: &mut World,
    exchanges: &mut Exchanger<World, V>,
    event: &Event,
) -> Result<(), TestCaseError> {
    match event {
        Event::BeginStep => world.steps.left.push_back(world.table.clone()),
        Event::EndStep => drop(world.steps.pop()),
        // It reads host memory only.
        Event::BeginRing => world.ring.left.push_back(world.store.clone()),
        Event::EndRing => drop(world.ring.pop()),
        Event::Copy => world.make_copy(),
        Event::Advance => drop(exchanges.advance(world, Ask::Now)),
        Event::Exchange(slot, load) => {
            let slots = exchanges.slots();
            let slot = slots.ids().nth(slot.index(slots.ids().count())).unwrap();
            let load = slots.roster().ids().nth(load.index(slots.roster().len())).unwrap();
            let evict = match slots.content(slot) {
                Content::Holds(id) => Some(id),
                _ => None,
            };
            let _ = exchanges.begin(Move { slot, evict, load }, world);
        }
        Event::Fail(after) => world.fails = Some(*after),
        Event::Pin(pinned) => world.pinned = *pinned,
        Event::Settle => drop(exchanges.settle(world)),
    }
    world.look()
}

/// At rest, everything is in one place, and spare places are back.
fn rest<V: Variant>(
    mut world: World,
    mut exchanges: Exchanger<World, V>,
    spares: usize,
) -> Result<(), TestCaseError> {
    (world.fails, world.pinned) = (None, false);
    prop_assert!(exchanges.settle(&mut world).is_ok());
    world.look()?;
    prop_assert!(exchanges.held().is_empty() && exchanges.room() == 2 * spares);
    let mut taken = BTreeSet::new();
    let slots = exchanges.slots();
    for (slot, place) in slots.ids().zip(&exchanges.places) {
        let Content::Holds(id) = slots.content(slot) else {
            return Err(TestCaseError::fail(format!("{slot:?} is empty")));
        };
        prop_assert_eq!((world.table[&id], world.cells[place.0]), (place.0, Cell::Whole(id)));
        prop_assert!(taken.insert(place.0) && !world.store.contains_key(&id));
    }
    for id in slots.roster().ids().filter(|id| slots.slot_of(*id).is_none()) {
        let at = world.store[&id];
        prop_assert_eq!((world.table[&id], world.cells[at]), (at, Cell::Whole(id)));
        prop_assert!(taken.insert(at));
    }
    for (length, places) in &exchanges.spares {
        prop_assert_eq!(places.len(), spares);
        prop_assert!(places.iter().all(|place| world.lengths[place.0] == *length && taken.insert(place.0)));
    }
    Ok(())
}

fn play<V: Variant>(slots: u64, spares: usize, events: &[Event]) -> Result<(), TestCaseError> {
    let (mut world, mut exchanges) = start::<V>(slots, spares);
    events.iter().try_for_each(|event| happen(&mut world, &mut exchanges, event))?;
    rest(world, exchanges, spares)
}

proptest! {
    /// Oracle: poisoned memory. Whatever comes in whatever order, what a step finds stays whole until it is done; at rest every expert is in
    /// one place, the table leads there, and every spare place is spare.
    #[test]
    fn what_steps_read_stays_whole(slots in 3u64..12, spares in 1usize..4, events in events()) {
        play::<Sound>(slots, spares, &events)?;
    }
}

/// What is found wrong with a mutant.
fn found<V: Variant>() -> String {
    let config = Config { failure_persistence: None, cases: 2000, max_shrink_iters: 0, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    match runner
        .run(&(3u64..12, 1usize..4, events()), |(slots, spares, events)| play::<V>(slots, spares, &events))
    {
        Err(TestError::Fail(reason, _)) => reason.to_string(),
        other => format!("{other:?}"),
    }
}

/// Mutant: an expert is published before it has arrived.
#[test]
fn late_copies_expose_an_early_publication() {
    struct Early;
    impl Variant for Early {
        const PUBLISHES_EARLY: bool = true;
    }
    assert!(found::<Early>().contains("what a step reads"));
}

/// Mutant: a block is written while steps, or the ring, read it.
#[test]
fn late_steps_expose_a_block_that_is_written_early() {
    struct Early;
    impl Variant for Early {
        const SENDS_EARLY: bool = true;
    }
    assert!(found::<Early>().contains("what a step reads"));
}

/// Mutant: an expert is published in its block before it has arrived there.
#[test]
fn late_copies_expose_an_early_leave() {
    struct Early;
    impl Variant for Early {
        const LEAVES_EARLY: bool = true;
    }
    assert!(found::<Early>().contains("what a step reads"));
}

/// Mutant: a place is filled again while steps read it.
#[test]
fn late_steps_expose_a_place_that_is_used_early() {
    struct Early;
    impl Variant for Early {
        const REUSES_EARLY: bool = true;
    }
    assert!(found::<Early>().contains("what a step reads"));
}

/// Oracle: by hand, the whole way of one exchange, and what it says meanwhile.
#[test]
fn an_exchange_takes_four_steps() {
    let (mut world, mut exchanges) = start::<Sound>(6, 1);
    let slot = exchanges.slots().ids().next().unwrap();
    let (evict, load) = (ExpertId { layer: 0, expert: 0 }, ExpertId { layer: 2, expert: 4 });
    let planned = Move { slot, evict: Some(evict), load };
    let longer = Move { load: ExpertId { layer: 1, expert: 4 }, ..planned };
    assert_eq!(exchanges.begin(longer, &mut world).unwrap(), Begun::Changed);
    assert_eq!([0, 1].map(|_| exchanges.begin(planned, &mut world).unwrap()), [Begun::Yes, Begun::Changed]);
    let other = Move {
        slot: exchanges.slots().ids().nth(2).unwrap(),
        evict: Some(ExpertId { layer: 2, expert: 0 }),
        load: ExpertId { layer: 2, expert: 3 },
    };
    assert_eq!(exchanges.begin(other, &mut world).unwrap(), Begun::NoRoom);
    let at = world.table.clone();
    let advance = |world: &mut World, exchanges: &mut Exchanger<World>| {
        exchanges.advance(world, Ask::Now).unwrap();
        (exchanges.take_landed(), world.table[&load] != at[&load], world.table[&evict] == at[&load])
    };
    assert_eq!(advance(&mut world, &mut exchanges), (0, false, false));
    world.make_copy();
    world.steps.left.push_back(Table::new());
    assert_eq!(advance(&mut world, &mut exchanges), (1, true, false));
    // The step may still read the block.
    assert_eq!(advance(&mut world, &mut exchanges), (0, true, false));
    assert!(world.copies.left.is_empty());
    world.steps.pop();
    assert_eq!(advance(&mut world, &mut exchanges), (0, true, false));
    world.make_copy();
    assert_eq!(advance(&mut world, &mut exchanges), (0, true, true));
    assert_eq!(exchanges.held(), BTreeSet::from([evict, load]));
    assert_eq!(advance(&mut world, &mut exchanges), (0, true, true));
    assert!(exchanges.held().is_empty() && exchanges.slots().slot_of(load) == Some(slot));
}
