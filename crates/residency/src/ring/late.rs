//! The ring's state under arbitrary orders of events: claims that are filled late, transfers that retire late, out
//! of order or with errors, skips, cancels and new generations in between, all as data and in one thread. Buffers
//! are poisoned when their transfer is over; bytes are looked at just before, which is as long as a device may read
//! them.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use super::fakes::{Memory, id, pattern};
use super::state::{Claim, Entry, Issue, Need, State};
use super::transfer::{Buffer, Ticket};
use crate::RingError;

/// Something that happens. Numbers choose among what is there.
#[derive(Debug, Clone)]
enum Event {
    Begin(Vec<u16>),
    Cancel,
    Skip(prop::sample::Index),
    Claim,
    Fill(prop::sample::Index, bool),
    Issue,
    Tell(prop::sample::Index),
    Retire(prop::sample::Index, bool),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let any = any::<prop::sample::Index>;
    let mostly = || prop::bool::weighted(0.9);
    let event = prop_oneof![
        1 => prop::collection::vec(0u16..40, 0..7).prop_map(Event::Begin),
        1 => Just(Event::Cancel),
        2 => any().prop_map(Event::Skip),
        5 => Just(Event::Claim),
        5 => (any(), mostly()).prop_map(|(which, well)| Event::Fill(which, well)),
        5 => Just(Event::Issue),
        4 => any().prop_map(Event::Tell),
        4 => (any(), mostly()).prop_map(|(which, well)| Event::Retire(which, well)),
    ];
    prop::collection::vec(event, 0..150)
}

/// What the tests break.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mutant {
    None,
    /// Every buffer is free as soon as it was sent.
    FreeWhenSent,
    /// A generation takes all buffers for free, and waits only when it fills them for the second time.
    FreeAtBegin,
    /// Tickets of older generations are taken for those of the current one.
    OldForNew,
}

/// What must have become of an entry, told apart from the ring's own account.
#[derive(Debug, Clone, Copy, Default)]
struct Fate {
    skipped: bool,
    unread: bool,
    sent: bool,
    retired: Option<bool>,
}

struct World {
    mutant: Mutant,
    buffers: usize,
    ring: State<Memory, u16>,
    claims: Vec<Claim<Memory>>,
    untold: Vec<Ticket>,
    sent: Vec<Claim<Memory>>,
    forged: Vec<Memory>,
    experts: Vec<u16>,
    fates: Vec<Fate>,
    last_issued: Option<usize>,
}

/// Bytes of an expert: not a whole number of words.
fn bytes(expert: u16) -> usize {
    9 + usize::from(expert) % 7
}

impl World {
    fn new(mutant: Mutant, buffers: usize) -> World {
        World {
            mutant,
            buffers,
            ring: State::new((0..buffers).map(|_| Memory::new(2)).collect()),
            claims: Vec::new(),
            untold: Vec::new(),
            sent: Vec::new(),
            forged: Vec::new(),
            experts: Vec::new(),
            fates: Vec::new(),
            last_issued: None,
        }
    }

    fn fate(&mut self, ticket: Ticket) -> Option<&mut Fate> {
        (ticket.generation == self.ring.generation).then(|| &mut self.fates[ticket.entry])
    }

    fn ticket(&self, ticket: Ticket) -> Ticket {
        match self.mutant {
            Mutant::OldForNew => Ticket { generation: self.ring.generation, ..ticket },
            _ => ticket,
        }
    }

    fn happen(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match event {
            Event::Begin(experts) => {
                self.ring.end();
                self.ring.free.append(&mut self.forged);
                let entry = |&expert| Entry::new(id(expert), bytes(expert), expert);
                self.ring.begin(experts.iter().map(entry).collect());
                self.experts = experts.clone();
                self.fates = vec![Fate::default(); experts.len()];
                self.last_issued = None;
            }
            Event::Cancel => self.ring.cancel(),
            Event::Skip(_) if self.fates.is_empty() => {
                let refused = matches!(self.ring.skip(0), Err(RingError::NoEntry { .. }));
                prop_assert!(refused);
            }
            Event::Skip(which) => {
                let entry = which.index(self.fates.len());
                self.ring.skip(entry).unwrap();
                let fate = &mut self.fates[entry];
                fate.skipped |= fate.retired != Some(true);
            }
            Event::Claim => self.claims.extend(self.ring.claim()),
            Event::Fill(which, well) if !self.claims.is_empty() => {
                let mut claim = self.claims.swap_remove(which.index(self.claims.len()));
                // Also a read that fails may write.
                claim.buffer.write(claim.bytes, |to| to.copy_from_slice(&pattern(claim.id, claim.bytes)));
                if let Some(fate) = self.fate(claim.ticket) {
                    fate.unread |= !well;
                }
                claim.ticket = self.ticket(claim.ticket);
                self.ring.filled(claim, if *well { Ok(()) } else { Err("unread".into()) });
            }
            Event::Issue => {
                let Some(Issue { claim, to }) = self.ring.issue() else { return Ok(()) };
                prop_assert_eq!(claim.id, id(to), "the place is another expert's");
                prop_assert_eq!(self.experts[claim.ticket.entry], to);
                prop_assert!(self.last_issued < Some(claim.ticket.entry), "the order is not the schedule's");
                self.last_issued = Some(claim.ticket.entry);
                self.fates[claim.ticket.entry].sent = true;
                match self.mutant {
                    Mutant::FreeWhenSent => self.ring.free.push(claim.buffer.clone()),
                    Mutant::FreeAtBegin => self.forged.push(claim.buffer.clone()),
                    Mutant::None | Mutant::OldForNew => {}
                }
                self.untold.push(claim.ticket);
                self.sent.push(claim);
            }
            Event::Tell(which) if !self.untold.is_empty() => {
                let ticket = self.untold.swap_remove(which.index(self.untold.len()));
                self.ring.told(self.ticket(ticket));
            }
            Event::Retire(which, well) if !self.sent.is_empty() => {
                let Claim { ticket, id, bytes, buffer } = self.sent.swap_remove(which.index(self.sent.len()));
                let found = buffer.read(bytes, <[u8]>::to_vec);
                prop_assert_eq!(found, pattern(id, bytes), "bytes of expert {}", id.expert);
                buffer.poison();
                if let Some(fate) = self.fate(ticket) {
                    fate.retired = Some(*well);
                }
                let result = if *well { Ok(()) } else { Err("immovable".into()) };
                self.ring.retired(self.ticket(ticket), bytes, buffer, result);
            }
            Event::Fill(..) | Event::Tell(_) | Event::Retire(..) => {}
        }
        self.compare()
    }

    /// The ring says of every entry what became of it.
    fn compare(&mut self) -> Result<(), TestCaseError> {
        for (entry, fate) in self.fates.iter().enumerate() {
            let said = self.ring.arrived(entry);
            let right = match (fate, &said) {
                (Fate { skipped: true, .. }, Some(Ok(false))) => true,
                (Fate { skipped: true, .. }, _) => false,
                (Fate { retired: Some(true), .. }, Some(Ok(true))) => true,
                (Fate { retired: Some(false), .. }, Some(Err(RingError::Transfer { .. }))) => true,
                (Fate { unread: true, .. }, Some(Err(RingError::Read { .. }))) => true,
                (Fate { sent: true, retired: None, .. }, None) => true,
                (Fate { sent: false, unread: false, .. }, Some(Err(RingError::Cancelled { .. }))) => {
                    self.ring.cancelled
                }
                (Fate { sent: false, unread: false, .. }, None) => !self.ring.cancelled,
                _ => false,
            };
            prop_assert!(right, "the fate of entry {} is {:?}, and the ring says {:?}", entry, fate, said);
        }
        Ok(())
    }

    /// Everyone does what there is to do; nothing may be left over then.
    fn come_to_rest(&mut self, first: prop::sample::Index) -> Result<(), TestCaseError> {
        // A round settles at least one entry, or fills at least one buffer.
        for _ in 0..2 * (self.fates.len() + self.buffers + 1) {
            self.happen(&Event::Claim)?;
            self.happen(&Event::Fill(first, true))?;
            self.happen(&Event::Issue)?;
            self.happen(&Event::Tell(first))?;
            self.happen(&Event::Retire(first, true))?;
        }
        prop_assert!(self.ring.met(Need::All), "an entry is left over");
        prop_assert!(self.claims.is_empty() && self.sent.is_empty() && self.untold.is_empty());
        let due = self.ring.due();
        prop_assert!(!due.stager && !due.issuer && !due.host);
        prop_assert_eq!(self.ring.free.len(), self.buffers, "buffers that are free at rest");
        Ok(())
    }
}

fn play(buffers: usize, events: &[Event], first: prop::sample::Index) -> Result<(), TestCaseError> {
    let mut world = World::new(Mutant::None, buffers);
    events.iter().try_for_each(|event| world.happen(event))?;
    world.come_to_rest(first)
}

proptest! {
    /// Oracle: each expert's own bytes, and an account of the events. Whatever comes in whatever order, what
    /// arrives is each expert's, every entry's end is told as it was, and at rest every buffer is free once.
    #[test]
    fn late_transfers_arrive_whole(buffers in 1usize..5, events in events(), rest in any::<prop::sample::Index>()) {
        play(buffers, &events, rest)?;
    }
}

/// What is found wrong with a mutant.
fn found(mutant: Mutant) -> String {
    let config = Config { failure_persistence: None, cases: 2000, max_shrink_iters: 0, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    match runner.run(&(1usize..5, events()), |(buffers, events)| {
        let mut world = World::new(mutant, buffers);
        events.iter().try_for_each(|event| world.happen(event))
    }) {
        Err(TestError::Fail(reason, _)) => reason.to_string(),
        other => format!("{other:?}"),
    }
}

/// Mutant: a buffer is filled without its transfer having retired.
#[test]
fn late_transfers_expose_a_missing_wait() {
    let found = found(Mutant::FreeWhenSent);
    assert!(found.contains("bytes of expert"), "{found}");
}

/// Mutant: the first jobs of a generation don't wait for the transfers of the last one.
#[test]
fn late_transfers_expose_a_wait_from_the_second_lap() {
    let found = found(Mutant::FreeAtBegin);
    assert!(found.contains("bytes of expert"), "{found}");
}

/// Mutant: a claim or a transfer of a generation that is over is taken for one of the current.
#[test]
fn late_transfers_expose_old_tickets_taken_for_new() {
    let found = found(Mutant::OldForNew);
    assert!(found.contains("the fate of entry") || found.contains("bytes of expert"), "{found}");
}
