//! The staging ring: pinned buffers between host memory that the device cannot read and the engine that copies to it.
//!
//! Stager threads copy experts from wherever they are ([`Source`]) into the buffers; the issuer thread hands the
//! filled ones to the [`TransferEngine`] in the order of the schedule; the engine retires each transfer when it
//! likes. A schedule is one generation: a layer, or all layers of a window. Entries that the routing doesn't want
//! are skipped, early or late, and a generation can be given up at any time.
//!
//! Owns the buffers and the order in which they are filled and sent. Does not know what the bytes are, where they
//! come from or what device reads them.
//!
//! Invariants:
//! - a buffer has one owner, and whoever fills it owns it. It is free again only by the retirement of its last
//!   transfer, in whatever generation that was sent: filling one that is still being read can't be written down;
//! - whoever waits sleeps, and is woken by the one whose work it waited for.
//!
//! Buffers are equally large, each for the largest expert, and any free one serves the next entry. A ring of bytes
//! that wraps around would waste less where experts' sizes differ, but it is freed in its order only: one late
//! transfer, or an entry that was skipped when it had been filled, would hold up everything behind it. An expert
//! larger than a buffer is refused when a generation begins: it would have to be split, which nobody needs as long
//! as the plan knows the largest.

mod counters;
#[cfg(test)]
mod fakes;
#[cfg(all(test, not(loom)))]
mod late;
#[cfg(all(test, loom))]
mod model;
mod protocol;
mod source;
mod state;
mod transfer;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use counters::{Counters, Waits};
use protocol::Protocol;
pub use source::Source;
use state::{Entry, Need, State};
pub use transfer::{Buffer, Transfer, TransferEngine};

use crate::{ExpertId, RingError};

/// A thread of the ring, for whoever starts it to give it its name and CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingThread {
    /// Copies experts; there are several, numbered from 0.
    Stager(usize),
    /// Talks to the engine; hardly computes.
    Issuer,
}

/// Starts a thread.
pub type Spawn<'a> = &'a mut dyn FnMut(RingThread, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;

/// How many buffers for experts of up to `largest` bytes fit into `bytes`.
///
/// # Errors
/// [`RingError::NoBuffers`] where not even one does.
pub fn buffers_in(bytes: usize, largest: usize) -> Result<usize, RingError> {
    match bytes.checked_div(largest) {
        None | Some(0) => Err(RingError::NoBuffers { bytes, largest }),
        Some(buffers) => Ok(buffers),
    }
}

/// A staging ring. Dropping it gives up what is under way and joins its threads; buffers that the engine still has
/// live until it lets go of them.
pub struct Ring<E: TransferEngine> {
    protocol: Arc<Protocol<E::Buffer, E::Place>>,
    source: Arc<dyn DynSource>,
    /// Bytes of a buffer.
    capacity: usize,
    threads: Vec<JoinHandle<()>>,
    /// The memory of the last generation's entries.
    spare: Vec<Entry<E::Buffer, E::Place>>,
}

/// What of a source a generation's beginning needs.
trait DynSource: Send + Sync {
    fn bytes(&self, id: ExpertId) -> Result<usize, String>;
}

impl<S: Source> DynSource for S {
    fn bytes(&self, id: ExpertId) -> Result<usize, String> {
        Source::bytes(self, id)
    }
}

impl<E: TransferEngine> Ring<E> {
    /// A ring over `buffers`, whose threads, an issuer and `stagers` stagers, `spawn` starts.
    pub fn new(
        buffers: Vec<E::Buffer>,
        stagers: usize,
        source: Arc<impl Source>,
        engine: Arc<E>,
        spawn: Spawn<'_>,
    ) -> Result<Ring<E>, RingError> {
        let Some(capacity) = buffers.iter().map(Buffer::capacity).min() else {
            return Err(RingError::NoBuffers { bytes: 0, largest: 0 });
        };
        if stagers == 0 {
            return Err(RingError::NoStagers);
        }
        let protocol = Arc::new(Protocol::new(buffers));
        let threads = Vec::with_capacity(stagers + 1);
        // An early return drops the ring, which joins the threads that were started.
        let mut ring =
            Ring { protocol: protocol.clone(), source: source.clone(), capacity, threads, spare: Vec::new() };
        for stager in 0..stagers {
            let (protocol, source) = (protocol.clone(), source.clone());
            let life = Box::new(move || protocol.stage(&*source));
            ring.threads
                .push(spawn(RingThread::Stager(stager), life).map_err(|source| RingError::Spawn { source })?);
        }
        let life = Box::new(move || protocol.issue(&*engine));
        ring.threads.push(spawn(RingThread::Issuer, life).map_err(|source| RingError::Spawn { source })?);
        Ok(ring)
    }

    /// Begins to stage and send these experts, in this order. A generation that was leaked is given up first.
    ///
    /// # Errors
    /// An expert isn't there, or is larger than a buffer. Nothing was begun then.
    pub fn begin(
        &mut self,
        schedule: impl IntoIterator<Item = (ExpertId, E::Place)>,
    ) -> Result<Generation<'_, E>, RingError> {
        self.end();
        let mut entries = std::mem::take(&mut self.spare);
        for (id, to) in schedule {
            let bytes = self.source.bytes(id).map_err(|reason| RingError::Unknown { id, reason })?;
            if bytes > self.capacity {
                return Err(RingError::TooLarge { id, bytes, buffer: self.capacity });
            }
            entries.push(Entry::new(id, bytes, to));
        }
        let number = self.protocol.begin(entries);
        Ok(Generation { ring: self, number })
    }

    /// The generation that was begun last and [left](Generation::leave), or one that is over.
    pub fn resume(&mut self) -> Generation<'_, E> {
        let number = self.protocol.generation();
        Generation { ring: self, number }
    }

    /// What the ring did so far.
    pub fn counters(&self) -> Counters {
        self.protocol.counters()
    }

    fn end(&mut self) {
        let mut entries = self.protocol.end();
        // Here, not under the lock: places are others' and may do anything when they are dropped.
        entries.clear();
        if entries.capacity() > 0 {
            self.spare = entries;
        }
    }
}

impl<E: TransferEngine> Drop for Ring<E> {
    fn drop(&mut self) {
        self.end();
        self.protocol.stop();
        // A panic in a source or an engine was contained and reported; there is nothing else that could be.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl<E: TransferEngine> fmt::Debug for Ring<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("capacity", &self.capacity)
            .field("threads", &self.threads.len())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

/// A schedule under way. Entries have the schedule's numbers, from 0. Dropping it gives up what wasn't sent yet and
/// waits for nothing: what was sent goes on, and the next generation begins around it.
pub struct Generation<'r, E: TransferEngine> {
    ring: &'r mut Ring<E>,
    number: u64,
}

impl<E: TransferEngine> Generation<'_, E> {
    /// An entry isn't wanted. It is not staged or not sent, if there is time; if it was sent already, nobody needs
    /// to wait for it.
    pub fn skip(&mut self, entry: usize) -> Result<(), RingError> {
        self.ring.protocol.skip(entry)
    }

    /// Sleeps until the engine was told of an entry, so that work which the device puts behind the engine's sees
    /// it; `false` if the entry was skipped.
    ///
    /// # Errors
    /// [`RingError::Read`], [`RingError::Transfer`], [`RingError::Cancelled`].
    pub fn issued(&mut self, entry: usize) -> Result<bool, RingError> {
        self.wait(Need::Issued(entry), |state| state.issued(entry))
    }

    /// Sleeps until an entry's bytes are in their place; `false` if it was skipped.
    ///
    /// # Errors
    /// As [`Generation::issued`].
    pub fn arrived(&mut self, entry: usize) -> Result<bool, RingError> {
        self.wait(Need::Arrived(entry), |state| state.arrived(entry))
    }

    /// Sleeps until all entries that weren't skipped are in their places.
    ///
    /// # Errors
    /// That of the first entry in the schedule's order that failed or was cancelled; the others have come to their end too.
    pub fn finish(self) -> Result<(), RingError> {
        self.ring.protocol.wait(Need::All, |state| {
            (0..state.entries.len())
                .filter_map(|entry| state.arrived(entry))
                .find_map(Result::err)
                .map_or(Ok(()), Err)
        })
    }

    /// Lets it go on. It is taken up again by [`Ring::resume`], and given up by the next one's beginning.
    pub fn leave(self) {
        std::mem::forget(self);
    }

    /// Who can give this generation up from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller { ring: self.ring.protocol.clone(), generation: self.number }
    }

    fn wait(
        &mut self,
        need: Need,
        ask: impl FnOnce(&State<E::Buffer, E::Place>) -> Option<Result<bool, RingError>>,
    ) -> Result<bool, RingError> {
        // A need that is met has an answer.
        self.ring.protocol.wait(need, ask).unwrap_or(Ok(false))
    }
}

impl<E: TransferEngine> Drop for Generation<'_, E> {
    fn drop(&mut self) {
        self.ring.end();
    }
}

impl<E: TransferEngine> fmt::Debug for Generation<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("number", &self.number).field("ring", &self.ring).finish()
    }
}

/// Gives one generation up. Of use to nobody once that is over, and harmless.
#[derive(Clone)]
pub struct Canceller {
    ring: Arc<dyn Cancel>,
    generation: u64,
}

impl Canceller {
    /// Nothing more is sent; entries that weren't are reported as [`RingError::Cancelled`]. Doesn't wait.
    pub fn cancel(&self) {
        self.ring.cancel(self.generation);
    }
}

impl fmt::Debug for Canceller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Canceller").field("generation", &self.generation).finish_non_exhaustive()
    }
}

trait Cancel: Send + Sync {
    fn cancel(&self, generation: u64);
}

impl<B: Buffer, P: Send + 'static> Cancel for Protocol<B, P> {
    fn cancel(&self, generation: u64) {
        Protocol::cancel(self, generation);
    }
}
