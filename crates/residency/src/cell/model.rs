//! The protocol under loom, in every interleaving of a few threads, and mutants of it that loom must catch.
//!
//! Values are numbers, and the value of epoch e is e + 1, so that a reader knows what it must find; 0 stands for a
//! slot that nobody should read. Loom itself finds any reading that overlaps a writing.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p strata-residency --lib` and a target folder of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;

use loom::sync::Arc;
use loom::thread;

use super::{Cell, Refused, Sound, Variant};
use crate::sync::Ordering;

type Numbers<V> = Arc<Cell<u64, V>>;

fn numbers<V: Variant>() -> Numbers<V> {
    Arc::new(Cell::new(1))
}

/// How often each epoch was read, over all schedules: a check that saw the first only would show nothing.
static READS: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Reads with the handle of whatever is current, twice.
fn read<V: Variant>(cell: &Numbers<V>) {
    let epoch = cell.epoch();
    for _ in 0..2 {
        match cell.pin(epoch) {
            Ok(value) => {
                READS[epoch.0 as usize].fetch_add(1, Ordering::Relaxed);
                assert_eq!(*value, epoch.0 + 1);
                assert_eq!(cell.epoch(), epoch, "the value moved under a pin");
            }
            Err(refused) => {
                assert_eq!(refused, Refused::Stale);
                assert_ne!(cell.epoch(), epoch, "a good handle was refused");
            }
        }
    }
}

/// Moves the value on as often as it can in `attempts`; every value that comes back is the one that should.
fn go_on<V: Variant>(cell: &Numbers<V>, attempts: usize) {
    for _ in 0..attempts {
        let epoch = cell.epoch();
        match cell.replace(epoch, epoch.0 + 2) {
            Ok(old) => assert_eq!(old, epoch.0 + 1),
            Err((Refused::Pinned, new)) => assert_eq!(new, epoch.0 + 2),
            Err((Refused::Stale, new)) => {
                assert_eq!(new, epoch.0 + 2);
                assert_ne!(cell.epoch(), epoch);
            }
        }
    }
}

/// After everyone is gone no pin is left: the value can be read and moved.
fn at_rest<V: Variant>(cell: &Numbers<V>) {
    let epoch = cell.epoch();
    assert_eq!(cell.pin(epoch).map(|value| *value), Ok(epoch.0 + 1));
    assert_eq!(cell.replace(epoch, epoch.0 + 2), Ok(epoch.0 + 1));
}

/// A reader beside a mover that moves twice, so that both slots are current in turn. Loom explores outwards from the
/// schedule in which a thread runs until it must stop and keeps only a word's last access to branch on, so each of
/// the two goes first once.
fn reader_beside_mover<V: Variant + Send + Sync + 'static>() {
    let cell = numbers::<V>();
    let mover = spawned(&cell, |cell| go_on(cell, 2));
    read(&cell);
    mover.join().unwrap();
    at_rest(&cell);
}

fn mover_beside_reader<V: Variant + Send + Sync + 'static>() {
    let cell = numbers::<V>();
    let reader = spawned(&cell, read);
    go_on(&cell, 2);
    reader.join().unwrap();
    at_rest(&cell);
}

/// Two readers and a mover.
fn readers_beside_mover<V: Variant + Send + Sync + 'static>() {
    let cell = numbers::<V>();
    let readers = [spawned(&cell, read), spawned(&cell, read)];
    go_on(&cell, 2);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    at_rest(&cell);
}

/// Two movers, one of which also reads.
fn movers_beside_each_other<V: Variant + Send + Sync + 'static>() {
    let cell = numbers::<V>();
    let other = spawned(&cell, |cell| {
        go_on(cell, 1);
        read(cell);
    });
    go_on(&cell, 2);
    other.join().unwrap();
    at_rest(&cell);
}

fn spawned<V>(cell: &Numbers<V>, work: impl FnOnce(&Numbers<V>) + 'static) -> thread::JoinHandle<()>
where
    V: Variant + Send + Sync + 'static,
{
    let cell = cell.clone();
    thread::spawn(move || work(&cell))
}

fn check(scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(scenario);
}

/// Whether loom finds something wrong with a mutant.
fn caught<V: Variant + Send + Sync + 'static>() -> bool {
    let scenarios: [fn(); 2] = [reader_beside_mover::<V>, mover_beside_reader::<V>];
    scenarios.into_iter().any(|scenario| catch_unwind(AssertUnwindSafe(|| check(scenario))).is_err())
}

#[test]
fn a_pinned_value_does_not_move() {
    check(reader_beside_mover::<Sound>);
    check(mover_beside_reader::<Sound>);
    assert!(READS[..3].iter().all(|reads| reads.load(Ordering::Relaxed) > 0), "{READS:?}");
}

#[test]
fn readers_do_not_disturb_each_other() {
    check(readers_beside_mover::<Sound>);
}

#[test]
fn one_mover_at_a_time() {
    check(movers_beside_each_other::<Sound>);
}

/// Names a mutant: [`Sound`] with one constant changed.
macro_rules! mutant {
    ($name:ident: $constant:ident: $type:ty = $value:expr) => {
        struct $name;
        impl Variant for $name {
            const $constant: $type = $value;
        }
    };
}
mutant!(LooksBeforeCounting: LOOKS_BEFORE_COUNTING: bool = true);
mutant!(AcceptsStale: ACCEPTS_STALE: bool = true);
mutant!(MovesUnderPins: MOVES_UNDER_PINS: bool = true);
mutant!(WritesLate: WRITES_LATE: bool = true);
mutant!(RelaxedUnpin: UNPIN: Ordering = Ordering::Relaxed);
mutant!(UnpublishedMove: MOVE: Ordering = Ordering::Acquire);
mutant!(ImpatientMove: MOVE: Ordering = Ordering::Release);

/// Mutant: a stale handle is pinned like a good one.
#[test]
fn mutant_accepts_stale_handles() {
    assert!(caught::<AcceptsStale>());
}

/// Mutant: the epoch may change between the look and the count.
#[test]
fn mutant_looks_before_counting() {
    assert!(caught::<LooksBeforeCounting>());
}

/// Mutant: a pin keeps nobody from moving the value.
#[test]
fn mutant_moves_under_pins() {
    assert!(caught::<MovesUnderPins>());
}

/// Mutant: readers of the new epoch find its slot unwritten.
#[test]
fn mutant_publishes_before_writing() {
    assert!(caught::<WritesLate>());
}

/// Mutant: nothing orders a reader's last access before the mover's.
#[test]
fn mutant_relaxed_unpin() {
    assert!(caught::<RelaxedUnpin>());
}

/// Mutant: nothing orders the slot's writing before its new readers.
#[test]
fn mutant_unpublished_move() {
    assert!(caught::<UnpublishedMove>());
}

/// Mutant: nothing orders the mover's clearing of the old slot after its last readers.
#[test]
fn mutant_impatient_move() {
    assert!(caught::<ImpatientMove>());
}
