//! What the process's control groups allow: CPU time, CPUs, memory. Versions 1, 2 and both at once.
//!
//! Owns finding the group's directories from `/proc/self/cgroup` and `/proc/self/mountinfo`, and reading the
//! limits in them. A limit of any ancestor binds too, so every directory up to the mount point is read. What
//! is out of sight (above a container's mount) can't be known.

use std::fmt;

use crate::cpuset::CpuSet;
use crate::memory::CgroupMemory;
use crate::source::SysTree;

/// CPU time per period that a control group grants: `runtime / period` CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuQuota {
    /// Microseconds of CPU time in a period.
    pub runtime_us: u64,
    /// Microseconds of a period; not 0.
    pub period_us: u64,
}

impl CpuQuota {
    /// How many CPUs' time it is.
    pub fn cpus(self) -> f64 {
        self.runtime_us as f64 / self.period_us as f64
    }

    /// How many threads can run all the time without being stopped; at least one.
    pub fn whole_cpus(self) -> usize {
        usize::try_from(self.runtime_us / self.period_us).unwrap_or(usize::MAX).max(1)
    }
}

impl fmt::Display for CpuQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} CPUs ({} of every {} us)", self.cpus(), self.runtime_us, self.period_us)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// The process's control groups.
pub(crate) struct Cgroups<'t> {
    tree: &'t dyn SysTree,
    membership: String,
    mounts: Vec<Mount>,
}

struct Mount {
    /// The group that is seen at `point`.
    root: String,
    /// Without the leading slash.
    point: String,
    version: Version,
    /// Version 1: controllers, among other options.
    options: String,
}

impl<'t> Cgroups<'t> {
    pub(crate) fn of_this_process(tree: &'t dyn SysTree) -> Self {
        let membership = tree.text("proc/self/cgroup").unwrap_or_default();
        let mounts =
            tree.text("proc/self/mountinfo").unwrap_or_default().lines().filter_map(Mount::parse).collect();
        Self { tree, membership, mounts }
    }

    /// The tightest CPU quota.
    pub(crate) fn quota(&self) -> Option<CpuQuota> {
        let (version, directories) = self.directories("cpu")?;
        let quotas = directories.iter().filter_map(|directory| {
            let (runtime, period) = match version {
                Version::V2 => {
                    let text = self.text(directory, "cpu.max")?;
                    let (runtime, period) = text.split_once(' ')?;
                    (runtime.to_owned(), period.to_owned())
                }
                Version::V1 => {
                    (self.text(directory, "cpu.cfs_quota_us")?, self.text(directory, "cpu.cfs_period_us")?)
                }
            };
            // `max` and -1 mean no limit, and are no u64.
            let (runtime_us, period_us) = (runtime.parse().ok()?, period.trim().parse().ok()?);
            (period_us > 0).then_some(CpuQuota { runtime_us, period_us })
        });
        quotas.min_by(|a, b| a.cpus().total_cmp(&b.cpus()))
    }

    /// The CPUs of the nearest group that says so.
    pub(crate) fn cpuset(&self) -> Option<CpuSet> {
        let (version, directories) = self.directories("cpuset")?;
        let names: &[&str] = match version {
            Version::V2 => &["cpuset.cpus.effective"],
            Version::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
        };
        let sets = directories
            .iter()
            .flat_map(|d| names.iter().filter_map(move |name| self.text(d, name)?.parse().ok()));
        sets.into_iter().find(|set: &CpuSet| !set.is_empty())
    }

    /// The memory limit with the least room left below it.
    pub(crate) fn memory(&self) -> Option<CgroupMemory> {
        let (version, directories) = self.directories("memory")?;
        let limits = directories.iter().filter_map(|directory| {
            let number = |name: &str| self.text(directory, name)?.parse::<u64>().ok();
            let (limit, used, inactive) = match version {
                Version::V2 => {
                    let limit = [number("memory.max"), number("memory.high")].into_iter().flatten().min()?;
                    (limit, number("memory.current"), "inactive_file")
                }
                Version::V1 => {
                    let limit = number("memory.limit_in_bytes")?;
                    // Version 1 says "no limit" by the largest multiple of a page.
                    if limit >= i64::MAX as u64 / 2 {
                        return None;
                    }
                    (limit, number("memory.usage_in_bytes"), "total_inactive_file")
                }
            };
            // Cached file pages that nobody uses are counted as used, but give way.
            let stat = self.text(directory, "memory.stat").unwrap_or_default();
            let reclaimable =
                stat.lines().find_map(|line| line.strip_prefix(inactive)?.trim().parse().ok()).unwrap_or(0);
            Some(CgroupMemory { limit, used: used.unwrap_or(0).saturating_sub(reclaimable) })
        });
        limits.min_by_key(CgroupMemory::room)
    }

    fn text(&self, directory: &str, name: &str) -> Option<String> {
        self.tree.text(&format!("{directory}/{name}"))
    }

    /// The directories of the process's group for `controller`, from its own up to the mount point.
    fn directories(&self, controller: &str) -> Option<(Version, Vec<String>)> {
        let mut unified = None;
        for line in self.membership.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if controllers.split(',').any(|c| c == controller) {
                let mounted =
                    |m: &&Mount| m.version == Version::V1 && m.options.split(',').any(|o| o == controller);
                let mount = self.mounts.iter().find(mounted);
                let conventional = Mount::at(&format!("sys/fs/cgroup/{controllers}"), Version::V1);
                return Some((Version::V1, mount.unwrap_or(&conventional).up_from(path)));
            }
            if id == "0" && controllers.is_empty() {
                unified = Some(path);
            }
        }
        let mount = self.mounts.iter().find(|m| m.version == Version::V2);
        let conventional = Mount::at("sys/fs/cgroup", Version::V2);
        Some((Version::V2, mount.unwrap_or(&conventional).up_from(unified?)))
    }
}

impl Mount {
    /// A line of mountinfo: `id parent major:minor root point options [tags] - type source superoptions`.
    fn parse(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let version = match *right.first()? {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => return None,
        };
        let (root, point) = (left.get(3)?, left.get(4)?);
        let options = right.get(2).copied().unwrap_or_default().to_owned();
        Some(Self {
            root: (*root).to_owned(),
            point: point.trim_start_matches('/').to_owned(),
            version,
            options,
        })
    }

    /// Where distributions put it, for a process that can't see mounts.
    fn at(point: &str, version: Version) -> Self {
        Self { root: "/".to_owned(), point: point.to_owned(), version, options: String::new() }
    }

    /// The directories from the group `path` up to the mount point. A path that is not below what is mounted
    /// (another container's view) leaves the mount point alone.
    fn up_from(&self, path: &str) -> Vec<String> {
        let below = path
            .strip_prefix(self.root.trim_end_matches('/'))
            .filter(|rest| rest.is_empty() || rest.starts_with('/'));
        let names: Vec<&str> = below.unwrap_or_default().split('/').filter(|name| !name.is_empty()).collect();
        let names = if names.contains(&"..") { Vec::new() } else { names };
        let directory = |depth: usize| {
            let mut path = self.point.clone();
            names[..depth].iter().for_each(|name| {
                path.push('/');
                path.push_str(name);
            });
            path
        };
        (0..=names.len()).rev().map(directory).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::MemoryTree;

    const GIB: u64 = 1 << 30;

    /// Version 1, as a host without namespaces shows it inside a container: the group's path is the mount's
    /// root.
    fn v1_container() -> MemoryTree {
        let mut tree = MemoryTree::new();
        tree.put("proc/self/cgroup", "9:memory:/docker/7f\n5:cpu,cpuacct:/docker/7f\n3:cpuset:/docker/7f\n1:name=systemd:/")
            .put(
                "proc/self/mountinfo",
                "61 50 0:30 /docker/7f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                 62 50 0:31 /docker/7f /sys/fs/cgroup/cpu,cpuacct ro shared:4 - cgroup cgroup rw,cpu,cpuacct\n\
                 63 50 0:32 /docker/7f /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset",
            )
            .put("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * GIB)
            .put("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
            .put("sys/fs/cgroup/memory/memory.stat", "cache 7\ninactive_file 7\ntotal_inactive_file 1000")
            .put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 150_000)
            .put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
            .put("sys/fs/cgroup/cpuset/cpuset.cpus", "4-6");
        tree
    }

    /// Oracle: the limits put there.
    #[test]
    fn version_1() {
        let tree = v1_container();
        let cgroups = Cgroups::of_this_process(&tree);
        assert_eq!(cgroups.memory(), Some(CgroupMemory { limit: 4 * GIB, used: GIB - 1000 }));
        let quota = cgroups.quota().unwrap();
        assert_eq!((quota.cpus(), quota.whole_cpus()), (1.5, 1));
        assert_eq!(cgroups.cpuset(), Some(CpuSet::from_iter([4, 5, 6])));
    }

    /// Oracle: what version 1 writes for "no limit".
    #[test]
    fn version_1_unlimited() {
        let mut tree = v1_container();
        tree.put("sys/fs/cgroup/memory/memory.limit_in_bytes", 9_223_372_036_854_771_712u64)
            .put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1);
        let cgroups = Cgroups::of_this_process(&tree);
        assert_eq!((cgroups.memory(), cgroups.quota()), (None, None));
    }

    /// Both versions at once: memory is in a version 1 hierarchy, CPU time in the unified one; the tightest
    /// of the levels binds, and one above the process's own has less room though a higher limit.
    #[test]
    fn both_versions_and_ancestors() {
        let mut tree = MemoryTree::new();
        tree.put("proc/self/cgroup", "4:memory:/a/b\n0::/u/v")
            .put(
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            )
            .put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 10 * GIB)
            .put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", 9 * GIB)
            .put("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 6 * GIB)
            .put("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", GIB)
            .put("sys/fs/cgroup/unified/u/v/cpu.max", "400000 100000")
            .put("sys/fs/cgroup/unified/u/cpu.max", "50000 100000");
        let cgroups = Cgroups::of_this_process(&tree);
        assert_eq!(cgroups.memory(), Some(CgroupMemory { limit: 10 * GIB, used: 9 * GIB }));
        let quota = cgroups.quota().unwrap();
        assert_eq!((quota.cpus(), quota.whole_cpus()), (0.5, 1));
        assert_eq!(cgroups.cpuset(), None);
    }

    /// A path outside what is mounted (`/..` of a namespace, or another root) leaves the mount point; no
    /// mounts to see leaves the usual place.
    #[test]
    fn paths_out_of_sight() {
        let mut tree = MemoryTree::new();
        tree.put("proc/self/cgroup", "0::/../../x").put("sys/fs/cgroup/memory.max", 2 * GIB);
        assert_eq!(Cgroups::of_this_process(&tree).memory(), Some(CgroupMemory { limit: 2 * GIB, used: 0 }));
        tree.put("proc/self/mountinfo", "1 2 0:1 /pod /cg rw - cgroup2 none rw")
            .put("proc/self/cgroup", "0::/podium/x")
            .put("cg/memory.high", GIB);
        assert_eq!(Cgroups::of_this_process(&tree).memory(), Some(CgroupMemory { limit: GIB, used: 0 }));
        assert_eq!(Cgroups::of_this_process(&MemoryTree::new()).memory(), None);
    }
}
