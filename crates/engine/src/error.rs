//! Why the engine refuses or fails.

use std::path::PathBuf;

use strata_backend::BackendError;

use crate::sampling::SamplingError;
use crate::snapshot::SnapshotError;

/// Why the engine refuses or fails.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The model file could not be read for its fingerprint.
    #[error(transparent)]
    Model(#[from] strata_model::ModelError),
    /// The n-gram table could not be read.
    #[error(transparent)]
    Table(#[from] strata_model::ngram::RowError),
    /// The model file failed.
    #[error(transparent)]
    File(#[from] strata_gguf::Error),
    /// The experts' bytes failed.
    #[error(transparent)]
    Store(#[from] strata_residency::StoreError),
    /// The plan doesn't fit the machine.
    #[error(transparent)]
    Plan(#[from] strata_plan::PlanError),
    /// The memory planned could not be had.
    #[error(transparent)]
    Arena(#[from] strata_plan::ArenaError),
    /// A sampling parameter is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A saved sequence can't be used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A configuration value can't be used.
    #[error("{0}")]
    Config(String),
    /// The caller gave up.
    #[error("cancelled")]
    Cancelled,
    /// A thread that reads experts can't be started.
    #[error("a thread that reads experts cannot be started: {0}")]
    Thread(std::io::Error),
    /// A context that the model doesn't allow.
    #[error("a context of {asked} tokens is not possible: {} allows 1 to {most}", .file.display())]
    Context {
        /// What was asked for.
        asked: usize,
        /// The model's own.
        most: usize,
        /// Its file.
        file: PathBuf,
    },
    /// No tokens were given.
    #[error("the prompt is empty: there is nothing to continue from")]
    EmptyPrompt,
    /// A token id that the vocabulary doesn't have.
    #[error("token id {id} is out of range: the model has {vocab} tokens")]
    TokenRange {
        /// The id.
        id: u32,
        /// How many the model has.
        vocab: usize,
    },
    /// More tokens than a sequence may have.
    #[error(
        "{wanted} tokens don't fit the context of {context}: shorten the prompt, or raise --context (the model allows {model})"
    )]
    TooLong {
        /// Tokens that the sequence would have.
        wanted: usize,
        /// The configured context.
        context: usize,
        /// The model's own.
        model: usize,
    },
    /// A weight that must be a number isn't.
    #[error(
        "{}: tensor `{tensor}` holds values that aren't finite: the file is damaged; compare its checksum with the publisher's, \
         or download it again",
        .file.display()
    )]
    BrokenTensor {
        /// The model's file.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// What the model computes isn't finite, because a weight isn't.
    #[error(
        "{}: at position {position} values stop being finite in {place}, and {} there hold values that aren't: the file is \
         damaged; compare its checksum with the publisher's, or download it again",
        .file.display(), listed(.tensors)
    )]
    Broken {
        /// The model's file.
        file: PathBuf,
        /// The place of the token whose row it is.
        position: usize,
        /// The first layer and op with such values.
        place: String,
        /// The broken tensors of that layer.
        tensors: Vec<String>,
    },
    /// What the model computes isn't finite, though the weights where that begins are.
    #[error(
        "{}: at position {position} values stop being finite in {place}, though all weights there are: the file is damaged, or \
         its values overflow; compare its checksum with the publisher's, or take another file of the model",
        .file.display()
    )]
    Overflow {
        /// The model's file.
        file: PathBuf,
        /// The place of the token whose row it is.
        position: usize,
        /// The first layer and op with such values.
        place: String,
    },
    /// What the model computed wasn't finite, and was when it was computed again.
    #[error(
        "{}: at position {position} values were not finite, but are when computed again: {backend} or this machine's memory errs \
         (`strata selftest` checks a GPU)",
        .file.display()
    )]
    Unsteady {
        /// The model's file.
        file: PathBuf,
        /// The place of the token whose row it is.
        position: usize,
        /// What computes.
        backend: String,
    },
    /// All sequences are taken.
    #[error("all {0} sequences are in use")]
    NoSequence(usize),
    /// The sequence was closed.
    #[error("the sequence has been closed")]
    Closed,
    /// The sequence is answering.
    #[error("the sequence is still answering")]
    Busy,
    /// Draft logits are wanted of a sequence whose first tokens the draft block hasn't seen.
    #[error("the draft block must read a sequence from its first token: open a new one")]
    DraftGap,
    /// The draft block is needed but absent.
    #[error("the model has no draft block loaded: {0}")]
    NoDraft(String),
}

/// Names of tensors in a sentence.
fn listed(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(" and ")
}
