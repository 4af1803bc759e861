//! The protocol of the pool: how a caller and its workers share a region's tasks, and how both sleep.
//!
//! Owns the words that both sides look at; does not own threads, CPU sets or the decision how long to spin.
//! It is written over `crate::sync`, so that loom and shuttle run the same source.
//!
//! A region goes through three words, one of them twice:
//!
//! 1. `left`, the tasks not yet finished, and one more for the caller. The caller moves it from 0 to
//!    `tasks + 1`, which also locks out a second caller.
//! 2. `claim`, `tasks << 32 | next`. Set once the closure is in place (release). Whoever adds one to it and
//!    gets `next < tasks` (acquire) owns that task.
//! 3. `epoch`, which only says "look again": workers sleep on it. The caller adds one and wakes as many
//!    sleepers as the region has tasks for.
//! 4. `left` again: everyone subtracts what they ran, once, at their end; who gets to one wakes the caller if
//!    it sleeps. The caller, done with everything, sets it to 0.
//!
//! Invariant: the closure is read only by the owner of an unfinished task. A region ends when no task is
//! unfinished, and the closure is replaced only after that: so a worker that wakes late, a region or a
//! thousand later, finds either nothing to claim or a task of the region that runs now, and then reads that
//! region's closure.
//!
//! Nothing waits for a worker that has claimed nothing. A worker that is late (its CPU is taken by someone
//! else) costs parallelism, not time: the caller goes through the tasks itself.
//!
//! Nobody sleeps through a region: a worker reads `epoch` before it looks for tasks and sleeps only on that
//! value. It announces itself in `sleepers` before it sleeps; the caller changes `epoch` before it reads
//! `sleepers`. Both are read-modify-writes of `sleepers`, so one of them comes second and sees the other.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use super::job::Job;
use crate::sync::{
    AtomicBool, AtomicU32, AtomicU64, Futex, Mutex, MutexGuard, Ordering, Patience, PoisonError,
};

/// The bit of `left` that says that the caller sleeps.
const ASLEEP: u32 = 1 << 31;

/// The protocol with a part taken out, for the tests that show that the models notice. [`Sound`] is what
/// runs.
pub(super) trait Variant {
    /// Workers are called before the tasks are there.
    const CALL_BEFORE_CLAIM: bool = false;
    /// The tasks are there before their closure is.
    const CLAIM_BEFORE_JOB: bool = false;
    /// The claim word does not carry the closure with it.
    const RELAXED_CLAIM: bool = false;
    /// A task counts as finished when it is claimed.
    const FINISHED_BEFORE_RUN: bool = false;
    /// The caller looks for sleepers before it changes the epoch.
    const SLEEPERS_BEFORE_EPOCH: bool = false;
    /// A worker sleeps without announcing itself.
    const SILENT_SLEEPER: bool = false;
    /// The caller sleeps without saying so in `left`.
    const SILENT_CALLER: bool = false;
    /// Workers are told to look before they can see that they shall stop.
    const STOP_AFTER_EPOCH: bool = false;
    /// Tasks that nobody claims after a panic are not accounted for.
    const FORGET_ABANDONED: bool = false;
    /// Who waits for a latch sleeps without saying so.
    const SILENT_WAITER: bool = false;
    /// A latch is open once its parts are done, whatever is still made of them.
    const OPEN_BEFORE_LAST: bool = false;
    /// What the parts of a latch did is not carried to whoever did the last.
    const RELAXED_PARTS: bool = false;
}

/// The protocol as it is.
pub(super) struct Sound;
impl Variant for Sound {}

/// Keeps what one side writes and the other watches away from its neighbours; 128 since x86 prefetches lines
/// in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// What a caller writes and workers watch: one cache line.
struct Front {
    epoch: Futex,
    /// Whether a step is running: workers may spin while it is.
    stepping: AtomicBool,
    claim: AtomicU64,
    job: Job,
    stop: AtomicBool,
}

/// What workers write and the caller watches.
struct Back {
    left: Futex,
    panicked: AtomicBool,
}

/// The shared words of one pool.
pub(super) struct Regions<V = Sound> {
    front: Line<Front>,
    back: Line<Back>,
    /// Workers that sleep on `epoch`, or are about to.
    sleepers: Line<AtomicU32>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    workers: u32,
    variant: PhantomData<fn() -> V>,
}

impl<V: Variant> Regions<V> {
    /// The most tasks a region can have.
    pub(super) const MOST_TASKS: usize = (ASLEEP - 2) as usize;

    /// For `workers` threads besides the caller.
    pub(super) fn new(workers: u32) -> Self {
        Self {
            front: Line(Front {
                epoch: Futex::new(0),
                stepping: AtomicBool::new(false),
                claim: AtomicU64::new(0),
                job: Job::new(),
                stop: AtomicBool::new(false),
            }),
            back: Line(Back { left: Futex::new(0), panicked: AtomicBool::new(false) }),
            sleepers: Line(AtomicU32::new(0)),
            panic: Mutex::new(None),
            workers,
            variant: PhantomData,
        }
    }

    /// Runs `f(task, worker)` for each task below `tasks` and returns when all have returned. The caller is
    /// worker 0. It spins at most `spin` for the last of the others, then sleeps.
    ///
    /// # Panics
    /// With the payload of the first task that panicked (tasks not yet claimed are then left out); or when a
    /// region is running already; or when `tasks` exceeds [`Self::MOST_TASKS`].
    pub(super) fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync), spin: Duration) {
        assert!(tasks <= Self::MOST_TASKS, "a region can have {} tasks, not {tasks}", Self::MOST_TASKS);
        if tasks == 0 {
            return;
        }
        let Back { left, panicked } = &self.back.0;
        // Acquire: what the last region of another caller did is done.
        if left.compare_exchange(0, tasks as u32 + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            panic!("a region of this pool is running already; regions neither nest nor overlap");
        }
        let _held = Held(left);
        if tasks == 1 || self.workers == 0 {
            (0..tasks).for_each(|task| f(task, 0));
            return;
        }
        if V::CALL_BEFORE_CLAIM {
            self.call_workers(tasks);
        }
        if V::CLAIM_BEFORE_JOB {
            self.front.0.claim.swap((tasks as u64) << 32, Ordering::Release);
        }
        // SAFETY: this thread took `left` from 0, so no other `put` runs until it gives it back. No `call`
        // runs: a call is made only by the owner of an unfinished task, and there was none; earlier ones
        // happen before this by the releases of `left` and our acquire. `f` is borrowed until this function
        // returns, or unwinds at its end, which is after `await_rest` has seen that no task is unfinished;
        // nothing between panics.
        unsafe { self.front.0.job.put(f) };
        if !V::CLAIM_BEFORE_JOB {
            let order = if V::RELAXED_CLAIM { Ordering::Relaxed } else { Ordering::Release };
            // A swap only for loom, which lets a store be overtaken by a late worker's earlier addition. It
            // costs nothing: the line is needed for writing anyway.
            self.front.0.claim.swap((tasks as u64) << 32, order);
        }
        if !V::CALL_BEFORE_CLAIM {
            self.call_workers(tasks);
        }
        self.work(0);
        self.await_rest(spin);
        if panicked.load(Ordering::Relaxed) {
            panicked.store(false, Ordering::Relaxed);
            if let Some(payload) = self.first_panic().take() {
                resume_unwind(payload);
            }
        }
    }

    /// A worker's life: runs what there is, waits, until [`Self::stop`]. Spins at most `spin` at a time, only
    /// while a step is running.
    pub(super) fn serve(&self, worker: usize, spin: Duration) {
        let Front { epoch, stop, .. } = &self.front.0;
        loop {
            // Before looking for work, so that work that comes after the look changes it.
            let seen = epoch.load(Ordering::Acquire);
            if stop.load(Ordering::Acquire) {
                return;
            }
            self.work(worker);
            self.await_call(seen, spin);
        }
    }

    /// Lets every worker return from [`Self::serve`].
    pub(super) fn stop(&self) {
        let Front { epoch, stop, .. } = &self.front.0;
        if !V::STOP_AFTER_EPOCH {
            stop.store(true, Ordering::Release);
        }
        epoch.fetch_add(1, Ordering::Release);
        epoch.wake_all();
        if V::STOP_AFTER_EPOCH {
            stop.store(true, Ordering::Release);
        }
    }

    /// Wakes all who sleep. They look, and wait for a region as if one had just ended.
    pub(super) fn rouse(&self) {
        let epoch = &self.front.0.epoch;
        epoch.fetch_add(1, Ordering::Release);
        if self.sleepers.0.fetch_add(0, Ordering::AcqRel) > 0 {
            epoch.wake_all();
        }
    }

    /// How many sleep, or are about to.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(super) fn asleep(&self) -> u32 {
        self.sleepers.0.fetch_add(0, Ordering::AcqRel)
    }

    /// A step begins: workers may spin between its regions.
    pub(super) fn begin_step(&self) {
        self.front.0.stepping.store(true, Ordering::Relaxed);
    }

    /// A step ends: workers stop spinning at once.
    pub(super) fn end_step(&self) {
        self.front.0.stepping.store(false, Ordering::Relaxed);
    }

    /// Whether a step is running.
    pub(super) fn stepping(&self) -> bool {
        self.front.0.stepping.load(Ordering::Relaxed)
    }

    /// A task of the current region, if there is one that nobody owns.
    #[inline]
    fn claim(&self) -> Option<usize> {
        let claim = &self.front.0.claim;
        let split = |word: u64| ((word >> 32) as u32, word as u32);
        // A look before the write: idle workers must not pull the line away from those that work, and `next`
        // overshoots by no more than one per thread.
        let (tasks, next) = split(claim.load(Ordering::Relaxed));
        if next >= tasks {
            return None;
        }
        let (tasks, next) = split(claim.fetch_add(1, Ordering::Acquire));
        (next < tasks).then_some(next as usize)
    }

    /// Runs tasks while there are any.
    fn work(&self, worker: usize) {
        let Back { left, panicked } = &self.back.0;
        let mut ran = 0u32;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            while let Some(task) = self.claim() {
                ran += 1;
                if V::FINISHED_BEFORE_RUN {
                    left.fetch_sub(1, Ordering::AcqRel);
                    ran -= 1;
                }
                // SAFETY: this thread owns an unfinished task: it is in `ran`, which is subtracted from
                // `left` only below. The claim acquired the word that was released after the `put` of its
                // region, whose `run` does not return, and so neither ends the borrow nor lets another `put`
                // begin, before `left` is down to 1.
                unsafe { self.front.0.job.call(task, worker) };
            }
        }));
        if let Err(payload) = outcome {
            let abandoned = self.abandon();
            if !V::FORGET_ABANDONED {
                ran += abandoned;
            }
            let mut first = self.first_panic();
            if first.is_none() {
                *first = Some(payload);
            } else {
                // Not dropped: a payload whose drop panics would end this thread with its tasks unfinished.
                std::mem::forget(payload);
            }
            drop(first);
            panicked.store(true, Ordering::Relaxed);
        }
        if ran > 0 && left.fetch_sub(ran, Ordering::AcqRel) == (ran + 1) | ASLEEP {
            left.wake_one();
        }
    }

    fn first_panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the tasks that nobody owns out of the current region; returns how many those were. Called by an
    /// owner of an unfinished task, so the region is the owner's.
    fn abandon(&self) -> u32 {
        let word = self.front.0.claim.swap(0, Ordering::Relaxed);
        ((word >> 32) as u32).saturating_sub(word as u32)
    }

    /// Tells workers to look, and wakes as many sleepers as `tasks` has work for, the caller and those awake
    /// counted.
    fn call_workers(&self, tasks: usize) {
        let epoch = &self.front.0.epoch;
        let early = V::SLEEPERS_BEFORE_EPOCH.then(|| self.sleepers.0.fetch_add(0, Ordering::AcqRel));
        epoch.fetch_add(1, Ordering::Release);
        // Adding zero, not a load: see the module's last paragraph.
        let asleep = early.unwrap_or_else(|| self.sleepers.0.fetch_add(0, Ordering::AcqRel));
        let helpers = (tasks as u32 - 1).min(self.workers);
        let wanted = helpers.saturating_sub(self.workers - asleep);
        if wanted >= asleep && wanted > 0 {
            epoch.wake_all();
        } else {
            (0..wanted).for_each(|_| epoch.wake_one());
        }
    }

    /// Waits until the epoch is no longer `seen`.
    fn await_call(&self, seen: u32, spin: Duration) {
        let epoch = &self.front.0.epoch;
        let mut patience = Patience::new(spin);
        while self.stepping() {
            if epoch.load(Ordering::Acquire) != seen {
                return;
            }
            if !patience.again() {
                break;
            }
        }
        if !V::SILENT_SLEEPER {
            self.sleepers.0.fetch_add(1, Ordering::AcqRel);
        }
        while epoch.load(Ordering::Acquire) == seen {
            epoch.wait(seen);
        }
        if !V::SILENT_SLEEPER {
            self.sleepers.0.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits until no task is unfinished: until `left` is one, but for the sleep bit.
    fn await_rest(&self, spin: Duration) {
        let left = &self.back.0.left;
        let mut patience = Patience::new(spin);
        loop {
            if left.load(Ordering::Acquire) == 1 {
                return;
            }
            if !patience.again() {
                break;
            }
        }
        let mark = if V::SILENT_CALLER { 0 } else { ASLEEP };
        let mut now = left.fetch_or(mark, Ordering::AcqRel) | mark;
        while now & !ASLEEP != 1 {
            left.wait(now);
            now = left.load(Ordering::Acquire);
        }
    }
}

/// The caller's hold on the pool; given back when its region ends, also by a panic.
struct Held<'a>(&'a Futex);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
