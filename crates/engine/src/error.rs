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
    /// The model's output is broken.
    #[error(
        "{}: the model gave no finite logit at position {position}: the file is damaged, or its values overflow",
        .file.display()
    )]
    NoFiniteLogit {
        /// The model's file.
        file: PathBuf,
        /// The place of the token whose logits they are.
        position: usize,
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
