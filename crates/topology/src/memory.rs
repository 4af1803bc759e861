//! How much memory there is for this process: the machine's, and what its control group leaves of it.
//!
//! Owns the numbers, not what to do about them: planning is `strata-plan`'s. They are a moment's: `available`
//! and `used` move.

use std::fmt;

use strata_plan::Bytes;

use crate::source::SysTree;

/// Memory of the machine and of the process's control group, in bytes. `None` where the system does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The machine's memory.
    pub total: Option<u64>,
    /// What can be had without swapping (`MemAvailable`).
    pub available: Option<u64>,
    /// The tightest limit of a control group around the process.
    pub cgroup: Option<CgroupMemory>,
    /// Whether huge pages are given to those who ask.
    pub huge_pages: Option<bool>,
}

/// A memory limit of a control group, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The most that the group may use.
    pub limit: u64,
    /// What it uses now, less file pages that would give way.
    pub used: u64,
}

impl CgroupMemory {
    /// What is left below the limit.
    pub fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// Memory that this process has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// Resident, pages of mapped files too.
    pub all: u64,
    /// Of it what belongs to the process alone: no pages of files.
    pub own: u64,
    /// The most that was resident so far.
    pub peak: u64,
}

impl Resident {
    /// What the process has now; nothing where the system does not say.
    pub fn now() -> Option<Resident> {
        Resident::of(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    fn of(status: &str) -> Option<Resident> {
        let entry = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
        };
        Some(Resident { all: entry("VmRSS")?, own: entry("RssAnon")?, peak: entry("VmHWM")? })
    }
}

impl MemoryLimits {
    /// What may still be allocated: the less of what the machine has available and what the control group
    /// leaves.
    pub fn usable(&self) -> Option<u64> {
        [self.available, self.cgroup.map(|c| c.room())].into_iter().flatten().min()
    }

    /// The most that this process could ever have: the less of the machine's memory and the control group's
    /// limit.
    pub fn ceiling(&self) -> Option<u64> {
        [self.total, self.cgroup.map(|c| c.limit)].into_iter().flatten().min()
    }

    /// From `/proc/meminfo`, `/sys/kernel/mm/transparent_hugepage`, and what the control groups say. A group's limit at or above the machine's
    /// memory is none.
    pub(crate) fn read(tree: &dyn SysTree, cgroup: Option<CgroupMemory>) -> Self {
        let text = tree.text("proc/meminfo").unwrap_or_default();
        let entry = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        let total = entry("MemTotal");
        let cgroup = cgroup.filter(|c| total.is_none_or(|total| c.limit < total));
        let available = entry("MemAvailable").or_else(|| entry("MemFree"));
        let policy = tree.text("sys/kernel/mm/transparent_hugepage/enabled");
        let huge_pages = policy.map(|words| !words.contains("[never]"));
        Self { total, available, cgroup, huge_pages }
    }
}

impl fmt::Display for MemoryLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.total {
            Some(total) => write!(f, "{}", Bytes(total))?,
            None => write!(f, "unknown size")?,
        }
        if let Some(available) = self.available {
            write!(f, ", {} available", Bytes(available))?;
        }
        if let Some(cgroup) = self.cgroup {
            write!(f, "; control group: limit {}, {} used", Bytes(cgroup.limit), Bytes(cgroup.used))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemoryTree;

    /// Oracle: the definition of the two minima; a limit that the machine can't reach is none.
    #[test]
    fn usable_and_ceiling() {
        let mut tree = MemoryTree::new();
        tree.put("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nSwapTotal: 5 kB");
        let alone = MemoryLimits::read(&tree, None);
        assert_eq!((alone.usable(), alone.ceiling()), (Some(600 * 1024), Some(1000 * 1024)));
        let tight = MemoryLimits::read(&tree, Some(CgroupMemory { limit: 500 * 1024, used: 501 * 1024 }));
        assert_eq!((tight.usable(), tight.ceiling()), (Some(0), Some(500 * 1024)));
        assert_eq!(
            MemoryLimits::read(&tree, Some(CgroupMemory { limit: 1000 * 1024, used: 900 * 1024 })),
            alone
        );
        assert_eq!(MemoryLimits::default().usable(), None);
    }

    /// Oracle: the kernel's documentation. The word in brackets is the policy.
    #[test]
    fn huge_pages_by_policy() {
        let mut tree = MemoryTree::new();
        assert_eq!(MemoryLimits::read(&tree, None).huge_pages, None);
        for (words, given) in [
            ("[always] madvise never", true),
            ("always [madvise] never", true),
            ("always madvise [never]", false),
        ] {
            tree.put("sys/kernel/mm/transparent_hugepage/enabled", words);
            assert_eq!(MemoryLimits::read(&tree, None).huge_pages, Some(given), "{words}");
        }
    }

    /// Oracle: proc_pid_status(5).
    #[test]
    fn what_a_process_has() {
        let status = "Name:\tx\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\nRssAnon:\t     500 kB\n";
        let resident = Resident::of(status).unwrap();
        assert_eq!((resident.all, resident.own, resident.peak), (2_048_000, 512_000, 3_072_000));
        assert_eq!(Resident::of("VmRSS: 1 kB"), None);
    }
}
