//! What ops cost: time and bytes per family, cheap enough to be always on.

use serde::Serialize;
use strata_residency::FileCount;

/// A family of ops, the grain at which time is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Token embedding.
    Embed,
    /// N-gram block.
    Ngram,
    /// Hyper-connection reads and writes.
    Mixer,
    /// Gated DeltaNet.
    Gdn,
    /// Sparse attention with its indexer.
    Qsa,
    /// Router and grouping.
    Route,
    /// Routed experts' products.
    Experts,
    /// Shared expert and the sum over experts.
    Combine,
    /// Final mixer and vocabulary head.
    Head,
    /// The draft block's join of embedding and residual.
    Draft,
}

impl Family {
    /// All families, in the order of a forward pass.
    pub const ALL: [Family; 10] = [
        Family::Embed,
        Family::Ngram,
        Family::Mixer,
        Family::Gdn,
        Family::Qsa,
        Family::Route,
        Family::Experts,
        Family::Combine,
        Family::Head,
        Family::Draft,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Family::Embed => "embed",
            Family::Ngram => "n-gram",
            Family::Mixer => "mixer",
            Family::Gdn => "gdn",
            Family::Qsa => "qsa",
            Family::Route => "route",
            Family::Experts => "experts",
            Family::Combine => "combine",
            Family::Head => "head",
            Family::Draft => "draft",
        }
    }
}

/// What one family has cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FamilyCount {
    /// Ops submitted.
    pub calls: u64,
    /// Time spent, nanoseconds.
    pub nanos: u64,
    /// Bytes of weights and state that had to be read at least once.
    pub bytes: u64,
}

/// What the host has computed of a device's windows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostCount {
    /// Layers of which the host computed some experts: round trips.
    pub asked: u64,
    /// Experts that it computed.
    pub experts: u64,
    /// From when it knew what to compute to its answer, nanoseconds.
    pub nanos: u64,
}

impl HostCount {
    /// Adds what was counted elsewhere.
    pub fn merge(&mut self, other: HostCount) {
        self.asked += other.asked;
        self.experts += other.experts;
        self.nanos += other.nanos;
    }
}

/// Routed experts of a device that keeps some of them in its own memory, and reads the others from beside it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ExpertCount {
    /// Experts that windows used: each once a window, whatever rows shared it.
    pub used: u64,
    /// Those of them that were in the device's own memory.
    pub resident: u64,
    /// Experts that came to the device's own memory, each in place of another.
    pub exchanged: u64,
}

impl ExpertCount {
    fn merge(&mut self, other: ExpertCount) {
        self.used += other.used;
        self.resident += other.resident;
        self.exchanged += other.exchanged;
    }
}

/// Copies of experts ahead of what computes with them, from host memory to the device's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkCount {
    /// Copied.
    pub bytes: u64,
    /// While copies were under way, nanoseconds.
    pub nanos: u64,
}

impl LinkCount {
    /// Adds to it.
    pub fn merge(&mut self, other: LinkCount) {
        self.bytes += other.bytes;
        self.nanos += other.nanos;
    }
}

/// What all families have cost since the counters were last taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    counts: [FamilyCount; Family::ALL.len()],
    /// Of a device that has the host compute with it.
    pub host: HostCount,
    /// Of a device with experts beside it.
    pub link: LinkCount,
    experts: Option<ExpertCount>,
    reads: Option<FileCount>,
}

impl Counters {
    /// One family's cost.
    pub fn get(&self, family: Family) -> FamilyCount {
        self.counts[family as usize]
    }

    /// Adds an op's cost.
    pub fn add(&mut self, family: Family, nanos: u64, bytes: u64) {
        let count = &mut self.counts[family as usize];
        count.calls += 1;
        count.nanos += nanos;
        count.bytes += bytes;
    }

    /// What was counted of routed experts; none where all are in one place.
    pub fn experts(&self) -> Option<ExpertCount> {
        self.experts
    }

    /// Adds to what was counted of routed experts.
    pub fn add_experts(&mut self, count: ExpertCount) {
        self.experts.get_or_insert_default().merge(count);
    }

    /// What was counted of experts read from files; none where none are.
    pub fn reads(&self) -> Option<FileCount> {
        self.reads
    }

    /// Adds to what was counted of experts read from files.
    pub fn add_reads(&mut self, count: FileCount) {
        self.reads.get_or_insert_default().merge(count);
    }

    /// Adds what was counted elsewhere or at another time.
    pub fn merge(&mut self, other: &Counters) {
        if let Some(reads) = other.reads {
            self.add_reads(reads);
        }
        if let Some(experts) = other.experts {
            self.add_experts(experts);
        }
        for (count, other) in self.counts.iter_mut().zip(&other.counts) {
            count.calls += other.calls;
            count.nanos += other.nanos;
            count.bytes += other.bytes;
        }
        self.host.merge(other.host);
        self.link.merge(other.link);
    }

    /// All families' time, nanoseconds.
    pub fn nanos(&self) -> u64 {
        self.counts.iter().map(|c| c.nanos).sum()
    }

    /// All families' bytes.
    pub fn bytes(&self) -> u64 {
        self.counts.iter().map(|c| c.bytes).sum()
    }
}
