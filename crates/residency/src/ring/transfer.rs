//! What the ring lends to the engine that moves its bytes on: a transfer, which holds the buffer until it is retired.

use std::fmt;
use std::ops::DerefMut;
use std::sync::Arc;

use crate::ExpertId;

/// A ring's buffer: host memory that the device reads. The ring moves it from owner to owner and touches its bytes
/// only while it owns it. Anything that dereferences to bytes is one; who made it has registered it with the device.
pub trait Buffer: Send + 'static {
    /// How many bytes it holds.
    fn capacity(&self) -> usize;

    /// Lends the first `bytes` bytes for writing.
    fn write<R>(&mut self, bytes: usize, f: impl FnOnce(&mut [u8]) -> R) -> R;

    /// Lends the first `bytes` bytes for reading.
    fn read<R>(&self, bytes: usize, f: impl FnOnce(&[u8]) -> R) -> R;
}

impl<B: DerefMut<Target = [u8]> + Send + 'static> Buffer for B {
    fn capacity(&self) -> usize {
        self.len()
    }

    fn write<R>(&mut self, bytes: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        f(&mut self[..bytes])
    }

    fn read<R>(&self, bytes: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        f(&self[..bytes])
    }
}

/// Moves the bytes of a ring's buffers to where they are wanted.
pub trait TransferEngine: Send + Sync + 'static {
    /// Host memory that this engine can read from.
    type Buffer: Buffer;
    /// Where an expert goes, exclusively owned until the engine drops it.
    type Place: Send + 'static;

    /// Starts to move an expert. Called by the ring's issuer, in the order of the schedule.
    ///
    /// The engine keeps `transfer` as long as anything reads its buffer, and then retires it, from any thread and
    /// in any order, also if the transfer can't be started. It may do so before it returns. It must not wait for a
    /// later transfer of the ring.
    fn submit(&self, transfer: Transfer<Self::Buffer>, to: Self::Place);
}

/// Where a transfer comes back to.
pub(super) trait Retire<B>: Send + Sync {
    fn retire(&self, ticket: Ticket, bytes: usize, buffer: B, result: Result<(), String>);
}

/// Which entry of which generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    pub generation: u64,
    pub entry: usize,
}

/// An expert on its way from a buffer to its place.
///
/// The ring fills the buffer again only after [`Transfer::retire`]. A transfer that is dropped, by a panic too, is
/// retired as failed: an engine that drops one promises, as in retiring it, that nothing reads the buffer any more.
pub struct Transfer<B> {
    /// `None` only once it is retired.
    buffer: Option<B>,
    id: ExpertId,
    bytes: usize,
    ticket: Ticket,
    ring: Arc<dyn Retire<B>>,
}

impl<B> Transfer<B> {
    pub(super) fn new(
        buffer: B,
        id: ExpertId,
        bytes: usize,
        ticket: Ticket,
        ring: Arc<dyn Retire<B>>,
    ) -> Self {
        Transfer { buffer: Some(buffer), id, bytes, ticket, ring }
    }

    /// Whose bytes.
    pub fn id(&self) -> ExpertId {
        self.id
    }

    /// How many, from the buffer's start.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer that holds them.
    pub fn buffer(&self) -> &B {
        self.buffer.as_ref().expect("a transfer has its buffer until it is retired")
    }

    /// Gives the buffer back: nothing reads it any more. On success the bytes are in their place; an error is a
    /// sentence.
    pub fn retire(mut self, result: Result<(), String>) {
        self.give_back(result);
    }

    fn give_back(&mut self, result: Result<(), String>) {
        if let Some(buffer) = self.buffer.take() {
            self.ring.retire(self.ticket, self.bytes, buffer, result);
        }
    }
}

impl<B> Drop for Transfer<B> {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        // A schedule that loom found wrong is over: its locks can't be taken any more.
        if cfg!(loom) && panicking {
            return;
        }
        let reason =
            if panicking { "the copy engine panicked" } else { "the copy engine gave the transfer up" };
        self.give_back(Err(reason.into()));
    }
}

impl<B> fmt::Debug for Transfer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Transfer { id, bytes, ticket, .. } = self;
        f.debug_struct("Transfer")
            .field("id", id)
            .field("bytes", bytes)
            .field("ticket", ticket)
            .finish_non_exhaustive()
    }
}
