//! The machine as one value: CPUs, cores, caches, NUMA nodes, kinds, the starting mask and the limits.
//!
//! Owns reading and reconciling them; what to do with them is `roles`'. A [`Topology`] is read once and never changes; it
//! can be made from any [`SysTree`], so every decision that rests on it is tested on machines nobody here has.
//!
//! Invariants: at least one CPU; [`Topology::allowed`] is not empty and every CPU in it is in [`Topology::cpus`]; each CPU
//! is in exactly one core. What could not be read is filled by the plainest guess (a CPU is a core of its own, on node 0)
//! and said in [`Topology::notes`].

use std::collections::BTreeMap;
use std::fmt;

use crate::cgroup::{Cgroups, CpuQuota};
use crate::cpuset::CpuSet;
use crate::memory::{Bytes, MemoryLimits};
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

    /// This machine and process: where the system isn't Linux, as many equal cores as the standard library counts.
    #[cfg(not(target_os = "linux"))]
    pub fn read() -> Self {
        let mut topology = Self::uniform(std::thread::available_parallelism().map_or(1, usize::from));
        topology.notes.push("CPUs are counted only: this system's topology is not read".to_owned());
        topology
    }

    /// A machine of `cpus` (at least one) equal cores without siblings, all allowed, whose memory is not known.
    pub fn uniform(cpus: usize) -> Self {
        let allowed: CpuSet = (0..cpus.max(1)).collect();
        let cpus = allowed.iter().map(Cpu::alone).collect();
        Self { cpus, allowed, quota: None, memory: MemoryLimits::default(), notes: Vec::new() }
    }

    /// The machine and process that a tree describes. Needs no file in particular, see [`Topology::notes`].
    pub fn from_tree(tree: &dyn SysTree) -> Self {
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

        if !cpus.iter().any(|cpu| cpu.siblings_known(tree)) {
            notes.push(
                "the system does not tell which CPUs share a core: each one counts as a core".to_owned(),
            );
        }
        settle_cores(&mut cpus);
        settle_nodes(tree, &mut cpus);
        settle_kinds(tree, &mut cpus);
        let memory = MemoryLimits::read(tree, cgroups.memory());
        if memory.total.is_none() {
            notes.push("the system does not tell how much memory it has".to_owned());
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

    fn siblings_known(&self, tree: &dyn SysTree) -> bool {
        sibling_list(tree, self.id).is_some()
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
        notes.push(format!("the control group's CPUs ({cgroup}) and the affinity mask ({mask}) have none in common: the mask counts"));
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
        let size = text("size").and_then(|size| parse_size(&size));
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

/// A cache size as the kernel prints it: `512K`.
fn parse_size(text: &str) -> Option<u64> {
    let units = [('K', 1u64 << 10), ('M', 1 << 20), ('G', 1 << 30)];
    let (digits, unit) = units
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(*suffix)?, *unit)))
        .unwrap_or((text, 1));
    digits.parse::<u64>().ok()?.checked_mul(unit)
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

/// Tells big from little. Where the kernel lists the kinds (Intel's hybrid parts) it is believed; else a CPU is little
/// if its capacity is below three quarters of the largest; without capacities, if its frequency is. Not "below the
/// largest": the favoured cores of one kind differ by some percent.
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
