//! CPUs, caches, NUMA nodes, capacities and masks as one value; thread roles; the sleeping pool.
//!
//! The crate answers three questions and nothing else.
//!
//! - *What is this machine, for this process?* [`Topology`]: read once, from a tree of files, so that a
//!   test can be any machine. It carries the starting affinity mask, the cgroup's CPU quota and set, and the
//!   [`MemoryLimits`].
//! - *Which thread belongs where?* [`Topology::assign`] is a pure function from a topology and a wished
//!   number of threads to an [`Assignment`]: a CPU set for each [`Role`]. [`spawn`] is how a thread gets one.
//! - *How do many threads compute one thing?* [`Pool`]: regions of tasks, claimed dynamically, whose threads
//!   sleep when they wait.
//!
//! It does not know what is computed, and it reads no environment variable.
//!
//! Invariants: no CPU set leaves the starting mask; no thread inherits its parent's set; no thread of the
//! pool spins longer than [`Pool::SPIN_LIMIT`], ever, nor at all outside a step ([`Pool::begin_step`]).
//!
//! `unsafe` lives in `pool::job` (the erased lifetime of a region's closure) and at its two call sites in
//! `pool::regions`, which keep the obligations stated there.

mod affinity;
mod cgroup;
mod cpuset;
#[cfg(test)]
mod machines;
mod memory;
mod pool;
mod roles;
mod source;
mod sync;
mod topology;

pub use affinity::{Refusal, refusal, spawn};
pub use cgroup::CpuQuota;
pub use cpuset::{CpuSet, ParseCpuSetError};
pub use memory::{CgroupMemory, MemoryLimits, Resident};
pub use pool::{Last, Latch, Pool, PoolError};
pub use roles::{AssignError, Assignment, Role};
pub use topology::{Caches, Cpu, Kind, Topology};
