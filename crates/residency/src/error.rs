//! What can go wrong with experts, as sentences.

use crate::{CopyError, ExpertId};

/// Why tensors can't be a layer's experts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// The tensor can't be divided among the experts.
    #[error("the {tensor} tensor of {bytes} bytes can't be cut into {experts} equal experts")]
    Uneven {
        /// Which tensor.
        tensor: &'static str,
        /// Its length.
        bytes: usize,
        /// How many experts.
        experts: u16,
    },
    /// Gate and up rows of a fused tensor can't be equally long.
    #[error("an expert's {bytes} bytes of the fused gate and up tensor can't be cut into halves")]
    Odd {
        /// An expert's bytes.
        bytes: usize,
    },
}

/// Why an expert's bytes can't be had or moved.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No experts were added for this layer.
    #[error("layer {layer} has no experts in the store")]
    NoLayer {
        /// The layer.
        layer: u16,
    },
    /// The layer has fewer experts.
    #[error("layer {} has no expert {}: it has {experts}", id.layer, id.expert)]
    NoExpert {
        /// Which expert was asked for.
        id: ExpertId,
        /// How many the layer has.
        experts: u16,
    },
    /// A layer was added twice.
    #[error("the experts of layer {layer} are in the store already")]
    LayerTwice {
        /// The layer.
        layer: u16,
    },
    /// The expert moved since the handle was taken.
    #[error("expert {} of layer {} moved since its handle was taken; take a new handle", id.expert, id.layer)]
    Stale {
        /// The expert.
        id: ExpertId,
    },
    /// The expert is being read, so it can't move.
    #[error("expert {} of layer {} is being read and can't move now; move it after this step", id.expert, id.layer)]
    Pinned {
        /// The expert.
        id: ExpertId,
    },
    /// The expert has a copy in the heap tier.
    #[error("expert {} of layer {} has a copy in the heap tier already", id.expert, id.layer)]
    Held {
        /// The expert.
        id: ExpertId,
    },
    /// More readers than can be counted.
    #[error("expert {} of layer {} has too many readers at once", id.expert, id.layer)]
    TooManyPins {
        /// The expert.
        id: ExpertId,
    },
    /// No slot of the heap tier is free, of those planned for experts of this length.
    #[error(
        "expert {} of layer {} needs a slot of {needed} bytes in the heap tier, and none of those that were planned is free",
        id.expert, id.layer
    )]
    HeapFull {
        /// The expert.
        id: ExpertId,
        /// Its bytes.
        needed: usize,
    },
    /// The expert could not be copied.
    #[error("expert {} of layer {} could not be copied: {reason}", id.expert, id.layer)]
    Copy {
        /// The expert.
        id: ExpertId,
        /// Why.
        #[source]
        reason: CopyError,
    },
    /// The expert could not be read from the file.
    #[error("expert {} of layer {} could not be read: {reason}", id.expert, id.layer)]
    Read {
        /// The expert.
        id: ExpertId,
        /// Why: with the tensor and the file.
        reason: String,
    },
    /// The reader of files failed.
    #[error("{reason}")]
    Reader {
        /// Why.
        reason: String,
    },
    /// A layer whose experts are in no file that could be read.
    #[error("the experts of layer {layer} are in no file that could be read")]
    NoFile {
        /// The layer.
        layer: u16,
    },
    /// All slots hold experts that are in use.
    #[error("no slot is free for the experts of layer {layer}: all that were planned are in use")]
    NoSlot {
        /// The layer.
        layer: u16,
    },
    /// The expert is in no tier that it could be computed with from.
    #[error("expert {} of layer {} is not in memory; it has to be read first", id.expert, id.layer)]
    Absent {
        /// The expert.
        id: ExpertId,
    },
    /// Slots don't hold what they are known to hold.
    #[error(transparent)]
    Accounting(#[from] crate::SlotError),
    /// The file under the mapped tier is not what was opened.
    #[error("{reason}")]
    Changed {
        /// A sentence from whoever watches the file.
        reason: String,
    },
}

/// Why a ring can't be made, or an expert didn't come through it.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The ring's memory holds not one buffer.
    #[error(
        "{bytes} bytes of staging memory hold no buffer for experts of up to {largest} bytes; plan more of it"
    )]
    NoBuffers {
        /// The ring's memory.
        bytes: usize,
        /// The largest expert.
        largest: usize,
    },
    /// Nobody would fill the buffers.
    #[error("a staging ring needs at least one stager thread")]
    NoStagers,
    /// A thread could not be started.
    #[error("a thread of the staging ring could not be started: {source}")]
    Spawn {
        /// What the system said.
        source: std::io::Error,
    },
    /// The source doesn't have the expert.
    #[error("expert {} of layer {} can't be staged: {reason}", id.expert, id.layer)]
    Unknown {
        /// The expert.
        id: ExpertId,
        /// Why.
        reason: String,
    },
    /// The expert doesn't fit a buffer.
    #[error(
        "expert {} of layer {} has {bytes} bytes and the staging ring's buffers {buffer}; plan them for the largest expert",
        id.expert, id.layer
    )]
    TooLarge {
        /// The expert.
        id: ExpertId,
        /// Its bytes.
        bytes: usize,
        /// A buffer's bytes.
        buffer: usize,
    },
    /// The schedule is shorter.
    #[error("the copy schedule has {entries} entries, and none with number {entry}")]
    NoEntry {
        /// Which was asked for.
        entry: usize,
        /// How many there are.
        entries: usize,
    },
    /// The expert's bytes could not be read.
    #[error("expert {} of layer {} could not be read: {reason}", id.expert, id.layer)]
    Read {
        /// The expert.
        id: ExpertId,
        /// Why.
        reason: String,
    },
    /// The expert's bytes could not be moved on.
    #[error("expert {} of layer {} could not be transferred: {reason}", id.expert, id.layer)]
    Transfer {
        /// The expert.
        id: ExpertId,
        /// Why.
        reason: String,
    },
    /// The generation was cancelled before the expert was sent.
    #[error("expert {} of layer {} was not transferred: its copy schedule was cancelled", id.expert, id.layer)]
    Cancelled {
        /// The expert.
        id: ExpertId,
    },
}
