//! The staging ring with its threads: late engines, failures of every kind, cancels and shutdown, what is given back.
#![cfg(not(loom))]

use std::collections::BTreeSet;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;
use strata_residency::*;

fn id(expert: u16) -> ExpertId {
    ExpertId { layer: 3, expert }
}

fn bytes(id: ExpertId) -> usize {
    1000 + usize::from(id.expert) * 37 % 500
}

const LARGEST: usize = 1500;

fn pattern(id: ExpertId) -> Vec<u8> {
    (0..bytes(id)).map(|place| (usize::from(id.expert) * 41 + place * 7 + place / 256) as u8).collect()
}

/// Experts from this one on can't be read, from that one on whoever reads them panics, and the last ones don't exist.
const UNREADABLE: u16 = 1000;
const PANICKING: u16 = 2000;
const ABSENT: u16 = 3000;

struct Patterns;

impl Source for Patterns {
    fn bytes(&self, id: ExpertId) -> Result<usize, String> {
        if id.expert < ABSENT { Ok(bytes(id)) } else { Err("it is absent".into()) }
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        // What was here before is not to be taken for the expert's.
        to.fill(0xEE);
        match id.expert {
            PANICKING.. => panic!("the page is gone"),
            UNREADABLE.. => Err("the disk is gone".into()),
            _ => {
                to.copy_from_slice(&pattern(id));
                Ok(())
            }
        }
    }
}

/// A buffer that says when it is dropped.
struct Pinned(Vec<u8>, #[expect(dead_code, reason = "counted")] Arc<()>);

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

fn buffers(count: usize) -> (Vec<Pinned>, Arc<()>) {
    let alive = Arc::new(());
    ((0..count).map(|_| Pinned(vec![0xAA; LARGEST], alive.clone())).collect(), alive)
}

/// What the engine makes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Arrives,
    Fails,
    Lost,
    Panics,
}

/// What arrived: entry, expert, bytes.
type Arrivals = Arc<Mutex<Vec<(usize, ExpertId, Vec<u8>)>>>;

/// An expert's place, with its fate and where its arrival is written down.
struct Place {
    entry: usize,
    fate: Fate,
    arrivals: Arrivals,
}

/// Retires transfers in an order that it draws, on a thread of its own.
struct Late(Mutex<Sender<(Transfer<Pinned>, Place)>>);

impl Late {
    /// Holds up to `hold` transfers back, as long as more keep coming.
    fn new(hold: usize, seed: usize) -> (Arc<Late>, JoinHandle<()>) {
        let (sender, receiver) = channel();
        (Arc::new(Late(Mutex::new(sender))), thread::spawn(move || Late::retire(receiver, hold, seed)))
    }

    fn retire(inbox: Receiver<(Transfer<Pinned>, Place)>, hold: usize, mut seed: usize) {
        let mut held = Vec::new();
        loop {
            if held.is_empty() {
                match inbox.recv() {
                    Ok(next) => held.push(next),
                    Err(_) => return,
                }
            }
            while held.len() < hold {
                match inbox.recv_timeout(Duration::from_micros(200)) {
                    Ok(next) => held.push(next),
                    Err(_) => break,
                }
            }
            seed = seed.wrapping_mul(25214903917).wrapping_add(11);
            let (transfer, place): (Transfer<Pinned>, Place) = held.swap_remove((seed >> 8) % held.len());
            match place.fate {
                Fate::Arrives => {
                    let bytes = transfer.buffer()[..transfer.bytes()].to_vec();
                    place.arrivals.lock().unwrap().push((place.entry, transfer.id(), bytes));
                    transfer.retire(Ok(()));
                }
                Fate::Fails => transfer.retire(Err("the link is down".into())),
                Fate::Lost | Fate::Panics => drop(transfer),
            }
        }
    }
}

impl TransferEngine for Late {
    type Buffer = Pinned;
    type Place = Place;

    fn submit(&self, transfer: Transfer<Pinned>, to: Place) {
        if to.fate == Fate::Panics {
            panic!("no such stream");
        }
        self.0.lock().unwrap().send((transfer, to)).unwrap();
    }
}

fn spawn(_: RingThread, life: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    Ok(thread::spawn(life))
}

fn ring(count: usize, stagers: usize, engine: &Arc<Late>) -> (Ring<Late>, Arc<()>) {
    let (buffers, alive) = buffers(count);
    let ring = Ring::new(buffers, stagers, Arc::new(Patterns), engine.clone(), &mut spawn).unwrap();
    (ring, alive)
}

/// One generation of a test.
#[derive(Debug, Clone)]
struct Script {
    entries: Vec<(u16, Fate)>,
    /// Entries to skip before, and after, one was waited for.
    early: BTreeSet<usize>,
    late: BTreeSet<usize>,
    wait_for: prop::sample::Index,
    ending: Ending,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
    Finish,
    Cancel,
    Drop,
    Leak,
}

fn script() -> impl Strategy<Value = Script> {
    let expert = prop_oneof![
        20 => 0..UNREADABLE,
        1 => UNREADABLE..PANICKING,
        1 => PANICKING..ABSENT,
    ];
    let fate = prop_oneof![
        20 => Just(Fate::Arrives),
        1 => Just(Fate::Fails),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Panics),
    ];
    let ending = prop_oneof![
        3 => Just(Ending::Finish),
        1 => Just(Ending::Cancel),
        1 => Just(Ending::Drop),
        1 => Just(Ending::Leak),
    ];
    let some = || prop::collection::btree_set(0usize..24, 0..8);
    let entries = prop::collection::vec((expert, fate), 0..24);
    (entries, some(), some(), any::<prop::sample::Index>(), ending).prop_map(
        |(entries, early, late, wait_for, ending)| Script { entries, early, late, wait_for, ending },
    )
}

/// What must be said of an entry that isn't skipped.
fn must_be(expert: u16, fate: Fate) -> Result<bool, &'static str> {
    match (expert, fate) {
        (PANICKING.., _) => Err("could not be read: its stager panicked: the page is gone"),
        (UNREADABLE.., _) => Err("could not be read: the disk is gone"),
        (_, Fate::Arrives) => Ok(true),
        (_, Fate::Fails) => Err("could not be transferred: the link is down"),
        (_, Fate::Lost) => Err("could not be transferred: the copy engine gave the transfer up"),
        (_, Fate::Panics) => Err("could not be transferred: the copy engine panicked"),
    }
}

fn same(found: &Result<bool, RingError>, expert: u16, must: Result<bool, &str>) -> bool {
    match (found, must) {
        (Ok(found), Ok(must)) => *found == must,
        (Err(found), Err(must)) => found.to_string() == format!("expert {expert} of layer 3 {must}"),
        _ => false,
    }
}

fn play(ring: &mut Ring<Late>, script: &Script) -> Result<(), TestCaseError> {
    let arrivals = Arrivals::default();
    let schedule = script
        .entries
        .iter()
        .enumerate()
        .map(|(entry, &(expert, fate))| (id(expert), Place { entry, fate, arrivals: arrivals.clone() }));
    let mut generation = ring.begin(schedule).unwrap();
    let count = script.entries.len();
    let mut skipped = BTreeSet::new();
    for &entry in script.early.iter().filter(|entry| **entry < count) {
        generation.skip(entry).unwrap();
        skipped.insert(entry);
    }
    if count > 0 {
        let entry = script.wait_for.index(count);
        let (expert, fate) = script.entries[entry];
        let must = must_be(expert, fate);
        if skipped.contains(&entry) {
            // Skipped, or over before.
            prop_assert!(generation.arrived(entry).is_ok());
        } else {
            let issued = generation.issued(entry);
            // What fails after it was issued may not have failed yet.
            prop_assert!(
                issued.as_ref().is_ok_and(|sent| *sent) || same(&issued, expert, must),
                "{:?}",
                issued
            );
            let arrived = generation.arrived(entry);
            prop_assert!(same(&arrived, expert, must), "{:?} instead of {:?}", arrived, must);
        }
    }
    for &entry in script.late.iter().filter(|entry| **entry < count) {
        generation.skip(entry).unwrap();
        skipped.insert(entry);
    }
    let failing = |&(entry, (expert, fate)): &(usize, (u16, Fate))| {
        !skipped.contains(&entry) && must_be(expert, fate).is_err()
    };
    match script.ending {
        Ending::Finish => {
            let found = generation.finish().map(|()| true);
            let first = script.entries.iter().copied().enumerate().find(failing);
            let right = match first {
                Some((_, (expert, fate))) => same(&found, expert, must_be(expert, fate)),
                None => found.is_ok(),
            };
            prop_assert!(right, "{:?} instead of {:?}", found, first);
            let arrived: BTreeSet<usize> =
                arrivals.lock().unwrap().iter().map(|(entry, ..)| *entry).collect();
            for (entry, &(expert, fate)) in script.entries.iter().enumerate() {
                prop_assert!(
                    skipped.contains(&entry) || arrived.contains(&entry) == must_be(expert, fate).is_ok(),
                    "entry {}",
                    entry
                );
            }
        }
        Ending::Cancel => {
            let canceller = generation.canceller();
            let other = thread::spawn(move || canceller.cancel());
            for entry in 0..count {
                let found = generation.arrived(entry);
                let (expert, fate) = script.entries[entry];
                let right = match &found {
                    Err(RingError::Cancelled { id: named }) => {
                        *named == id(expert) && !skipped.contains(&entry)
                    }
                    _ if skipped.contains(&entry) => found.is_ok(),
                    _ => same(&found, expert, must_be(expert, fate)),
                };
                prop_assert!(right, "{:?}", found);
            }
            other.join().unwrap();
        }
        Ending::Drop => drop(generation),
        Ending::Leak => std::mem::forget(generation),
    }
    for (entry, named, bytes) in arrivals.lock().unwrap().iter() {
        prop_assert_eq!(*named, id(script.entries[*entry].0));
        prop_assert!(*bytes == pattern(*named), "bytes of expert {}", named.expert);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Oracle: each expert's own bytes, and what must become of an entry by its script. Generations one after the
    /// other, however the last one ended; then the ring is dropped, and buffers and places are given back.
    #[test]
    fn what_arrives_is_each_experts(
        scripts in prop::collection::vec(script(), 1..6),
        (buffers, stagers) in (1usize..5, 1usize..4),
        (hold, seed) in (1usize..5, any::<usize>()),
    ) {
        let (engine, thread) = Late::new(hold, seed);
        let (mut ring, alive) = ring(buffers, stagers, &engine);
        scripts.iter().try_for_each(|script| play(&mut ring, script))?;
        let counters = ring.counters();
        prop_assert!(counters.arrived <= counters.sent && counters.sent <= counters.staged, "{:?}", counters);
        drop(ring);
        // The engine retires what it still has.
        drop(engine);
        thread.join().unwrap();
        prop_assert_eq!(Arc::strong_count(&alive), 1, "buffers live on");
    }
}

/// Oracle: the numbers counted by hand.
#[test]
fn counters_count() {
    let (engine, _) = Late::new(1, 0);
    let (mut ring, _) = ring(2, 2, &engine);
    let arrivals = Arrivals::default();
    let place = |entry, fate| Place { entry, fate, arrivals: arrivals.clone() };
    let experts = [(1, Fate::Arrives), (UNREADABLE, Fate::Arrives), (2, Fate::Fails), (3, Fate::Arrives)];
    let schedule =
        experts.iter().enumerate().map(|(entry, &(expert, fate))| (id(expert), place(entry, fate)));
    let mut generation = ring.begin(schedule).unwrap();
    assert!(generation.arrived(3).unwrap());
    assert!(generation.arrived(1).is_err());
    assert!(generation.arrived(2).is_err());
    generation.skip(1).unwrap();
    generation.skip(1).unwrap();
    assert!(matches!(generation.finish(), Err(RingError::Transfer { id: named, .. }) if named == id(2)));
    let counters = ring.counters();
    assert_eq!((counters.staged, counters.sent, counters.arrived, counters.failed), (3, 3, 2, 2));
    assert_eq!((counters.skipped, counters.cancelled), (1, 0));
    assert_eq!(counters.bytes as usize, bytes(id(1)) + bytes(id(3)));
}

/// Oracle: the documented behaviour. A generation that was left goes on, is taken up again, and is given up by the next one's beginning.
#[test]
fn a_generation_may_be_left() {
    let (engine, _) = Late::new(1, 0);
    let (mut ring, _) = ring(2, 2, &engine);
    let arrivals = Arrivals::default();
    let schedule = |experts: std::ops::Range<u16>| {
        let place = |entry| Place { entry, fate: Fate::Arrives, arrivals: arrivals.clone() };
        experts.enumerate().map(move |(entry, expert)| (id(expert), place(entry))).collect::<Vec<_>>()
    };
    ring.begin(schedule(1..5)).unwrap().leave();
    let mut again = ring.resume();
    assert!(again.arrived(3).unwrap());
    again.leave();
    ring.resume().finish().unwrap();
    assert_eq!(ring.counters().arrived, 4);
    // Dropped, it is over.
    drop(ring.resume());
    assert!(ring.resume().arrived(0).is_err());
    ring.begin(schedule(5..9)).unwrap().leave();
    ring.begin(schedule(9..10)).unwrap().finish().unwrap();
}

/// Oracle: the documented behaviour. What can't be staged is refused before anything begins, with its expert.
#[test]
fn refusals_name_what_to_do() {
    let (engine, _) = Late::new(1, 0);
    let place = || Place { entry: 0, fate: Fate::Arrives, arrivals: Default::default() };
    let (mut whole, _) = ring(1, 1, &engine);
    let absent = whole.begin([(id(1), place()), (id(ABSENT), place())]).unwrap_err();
    assert_eq!(absent.to_string(), "expert 3000 of layer 3 can't be staged: it is absent");
    let outside = whole.begin([(id(1), place())]).unwrap().arrived(1).unwrap_err();
    assert_eq!(outside.to_string(), "the copy schedule has 1 entries, and none with number 1");

    let small = vec![Pinned(vec![0; 1040], Arc::new(())), Pinned(vec![0; 1030], Arc::new(()))];
    let mut small = Ring::new(small, 1, Arc::new(Patterns), engine.clone(), &mut spawn).unwrap();
    let large = small.begin([(id(1), place())]).unwrap_err();
    assert_eq!(
        large.to_string(),
        "expert 1 of layer 3 has 1037 bytes and the staging ring's buffers 1030; plan them for the largest expert"
    );

    let none = Ring::new(Vec::new(), 1, Arc::new(Patterns), engine.clone(), &mut spawn).unwrap_err();
    assert!(matches!(none, RingError::NoBuffers { .. }));
    let idle = Ring::new(buffers(1).0, 0, Arc::new(Patterns), engine.clone(), &mut spawn).unwrap_err();
    assert!(matches!(idle, RingError::NoStagers));
    assert_eq!(buffers_in(4500, LARGEST).unwrap(), 3);
    assert_eq!(
        buffers_in(1499, LARGEST).unwrap_err().to_string(),
        "1499 bytes of staging memory hold no buffer for experts of up to 1500 bytes; plan more of it"
    );
}

/// Oracle: the count of threads that ended. A thread that can't be started ends those that were, and their buffers.
#[test]
fn a_ring_that_is_half_made_ends() {
    let (engine, _) = Late::new(1, 0);
    for started in 0..3 {
        let (buffers, alive) = buffers(2);
        let ended = Arc::new(AtomicUsize::new(0));
        let mut asked = Vec::new();
        let error = Ring::new(buffers, 2, Arc::new(Patterns), engine.clone(), &mut |which, life| {
            asked.push(which);
            if asked.len() > started {
                return Err(io::Error::other("no more threads"));
            }
            let ended = ended.clone();
            Ok(thread::spawn(move || {
                life();
                ended.fetch_add(1, Ordering::Relaxed);
            }))
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "a thread of the staging ring could not be started: no more threads");
        assert_eq!(asked, [RingThread::Stager(0), RingThread::Stager(1), RingThread::Issuer][..=started]);
        assert_eq!((ended.load(Ordering::Relaxed), Arc::strong_count(&alive)), (started, 1));
    }
}

/// Oracle: the documented behaviour. A ring ends while the engine still has transfers; their buffers live until it
/// is done.
#[test]
fn transfers_outlive_the_ring() {
    struct Keeps(Mutex<Vec<Transfer<Pinned>>>);
    impl TransferEngine for Keeps {
        type Buffer = Pinned;
        type Place = ();
        fn submit(&self, transfer: Transfer<Pinned>, (): ()) {
            self.0.lock().unwrap().push(transfer);
        }
    }
    let engine = Arc::new(Keeps(Mutex::new(Vec::new())));
    let (buffers, alive) = buffers(2);
    let mut ring = Ring::new(buffers, 1, Arc::new(Patterns), engine.clone(), &mut spawn).unwrap();
    let mut generation = ring.begin([1, 2, 3].map(|expert| (id(expert), ()))).unwrap();
    assert!(generation.issued(0).unwrap() && generation.issued(1).unwrap());
    drop(generation);
    assert_eq!(ring.counters().cancelled, 1);
    drop(ring);
    assert_eq!(Arc::strong_count(&alive), 3);
    for transfer in engine.0.lock().unwrap().drain(..) {
        assert_eq!(transfer.buffer()[..transfer.bytes()], pattern(transfer.id()));
        transfer.retire(Ok(()));
    }
    assert_eq!(Arc::strong_count(&alive), 1);
}
