//! Who waits for what, and who wakes them: the ring's state under one lock.
//!
//! Stagers, the issuer, the host and the engine take the lock a few times per expert, for moments: some megabytes
//! are copied in between. So one lock is cheap, and every change is atomic: an entry that is skipped, a generation
//! that is cancelled and a transfer that retires can't pass each other half-way.
//!
//! Everyone sleeps on a condition variable of their role, and says so in [`Asleep`](super::state::Asleep). Whoever
//! changes the state asks it whom the change concerns ([`State::due`](super::state::State::due)) and wakes these:
//! the issuer or the host when it is theirs to go on; one stager where an entry and a buffer are there to claim,
//! which wakes the next one if there are more. All stagers are alike, so it doesn't matter which one wakes. Only
//! shutdown wakes everyone.

use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::counters::Counters;
use super::source::Source;
use super::state::{Claim, Due, Entry, Issue, Need, State};
use super::transfer::{Buffer, Retire, Ticket, Transfer, TransferEngine};
use crate::RingError;
use crate::sync::{Condvar, Mutex, MutexGuard, contained};

/// What tests may break, to show that they would notice. [`Sound`] is what runs.
///
/// That a buffer is filled only after its last transfer is no constant here: it follows from buffers having one
/// owner. Tests break it by forging a second one.
pub(super) trait Variant: 'static {
    /// A claim or a transfer of an older generation is taken for one of the current.
    const TAKES_OLD_FOR_NEW: bool = false;
    /// Whoever filled a buffer wakes the issuer first and publishes the buffer then.
    const WAKES_BEFORE_PUBLISHING: bool = false;
    /// Nobody wakes stagers.
    const LETS_STAGERS_SLEEP: bool = false;
    /// Nobody wakes the issuer.
    const LETS_ISSUER_SLEEP: bool = false;
    /// Nobody wakes the host.
    const LETS_HOST_SLEEP: bool = false;
}

/// The protocol as it is meant.
pub(super) struct Sound;

impl Variant for Sound {}

pub(super) struct Protocol<B, P, V = Sound> {
    state: Mutex<State<B, P>>,
    stagers: Condvar,
    issuer: Condvar,
    host: Condvar,
    variant: PhantomData<fn() -> V>,
}

type Guard<'a, B, P> = MutexGuard<'a, State<B, P>>;

impl<B: Buffer, P: Send + 'static, V: Variant> Protocol<B, P, V> {
    pub fn new(buffers: Vec<B>) -> Self {
        Protocol {
            state: Mutex::new(State::new(buffers)),
            stagers: Condvar::new(),
            issuer: Condvar::new(),
            host: Condvar::new(),
            variant: PhantomData,
        }
    }

    /// A stager's life: fills buffers until the ring stops.
    pub fn stage(&self, source: &impl Source) {
        while let Some(mut claim) = self.claim() {
            let Claim { id, bytes, ref mut buffer, .. } = claim;
            let read = contained(|| buffer.write(bytes, |to| source.read(id, to)));
            self.filled(claim, read.unwrap_or_else(|said| Err(format!("its stager panicked: {said}"))));
        }
    }

    /// The issuer's life: tells the engine of filled buffers until the ring stops.
    pub fn issue(self: &Arc<Self>, engine: &impl TransferEngine<Buffer = B, Place = P>) {
        while let Some(Issue { claim: Claim { ticket, id, bytes, buffer }, to }) = self.next_issue() {
            let transfer = Transfer::new(buffer, id, bytes, ticket, self.clone());
            // One that panics drops the transfer, which is thereby retired as failed.
            let _ = contained(|| engine.submit(transfer, to));
            self.change(|state| state.told(ticket));
        }
    }

    /// Starts a generation, once the last one was ended, and returns its number.
    pub fn begin(&self, entries: Vec<Entry<B, P>>) -> u64 {
        self.change(|state| {
            state.begin(entries);
            state.generation
        })
    }

    /// Ends a generation: what wasn't sent isn't sent any more. Returns its entries.
    pub fn end(&self) -> Vec<Entry<B, P>> {
        self.change(State::end)
    }

    pub fn cancel(&self, generation: u64) {
        self.change(|state| {
            if state.generation == generation {
                state.cancel();
            }
        });
    }

    pub fn skip(&self, entry: usize) -> Result<(), RingError> {
        self.change(|state| state.skip(entry))
    }

    /// Sleeps until `need` is met, and asks then.
    pub fn wait<R>(&self, need: Need, ask: impl FnOnce(&State<B, P>) -> R) -> R {
        let mut state = self.lock();
        let mut since = None;
        while !state.met(need) {
            since = since.or_else(|| Some(Instant::now()));
            state.asleep.host = Some(need);
            state = self.host.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.asleep.host = None;
        if let Some(since) = since {
            state.counters.host.add(since.elapsed());
        }
        ask(&state)
    }

    /// The number of the latest generation.
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Sends everyone home.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.stagers.notify_all();
        self.issuer.notify_all();
    }

    fn claim(&self) -> Option<Claim<B>> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(claim) = state.claim() {
                let due = state.due();
                drop(state);
                self.wake(due);
                return Some(claim);
            }
            state.asleep.stagers += 1;
            state.look_at_the_clock();
            state = self.stagers.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep.stagers -= 1;
            state.asleep.stager_called = false;
        }
    }

    fn filled(&self, mut claim: Claim<B>, result: Result<(), String>) {
        if V::WAKES_BEFORE_PUBLISHING {
            self.lock().asleep.issuer = false;
            self.issuer.notify_one();
        }
        let mut state = self.lock();
        if V::TAKES_OLD_FOR_NEW {
            claim.ticket.generation = state.generation;
        }
        state.filled(claim, result);
        let mut due = state.due();
        drop(state);
        due.issuer &= !V::WAKES_BEFORE_PUBLISHING;
        self.wake(due);
    }

    fn next_issue(&self) -> Option<Issue<B, P>> {
        let mut state = self.lock();
        let mut since = None;
        loop {
            if state.stop {
                return None;
            }
            if let Some(issue) = state.issue() {
                if let Some(since) = since {
                    state.counters.issuer.add(Instant::elapsed(&since));
                }
                return Some(issue);
            }
            if state.has_unissued() {
                since = since.or_else(|| Some(Instant::now()));
            }
            state.asleep.issuer = true;
            state = self.issuer.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Changes the state, and wakes those whom that concerns.
    pub fn change<R>(&self, f: impl FnOnce(&mut State<B, P>) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        let due = state.due();
        drop(state);
        self.wake(due);
        result
    }

    fn wake(&self, due: Due) {
        if due.stager && !V::LETS_STAGERS_SLEEP {
            self.stagers.notify_one();
        }
        if due.issuer && !V::LETS_ISSUER_SLEEP {
            self.issuer.notify_one();
        }
        if due.host && !V::LETS_HOST_SLEEP {
            self.host.notify_one();
        }
    }

    fn lock(&self) -> Guard<'_, B, P> {
        // Nothing under the lock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Buffer, P: Send + 'static, V: Variant> Retire<B> for Protocol<B, P, V> {
    fn retire(&self, mut ticket: Ticket, bytes: usize, buffer: B, result: Result<(), String>) {
        self.change(|state| {
            if V::TAKES_OLD_FOR_NEW {
                ticket.generation = state.generation;
            }
            state.retired(ticket, bytes, buffer, result);
        });
    }
}
