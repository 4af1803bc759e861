//! Which thread belongs where: roles, and the CPU set of each.
//!
//! Owns the policy, as a pure function of a [`Topology`]; the system call is `affinity`'s. The rules:
//!
//! - Cores are ranked big before little, and within a kind by package, NUMA node, L3 group and number, so
//!   that few threads share a cache. A core counts as one, whatever its SMT siblings.
//! - *Driver*: the first core, all its allowed siblings. *Compute*: the first sibling of each of the next
//!   `threads - 1` cores, a CPU for each worker: left to the kernel, one that is woken may land behind another that
//!   spins, and stay there until the next tick, milliseconds later.
//! - *Front* (tokenizer, clients): the cores that neither drive nor compute, if there are some; else as Io.
//! - *Io* (reads and the copies behind them): everything but the driver's core, if that leaves something;
//!   else everything.
//! - With more threads than cores the compute set grows by the other siblings; with more than CPUs, driver
//!   and compute share all CPUs, and the kernel balances.
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
        "{asked} threads are more than {limit}, the most there can be; \
         leave --threads out for one per physical core"
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

    /// Whether waiting threads may spin inside a step: not with more threads than allowed CPUs, nor under a
    /// CPU quota, where a spin is paid with somebody's work.
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

    /// The CPUs of a worker of the pool, counted from 1: one of its own, where there are enough.
    pub fn worker(&self, worker: usize) -> CpuSet {
        let own = self
            .compute
            .iter()
            .nth(worker.wrapping_sub(1))
            .filter(|_| self.threads - 1 <= self.compute.len());
        own.map_or_else(|| self.compute.clone(), |cpu| CpuSet::from_iter([cpu]))
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
    /// The CPU sets of every role for `threads` computing threads, the driver counted; see the module for the
    /// rules.
    ///
    /// By default there is a thread per physical core; under a CPU quota not more than the quota's whole CPUs
    /// (at least one), since a thread too many stops all of them until the quota's next period.
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
            // Siblings are asked for: first siblings of every core but the driver's, then the others in the
            // same order, the driver's core last, whose first sibling stays the driver's.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::{self, range};

    fn assign(tree: &crate::source::MemoryTree, threads: impl Into<Option<usize>>) -> Assignment {
        Topology::from_tree(tree).assign(threads.into()).unwrap()
    }

    /// The CPU lists of driver, compute, io and front.
    fn sets(a: &Assignment) -> [String; 4] {
        Role::ALL.map(|role| a.set(role).to_string())
    }

    /// Oracle: the rules of the module, by hand.
    #[test]
    fn desktop() {
        let tree = machines::desktop();
        let a = assign(&tree, None);
        assert_eq!((a.threads(), a.may_spin()), (6, true));
        assert_eq!(sets(&a), ["0,6", "1-5", "1-5,7-11", "1-5,7-11"]);
        // Fewer than cores: whole cores are left for what faces people.
        assert_eq!(sets(&assign(&tree, 3)), ["0,6", "1-2", "1-5,7-11", "3-5,9-11"]);
        assert_eq!(sets(&assign(&tree, 1)), ["0,6", "0,6", "1-5,7-11", "1-5,7-11"]);
        // Siblings only when asked for; the driver's own comes last.
        assert_eq!(sets(&assign(&tree, 8))[..2], ["0", "1-5,7-8"]);
        let all = assign(&tree, 12);
        assert_eq!((sets(&all)[0].as_str(), sets(&all)[1].as_str(), all.may_spin()), ("0", "1-11", true));
        let over = assign(&tree, 13);
        assert_eq!(
            (sets(&over)[0].as_str(), sets(&over)[1].as_str(), over.may_spin()),
            ("0-11", "0-11", false)
        );
    }

    /// Oracle: by hand: one L3 group fills before the other.
    #[test]
    fn chiplets_fill_one_after_the_other() {
        let tree = machines::two_chiplets();
        assert_eq!(sets(&assign(&tree, 6))[..2], ["0", "2,4,6,8,10"]);
        assert_eq!(sets(&assign(&tree, 8))[..2], ["0", "1-4,6,8,10"]);
    }

    /// Oracle: by hand: P-cores first, one thread each, then E-cores; siblings of P-cores last.
    #[test]
    fn intel_hybrid() {
        let tree = machines::intel_hybrid();
        let a = assign(&tree, None);
        assert_eq!((a.threads(), a.may_spin()), (12, true));
        assert_eq!(sets(&a)[..2], ["0-1", "2,4,6,8-15"]);
        assert_eq!(sets(&assign(&tree, 4)), ["0-1", "2,4,6", "2-15", "8-15"]);
    }

    /// Oracle: by hand. The mistake that this crate is there to prevent: work on CPU 0, a little one, because
    /// it comes first.
    #[test]
    fn arm_hybrid_leaves_the_little_first_cpu() {
        let tree = machines::arm_hybrid();
        assert_eq!(sets(&assign(&tree, 10)), ["5", "6-9,15-19", "0-4,6-19", "0-4,10-14"]);
        assert_eq!(sets(&assign(&tree, 12))[1], "0-1,6-9,15-19");
        assert_eq!(assign(&tree, None).threads(), 20);
    }

    /// Oracle: by hand: a socket fills before the other.
    #[test]
    fn two_sockets() {
        let tree = machines::two_sockets();
        assert_eq!(sets(&assign(&tree, 4))[..2], ["0,8", "2,4,6"]);
        assert_eq!(sets(&assign(&tree, None))[..2], ["0,8", "1-7"]);
    }

    /// Oracle: by hand: a mask of two cores, a quota of 2.5 CPUs, so no spinning.
    #[test]
    fn container() {
        let mut tree = machines::container();
        let a = assign(&tree, None);
        assert_eq!((a.threads(), a.may_spin()), (2, false));
        assert_eq!(sets(&a), ["2,8", "3", "3", "3"]);
        // The quota is tighter than the mask.
        tree.put("sys/fs/cgroup/job/cpu.max", "90000 100000");
        assert_eq!(assign(&tree, None).threads(), 1);
        assert_eq!(assign(&tree, 3).threads(), 3);
    }

    /// Oracle: the invariant. On every machine, for every number of threads, every set is inside the mask and
    /// not empty, and there are CPUs enough for the workers unless there are more threads than CPUs.
    #[test]
    fn every_set_is_inside_the_mask() {
        for (name, tree) in machines::all() {
            let topology = Topology::from_tree(&tree);
            for threads in (1..40).map(Some).chain([None]) {
                let a = topology.assign(threads).unwrap();
                assert_eq!(a.threads(), threads.unwrap_or(a.threads()));
                for role in Role::ALL {
                    let set = a.set(role);
                    assert!(
                        !set.is_empty() && set.is_subset(topology.allowed()),
                        "{name} {threads:?} {role}: {set}"
                    );
                }
                if a.threads() <= topology.allowed().len() && a.threads() > 1 {
                    let (driver, compute) = (a.set(Role::Driver), a.set(Role::Compute));
                    assert_eq!(compute.len(), a.threads() - 1, "{name} {threads:?}");
                    assert!(driver.intersection(compute).is_empty(), "{name} {threads:?}");
                }
            }
        }
    }

    /// Oracle: the rule. Workers have CPUs of their own that add up to the compute set; where there are more than CPUs, all have all.
    #[test]
    fn workers_have_a_cpu_each() {
        for (name, tree) in machines::all() {
            for threads in 2..40 {
                let a = assign(&tree, threads);
                let sets: Vec<CpuSet> = (1..threads).map(|worker| a.worker(worker)).collect();
                let together = sets.iter().fold(CpuSet::from_iter([]), |all, set| all.union(set));
                assert_eq!(&together, a.set(Role::Compute), "{name} {threads}");
                let own = a.set(Role::Compute).len() >= threads - 1;
                assert!(sets.iter().all(|set| (set.len() == 1) == (own || a.set(Role::Compute).len() == 1)));
            }
        }
    }

    /// Oracle: the documented errors and text.
    #[test]
    fn refusals_and_text() {
        let t = Topology::from_tree(&machines::desktop());
        assert_eq!(t.assign(Some(0)), Err(AssignError::NoThreads));
        assert!(t.assign(Some(5000)).unwrap_err().to_string().contains("5000 threads are more than 4096"));
        let text = t.assign(Some(3)).unwrap().to_string();
        assert_eq!(
            text,
            "3 compute threads (the driver counted); they may spin briefly inside a step\n  driver   CPUs 0,6\n  \
             compute  CPUs 1-2\n  io       CPUs 1-5,7-11\n  front    CPUs 3-5,9-11\n"
        );
        assert_eq!(Topology::uniform(0).assign(None).unwrap().set(Role::Io), &range(0..=0));
    }
}
