//! Experts in memory that the GPU can't read: through pinned buffers, by the staging ring of `strata-residency`.
//!
//! Owns the ring's threads and its engine. Stagers copy experts into buffers, the issuer has the stream of copies take them to the device, and
//! a third kind of thread, the retirer, gives a buffer back when its copy has been made.
//!
//! A window's experts go to places that others are read from until shortly before: so the issuer sends a chunk's only once the window has come so far
//! ([`Staging::open`]). Whoever gives a window up closes that gate for good, and no copy is queued after that.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use strata_backend::BackendError;
use strata_residency::{ExpertId, ExpertStore, Ring, RingThread, Transfer, TransferEngine, buffers_in};

use crate::driver::{Context, DeviceSlice, DriverError, Event, PinnedMemory, Stream};
use crate::failed;

/// Starts a thread of this name.
pub type SpawnStager = Box<dyn FnMut(&str, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> + Send>;

/// Threads and pinned memory for experts that the GPU can't read where they are.
pub struct Stagers {
    /// Starts one.
    pub spawn: SpawnStager,
    /// How many copy.
    pub most: usize,
    /// Bytes of pinned buffers.
    pub bytes: usize,
}

/// Where an expert goes.
pub(super) struct To {
    pub(super) at: DeviceSlice<u8>,
    /// Which chunk of a window it is of, if it is of one.
    pub(super) chunk: Option<usize>,
    /// What is reached when it and all before it are there.
    pub(super) arrived: Option<Arc<Event>>,
}

/// A pinned buffer, and when it has been copied.
struct Pinned {
    memory: PinnedMemory<u8>,
    copied: Event,
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

/// How far the issuer may go.
enum Gate {
    /// To chunks before this one.
    Before(usize),
    /// Nowhere: what was begun is given up.
    Closed,
}

/// The ring's engine.
struct Copies {
    context: Context,
    stream: Stream,
    gate: Mutex<Gate>,
    opened: Condvar,
    /// To the retirer; none once nothing is sent any more.
    sent: Mutex<Option<Sender<Transfer<Pinned>>>>,
}

impl Copies {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, gate: Gate) {
        *self.gate() = gate;
        self.opened.notify_one();
    }

    /// Opens it further, unless it is closed.
    fn open(&self, end: usize) {
        if let Gate::Before(before) = &mut *self.gate() {
            *before = end;
            self.opened.notify_one();
        }
    }

    fn queue(&self, buffer: &Pinned, to: &To) -> Result<(), DriverError> {
        self.context.enter()?;
        // SAFETY: the buffer is the transfer's until it is retired, which is when `copied` has been reached, or nothing is queued any more.
        unsafe { self.stream.queue_upload(&buffer.memory, to.at)? };
        to.arrived.as_ref().map_or(Ok(()), |arrived| arrived.record(&self.stream))?;
        buffer.copied.record(&self.stream)
    }
}

impl TransferEngine for Copies {
    type Buffer = Pinned;
    type Place = To;

    fn submit(&self, transfer: Transfer<Pinned>, to: To) {
        let mut gate = self.gate();
        loop {
            match *gate {
                Gate::Closed => break,
                Gate::Before(end) if to.chunk.is_none_or(|chunk| chunk < end) => break,
                Gate::Before(_) => gate = self.opened.wait(gate).unwrap_or_else(PoisonError::into_inner),
            }
        }
        if matches!(*gate, Gate::Closed) {
            return transfer.retire(Err("its window was given up".into()));
        }
        // Under the lock: behind a closed gate nothing is queued.
        if let Err(error) = self.queue(transfer.buffer(), &to) {
            // The copy itself may be under way.
            let _ = self.stream.synchronize();
            return transfer.retire(Err(error.to_string()));
        }
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sent) = &*sent {
            // The retirer goes on until all senders are gone.
            let _ = sent.send(transfer);
        }
    }
}

/// The retirer's life: copies are made in the order in which they were sent.
fn retire(context: &Context, sent: &Receiver<Transfer<Pinned>>) {
    let entered = context.enter();
    for transfer in sent {
        let made = entered.clone().and_then(|()| transfer.buffer().copied.wait());
        transfer.retire(made.map_err(|error| error.to_string()));
    }
}

/// The staging ring of a device.
pub(super) struct Staging {
    ring: Ring<Copies>,
    copies: Arc<Copies>,
    retirer: Option<JoinHandle<()>>,
}

impl Staging {
    /// A ring with buffers for experts of up to `largest` bytes, whose copies are made by `stream`.
    pub(super) fn new(
        context: &Context,
        stream: Stream,
        store: &Arc<ExpertStore>,
        largest: usize,
        Stagers { mut spawn, most, bytes }: Stagers,
    ) -> Result<Staging, BackendError> {
        let buffer = || -> Result<Pinned, DriverError> {
            Ok(Pinned { memory: PinnedMemory::new(context, largest)?, copied: Event::new(context)? })
        };
        let count = buffers_in(bytes, largest).map_err(failed)?;
        let buffers = (0..count).map(|_| buffer()).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let (sender, sent) = channel();
        let copies = Arc::new(Copies {
            context: context.clone(),
            stream,
            gate: Mutex::new(Gate::Closed),
            opened: Condvar::new(),
            sent: Mutex::new(Some(sender)),
        });
        let of_retirer = context.clone();
        let retirer = spawn("retirer", Box::new(move || retire(&of_retirer, &sent))).map_err(failed)?;
        let mut start = |thread: RingThread, life| match thread {
            RingThread::Stager(number) => spawn(&format!("stager-{number}"), life),
            RingThread::Issuer => spawn("issuer", life),
        };
        let ring = Ring::new(buffers, most.max(1), Arc::clone(store), Arc::clone(&copies), &mut start);
        Ok(Staging { ring: ring.map_err(failed)?, copies, retirer: Some(retirer) })
    }

    /// Begins to bring these experts in this order; those of chunks only before `open`.
    pub(super) fn begin(
        &mut self,
        experts: impl IntoIterator<Item = (ExpertId, To)>,
        open: usize,
    ) -> Result<(), BackendError> {
        self.copies.set(Gate::Before(open));
        self.ring.begin(experts).map_err(failed)?.leave();
        Ok(())
    }

    /// Lets chunks before `open` be sent too.
    pub(super) fn open(&self, open: usize) {
        self.copies.open(open);
    }

    /// Sleeps until the copies of these entries are queued.
    pub(super) fn issued(&mut self, mut entries: Range<usize>) -> Result<(), BackendError> {
        let mut generation = self.ring.resume();
        let all = entries.try_for_each(|entry| generation.issued(entry).map(|_| ())).map_err(failed);
        generation.leave();
        all
    }

    /// Sleeps until all that was begun has arrived.
    pub(super) fn finish(&mut self) -> Result<(), BackendError> {
        self.ring.resume().finish().map_err(failed)
    }

    /// Gives up what was begun: no copy is queued after this.
    pub(super) fn give_up(&mut self) {
        self.copies.set(Gate::Closed);
        drop(self.ring.resume());
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.give_up();
        // The retirer ends with what was sent; nothing in it panics.
        *self.copies.sent.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.retirer.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use strata_residency::LayerSource;

    use super::*;
    use crate::driver::{Device, fake};

    const EXPERTS: u16 = 24;
    /// Bytes of a copy.
    const COPY: usize = 768;

    /// Staging with three buffers and two stagers, on a driver whose copies are made at once; the ends of chunks.
    fn staging() -> (Staging, Vec<Arc<Event>>) {
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
        let tensor = |bytes: usize| vec![7u8; bytes * usize::from(EXPERTS)].into();
        let source = LayerSource::split(EXPERTS, tensor(200), tensor(256), tensor(20)).unwrap();
        assert_eq!(source.copy_layout().bytes, COPY);
        store.add_layer(0, source).unwrap();
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).spawn(work)
        };
        let stagers = Stagers { spawn: Box::new(start), most: 2, bytes: 3 * COPY };
        let ends = (0..4).map(|_| Arc::new(Event::new(&context).unwrap())).collect();
        let stream = Stream::new(&context).unwrap();
        (Staging::new(&context, stream, &Arc::new(store), COPY, stagers).unwrap(), ends)
    }

    /// All experts, six to a chunk.
    fn window(ends: &[Arc<Event>]) -> impl Iterator<Item = (ExpertId, To)> {
        (0..EXPERTS).map(|expert| {
            let chunk = usize::from(expert / 6);
            let at = DeviceSlice::nowhere(COPY);
            let arrived = (expert % 6 == 5).then(|| Arc::clone(&ends[chunk]));
            (ExpertId { layer: 0, expert }, To { at, chunk: Some(chunk), arrived })
        })
    }

    /// Waits until nothing changes any more, as far as one can tell.
    fn arrived(staging: &Staging, at_least: u64) -> u64 {
        for _ in 0..500 {
            if staging.ring.counters().arrived >= at_least {
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
        thread::sleep(Duration::from_millis(20));
        staging.ring.counters().arrived
    }

    /// Oracle: the gate. Experts of chunks that it is open for arrive, and not one of the others before it is.
    #[test]
    fn a_window_comes_as_far_as_it_may() {
        let (mut staging, ends) = staging();
        staging.begin(window(&ends), 1).unwrap();
        staging.issued(0..6).unwrap();
        assert_eq!(arrived(&staging, 6), 6);
        staging.open(3);
        staging.issued(6..18).unwrap();
        assert_eq!(arrived(&staging, 18), 18);
        staging.open(4);
        staging.finish().unwrap();
        assert_eq!(staging.ring.counters().arrived, 24);
    }

    /// Oracle: that the test ends, and the counts. A window is given up while the issuer waits at the gate; what comes next gets through, and a gate that
    /// was closed is not opened by whoever thinks that it is still the old one.
    #[test]
    fn a_window_is_given_up_at_the_gate() {
        let (mut staging, ends) = staging();
        for round in 0..20 {
            staging.begin(window(&ends), 1).unwrap();
            staging.issued(0..6).unwrap();
            staging.give_up();
            staging.open(4);
            assert!(staging.issued(18..19).is_err());
            let few = (0..5).map(|expert| {
                (
                    ExpertId { layer: 0, expert },
                    To { at: DeviceSlice::nowhere(COPY), chunk: None, arrived: None },
                )
            });
            staging.begin(few, 0).unwrap();
            staging.finish().unwrap();
            assert_eq!(staging.ring.counters().arrived, 11 * (round + 1));
        }
        // And dropped while the issuer waits.
        staging.begin(window(&ends), 0).unwrap();
    }

    /// Oracle: the sentence of the one who knows the experts.
    #[test]
    fn an_expert_that_there_is_not_is_named() {
        let (mut staging, _) = staging();
        let to = To { at: DeviceSlice::nowhere(COPY), chunk: None, arrived: None };
        let refused = staging.begin([(ExpertId { layer: 3, expert: 1 }, to)], 0).unwrap_err().to_string();
        assert!(refused.contains("expert 1 of layer 3"), "{refused}");
    }
}
