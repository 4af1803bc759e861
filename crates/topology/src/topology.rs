//! The machine as one value: CPUs, cores, caches, NUMA nodes, kinds, the starting mask and the limits.
//!
//! Owns reading and reconciling them; what to do with them is `roles`'. A [`Topology`] is read once and never
//! changes; it can be made from any `SysTree`, so every decision that rests on it is tested on machines
//! nobody here has.
//!
//! Invariants: at least one CPU; [`Topology::allowed`] is not empty and every CPU in it is in
//! [`Topology::cpus`]; each CPU is in exactly one core. What could not be read is filled by the plainest
//! guess (a CPU is a core of its own, on node 0) and said in [`Topology::notes`].

use std::collections::BTreeMap;
use std::fmt;

use strata_plan::Bytes;

use crate::cgroup::{Cgroups, CpuQuota};
use crate::cpuset::CpuSet;
use crate::memory::MemoryLimits;
use crate::source::SysTree;

/// Big cores before little ones. On a machine of equal cores all are big.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A performance core, or any core of a machine with one kind.
    Big,
    /// An efficiency core.
    Little,
}

/// Sizes in bytes of the caches that a CPU sees; `None` where there is none or the system does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Caches {
    /// Level 1, data.
    pub l1d: Option<u64>,
    /// Level 2.
    pub l2: Option<u64>,
    /// Level 3, the whole of it, however many share it.
    pub l3: Option<u64>,
}

/// One logical CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpu {
    /// The system's number.
    pub id: usize,
    /// The package (socket).
    pub package: usize,
    /// The physical core, named by the lowest CPU of it.
    pub core: usize,
    /// The CPUs of that core, this one among them.
    pub siblings: CpuSet,
    /// The group that shares a level 3 cache, named by its lowest CPU.
    pub l3: Option<usize>,
    /// The NUMA node.
    pub node: usize,
    /// The kernel's `cpu_capacity`: 1024 is the fastest.
    pub capacity: Option<u32>,
    /// The highest frequency, in kHz.
    pub max_khz: Option<u64>,
    /// Big or little.
    pub kind: Kind,
    /// Cache sizes.
    pub caches: Caches,
}

/// The machine as this process may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    cpus: Vec<Cpu>,
    allowed: CpuSet,
    quota: Option<CpuQuota>,
    memory: MemoryLimits,
    notes: Vec<String>,
}

const CPU: &str = "sys/devices/system/cpu";

impl Topology {
    /// This machine and process, now. Read it early: the starting mask is that of the process's first thread.
    #[cfg(target_os = "linux")]
    pub fn read() -> Self {
        Self::build(&crate::source::HostTree::new("/"), crate::affinity::process_mask())
    }

    /// This machine and process: where the system isn't Linux, as many equal cores as the standard library
    /// counts.
    #[cfg(not(target_os = "linux"))]
    pub fn read() -> Self {
        let mut topology = Self::uniform(std::thread::available_parallelism().map_or(1, usize::from));
        topology.notes.push("CPUs are counted only: this system's topology is not read".to_owned());
        topology
    }

    /// A machine of `cpus` (at least one) equal cores without siblings, all allowed, whose memory is not
    /// known.
    pub fn uniform(cpus: usize) -> Self {
        let allowed: CpuSet = (0..cpus.max(1)).collect();
        let cpus = allowed.iter().map(Cpu::alone).collect();
        Self { cpus, allowed, quota: None, memory: MemoryLimits::default(), notes: Vec::new() }
    }

    /// The machine and process that a tree describes. Needs no file in particular, see [`Topology::notes`].
    #[cfg(test)]
    pub(crate) fn from_tree(tree: &dyn SysTree) -> Self {
        Self::build(tree, None)
    }

    /// All online CPUs, by number; those the process may not use too.
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// A CPU by number.
    pub fn cpu(&self, id: usize) -> Option<&Cpu> {
        self.cpus.binary_search_by_key(&id, |cpu| cpu.id).ok().map(|i| &self.cpus[i])
    }

    /// The CPUs that the process may use: its starting affinity mask inside its control group's set.
    pub fn allowed(&self) -> &CpuSet {
        &self.allowed
    }

    /// The CPU time that the process's control group grants, if that is limited.
    pub fn quota(&self) -> Option<CpuQuota> {
        self.quota
    }

    /// Memory of the machine and the control group, as it was when this was read.
    pub fn memory(&self) -> MemoryLimits {
        self.memory
    }

    /// What could not be read and what was assumed for it, a sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// How many physical cores have an allowed CPU.
    pub fn allowed_cores(&self) -> usize {
        let mut cores: Vec<usize> = self.allowed_cpus().map(|cpu| cpu.core).collect();
        cores.sort_unstable();
        cores.dedup();
        cores.len()
    }

    /// Whether there are big and little cores among all CPUs.
    pub fn is_hybrid(&self) -> bool {
        self.cpus.iter().any(|cpu| cpu.kind == Kind::Little)
    }

    fn allowed_cpus(&self) -> impl Iterator<Item = &Cpu> {
        self.cpus.iter().filter(|cpu| self.allowed.contains(cpu.id))
    }

    fn build(tree: &dyn SysTree, known_mask: Option<CpuSet>) -> Self {
        let mut notes = Vec::new();
        let online = tree.text(&format!("{CPU}/online")).and_then(|text| text.parse::<CpuSet>().ok());
        let online = online.filter(|set| !set.is_empty());

        let cgroups = Cgroups::of_this_process(tree);
        let allowed = allowed_cpus(tree, known_mask, online.as_ref(), cgroups.cpuset(), &mut notes);
        let ids = online.unwrap_or_else(|| allowed.clone()).union(&allowed);
        let mut cpus: Vec<Cpu> = ids.iter().map(|id| read_cpu(tree, id)).collect();

        if !ids.iter().any(|id| sibling_list(tree, id).is_some()) {
            notes.push(
                "the system does not tell which CPUs share a core: each one counts as a core".to_owned(),
            );
        }
        settle_cores(&mut cpus);
        settle_nodes(tree, &mut cpus);
        settle_kinds(tree, &mut cpus);
        let memory = MemoryLimits::read(tree, cgroups.memory());
        if memory.usable().is_none() {
            notes.push("the system does not tell how much memory there is: no limit is known".to_owned());
        }
        Self { cpus, allowed, quota: cgroups.quota(), memory, notes }
    }
}

impl Cpu {
    /// A CPU of which nothing is known.
    fn alone(id: usize) -> Self {
        Self {
            id,
            package: 0,
            core: id,
            siblings: CpuSet::from_iter([id]),
            l3: None,
            node: 0,
            capacity: None,
            max_khz: None,
            kind: Kind::Big,
            caches: Caches::default(),
        }
    }
}

/// The starting mask, inside the control group's set.
fn allowed_cpus(
    tree: &dyn SysTree,
    known_mask: Option<CpuSet>,
    online: Option<&CpuSet>,
    cgroup: Option<CpuSet>,
    notes: &mut Vec<String>,
) -> CpuSet {
    let status = tree.text("proc/self/status").unwrap_or_default();
    let list =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")?.parse::<CpuSet>().ok());
    let mask = list.or(known_mask).filter(|set| !set.is_empty()).unwrap_or_else(|| {
        notes.push(
            "the system does not tell the process's affinity mask: all CPUs count as allowed".to_owned(),
        );
        online.cloned().unwrap_or_else(|| CpuSet::from_iter([0]))
    });
    let Some(cgroup) = cgroup else { return mask };
    let both = mask.intersection(&cgroup);
    if both.is_empty() {
        notes.push(format!(
            "the control group's CPUs ({cgroup}) and the affinity mask ({mask}) have none in common: \
             the mask counts"
        ));
        return mask;
    }
    both
}

fn sibling_list(tree: &dyn SysTree, id: usize) -> Option<CpuSet> {
    let names = ["core_cpus_list", "thread_siblings_list"];
    let text = names.iter().find_map(|name| tree.text(&format!("{CPU}/cpu{id}/topology/{name}")))?;
    text.parse().ok().filter(|set: &CpuSet| set.contains(id))
}

/// What the CPU's own directory tells. Kind, node and the other side of `siblings` come later.
fn read_cpu(tree: &dyn SysTree, id: usize) -> Cpu {
    let directory = format!("{CPU}/cpu{id}");
    let number = |path: &str| tree.text(&format!("{directory}/{path}"))?.parse::<u64>().ok();
    let mut cpu = Cpu::alone(id);
    // Some virtual machines say -1.
    cpu.package = number("topology/physical_package_id").map_or(0, |n| n as usize);
    if let Some(core) = sibling_list(tree, id).and_then(|set| set.first()) {
        cpu.core = core;
    }
    cpu.capacity = number("cpu_capacity").and_then(|n| u32::try_from(n).ok());
    cpu.max_khz = number("cpufreq/cpuinfo_max_freq");
    for index in tree.names(&format!("{directory}/cache")) {
        let text = |name: &str| tree.text(&format!("{directory}/cache/{index}/{name}"));
        let size = text("size").and_then(|size| Some(size.parse::<Bytes>().ok()?.0));
        match (text("level").as_deref(), text("type").as_deref()) {
            (Some("1"), Some("Data" | "Unified")) => cpu.caches.l1d = size,
            (Some("2"), Some("Data" | "Unified")) => cpu.caches.l2 = size,
            (Some("3"), Some("Data" | "Unified")) => {
                cpu.caches.l3 = size;
                let shared = text("shared_cpu_list").and_then(|list| list.parse::<CpuSet>().ok());
                cpu.l3 = Some(shared.and_then(|set| set.first()).unwrap_or(id));
            }
            _ => {}
        }
    }
    cpu
}

/// Makes `siblings` agree with `core`, so that each CPU is in one core even if the files disagree.
fn settle_cores(cpus: &mut [Cpu]) {
    let mut cores: BTreeMap<usize, CpuSet> = BTreeMap::new();
    for cpu in cpus.iter() {
        cores.entry(cpu.core).or_default().insert(cpu.id);
    }
    for cpu in cpus {
        cpu.siblings = cores[&cpu.core].clone();
        // The lowest may be offline.
        cpu.core = cpu.siblings.first().unwrap_or(cpu.id);
    }
}

fn settle_nodes(tree: &dyn SysTree, cpus: &mut [Cpu]) {
    let directory = "sys/devices/system/node";
    for name in tree.names(directory) {
        let Some(node) = name.strip_prefix("node").and_then(|n| n.parse::<usize>().ok()) else { continue };
        let list =
            tree.text(&format!("{directory}/{name}/cpulist")).and_then(|list| list.parse::<CpuSet>().ok());
        let Some(list) = list else { continue };
        cpus.iter_mut().filter(|cpu| list.contains(cpu.id)).for_each(|cpu| cpu.node = node);
    }
}

/// Tells big from little. Where the kernel lists the kinds (Intel's hybrid parts) it is believed; else a CPU
/// is little if its capacity is below three quarters of the largest; without capacities, if its frequency is.
/// Not "below the largest": the favoured cores of one kind differ by some percent.
fn settle_kinds(tree: &dyn SysTree, cpus: &mut [Cpu]) {
    let list = |path: &str| tree.text(path).and_then(|text| text.parse::<CpuSet>().ok()).unwrap_or_default();
    let big = list("sys/devices/cpu_core/cpus");
    let little = list("sys/devices/cpu_atom/cpus").union(&list("sys/devices/cpu_lowpower/cpus"));
    if !big.is_empty() && !little.is_empty() {
        cpus.iter_mut().filter(|cpu| little.contains(cpu.id)).for_each(|cpu| cpu.kind = Kind::Little);
        return;
    }
    let all = |speed: fn(&Cpu) -> Option<u64>| cpus.iter().map(speed).collect::<Option<Vec<u64>>>();
    let speeds = all(|cpu| cpu.capacity.map(u64::from)).or_else(|| all(|cpu| cpu.max_khz));
    let Some(speeds) = speeds else { return };
    let fastest = speeds.iter().copied().max().unwrap_or(0);
    for (cpu, speed) in cpus.iter_mut().zip(speeds) {
        // In 128 bits: the numbers are a file's.
        if u128::from(speed) * 4 < u128::from(fastest) * 3 {
            cpu.kind = Kind::Little;
        }
    }
}

/// Several lines, each a name and its facts.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let distinct = |key: fn(&Cpu) -> Option<usize>| {
            let keys: std::collections::BTreeSet<usize> = self.allowed_cpus().filter_map(key).collect();
            keys.len()
        };
        write!(f, "CPUs    {} allowed of {}", self.allowed, self.cpus.len())?;
        write!(f, ": {}, ", count(self.allowed_cores(), "core"))?;
        write!(f, "{}, ", count(distinct(|cpu| Some(cpu.package)), "package"))?;
        writeln!(f, "{}", count(distinct(|cpu| Some(cpu.node)), "NUMA node"))?;
        if self.is_hybrid() {
            let of = |kind| self.allowed_cpus().filter(|c| c.kind == kind).map(|c| c.id).collect::<CpuSet>();
            writeln!(f, "kinds   big {}; little {}", of(Kind::Big), of(Kind::Little))?;
        }
        // One line per different set of caches: hybrid machines have two.
        let mut caches: Vec<(Caches, CpuSet)> = Vec::new();
        for cpu in self.allowed_cpus() {
            match caches.iter_mut().find(|(c, _)| *c == cpu.caches) {
                Some((_, set)) => _ = set.insert(cpu.id),
                None => caches.push((cpu.caches, CpuSet::from_iter([cpu.id]))),
            }
        }
        for (Caches { l1d, l2, l3 }, set) in caches {
            let sizes = [("L1d", l1d), ("L2", l2), ("L3", l3)];
            let sizes: Vec<String> =
                sizes.iter().filter_map(|(name, size)| Some(format!("{name} {}", Bytes((*size)?)))).collect();
            if !sizes.is_empty() {
                writeln!(f, "caches  {} (CPUs {set})", sizes.join(", "))?;
            }
        }
        let groups = distinct(|cpu| cpu.l3);
        if groups > 1 {
            writeln!(f, "        {groups} groups of CPUs share a level 3 cache each")?;
        }
        if let Some(quota) = self.quota {
            writeln!(f, "quota   {quota}")?;
        }
        writeln!(f, "memory  {}", self.memory)?;
        for note in &self.notes {
            writeln!(f, "note    {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::{self, range};
    use crate::source::MemoryTree;

    fn kinds(topology: &Topology, kind: Kind) -> CpuSet {
        topology.cpus().iter().filter(|cpu| cpu.kind == kind).map(|cpu| cpu.id).collect()
    }

    /// Oracle: the machine as its maker describes it.
    #[test]
    fn desktop() {
        let t = Topology::from_tree(&machines::desktop());
        assert_eq!((t.cpus().len(), t.allowed_cores(), t.is_hybrid()), (12, 6, false));
        let cpu = t.cpu(7).unwrap();
        assert_eq!((cpu.core, cpu.package, cpu.node, cpu.l3), (1, 0, 0, Some(0)));
        assert_eq!(cpu.siblings, CpuSet::from_iter([1, 7]));
        assert_eq!(cpu.caches, Caches { l1d: Some(32 << 10), l2: Some(1 << 20), l3: Some(32 << 20) });
        assert_eq!(cpu.max_khz, Some(5_050_000));
        assert_eq!(t.memory().total, Some(65_536_000 * 1024));
        assert!(t.notes().is_empty(), "{:?}", t.notes());
        assert!(t.cpu(12).is_none());
    }

    /// Oracle: the kernel's lists of both kinds, which the capacities would contradict.
    #[test]
    fn intel_hybrid() {
        let mut tree = machines::intel_hybrid();
        let t = Topology::from_tree(&tree);
        assert_eq!(kinds(&t, Kind::Little), range(8..=15));
        assert_eq!(t.allowed_cores(), 12);
        // With no lists, a capacity a little below the largest does not make a core little.
        tree.cut("sys/devices/cpu_core").cut("sys/devices/cpu_atom");
        assert!(!Topology::from_tree(&tree).is_hybrid());
    }

    /// Oracle: the machine's description: ten of each kind, CPU 0 little. Frequencies alone say the same.
    #[test]
    fn arm_hybrid() {
        let mut tree = machines::arm_hybrid();
        let little = range(0..=4).union(&range(10..=14));
        assert_eq!(kinds(&Topology::from_tree(&tree), Kind::Little), little);
        tree.cut("sys/devices/system/cpu/cpu3/cpu_capacity");
        assert_eq!(kinds(&Topology::from_tree(&tree), Kind::Little), little);
    }

    /// Oracle: the machine's description.
    #[test]
    fn two_sockets() {
        let t = Topology::from_tree(&machines::two_sockets());
        let cpu = t.cpu(13).unwrap();
        assert_eq!((cpu.package, cpu.node, cpu.core, cpu.l3), (1, 1, 5, Some(1)));
        assert_eq!((t.allowed_cores(), t.cpus().len()), (8, 16));
    }

    /// Oracle: the container's limits, the tightest level of each.
    #[test]
    fn container() {
        let t = Topology::from_tree(&machines::container());
        assert_eq!(t.allowed(), &CpuSet::from_iter([2, 3, 8]));
        assert_eq!((t.cpus().len(), t.allowed_cores()), (12, 2));
        assert_eq!(t.quota().unwrap().cpus(), 2.5);
        let memory = t.memory();
        assert_eq!(memory.ceiling(), Some(8 << 30));
        // 3 GiB used, 2 of them idle file pages.
        assert_eq!(memory.usable(), Some(7 << 30));
    }

    /// Oracle: the rule for missing files: a core per allowed CPU, and a note.
    #[test]
    fn no_sysfs() {
        let t = Topology::from_tree(&machines::no_sysfs());
        assert_eq!(t.allowed(), &CpuSet::from_iter([1, 3, 4]));
        assert_eq!((t.cpus().len(), t.allowed_cores()), (3, 3));
        assert!(t.notes().iter().any(|n| n.contains("each one counts as a core")), "{:?}", t.notes());
        let t = Topology::from_tree(&MemoryTree::new());
        assert_eq!((t.allowed().len(), t.cpus().len(), t.notes().len()), (1, 1, 3));
    }

    /// A CPU that went offline takes its name from a core but not the core's other CPU.
    #[test]
    fn an_offline_sibling() {
        let mut tree = machines::desktop();
        tree.put("sys/devices/system/cpu/online", "1-11").put("proc/self/status", "Cpus_allowed_list:\t1-11");
        let t = Topology::from_tree(&tree);
        assert_eq!((t.cpu(6).unwrap().core, t.allowed_cores()), (6, 6));
    }

    /// A mask and a control group that contradict each other: the mask counts, with a note.
    #[test]
    fn disjoint_cpuset() {
        let mut tree = machines::container();
        tree.put("sys/fs/cgroup/job/cpuset.cpus.effective", "9-11");
        let t = Topology::from_tree(&tree);
        assert_eq!(t.allowed(), &CpuSet::from_iter([2, 3, 8]));
        assert!(t.notes()[0].contains("none in common"), "{:?}", t.notes());
    }

    /// Oracle: none needed. Whatever is in a file, the invariants of the type hold. Of files that differ by a
    /// number in their path only, the last is tried.
    #[test]
    fn nonsense_is_survived() {
        for (name, tree) in machines::all() {
            let kind = |path: &str| path.replace(|c: char| c.is_ascii_digit(), "");
            let kinds: BTreeMap<String, &str> = tree.paths().map(|path| (kind(path), path)).collect();
            for path in kinds.into_values() {
                for text in ["", "-1", "x", "99999999999999999999", "5-1", "0-3,70", "\u{0}", "max max"] {
                    let mut tree = tree.clone();
                    tree.put(path, text);
                    let t = Topology::from_tree(&tree);
                    let at = format!("{name}: {path} = {text}");
                    assert!(!t.allowed().is_empty(), "{at}");
                    assert!(t.allowed().iter().all(|id| t.cpu(id).is_some()), "{at}");
                    for cpu in t.cpus() {
                        assert!(
                            cpu.siblings.contains(cpu.id) && cpu.siblings.first() == Some(cpu.core),
                            "{at}"
                        );
                        assert!(
                            cpu.siblings.iter().all(|id| t.cpu(id).is_some_and(|c| c.core == cpu.core)),
                            "{at}"
                        );
                    }
                    let _ = t.to_string();
                }
            }
        }
    }

    /// Oracle: this process. Whatever machine the tests run on, the standard library counts the same CPUs (or
    /// fewer: it divides by the quota).
    #[test]
    fn this_machine() {
        let t = Topology::read();
        let counted = std::thread::available_parallelism().unwrap().get();
        assert!(t.allowed().len() >= counted, "{t}");
    }

    /// Oracle: the text as people are to read it.
    #[test]
    fn readable() {
        let text = Topology::from_tree(&machines::arm_hybrid()).to_string();
        let expected = "\
CPUs    0-19 allowed of 20: 20 cores, 1 package, 1 NUMA node
kinds   big 5-9,15-19; little 0-4,10-14
caches  L1d 32 KiB, L2 512 KiB, L3 8 MiB (CPUs 0-4)
caches  L1d 32 KiB, L2 2 MiB, L3 8 MiB (CPUs 5-9)
caches  L1d 32 KiB, L2 512 KiB, L3 16 MiB (CPUs 10-14)
caches  L1d 32 KiB, L2 2 MiB, L3 16 MiB (CPUs 15-19)
        2 groups of CPUs share a level 3 cache each
memory  62.5 GiB, 50 GiB available
";
        assert_eq!(text, expected);
        let text = Topology::from_tree(&machines::container()).to_string();
        assert!(text.contains("CPUs    2-3,8 allowed of 12: 2 cores"), "{text}");
        assert!(text.contains("quota   2.50 CPUs (250000 of every 100000 us)"), "{text}");
        assert!(text.contains("control group: limit 8 GiB, 1 GiB used"), "{text}");
    }
}
