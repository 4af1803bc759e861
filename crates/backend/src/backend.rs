//! The trait that a backend implements.

use crate::{Buffer, Checkpoint, Counters, Largest, Op, SeqSlot, Span};

/// A point in the order of submitted ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub u64);

/// Why a backend could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An expert's bytes could not be had.
    #[error(transparent)]
    Store(#[from] strata_residency::StoreError),
    /// State bytes of another shape than this backend's.
    #[error(
        "the saved state does not fit: it has {found} bytes where this model and configuration need {expected}"
    )]
    StateSize {
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The device failed; nothing submitted since the last good fence can be trusted.
    #[error("{device}: {reason}")]
    Device {
        /// Which device.
        device: String,
        /// What it said.
        reason: String,
    },
}

/// A machine that computes ops in the order of their submission.
///
/// Weights and buffers exist before the first op; nothing is allocated after.
pub trait Backend: Send {
    /// The name in reports, e.g. `cpu (avx512, 8 threads)`.
    fn name(&self) -> String;

    /// A step begins: ops will follow one another closely until [`Backend::end_step`], and threads may stay awake between them.
    fn begin_step(&mut self);

    /// The step is over: nothing more is coming soon, whoever waits must sleep.
    fn end_step(&mut self);

    /// Submits an op. Its inputs are what earlier ops left; borrowed slices are read before this returns.
    fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError>;

    /// The point after everything submitted so far.
    ///
    /// # Errors
    /// Something submitted since the last fence could not be queued: its window is lost.
    fn fence(&mut self) -> Result<Fence, BackendError>;

    /// Sleeps until everything before `fence` is done.
    fn wait(&mut self, fence: Fence) -> Result<(), BackendError>;

    /// As [`Backend::wait`], or somewhat longer: for whoever has submitted more already, so that nobody waits for the answer.
    fn wait_idly(&mut self, fence: Fence) -> Result<(), BackendError> {
        self.wait(fence)
    }

    /// Waits for all ops and copies floats out of a buffer, starting at its `first` float.
    fn read(&mut self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError>;

    /// Waits for all ops and finds the largest values of rows of logits, adjusted and masked, of equal ones those of the lower index first:
    /// `[rows][count]` indices and values; and, unless `masses` is empty, the sum of each row's [`crate::mass`]. The first of a row with
    /// logits that aren't finite is NaN, and its others and its mass are whatever they are. False, and nothing is written, where the
    /// backend has no way to that is faster than [`Backend::read`], or not for so many adjustments.
    fn largest(
        &mut self,
        _buffer: Buffer,
        _wanted: Largest<'_>,
        _out: &mut [(u32, f32)],
        _masses: &mut [u64],
    ) -> Result<bool, BackendError> {
        Ok(false)
    }

    /// Makes the pending state of the spans' sequences their committed one. Without this call a window changes nothing.
    fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError>;

    /// Makes a sequence's state that of zero tokens.
    fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError>;

    /// Copies the committed state of `from`'s first `tokens` tokens to `to`. All of them: the recurrent state has no other length.
    fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError>;

    /// Makes a checkpoint, as a window's [`crate::Cut`] filled it, the committed recurrent state of a sequence. The positional caches of the checkpoint's tokens must be those of `slot`.
    fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError>;

    /// Appends the committed state of a sequence of `tokens` tokens as bytes, little-endian:
    /// per layer the recurrent floats, then the positional cache as [`crate::Spec`] sizes them.
    fn export(&mut self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError>;

    /// Makes exported bytes the committed state of a sequence.
    fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError>;

    /// Hands over the counters and starts them anew.
    fn take_counters(&mut self) -> Counters;

    /// Bytes of the device's own memory that are taken since the backend-to-be counted them, by the device's count of all that is
    /// free: what other programs took meanwhile is in it. Nothing for a backend without such memory.
    fn device_bytes(&self) -> Option<u64> {
        None
    }
}
