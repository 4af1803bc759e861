//! The ring under loom, in every interleaving of host, stagers and issuer with few forced switches; and mutants that
//! loom must catch.
//!
//! The host is the test's own thread. The engine retires a transfer at once, or keeps it for the host to retire
//! late. Bytes are looked at when a transfer is retired, which is as long as a device may read them. A thread that
//! nobody wakes is loom's to find: it reports a deadlock.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p strata-residency --lib` and a target folder of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
// Not loom's: its count is not what is modelled.
use std::sync::{Arc, OnceLock, Weak};

use loom::thread;

use super::fakes::{Memory, id, pattern};
use super::protocol::{Protocol, Sound, Variant};
use super::source::Source;
use super::state::{Entry, Need};
use super::transfer::{Buffer, Transfer, TransferEngine};
use crate::sync::{Mutex, said};
use crate::{ExpertId, RingError};

/// Bytes of an expert.
const BYTES: usize = 8;

/// Experts that can't be read and can't be transferred.
const UNREADABLE: u16 = 100;
const IMMOVABLE: u16 = 101;

struct Patterns;

impl Source for Patterns {
    fn bytes(&self, _: ExpertId) -> Result<usize, String> {
        Ok(BYTES)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        to.copy_from_slice(&pattern(id, BYTES));
        if id.expert == UNREADABLE { Err("unreadable".into()) } else { Ok(()) }
    }
}

/// How a test forges a second owner of a buffer, which is what not waiting for its transfer would come to.
#[derive(Clone, Copy, PartialEq)]
enum Forgery {
    None,
    /// Every buffer is free as soon as it was sent.
    WhenSent,
    /// A generation takes all buffers for free, and waits only when it fills them for the second time.
    AtBegin,
}

struct Engine<V> {
    /// How many transfers are yet to be kept.
    keep: Mutex<usize>,
    kept: Mutex<Vec<Transfer<Memory>>>,
    arrived: Mutex<Vec<u16>>,
    forgery: Forgery,
    sent: Mutex<Vec<Memory>>,
    ring: OnceLock<Weak<Protocol<Memory, u16, V>>>,
}

impl<V: Variant> Engine<V> {
    fn ring(&self) -> Arc<Protocol<Memory, u16, V>> {
        self.ring.get().unwrap().upgrade().unwrap()
    }

    fn retire(&self, transfer: Transfer<Memory>) {
        let id = transfer.id();
        assert_eq!(
            transfer.buffer().read(BYTES, <[u8]>::to_vec),
            pattern(id, BYTES),
            "bytes of expert {}",
            id.expert
        );
        if id.expert == IMMOVABLE {
            transfer.retire(Err("immovable".into()));
        } else {
            self.arrived.lock().unwrap().push(id.expert);
            transfer.retire(Ok(()));
        }
    }

    /// Retires the transfer that was kept first.
    fn retire_kept(&self) {
        let transfer = self.kept.lock().unwrap().remove(0);
        self.retire(transfer);
    }
}

impl<V: Variant> TransferEngine for Engine<V> {
    type Buffer = Memory;
    type Place = u16;

    fn submit(&self, transfer: Transfer<Memory>, to: u16) {
        assert_eq!(transfer.id(), id(to));
        match self.forgery {
            Forgery::None => {}
            Forgery::WhenSent => self.ring().change(|state| state.free.push(transfer.buffer().clone())),
            Forgery::AtBegin => self.sent.lock().unwrap().push(transfer.buffer().clone()),
        }
        let mut keep = self.keep.lock().unwrap();
        if *keep > 0 {
            *keep -= 1;
            self.kept.lock().unwrap().push(transfer);
        } else {
            drop(keep);
            self.retire(transfer);
        }
    }
}

/// A ring in the making.
#[derive(Clone, Copy)]
struct Setup {
    buffers: usize,
    stagers: usize,
    /// How many transfers the engine keeps.
    keep: usize,
    forgery: Forgery,
}

const ONE: Setup = Setup { buffers: 1, stagers: 1, keep: 0, forgery: Forgery::None };

struct Host<V: Variant> {
    ring: Arc<Protocol<Memory, u16, V>>,
    engine: Arc<Engine<V>>,
}

impl<V: Variant> Host<V> {
    fn begin(&self, experts: &[u16]) {
        let forged = std::mem::take(&mut *self.engine.sent.lock().unwrap());
        self.ring.change(|state| state.free.extend(forged));
        self.ring.begin(experts.iter().map(|&expert| Entry::new(id(expert), BYTES, expert)).collect());
    }

    fn issued(&self, entry: usize) -> bool {
        self.ring.wait(Need::Issued(entry), |state| state.issued(entry)).unwrap().unwrap()
    }

    fn arrived(&self, entry: usize) -> Result<bool, RingError> {
        self.ring.wait(Need::Arrived(entry), |state| state.arrived(entry)).unwrap()
    }

    fn finish(&self) {
        self.ring.wait(Need::All, |_| ());
        self.ring.end();
    }
}

/// Runs `host` with the ring's threads beside it, and looks afterwards whether all is where it belongs.
fn with_ring<V: Variant>(setup: Setup, host: impl FnOnce(&Host<V>)) {
    let ring = Arc::new(Protocol::new((0..setup.buffers).map(|_| Memory::new(1)).collect()));
    let engine = Arc::new(Engine {
        keep: Mutex::new(setup.keep),
        kept: Mutex::new(Vec::new()),
        arrived: Mutex::new(Vec::new()),
        forgery: setup.forgery,
        sent: Mutex::new(Vec::new()),
        ring: OnceLock::from(Arc::downgrade(&ring)),
    });
    let mut threads = Vec::new();
    for _ in 0..setup.stagers {
        let ring = ring.clone();
        threads.push(thread::spawn(move || ring.stage(&Patterns)));
    }
    threads.push(thread::spawn({
        let (ring, engine) = (ring.clone(), engine.clone());
        move || ring.issue(&*engine)
    }));
    let this = Host { ring, engine };
    host(&this);
    this.ring.stop();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // A claim that was under way when the ring stopped was finished by its stager.
    if setup.forgery == Forgery::None {
        assert_eq!(this.ring.change(|state| state.free.len()), setup.buffers, "buffers are free at the end");
    }
}

fn check(bound: usize, scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.check(scenario);
}

/// What loom finds wrong with a scenario.
fn caught(scenario: impl Fn() + Send + Sync + 'static) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(|| check(2, scenario))) else { return "nothing".into() };
    said(&*payload)
}

const WRONG_BYTES: &str = "bytes of expert";
const ASLEEP: &str = "deadlock";

/// An expert is sent and then skipped, so that nobody waits for it; the next generation wants its buffer, and the
/// transfer retires when it likes.
fn sent_and_skipped<V: Variant>(forgery: Forgery) {
    with_ring::<V>(Setup { keep: 1, forgery, ..ONE }, |host| {
        host.begin(&[0]);
        assert!(host.issued(0));
        host.ring.skip(0).unwrap();
        host.finish();
        host.begin(&[1]);
        host.engine.retire_kept();
        assert!(host.arrived(0).unwrap());
        host.finish();
        // In whatever order.
        host.engine.arrived.lock().unwrap().sort();
        assert_eq!(*host.engine.arrived.lock().unwrap(), [0, 1]);
    });
}

/// A generation is skipped in part while it is staged, the next one is cancelled while it is.
fn skipped_and_cancelled<V: Variant>() {
    with_ring::<V>(ONE, |host| {
        host.begin(&[0, 1]);
        host.ring.skip(0).unwrap();
        assert!(host.arrived(1).unwrap());
        host.finish();
        host.begin(&[2]);
        host.ring.cancel(2);
        let arrived = host.arrived(0);
        host.finish();
        let moved = host.engine.arrived.lock().unwrap().clone();
        match arrived {
            Ok(arrived) => assert!(arrived && moved.ends_with(&[1, 2])),
            Err(RingError::Cancelled { id: named }) => assert!(named == id(2) && moved.ends_with(&[1])),
            Err(other) => panic!("{other}"),
        }
    });
}

/// More entries than buffers, none skipped.
fn twice_around<V: Variant>() {
    with_ring::<V>(ONE, |host| {
        host.begin(&[0, 1]);
        host.finish();
        assert_eq!(*host.engine.arrived.lock().unwrap(), [0, 1]);
    });
}

/// A transfer of a generation that was given up retires in the next one, whose first entry is sent and not there yet.
fn late_from_before<V: Variant>() {
    with_ring::<V>(Setup { buffers: 2, keep: 2, ..ONE }, |host| {
        host.begin(&[0]);
        assert!(host.issued(0));
        host.ring.end();
        host.begin(&[1]);
        assert!(host.issued(0));
        host.engine.retire_kept();
        assert!(
            host.ring.change(|state| state.arrived(0).is_none()),
            "another's transfer was taken for this one"
        );
        host.engine.retire_kept();
        host.finish();
    });
}

#[test]
fn a_buffer_waits_for_a_transfer_that_nobody_waits_for() {
    check(3, || sent_and_skipped::<Sound>(Forgery::None));
}

#[test]
fn skips_and_cancels_fall_anywhere() {
    check(2, skipped_and_cancelled::<Sound>);
}

#[test]
fn entries_go_around_in_order() {
    check(3, twice_around::<Sound>);
}

#[test]
fn old_transfers_are_told_from_new_ones() {
    check(2, late_from_before::<Sound>);
}

/// Two stagers that take turns: what they stage is sent in order, and the sleeping one is woken.
#[test]
fn two_stagers() {
    check(2, || {
        with_ring::<Sound>(Setup { buffers: 2, stagers: 2, ..ONE }, |host| {
            host.begin(&[0, 1]);
            host.finish();
            assert_eq!(*host.engine.arrived.lock().unwrap(), [0, 1]);
        })
    });
}

/// Failures end their entry and nothing else.
#[test]
fn failures_end_their_entry() {
    check(2, || {
        with_ring::<Sound>(ONE, |host| {
            host.begin(&[UNREADABLE, IMMOVABLE, 2]);
            assert!(
                matches!(host.arrived(1), Err(RingError::Transfer { id: named, .. }) if named == id(IMMOVABLE))
            );
            assert!(
                matches!(host.arrived(0), Err(RingError::Read { id: named, .. }) if named == id(UNREADABLE))
            );
            host.finish();
            assert_eq!(*host.engine.arrived.lock().unwrap(), [2]);
        })
    });
}

/// The ring ends wherever it is, and the threads go home.
#[test]
fn shutdown_falls_anywhere() {
    check(2, || {
        with_ring::<Sound>(ONE, |host| {
            host.begin(&[0, 1]);
            host.ring.end();
        })
    });
}

/// Names a mutant: [`Sound`] with one constant changed.
macro_rules! mutant {
    ($name:ident: $constant:ident) => {
        struct $name;
        impl Variant for $name {
            const $constant: bool = true;
        }
    };
}
mutant!(TakesOldForNew: TAKES_OLD_FOR_NEW);
mutant!(WakesBeforePublishing: WAKES_BEFORE_PUBLISHING);
mutant!(LetsStagersSleep: LETS_STAGERS_SLEEP);
mutant!(LetsIssuerSleep: LETS_ISSUER_SLEEP);
mutant!(LetsHostSleep: LETS_HOST_SLEEP);

/// Mutant: a buffer is filled without its transfer having retired.
#[test]
fn mutant_without_the_wait() {
    let found = caught(|| sent_and_skipped::<Sound>(Forgery::WhenSent));
    assert!(found.contains(WRONG_BYTES), "{found}");
}

/// Mutant: the first jobs of a generation don't wait for the transfers of the last one.
#[test]
fn mutant_waits_from_the_second_lap() {
    let found = caught(|| sent_and_skipped::<Sound>(Forgery::AtBegin));
    assert!(found.contains(WRONG_BYTES), "{found}");
}

/// Mutant: a transfer of a generation that is over is taken for one of the current.
#[test]
fn mutant_takes_old_for_new() {
    let found = caught(late_from_before::<TakesOldForNew>);
    assert!(found.contains("another's transfer"), "{found}");
}

/// Mutant: the issuer is woken before there is anything to see, and sleeps on.
#[test]
fn mutant_wakes_before_publishing() {
    let found = caught(twice_around::<WakesBeforePublishing>);
    assert!(found.contains(ASLEEP), "{found}");
}

/// Mutant: nobody wakes the stager when a buffer is free.
#[test]
fn mutant_lets_stagers_sleep() {
    let found = caught(twice_around::<LetsStagersSleep>);
    assert!(found.contains(ASLEEP), "{found}");
}

/// Mutant: nobody wakes the issuer.
#[test]
fn mutant_lets_the_issuer_sleep() {
    let found = caught(twice_around::<LetsIssuerSleep>);
    assert!(found.contains(ASLEEP), "{found}");
}

/// Mutant: nobody wakes the host.
#[test]
fn mutant_lets_the_host_sleep() {
    let found = caught(twice_around::<LetsHostSleep>);
    assert!(found.contains(ASLEEP), "{found}");
}
