//! How experts are copied between tiers.
//!
//! A copy may still be running when [`CopyEngine::copy`] returns. Its destination is then inside the fence, and only
//! waiting for the fence gives it back: reading too early, or reusing the destination under a running copy, does not
//! compile.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};

use strata_plan::Block;

use crate::sync::Mutex;
use crate::{ExpertId, Extent, LayerSource};

/// Why a copy failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The destination is not as long as the expert.
    #[error("the destination has {found} bytes where the expert's copy has {expected}")]
    Length {
        /// The copy's bytes.
        expected: usize,
        /// The destination's bytes.
        found: usize,
    },
    /// The source could not be read.
    #[error("{0}")]
    Read(String),
}

impl CopyError {
    pub(crate) fn check_length(home: &LayerSource, copy: &[u8]) -> Result<(), CopyError> {
        let (expected, found) = (home.copy_layout().bytes, copy.len());
        if expected == found { Ok(()) } else { Err(CopyError::Length { expected, found }) }
    }
}

/// Copies an expert's bytes from its home into slots of one tier.
pub trait CopyEngine: Send + Sync {
    /// A place of that tier, exclusively owned.
    type Slot;
    /// A copy that was started, with the slot that it fills.
    type Fence;

    /// Starts to copy an expert into `to`, laid out by [`LayerSource::copy_layout`]. A copy that runs on after the return keeps a clone
    /// of `home`.
    fn copy(&self, id: ExpertId, home: &LayerSource, to: Self::Slot) -> Result<Self::Fence, CopyError>;

    /// Sleeps until the copy is done and returns the filled slot.
    fn wait(&self, fence: Self::Fence) -> Result<Self::Slot, CopyError>;
}

/// The heap tier's slots that hold no expert, by their length.
#[derive(Debug, Default)]
pub(crate) struct FreeSlots(Mutex<BTreeMap<usize, Vec<Block<u8>>>>);

impl FreeSlots {
    /// A slot of exactly `bytes` bytes, with whatever was in it last.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<HeapSlot> {
        let block = self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&bytes)?.pop()?;
        Some(HeapSlot { block: Some(block), home: self.clone() })
    }

    /// A slot with what is in it, which is free again once it is dropped.
    pub(crate) fn lend(self: &Arc<Self>, block: Option<Block<u8>>) -> HeapSlot {
        HeapSlot { block, home: self.clone() }
    }

    pub(crate) fn put(&self, block: Block<u8>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(block.len()).or_default().push(block);
    }
}

/// A slot of the heap tier on its way to hold an expert. Dropped before it does, it is free again.
#[derive(Debug)]
pub struct HeapSlot {
    /// `None` only once the store has taken it over.
    block: Option<Block<u8>>,
    home: Arc<FreeSlots>,
}

impl HeapSlot {
    pub(crate) fn into_block(mut self) -> Option<Block<u8>> {
        self.block.take()
    }
}

impl Drop for HeapSlot {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.home.put(block);
        }
    }
}

impl Deref for HeapSlot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.block.as_deref().unwrap_or_default()
    }
}

impl DerefMut for HeapSlot {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.block.as_deref_mut().unwrap_or_default()
    }
}

/// Reads a part of an expert from the file that its home tensors are mapped from, into a buffer of the same length.
/// Fails with one sentence that names the file.
pub type ReadAt = Box<dyn Fn(ExpertId, &Extent, &mut [u8]) -> Result<(), String> + Send + Sync>;

/// Reads an expert's gate, up and down rows.
pub(crate) fn read_parts(
    read: &ReadAt,
    id: ExpertId,
    home: &LayerSource,
    to: [&mut [u8]; 3],
) -> Result<(), String> {
    let extents = home.extents(id.expert);
    extents.iter().zip(to).try_for_each(|(extent, part)| read(id, extent, part))
}

/// The copy engine of the heap tier. It reads the file, so that the mapping's pages stay untouched.
///
/// Copies are done when [`CopyEngine::copy`] returns.
pub struct HostCopy(ReadAt);

impl HostCopy {
    /// Copies with `read`.
    pub fn new(read: ReadAt) -> HostCopy {
        HostCopy(read)
    }
}

impl CopyEngine for HostCopy {
    type Slot = HeapSlot;
    type Fence = HeapSlot;

    fn copy(&self, id: ExpertId, home: &LayerSource, mut to: HeapSlot) -> Result<HeapSlot, CopyError> {
        CopyError::check_length(home, &to)?;
        read_parts(&self.0, id, home, home.cut_mut(&mut to)).map_err(CopyError::Read)?;
        Ok(to)
    }

    fn wait(&self, fence: HeapSlot) -> Result<HeapSlot, CopyError> {
        Ok(fence)
    }
}
