//! The pool's protocol under two model checkers, and mutants of it that they must catch.
//!
//! Loom goes through every interleaving (up to a number of forced switches) under the memory model, and knows
//! which reads race: it is the oracle for the closure's hand-over. Shuttle goes through random schedules with
//! more threads: it is the oracle for lost wake-ups. Both report a thread that nobody wakes as a deadlock.
//! The same scenarios run under both, over [`Sound`] and over each mutant:
//!
//! ```text
//! RUSTFLAGS="--cfg loom"    cargo test -p strata-topology --lib model --target-dir target/loom
//! RUSTFLAGS="--cfg shuttle" cargo test -p strata-topology --lib model --target-dir target/shuttle
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
// Not the checkers': its count is not what is modelled, and loom's aborts when a finding unwinds.
use std::sync::Arc;
use std::time::Duration;

#[cfg(loom)]
use loom::thread;
#[cfg(shuttle)]
use shuttle::thread;

use super::latch::Word;
use super::regions::{Regions, Sound, Variant};
use crate::sync::{Cell, Futex, Ordering};

const SLEEP_AT_ONCE: Duration = Duration::ZERO;
/// In a model: look once more.
const SPIN: Duration = Duration::from_micros(1);

/// Runs `body` as the caller of a pool with `workers` workers, inside a step; then stops and joins them.
fn with_pool<V: Variant + 'static>(workers: usize, spin: Duration, body: impl FnOnce(&Regions<V>)) {
    let regions = Arc::new(Regions::<V>::new(workers as u32));
    regions.begin_step();
    let threads: Vec<_> = (1..=workers)
        .map(|worker| {
            let regions = Arc::clone(&regions);
            thread::spawn(move || regions.serve(worker, spin))
        })
        .collect();
    body(&regions);
    regions.end_step();
    regions.stop();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What the tasks of one region write, without atomics: a race or a missing hand-over is the model's to find.
struct Slots(Vec<Cell<u32>>);

// SAFETY: a slot is written by the task that it belongs to and read after the region; that is what the models
// check.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(tasks: usize) -> Self {
        Self((0..tasks).map(|_| Cell::new(0)).collect())
    }
    fn add(&self, task: usize, n: u32) {
        // SAFETY: see the `Sync` of `Slots`.
        self.0[task].with_mut(|slot| unsafe { *slot += n });
    }
    fn get(&self, task: usize) -> u32 {
        // SAFETY: see the `Sync` of `Slots`.
        self.0[task].with(|slot| unsafe { *slot })
    }
}

/// Regions one after the other, each with its own closure and slots: every task runs once, by its own
/// region's closure, and the caller sees what it wrote. Workers that wake late meet every later region.
fn regions_in_a_row<V: Variant + 'static>(workers: usize, tasks: &[usize], spin: Duration) {
    with_pool::<V>(workers, spin, |regions| {
        for (region, &tasks) in tasks.iter().enumerate() {
            let mark = region as u32 + 1;
            let slots = Slots::new(tasks);
            regions.run(tasks, &|task, _| slots.add(task, mark), spin);
            (0..tasks).for_each(|task| assert_eq!(slots.get(task), mark, "task {task} of region {region}"));
        }
    });
}

/// A region with a task per thread, each of which waits for all the others: it ends only if every worker
/// comes.
fn everyone_is_needed<V: Variant + 'static>(workers: usize, rounds: usize, spin: Duration) {
    with_pool::<V>(workers, spin, |regions| {
        for _ in 0..rounds {
            let missing = Futex::new(workers as u32 + 1);
            regions.run(
                workers + 1,
                &|_, _| {
                    if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                        missing.wake_all();
                    }
                    loop {
                        match missing.load(Ordering::Acquire) {
                            0 => return,
                            n => missing.wait(n),
                        }
                    }
                },
                spin,
            );
        }
    });
}

/// A task panics: the caller gets its payload, once nobody is in the region; the next region is whole.
fn a_task_panics<V: Variant + 'static>(workers: usize, which: usize, tasks: usize) {
    with_pool::<V>(workers, SLEEP_AT_ONCE, |regions| {
        let slots = Slots::new(tasks);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            regions.run(
                tasks,
                &|task, _| {
                    slots.add(task, 1);
                    if task == which {
                        resume_unwind(Box::new(task));
                    }
                },
                SLEEP_AT_ONCE,
            );
        }));
        let payload = outcome.expect_err("the panic is the caller's");
        match payload.downcast::<usize>() {
            Ok(task) => assert_eq!(*task, which),
            // A finding of the model inside a task.
            Err(other) => resume_unwind(other),
        }
        (0..tasks).for_each(|task| assert!(slots.get(task) <= 1));
        assert_eq!(slots.get(which), 1);
        let slots = Slots::new(2);
        regions.run(2, &|task, _| slots.add(task, 1), SLEEP_AT_ONCE);
        assert_eq!((slots.get(0), slots.get(1)), (1, 1));
    });
}

/// A region whose first tasks do parts of something, whose last part's task makes something of it, and whose other tasks wait
/// for that and read it.
fn tasks_wait<V: Variant + 'static>(workers: usize, parts: usize, readers: usize, spin: Duration) {
    with_pool::<V>(workers, spin, |regions| {
        let slots = Slots::new(parts + 1);
        let mut latch = Word::<V>::new();
        latch.close(parts as u32);
        let latch = latch;
        regions.run(
            parts + readers,
            &|task, _| {
                if task < parts {
                    slots.add(task, 1);
                    if latch.done(1) {
                        slots.add(parts, (0..parts).map(|part| slots.get(part)).sum());
                        latch.open();
                    }
                } else {
                    latch.wait(spin);
                    assert_eq!(slots.get(parts), parts as u32);
                }
            },
            spin,
        );
    });
}

/// A latch of two parts without a pool: this thread does one of them, another thread the other; a third waits.
fn a_latch<V: Variant + 'static>(spin: Duration) {
    let mut latch = Word::<V>::new();
    latch.close(2);
    let shared = Arc::new((latch, Slots::new(3)));
    let part = |shared: &(Word<V>, Slots), part: usize| {
        let (latch, slots) = shared;
        slots.add(part, 1);
        if latch.done(1) {
            slots.add(2, slots.get(0) + slots.get(1));
            latch.open();
        }
    };
    let other = Arc::clone(&shared);
    let other = thread::spawn(move || part(&other, 1));
    let waiter = Arc::clone(&shared);
    let waiter = thread::spawn(move || {
        waiter.0.wait(spin);
        assert_eq!(waiter.1.get(2), 2);
    });
    part(&shared, 0);
    other.join().unwrap();
    waiter.join().unwrap();
}

/// The pool goes while its workers sleep, or are about to.
fn stops_while_asleep<V: Variant + 'static>(workers: usize) {
    with_pool::<V>(workers, SLEEP_AT_ONCE, |_| {});
}

/// Names a mutant: [`Sound`] with one constant turned on.
macro_rules! mutant {
    ($name:ident: $flaw:ident) => {
        struct $name;
        impl Variant for $name {
            const $flaw: bool = true;
        }
    };
}
mutant!(CallBeforeClaim: CALL_BEFORE_CLAIM);
#[cfg(loom)]
mutant!(ClaimBeforeJob: CLAIM_BEFORE_JOB);
#[cfg(loom)]
mutant!(RelaxedClaim: RELAXED_CLAIM);
mutant!(FinishedBeforeRun: FINISHED_BEFORE_RUN);
mutant!(SleepersBeforeEpoch: SLEEPERS_BEFORE_EPOCH);
mutant!(SilentSleeper: SILENT_SLEEPER);
mutant!(SilentCaller: SILENT_CALLER);
mutant!(StopAfterEpoch: STOP_AFTER_EPOCH);
mutant!(ForgetAbandoned: FORGET_ABANDONED);
mutant!(SilentWaiter: SILENT_WAITER);
#[cfg(loom)]
mutant!(OpenBeforeLast: OPEN_BEFORE_LAST);
#[cfg(loom)]
mutant!(RelaxedParts: RELAXED_PARTS);

/// Whether the checker finds something wrong with `scenario`.
fn caught(scenario: impl Fn() + Send + Sync + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| check(scenario))).is_err()
}

/// Every interleaving with at most two switches that no thread asked for, or many random schedules.
fn check(scenario: impl Fn() + Send + Sync + 'static) {
    check_within(2, scenario);
}

/// [`check`] with so many unasked switches: fewer where there are more threads.
#[cfg(loom)]
fn check_within(switches: usize, scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(scenario);
}

#[cfg(shuttle)]
fn check_within(_switches: usize, scenario: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(scenario, 2000);
}

#[test]
fn two_regions() {
    check(|| regions_in_a_row::<Sound>(1, &[2, 2], SLEEP_AT_ONCE));
}

#[test]
fn two_regions_spinning() {
    check(|| regions_in_a_row::<Sound>(1, &[2, 2], SPIN));
}

#[test]
fn a_region_more_tasks_than_threads() {
    check(|| regions_in_a_row::<Sound>(1, &[3, 2], SLEEP_AT_ONCE));
}

/// Region of one task between two others: it runs beside workers that are still waking.
#[test]
fn a_region_of_one_between() {
    check(|| regions_in_a_row::<Sound>(1, &[2, 1, 2], SLEEP_AT_ONCE));
}

#[test]
fn two_workers() {
    check_within(1, || regions_in_a_row::<Sound>(2, &[3], SLEEP_AT_ONCE));
}

/// Beyond loom's reach: many threads, late for many regions.
#[cfg(shuttle)]
#[test]
fn many_workers() {
    check(|| regions_in_a_row::<Sound>(4, &[2, 5, 2, 1, 9, 3], SLEEP_AT_ONCE));
    check(|| regions_in_a_row::<Sound>(3, &[4, 4, 4], SPIN));
    check(|| everyone_is_needed::<Sound>(4, 3, SLEEP_AT_ONCE));
    check(|| everyone_is_needed::<Sound>(3, 3, SPIN));
    check(|| a_task_panics::<Sound>(3, 4, 9));
    check(|| tasks_wait::<Sound>(3, 3, 4, SLEEP_AT_ONCE));
}

#[test]
fn every_worker_comes() {
    check(|| everyone_is_needed::<Sound>(1, 2, SLEEP_AT_ONCE));
    check(|| everyone_is_needed::<Sound>(1, 2, SPIN));
    check_within(1, || everyone_is_needed::<Sound>(2, 1, SLEEP_AT_ONCE));
}

#[test]
fn latches_open() {
    check(|| a_latch::<Sound>(SLEEP_AT_ONCE));
    check(|| a_latch::<Sound>(SPIN));
}

#[test]
fn tasks_wait_for_tasks() {
    check(|| tasks_wait::<Sound>(1, 1, 1, SLEEP_AT_ONCE));
    check(|| tasks_wait::<Sound>(1, 2, 1, SLEEP_AT_ONCE));
    check(|| tasks_wait::<Sound>(1, 2, 2, SPIN));
    check_within(1, || tasks_wait::<Sound>(2, 2, 2, SLEEP_AT_ONCE));
}

#[test]
fn panics_reach_the_caller() {
    check(|| a_task_panics::<Sound>(1, 0, 2));
    check(|| a_task_panics::<Sound>(1, 0, 3));
    check(|| a_task_panics::<Sound>(1, 1, 2));
}

#[test]
fn stops() {
    check(|| stops_while_asleep::<Sound>(1));
    check(|| stops_while_asleep::<Sound>(2));
}

#[test]
fn mutant_called_too_early() {
    assert!(caught(|| everyone_is_needed::<CallBeforeClaim>(1, 1, SLEEP_AT_ONCE)));
}

/// Only loom knows plain memory.
#[cfg(loom)]
#[test]
fn mutant_claim_before_the_closure() {
    assert!(caught(|| regions_in_a_row::<ClaimBeforeJob>(1, &[2, 2], SLEEP_AT_ONCE)));
}

/// Only loom knows memory orders.
#[cfg(loom)]
#[test]
fn mutant_claim_without_the_closure() {
    assert!(caught(|| regions_in_a_row::<RelaxedClaim>(1, &[2], SLEEP_AT_ONCE)));
}

#[test]
fn mutant_finished_too_early() {
    assert!(caught(|| regions_in_a_row::<FinishedBeforeRun>(1, &[2, 2], SLEEP_AT_ONCE)));
}

#[test]
fn mutant_looks_for_sleepers_too_early() {
    assert!(caught(|| everyone_is_needed::<SleepersBeforeEpoch>(1, 1, SLEEP_AT_ONCE)));
}

#[test]
fn mutant_sleeper_unannounced() {
    assert!(caught(|| everyone_is_needed::<SilentSleeper>(1, 1, SLEEP_AT_ONCE)));
}

#[test]
fn mutant_caller_unannounced() {
    assert!(caught(|| regions_in_a_row::<SilentCaller>(1, &[2], SLEEP_AT_ONCE)));
}

#[test]
fn mutant_stop_after_the_call() {
    assert!(caught(|| stops_while_asleep::<StopAfterEpoch>(1)));
}

#[test]
fn mutant_abandoned_tasks_forgotten() {
    assert!(caught(|| a_task_panics::<ForgetAbandoned>(1, 0, 3)));
}

#[test]
fn mutant_waiter_unannounced() {
    assert!(caught(|| a_latch::<SilentWaiter>(SLEEP_AT_ONCE)));
}

/// Only loom knows plain memory.
#[cfg(loom)]
#[test]
fn mutant_latch_open_too_early() {
    assert!(caught(|| a_latch::<OpenBeforeLast>(SLEEP_AT_ONCE)));
}

/// Only loom knows memory orders.
#[cfg(loom)]
#[test]
fn mutant_parts_without_their_effects() {
    assert!(caught(|| a_latch::<RelaxedParts>(SLEEP_AT_ONCE)));
}
