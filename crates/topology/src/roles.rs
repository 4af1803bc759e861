//! Which thread belongs where: roles, and the CPU set of each.
//!
//! Owns the policy, as a pure function of a [`Topology`]; the system call is `affinity`'s. The rules:
//!
//! - Cores are ranked big before little, and within a kind by package, NUMA node, L3 group and number, so that few
//!   threads share a cache. A core counts as one, whatever its SMT siblings.
//! - *Driver*: the first core, all its allowed siblings. *Compute*: the first sibling of each of the next `threads - 1`
//!   cores, one set for all workers; the kernel balances inside it.
//! - *Front* (tokenizer, clients): the cores that neither drive nor compute, if there are some; else as Io.
//! - *Io* (reads and the copies behind them): everything but the driver's core, if that leaves something; else everything.
//! - With more threads than cores the compute set grows by the other siblings; with more than CPUs, driver and compute
//!   share all CPUs.
//!
//! Invariant: no set is empty and none leaves the allowed CPUs.

use std::fmt;

use crate::cpuset::CpuSet;
use crate::topology::{Cpu, Topology};

/// What a thread is for. Every thread of the program has a role, and the role decides its CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Drives the steps: decodes, launches, takes part in computing as worker 0.
    Driver,
    /// A worker of the pool.
    Compute,
    /// Reads files and copies what it read.
    Io,
    /// Faces people: tokenizer, terminal, clients.
    Front,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 4] = [Role::Driver, Role::Compute, Role::Io, Role::Front];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Driver => "driver",
            Role::Compute => "compute",
            Role::Io => "io",
            Role::Front => "front",
        })
    }
}

/// Why there is no assignment for a wished number of threads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Zero threads.
    #[error("0 threads can't compute; leave --threads out for one per physical core")]
    NoThreads,
    /// More threads than make sense on any machine.
    #[error(
        "{asked} threads are more than {limit}, the most there can be; leave --threads out for one per physical core"
    )]
    TooMany {
        /// What was asked for.
        asked: usize,
        /// [`Assignment::MOST_THREADS`].
        limit: usize,
    },
}

/// The CPU set of each role, and how many threads compute. Made by [`Topology::assign`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    threads: usize,
    may_spin: bool,
    driver: CpuSet,
    compute: CpuSet,
    io: CpuSet,
    front: CpuSet,
}

impl Assignment {
    /// The most threads that can be asked for.
    pub const MOST_THREADS: usize = 4096;

    /// How many threads compute, the driver counted.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether waiting threads may spin inside a step: not with more threads than allowed CPUs, nor under a CPU quota,
    /// where a spin is paid with somebody's work.
    pub fn may_spin(&self) -> bool {
        self.may_spin
    }

    /// The CPUs of a role: never empty, always inside the starting mask.
    pub fn set(&self, role: Role) -> &CpuSet {
        match role {
            Role::Driver => &self.driver,
            Role::Compute => &self.compute,
            Role::Io => &self.io,
            Role::Front => &self.front,
        }
    }
}

impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spin = if self.may_spin { "may spin briefly inside a step" } else { "never spin" };
        writeln!(f, "{} compute threads (the driver counted); they {spin}", self.threads)?;
        for role in Role::ALL {
            writeln!(f, "  {role:8} CPUs {}", self.set(role))?;
        }
        Ok(())
    }
}

impl Topology {
    /// The CPU sets of every role for `threads` computing threads, the driver counted; see the module for the rules.
    ///
    /// By default there is a thread per physical core; under a CPU quota not more than the quota's whole CPUs (at least
    /// one), since a thread too many stops all of them until the quota's next period.
    pub fn assign(&self, threads: Option<usize>) -> Result<Assignment, AssignError> {
        match threads {
            Some(0) => return Err(AssignError::NoThreads),
            Some(asked) if asked > Assignment::MOST_THREADS => {
                return Err(AssignError::TooMany { asked, limit: Assignment::MOST_THREADS });
            }
            _ => {}
        }
        let allowed = self.allowed();
        let cores = self.ranked_cores();
        let threads = threads.unwrap_or_else(|| {
            let quota = self.quota().map_or(usize::MAX, |q| q.whole_cpus());
            cores.len().min(quota)
        });

        let all_of = |core: &[&Cpu]| core.iter().map(|cpu| cpu.id).collect::<CpuSet>();
        let driver_core = cores.first().map(|core| all_of(core)).unwrap_or_else(|| allowed.clone());
        let others = allowed.difference(&driver_core);
        let io = if others.is_empty() { allowed.clone() } else { others };

        let workers = threads - 1;
        let rest = cores.get(1..).unwrap_or_default();
        let (driver, compute) = if threads > allowed.len() {
            (allowed.clone(), allowed.clone())
        } else if workers == 0 {
            // No worker will be spawned; what a later one would share is the driver's core.
            (driver_core.clone(), driver_core.clone())
        } else if workers <= rest.len() {
            let compute = rest[..workers].iter().filter_map(|core| core.first()).map(|cpu| cpu.id).collect();
            (driver_core.clone(), compute)
        } else {
            // Siblings are asked for: first siblings of every core but the driver's, then the others in the same order,
            // the driver's core last, whose first sibling stays the driver's.
            let depth = cores.iter().map(Vec::len).max().unwrap_or(0);
            let by_sibling =
                (0..depth).flat_map(|i| rest.iter().chain(&cores[..1]).filter_map(move |core| core.get(i)));
            let first = cores[0][0].id;
            let compute = by_sibling.map(|cpu| cpu.id).filter(|&id| id != first).take(workers).collect();
            (CpuSet::from_iter([first]), compute)
        };

        let busy = driver.union(&compute);
        let idle = cores.iter().filter(|core| core.iter().all(|cpu| !busy.contains(cpu.id)));
        let spare: CpuSet = idle.flatten().map(|cpu| cpu.id).collect();
        let front = if spare.is_empty() { io.clone() } else { spare };
        let may_spin = threads <= allowed.len() && self.quota().is_none();
        Ok(Assignment { threads, may_spin, driver, compute, io, front })
    }

    /// The allowed CPUs by physical core, in the order in which cores are put to work.
    fn ranked_cores(&self) -> Vec<Vec<&Cpu>> {
        let mut cpus: Vec<&Cpu> = self.cpus().iter().filter(|cpu| self.allowed().contains(cpu.id)).collect();
        cpus.sort_by_key(|cpu| (cpu.core, cpu.id));
        let mut cores: Vec<Vec<&Cpu>> = cpus.chunk_by(|a, b| a.core == b.core).map(<[_]>::to_vec).collect();
        cores.sort_by_key(|core| {
            let cpu = core[0];
            (cpu.kind, cpu.package, cpu.node, cpu.l3, cpu.id)
        });
        cores
    }
}
