//! What a user may decide about the engine, resolved before anything is allocated.

use std::path::PathBuf;

use strata_backend::KvFormat;

/// Where routed experts live in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertHome {
    /// In the heap if a device reads experts that have no room on it and memory has room for them, else mapped.
    #[default]
    Auto,
    /// Read in place from the mapped model file; the page cache decides what stays.
    Mapped,
    /// Copied into memory at start.
    Heap,
    /// Of those that a device has no room for, or of all, as many as fit so many bytes are copied into memory at start, the most used ones; the others are
    /// read from the file when they are used, without the page cache where that is possible.
    #[serde(skip_deserializing)]
    Budget(u64),
}

/// The engine's configuration.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Tokens a sequence may have; by default the model's own context, at most 16,384.
    pub context: Option<usize>,
    /// Rows of a prompt window; by default as many as a modest share of the memory allows, at most 512.
    pub window: Option<usize>,
    /// Sequences that may hold state at once.
    pub sequences: usize,
    /// Recurrent states kept for going back to.
    pub checkpoints: usize,
    /// How keys and values are stored.
    pub kv: KvFormat,
    /// Whether to load the draft block.
    pub draft: bool,
    /// Where routed experts live.
    pub experts: ExpertHome,
    /// The file that keeps what steps teach of experts' use, for [`ExpertHome::Budget`]; none is read or written where this is none, nor for a device, which
    /// has its own.
    pub ranking: Option<PathBuf>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            context: None,
            window: None,
            sequences: 1,
            checkpoints: 2,
            kv: KvFormat::F16,
            draft: false,
            experts: ExpertHome::Auto,
            ranking: None,
        }
    }
}
