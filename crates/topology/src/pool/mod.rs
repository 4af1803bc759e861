//! The sleeping pool: threads that compute one region at a time, and sleep when they wait.
//!
//! Owns the worker threads and the rule for spinning; the protocol between them is `regions`. Does not know
//! what a task is. A *region* is a number of tasks over one closure; its caller takes part as worker 0 and
//! gets on when every task has returned. A *step* ([`Pool::begin_step`]) is a stretch of regions that follow each
//! other closely, such as one decode step.
//!
//! Invariant (the project's promise that no thread spins while it waits): a thread of the pool spins only
//! inside a step, at most [`Pool::SPIN_LIMIT`] at a time (between regions, or at a [`Latch`] inside of one), and never when there are more threads than CPUs or
//! the process has a CPU quota. Everything else is a sleep on a futex.
//!
//! A region allocates nothing. What it costs is `benches/pool.rs`.

mod job;
mod latch;
#[cfg(all(test, any(loom, shuttle)))]
mod model;
mod regions;
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;

use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::affinity::spawn;
use crate::roles::{AssignError, Assignment, Role};
use crate::topology::Topology;
pub use latch::{Last, Latch};
use regions::Regions;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The number of threads is none that can be had.
    #[error(transparent)]
    Assign(#[from] AssignError),
    /// The system refuses a thread.
    #[error(
        "the system refused worker thread {worker} of {threads}: {source}; \
         ask for fewer with --threads or raise the process limit"
    )]
    Spawn {
        /// Which worker; the caller is 0.
        worker: usize,
        /// How many threads the pool was to have.
        threads: usize,
        /// The system's word.
        source: std::io::Error,
    },
}

/// Threads that run the tasks of one region at a time.
///
/// Dropping the pool stops and joins its workers.
pub struct Pool {
    regions: Arc<Regions>,
    workers: Vec<JoinHandle<()>>,
    spin: Duration,
}

impl Pool {
    /// The longest that a thread spins at a time, and only inside a step.
    pub const SPIN_LIMIT: Duration = Duration::from_micros(20);

    /// A pool of `threads` threads, the caller counted; by default one per physical core (see
    /// [`Topology::assign`]).
    pub fn new(topology: &Topology, threads: impl Into<Option<usize>>) -> Result<Self, PoolError> {
        Self::with(&topology.assign(threads.into())?)
    }

    /// A pool with the threads and CPU sets of `assignment`. The thread that will call [`Pool::run`] is not
    /// touched: spawn it as [`Role::Driver`].
    pub fn with(assignment: &Assignment) -> Result<Self, PoolError> {
        let threads = assignment.threads();
        // A little short of the limit, for the looks between two readings of the clock.
        let spin = if assignment.may_spin() { Self::SPIN_LIMIT.mul_f32(0.95) } else { Duration::ZERO };
        let mut pool = Self {
            regions: Arc::new(Regions::new(threads as u32 - 1)),
            workers: Vec::with_capacity(threads - 1),
            spin,
        };
        for worker in 1..threads {
            let regions = Arc::clone(&pool.regions);
            let name = format!("compute-{worker}");
            let thread =
                spawn(Role::Compute, &assignment.worker(worker), &name, move || regions.serve(worker, spin));
            // An early return drops the pool, which joins those that were spawned.
            pool.workers.push(thread.map_err(|source| PoolError::Spawn { worker, threads, source })?);
        }
        // All come up before the first region: what the system and the library set up for a thread is not set up in the middle
        // of work.
        let up = Barrier::new(threads);
        pool.run(threads, &|_, _| _ = up.wait());
        Ok(pool)
    }

    /// How many threads run tasks, the caller counted. Worker numbers are below it.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(task, worker)` once for every task below `tasks` and returns when all have returned.
    ///
    /// Tasks are claimed in ascending order by whoever is free; the calling thread is worker 0. At any time,
    /// no two threads have the same worker number, so it can index scratch. What the tasks wrote is visible
    /// after the return. One task, or a pool of one thread, runs without any other thread being told.
    ///
    /// # Panics
    /// When a task panics: with the payload of the first that did, after every thread has left the region;
    /// tasks not begun by then are left out. The pool stays usable. Also when called from inside a task or
    /// from two threads at once, and for more than 2^31 - 2 tasks.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let spin = if self.regions.stepping() { self.spin } else { Duration::ZERO };
        self.regions.run(tasks, f, spin);
    }

    /// Cuts `0..len` into chunks of `grain` (the last may be shorter) and runs `f(chunk, worker)` once for
    /// each, as [`Pool::run`] does. Where the cuts are depends on `len` and `grain` only, not on the number
    /// of threads.
    ///
    /// # Panics
    /// As [`Pool::run`]; and when `grain` is 0.
    pub fn run_ranges(&self, len: usize, grain: usize, f: &(dyn Fn(Range<usize>, usize) + Sync)) {
        self.run(len.div_ceil(grain), &|task, worker| {
            let start = task * grain;
            f(start..len.min(start.saturating_add(grain)), worker);
        });
    }

    /// Waits until `latch` is open, as threads wait between regions: with a spin inside a step, then asleep. Only a task of the
    /// running region may wait, and only for tasks of that region with lower numbers than its own: these have begun, as tasks
    /// are claimed in ascending order.
    pub fn wait_for(&self, latch: &Latch) {
        latch.wait(if self.regions.stepping() { self.spin } else { Duration::ZERO });
    }

    /// Begins a step, unless one is running: until [`Pool::end_step`], threads that wait for the next region may
    /// spin for [`Pool::SPIN_LIMIT`] first. For regions that follow each other closely, not over a wait for a client, a
    /// disk or a device that the caller can foresee: each costs every worker one such spin.
    pub fn begin_step(&self) {
        self.regions.begin_step();
    }

    /// A region of the running step will come in a moment: wakes the workers that sleep, who then spin for it like after one. To be called so
    /// long before as it takes them to wake.
    pub fn rouse(&self) {
        if self.regions.stepping() && self.spin > Duration::ZERO {
            self.regions.rouse();
        }
    }

    /// Ends the step: who waits, sleeps.
    pub fn end_step(&self) {
        self.regions.end_step();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.regions.stop();
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a task; nothing else in it panics.
            let _ = worker.join();
        }
    }
}
