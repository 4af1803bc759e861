//! What a ring did, in numbers.

use std::time::Duration;

/// What a ring did since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Buffers filled, of entries that were wanted then or not.
    pub staged: u64,
    /// Transfers handed to the engine.
    pub sent: u64,
    /// Transfers that ended well, those of entries that were skipped meanwhile included.
    pub arrived: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Entries that were skipped.
    pub skipped: u64,
    /// Reads and transfers that failed.
    pub failed: u64,
    /// Generations that were given up before all their entries had been settled.
    pub cancelled: u64,
    /// Stagers, while an entry was to be staged and no buffer was free: the time in which any of them waited, not
    /// their sum.
    pub stagers: Waits,
    /// The issuer, while an entry was still to be staged.
    pub issuer: Waits,
    /// The caller of [`super::Generation`].
    pub host: Waits,
}

/// How often and for how long someone slept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// How often.
    pub count: u64,
    /// How long in all.
    pub time: Duration,
}

impl Waits {
    pub(super) fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time += time;
    }
}
