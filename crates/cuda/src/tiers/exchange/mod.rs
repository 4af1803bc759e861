//! Experts that change places: one beside the GPU comes to a slot, and the one that was in it goes where the first came from.
//!
//! Owns the accounting of slots, which place in the GPU's memory is which slot's, the spare places, and the exchanges under way. Knows no
//! driver: whoever copies, publishes and knows how far the GPU is, is a [`Link`].
//!
//! An exchange is always in one of four stages ([`Stage`]), each a value that owns what nobody else may touch meanwhile, so that a place under a
//! copy can't be read, filled or given away twice. Nobody waits between them but [`Exchanger::settle`]: before each step they are asked
//! ([`Exchanger::advance`]).
//!
//! Invariant: from when a step is begun until it is done, what it finds an expert by leads to a whole copy of that expert.

#[cfg(test)]
mod late;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::marker::PhantomData;

use strata_residency::{Content, ExpertId, Move, SlotId, Slots};

/// The number of an exchange among those that can be under way. It is one exchange's at a time.
#[derive(Debug)]
pub(super) struct Seat(usize);

impl Seat {
    pub(super) fn index(&self) -> usize {
        self.0
    }
}

/// How to ask whether something is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// Whether it is by now.
    Now,
    /// Not before it is.
    Wait,
}

/// What becomes of a block that is given away: it may come back, also with a failure.
pub(super) type Given<B, F> = Result<Option<B>, (F, B)>;

/// What makes copies and tells the GPU where experts are.
pub(super) trait Link {
    /// A place in the GPU's memory, exclusively owned.
    type Place;
    /// An expert's copy in host memory, likewise.
    type Block;
    type Failed;

    /// Queues the copy of an expert in host memory to a place, behind all copies before. The expert is read where it is meanwhile.
    fn bring(&mut self, seat: &Seat, id: ExpertId, to: &mut Self::Place) -> Result<(), Self::Failed>;

    /// Queues the copy of a place to a block, behind all copies before. The place is read meanwhile.
    fn send(&mut self, seat: &Seat, from: &Self::Place, to: &mut Self::Block) -> Result<(), Self::Failed>;

    /// Whether the seat's last copy has been made.
    fn copied(&mut self, seat: &Seat, ask: Ask) -> Result<bool, Self::Failed>;

    /// Whatever is queued from now on finds the expert in this place; its block in host memory is nobody's. `None`, to be asked again, while
    /// somebody on the host reads it.
    fn found_in_place(
        &mut self,
        seat: &Seat,
        id: ExpertId,
        at: &Self::Place,
    ) -> Result<Option<Self::Block>, Self::Failed>;

    /// Whatever is queued from now on, and the host, finds the expert in this block. The block comes back, to be given again, while somebody on the
    /// host reads the expert elsewhere.
    fn found_in_block(
        &mut self,
        seat: &Seat,
        id: ExpertId,
        block: Self::Block,
    ) -> Given<Self::Block, Self::Failed>;

    /// Whether all that may find an expert where it was before the seat's last publication is done.
    fn passed(&mut self, seat: &Seat, ask: Ask) -> Result<bool, Self::Failed>;
}

/// What became of a planned move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    /// The exchange is under way.
    Yes,
    /// There is no spare place just now.
    NoRoom,
    /// It is none, or the slots have changed since it was planned.
    Changed,
}

/// What tests may break, to show that they would notice. [`Sound`] is what runs.
pub(super) trait Variant {
    /// An expert is published in its place before it has arrived.
    const PUBLISHES_EARLY: bool = false;
    /// A block is written before all who read it are done.
    const SENDS_EARLY: bool = false;
    /// An expert is published in its block before it has arrived there.
    const LEAVES_EARLY: bool = false;
    /// A place is spare before all who read it are done.
    const REUSES_EARLY: bool = false;
}

/// The protocol as it is meant.
#[derive(Debug)]
pub(super) struct Sound;

impl Variant for Sound {}

/// Where an exchange is.
enum Stage<P, B> {
    /// The expert is on its way to a place that was spare, and found in host memory.
    Coming { to: P },
    /// It is found in its place. What was queued before may still read its block. The other one is found in the place that was its slot's.
    Here { from: P, block: B },
    /// The other one is on its way to the block.
    Leaving { from: P, block: B },
    /// It is found there. What was queued before may still read its place.
    Gone { from: P },
}

/// The stage that follows another, or the same, or the place that is spare behind the last; and what failed.
type Next<P, B, F> = (Result<Stage<P, B>, P>, Option<F>);

struct Exchange<P, B> {
    seat: Seat,
    slot: SlotId,
    load: ExpertId,
    evict: ExpertId,
    stage: Stage<P, B>,
}

/// The slots, and what is under way between them and host memory.
pub(super) struct Exchanger<L: Link, V = Sound> {
    slots: Slots,
    /// Of each slot.
    places: Vec<L::Place>,
    /// By the length of slots that they can be of.
    spares: BTreeMap<u64, Vec<L::Place>>,
    seats: Vec<Seat>,
    under_way: VecDeque<Exchange<L::Place, L::Block>>,
    landed: u64,
    variant: PhantomData<fn() -> V>,
}

impl<L: Link, V: Variant> Exchanger<L, V> {
    /// Slots as they are, with a place for each, and spare places by their length.
    pub(super) fn new(slots: Slots, places: Vec<L::Place>, spares: BTreeMap<u64, Vec<L::Place>>) -> Self {
        assert_eq!(slots.ids().count(), places.len());
        let seats: Vec<Seat> = (0..spares.values().map(Vec::len).sum()).rev().map(Seat).collect();
        let under_way = VecDeque::with_capacity(seats.len());
        Exchanger { slots, places, spares, seats, under_way, landed: 0, variant: PhantomData }
    }

    /// The accounting. An expert that leaves is in no slot from when its exchange begins.
    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Exchanges that may begin now.
    pub(super) fn room(&self) -> usize {
        self.seats.len()
    }

    /// Whether nothing is under way.
    pub(super) fn is_settled(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Experts that are part of an exchange.
    pub(super) fn held(&self) -> BTreeSet<ExpertId> {
        self.under_way.iter().flat_map(|exchange| [exchange.load, exchange.evict]).collect()
    }

    /// Exchanges of which the expert that comes was found in its slot since this was asked last.
    pub(super) fn take_landed(&mut self) -> u64 {
        std::mem::take(&mut self.landed)
    }

    /// Begins an exchange. Only between steps.
    pub(super) fn begin(&mut self, planned: Move, link: &mut L) -> Result<Begun, L::Failed> {
        let Move { slot, evict: Some(evict), load } = planned else { return Ok(Begun::Changed) };
        let (roster, length) = (self.slots.roster(), self.slots.bytes(slot));
        let changed = self.slots.content(slot) != Content::Holds(evict) || self.slots.slot_of(load).is_some();
        let alike = roster.number(load).is_some() && roster.bytes(load) == roster.bytes(evict);
        let held = self.held();
        if changed || !alike || held.contains(&load) || held.contains(&evict) {
            return Ok(Begun::Changed);
        }
        let Some(mut to) = self.spares.get_mut(&length).and_then(Vec::pop) else { return Ok(Begun::NoRoom) };
        let seat = self.seats.pop().expect("there are as many as spare places");
        if let Err(failed) = link.bring(&seat, load, &mut to) {
            // What was queued of the copy ends before the place's next one begins.
            self.give_back(length, to, seat);
            return Err(failed);
        }
        self.slots.begin(planned).expect("the slots are as the move wants them");
        self.under_way.push_back(Exchange { seat, slot, load, evict, stage: Stage::Coming { to } });
        Ok(Begun::Yes)
    }

    /// Takes every exchange to its next stage, if it can go on. Only between steps.
    ///
    /// # Errors
    /// The first that failed; it, and those behind it, are where they were.
    pub(super) fn advance(&mut self, link: &mut L, ask: Ask) -> Result<(), L::Failed> {
        let mut failure = None;
        for _ in 0..self.under_way.len() {
            let Some(exchange) = self.under_way.pop_front() else { break };
            if failure.is_some() {
                self.under_way.push_back(exchange);
                continue;
            }
            let Exchange { seat, slot, load, evict, stage } = exchange;
            let (stage, failed) = self.next(stage, (&seat, slot, load, evict), link, ask);
            failure = failed;
            match stage {
                Ok(stage) => self.under_way.push_back(Exchange { seat, slot, load, evict, stage }),
                Err(spare) => self.give_back(self.slots.bytes(slot), spare, seat),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Waits until nothing is under way. What the host reads just now stays as it is.
    pub(super) fn settle(&mut self, link: &mut L) -> Result<(), L::Failed> {
        // An exchange has four stages.
        (0..4).try_for_each(|_| self.advance(link, Ask::Wait))
    }

    fn give_back(&mut self, length: u64, place: L::Place, seat: Seat) {
        self.spares.entry(length).or_default().push(place);
        self.seats.push(seat);
    }

    /// What comes of a stage.
    fn next(
        &mut self,
        stage: Stage<L::Place, L::Block>,
        (seat, slot, load, evict): (&Seat, SlotId, ExpertId, ExpertId),
        link: &mut L,
        ask: Ask,
    ) -> Next<L::Place, L::Block, L::Failed> {
        match stage {
            Stage::Coming { to } => {
                let arrived = if V::PUBLISHES_EARLY { Ok(true) } else { link.copied(seat, ask) };
                let found = match arrived {
                    Ok(true) => link.found_in_place(seat, load, &to),
                    Ok(false) => Ok(None),
                    Err(failed) => Err(failed),
                };
                match found {
                    Ok(Some(block)) => {
                        self.slots.land(slot).expect("it was begun with the exchange");
                        self.landed += 1;
                        let from = std::mem::replace(&mut self.places[slot.index()], to);
                        (Ok(Stage::Here { from, block }), None)
                    }
                    Ok(None) => (Ok(Stage::Coming { to }), None),
                    Err(failed) => (Ok(Stage::Coming { to }), Some(failed)),
                }
            }
            Stage::Here { from, mut block } => {
                let passed = if V::SENDS_EARLY { Ok(true) } else { link.passed(seat, ask) };
                let sent = match passed {
                    Ok(true) => link.send(seat, &from, &mut block).map(|()| true),
                    other => other,
                };
                match sent {
                    Ok(true) => (Ok(Stage::Leaving { from, block }), None),
                    // What was queued of a copy that failed ends before it is made again.
                    other => (Ok(Stage::Here { from, block }), other.err()),
                }
            }
            Stage::Leaving { from, block } => {
                let arrived = if V::LEAVES_EARLY { Ok(true) } else { link.copied(seat, ask) };
                match arrived {
                    Ok(true) => {}
                    other => return (Ok(Stage::Leaving { from, block }), other.err()),
                }
                match link.found_in_block(seat, evict, block) {
                    Ok(None) => (Ok(Stage::Gone { from }), None),
                    Ok(Some(block)) => (Ok(Stage::Leaving { from, block }), None),
                    Err((failed, block)) => (Ok(Stage::Leaving { from, block }), Some(failed)),
                }
            }
            Stage::Gone { from } => {
                let passed = if V::REUSES_EARLY { Ok(true) } else { link.passed(seat, ask) };
                match passed {
                    Ok(true) => (Err(from), None),
                    other => (Ok(Stage::Gone { from }), other.err()),
                }
            }
        }
    }
}
