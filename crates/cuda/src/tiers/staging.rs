//! Experts in memory that the GPU can't read: through pinned buffers, by the staging ring of `strata-residency`.
//!
//! Owns the ring's threads and its engine. Stagers copy experts into buffers, the issuer has the stream of copies take them to the device, and
//! a third kind of thread, the retirer, gives a buffer back when its copy has been made.
//!
//! A window's experts go to places that others are read from until shortly before: so the issuer sends a chunk's only once the window has come so far
//! ([`Staging::open`]). The gate knows one window: once another was begun, or it was given up, no copy of it is queued.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use strata_backend::BackendError;
use strata_residency::{ExpertId, ExpertStore, Ring, RingThread, Transfer, TransferEngine, buffers_in};

use crate::driver::{Context, DeviceSlice, DriverError, Event, PinnedMemory, PinnedPart, Stream};
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
    /// What comes before it, if it is its chunk's first.
    pub(super) begins: Option<Begins>,
    /// What is reached when it and all before it are there, if it is its chunk's last.
    pub(super) arrived: Option<Arc<Event>>,
}

/// What a chunk begins with. It is queued by the issuer, right before the chunk's first staged copy: whoever did that ahead would have the copies wait
/// that are of chunks before and that no buffer was free for yet.
pub(super) struct Begins {
    /// When its place is free.
    pub(super) used: Arc<Event>,
    /// What the GPU can read, from where to where.
    pub(super) pieces: Arc<Vec<Piece>>,
}

/// A copy from host memory, all of it in one registration, and to where.
pub(super) type Piece = (Range<usize>, DeviceSlice<u8>);

/// A pinned buffer, and when it has been copied.
struct Pinned {
    memory: PinnedPart<u8>,
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

/// How far the issuer may go: with experts of this window only, to chunks before `end`.
struct Gate {
    window: u64,
    end: usize,
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

    /// Begins another window; what was begun before is given up, also by an issuer that is at the gate with it and looks late.
    fn next(&self, end: usize) -> u64 {
        let mut gate = self.gate();
        *gate = Gate { window: gate.window + 1, end };
        self.opened.notify_one();
        gate.window
    }

    /// Opens it further for the window that was begun last.
    fn open(&self, end: usize) {
        self.gate().end = end;
        self.opened.notify_one();
    }

    fn queue(&self, buffer: &Pinned, to: &To) -> Result<(), DriverError> {
        self.context.enter()?;
        if let Some(Begins { used, pieces }) = &to.begins {
            used.hold(&self.stream)?;
            for (from, to) in pieces.iter() {
                // SAFETY: a piece of one registration, which the ring that this is a part of keeps; copies of experts don't change there. Whoever drops the
                // ring waits for the copies.
                unsafe { self.stream.queue_registered(from.start, *to)? };
            }
        }
        // SAFETY: the buffer is pinned, and the transfer's until it is retired, which is when `copied` has been reached, or nothing is queued any more.
        unsafe { self.stream.queue_upload(&buffer.memory, to.at)? };
        to.arrived.as_ref().map_or(Ok(()), |arrived| arrived.record(&self.stream))?;
        buffer.copied.record(&self.stream)
    }
}

impl TransferEngine for Copies {
    type Buffer = Pinned;
    /// With its window.
    type Place = (u64, To);

    fn submit(&self, transfer: Transfer<Pinned>, (window, to): (u64, To)) {
        let mut gate = self.gate();
        while gate.window == window && to.chunk.is_some_and(|chunk| chunk >= gate.end) {
            gate = self.opened.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        if gate.window != window {
            return transfer.retire(Err("its window was given up".into()));
        }
        // Under the lock: of a window that was given up nothing is queued.
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
        let count = buffers_in(bytes.max(largest), largest).map_err(failed)?;
        let memory = PinnedMemory::new(context, count * largest).map_err(failed)?;
        let buffer = |memory| Ok(Pinned { memory, copied: Event::new(context)? });
        let buffers = memory.parts(largest).into_iter().map(buffer).collect::<Result<_, DriverError>>();
        let buffers = buffers.map_err(failed)?;
        let (sender, sent) = channel();
        let copies = Arc::new(Copies {
            context: context.clone(),
            stream,
            gate: Mutex::new(Gate { window: 0, end: 0 }),
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

    /// Begins a window's experts, in this order; those of chunks before `open` may go.
    pub(super) fn begin(
        &mut self,
        experts: impl IntoIterator<Item = (ExpertId, To)>,
        open: usize,
    ) -> Result<(), BackendError> {
        let window = self.copies.next(open);
        let experts = experts.into_iter().map(|(id, to)| (id, (window, to)));
        self.ring.begin(experts).map_err(failed)?.leave();
        Ok(())
    }

    /// Brings these experts, which are of no chunk, and sleeps until they are there.
    pub(super) fn bring(
        &mut self,
        experts: impl IntoIterator<Item = (ExpertId, To)>,
    ) -> Result<(), BackendError> {
        let window = self.copies.next(0);
        let experts = experts.into_iter().map(|(id, to)| (id, (window, to)));
        self.ring.begin(experts).map_err(failed)?.finish().map_err(failed)
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

    /// Gives up what was begun: no copy is queued after this.
    pub(super) fn give_up(&mut self) {
        self.copies.next(0);
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
            (ExpertId { layer: 0, expert }, To { at, chunk: Some(chunk), begins: None, arrived })
        })
    }

    /// How many have arrived, once it is so many, or after a while.
    fn arrived_soon(staging: &Staging, at_least: u64) -> u64 {
        for _ in 0..2000 {
            if staging.ring.counters().arrived >= at_least {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        staging.ring.counters().arrived
    }

    /// The same, and a little later.
    fn arrived(staging: &Staging, at_least: u64) -> u64 {
        arrived_soon(staging, at_least);
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
        staging.issued(18..24).unwrap();
        assert_eq!(arrived(&staging, 24), 24);
    }

    /// Oracle: that the test ends, and the counts. A window is given up while the issuer waits at the gate, and another is begun before it has looked.
    #[test]
    fn a_window_is_given_up_at_the_gate() {
        let (mut staging, ends) = staging();
        for round in 0..200 {
            staging.begin(window(&ends), 1).unwrap();
            staging.issued(0..6).unwrap();
            staging.give_up();
            staging.open(4);
            assert!(staging.issued(18..19).is_err());
            let few = (0..5).map(|expert| {
                let at = DeviceSlice::nowhere(COPY);
                (ExpertId { layer: 0, expert }, To { at, chunk: None, begins: None, arrived: None })
            });
            staging.bring(few).unwrap();
            assert_eq!(arrived_soon(&staging, 11 * (round + 1)), 11 * (round + 1));
        }
        // And dropped while the issuer waits.
        staging.begin(window(&ends), 0).unwrap();
    }

    /// Oracle: nothing arrives. An issuer that comes to the gate with an expert of an earlier window turns back, however far the gate is open now, and also
    /// where it would have to wait.
    #[test]
    fn an_earlier_window_is_turned_back() {
        for open in [0, 4] {
            let (mut staging, ends) = staging();
            let early = staging.copies.gate().window;
            staging.copies.next(open);
            let late = window(&ends).map(|(id, to)| (id, (early, to)));
            let error = staging.ring.begin(late).unwrap().finish().unwrap_err().to_string();
            assert!(error.contains("given up"), "{error}");
            assert_eq!(staging.ring.counters().arrived, 0);
        }
    }

    /// Oracle: the sentence of the one who knows the experts.
    #[test]
    fn an_expert_that_there_is_not_is_named() {
        let (mut staging, _) = staging();
        let to = To { at: DeviceSlice::nowhere(COPY), chunk: None, begins: None, arrived: None };
        let refused = staging.begin([(ExpertId { layer: 3, expert: 1 }, to)], 0).unwrap_err().to_string();
        assert!(refused.contains("expert 1 of layer 3"), "{refused}");
    }
}
