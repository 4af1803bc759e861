//! Machines for the tests, as the files their kernels show.

use crate::cpuset::CpuSet;
use crate::source::MemoryTree;

/// What a machine's `/proc` and `/sys` say of one CPU.
struct Files {
    siblings: CpuSet,
    package: usize,
    l3: CpuSet,
    l2_kib: u64,
    l3_kib: u64,
    capacity: Option<u32>,
    max_khz: u64,
}

/// The CPUs of a range.
pub(crate) fn range(cpus: std::ops::RangeInclusive<usize>) -> CpuSet {
    cpus.collect()
}

/// A tree with `files(cpu)` for each CPU, all of them allowed and online, on the given NUMA nodes.
fn machine(cpus: usize, nodes: &[CpuSet], files: impl Fn(usize) -> Files) -> MemoryTree {
    let all: CpuSet = (0..cpus).collect();
    let mut tree = MemoryTree::new();
    tree.put("sys/devices/system/cpu/online", &all)
        .put(
            "proc/self/status",
            format!("Name:\tstrata\nCpus_allowed:\tff\nCpus_allowed_list:\t{all}\nThreads:\t1"),
        )
        .put(
            "proc/meminfo",
            "MemTotal:       65536000 kB\nMemFree:         1024000 kB\nMemAvailable:   52428800 kB",
        );
    for (node, set) in nodes.iter().enumerate() {
        tree.put(format!("sys/devices/system/node/node{node}/cpulist"), set);
    }
    tree.put("sys/devices/system/node/online", format!("0-{}", nodes.len() - 1));
    for cpu in 0..cpus {
        let Files { siblings, package, l3, l2_kib, l3_kib, capacity, max_khz } = files(cpu);
        let at = |name: &str| format!("sys/devices/system/cpu/cpu{cpu}/{name}");
        tree.put(at("topology/core_cpus_list"), &siblings)
            .put(at("topology/physical_package_id"), package)
            .put(at("cpufreq/cpuinfo_max_freq"), max_khz);
        if let Some(capacity) = capacity {
            tree.put(at("cpu_capacity"), capacity);
        }
        let caches = [
            ("1", "Data", 32, &siblings),
            ("1", "Instruction", 64, &siblings),
            ("2", "Unified", l2_kib, &siblings),
        ];
        for (i, (level, kind, kib, shared)) in
            caches.into_iter().chain([("3", "Unified", l3_kib, &l3)]).enumerate()
        {
            tree.put(at(&format!("cache/index{i}/level")), level)
                .put(at(&format!("cache/index{i}/type")), kind)
                .put(at(&format!("cache/index{i}/size")), format!("{kib}K"))
                .put(at(&format!("cache/index{i}/shared_cpu_list")), shared);
        }
    }
    tree
}

/// 6 cores, 12 threads, one L3: CPU n and n + 6 share a core. Favoured cores are a little faster, none is
/// little.
pub(crate) fn desktop() -> MemoryTree {
    machine(12, &[range(0..=11)], |cpu| Files {
        siblings: CpuSet::from_iter([cpu % 6, cpu % 6 + 6]),
        package: 0,
        l3: range(0..=11),
        l2_kib: 1024,
        l3_kib: 32768,
        capacity: None,
        max_khz: 5_000_000 + 50_000 * (cpu as u64 % 6 % 3),
    })
}

/// 12 cores on two chiplets of an L3 each, no SMT.
pub(crate) fn two_chiplets() -> MemoryTree {
    machine(12, &[range(0..=11)], |cpu| Files {
        siblings: CpuSet::from_iter([cpu]),
        package: 0,
        l3: if cpu % 2 == 0 { (0..12).step_by(2).collect() } else { (1..12).step_by(2).collect() },
        l2_kib: 1024,
        l3_kib: 32768,
        capacity: None,
        max_khz: 5_000_000,
    })
}

/// Intel hybrid: 4 P-cores with two threads (0-7), 8 E-cores (8-15). Two P-cores are favoured, so that not
/// every P-core has the largest capacity.
pub(crate) fn intel_hybrid() -> MemoryTree {
    let mut tree = machine(16, &[range(0..=15)], |cpu| Files {
        siblings: if cpu < 8 { CpuSet::from_iter([cpu & !1, cpu | 1]) } else { CpuSet::from_iter([cpu]) },
        package: 0,
        l3: range(0..=15),
        l2_kib: if cpu < 8 { 2048 } else { 4096 },
        l3_kib: 30720,
        capacity: Some(match cpu {
            4..=7 => 1024,
            0..=3 => 998,
            // Beyond three quarters: only the kernel's lists tell these E-cores from P-cores.
            _ => 790,
        }),
        max_khz: if cpu < 8 { 5_400_000 } else { 4_600_000 },
    });
    tree.put("sys/devices/cpu_core/cpus", "0-7").put("sys/devices/cpu_atom/cpus", "8-15");
    tree
}

/// Hybrid ARM: 10 little cores (0-4, 10-14) and 10 big ones (5-9, 15-19), told by capacity alone; CPU 0 is
/// little.
pub(crate) fn arm_hybrid() -> MemoryTree {
    let mut tree = machine(20, &[range(0..=19)], |cpu| {
        let big = cpu % 10 >= 5;
        Files {
            siblings: CpuSet::from_iter([cpu]),
            package: 0,
            l3: if cpu < 10 { range(0..=9) } else { range(10..=19) },
            l2_kib: if big { 2048 } else { 512 },
            l3_kib: if cpu < 10 { 8192 } else { 16384 },
            capacity: Some(match (big, cpu) {
                (true, 15..=19) => 1024,
                (true, _) => 1010,
                (false, _) => 718,
            }),
            max_khz: if big { 3_900_000 } else { 2_808_000 },
        }
    });
    tree.cut("sys/devices/system/node");
    tree
}

/// Two sockets of 4 cores and 8 threads, a NUMA node each; numbers alternate between sockets, siblings are n
/// and n + 8.
pub(crate) fn two_sockets() -> MemoryTree {
    let even: CpuSet = (0..16).step_by(2).collect();
    let odd: CpuSet = (1..16).step_by(2).collect();
    let socket = [even.clone(), odd.clone()];
    machine(16, &[even, odd], move |cpu| Files {
        siblings: CpuSet::from_iter([cpu % 8, cpu % 8 + 8]),
        package: cpu % 2,
        l3: socket[cpu % 2].clone(),
        l2_kib: 1024,
        l3_kib: 36864,
        capacity: None,
        max_khz: 3_500_000,
    })
}

/// A container on the desktop: CPUs 2, 3 and 8 (the sibling of 2) in the mask, 2.5 CPUs of quota and 8 GiB by
/// cgroup v2, seen from inside a namespace; the quota is the parent's.
pub(crate) fn container() -> MemoryTree {
    let mut tree = desktop();
    tree.put("proc/self/status", "Name:\tstrata\nCpus_allowed_list:\t2-3,8")
        .put("proc/self/cgroup", "0::/job/step")
        .put("proc/self/mountinfo", "40 31 0:27 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate")
        .put("sys/fs/cgroup/job/cpu.max", "250000 100000")
        .put("sys/fs/cgroup/job/step/cpu.max", "max 100000")
        .put("sys/fs/cgroup/job/cpuset.cpus.effective", "0-3,8-9")
        .put("sys/fs/cgroup/job/memory.max", "max")
        .put("sys/fs/cgroup/job/step/memory.max", 8u64 << 30)
        .put("sys/fs/cgroup/job/step/memory.current", 3u64 << 30)
        .put(
            "sys/fs/cgroup/job/step/memory.stat",
            "anon 1073741824\ninactive_file 2147483648\nactive_file 0",
        );
    tree
}

/// Only the mask is known: CPUs 1, 3 and 4.
pub(crate) fn no_sysfs() -> MemoryTree {
    let mut tree = MemoryTree::new();
    tree.put("proc/self/status", "Cpus_allowed_list:\t1,3-4");
    tree
}

/// Every machine by name.
pub(crate) fn all() -> [(&'static str, MemoryTree); 8] {
    [
        ("desktop", desktop()),
        ("two chiplets", two_chiplets()),
        ("intel hybrid", intel_hybrid()),
        ("arm hybrid", arm_hybrid()),
        ("two sockets", two_sockets()),
        ("container", container()),
        ("no sysfs", no_sysfs()),
        ("nothing at all", MemoryTree::new()),
    ]
}
