//! The ring's state, changed by one thread at a time: what each entry has come to, and which buffers are free.
//!
//! Knows no threads and no locks: [`super::protocol`] holds the lock, sleeps and wakes. It reads the clock, for the
//! counters only.
//!
//! Invariants:
//! - a buffer is in one place: `free`, a stager's [`Claim`], [`Progress::Filled`], or a [`super::Transfer`]. It
//!   moves there by value, so none is filled that a transfer still has; it is free again only when that transfer is
//!   retired, whatever became of the entry and its generation meanwhile;
//! - entries are claimed, and issued, in the order of the schedule.

use std::mem;
use std::time::Instant;

use super::counters::Counters;
use super::transfer::Ticket;
use crate::{ExpertId, RingError};

pub(super) struct State<B, P> {
    pub free: Vec<B>,
    /// The current generation; it goes up by one with each.
    pub generation: u64,
    pub entries: Vec<Entry<B, P>>,
    /// Every entry before these was claimed, was issued, has come to an end; or is not to be.
    next_claim: usize,
    next_issue: usize,
    next_end: usize,
    pub cancelled: bool,
    pub stop: bool,
    /// Who sleeps, and on what: see [`super::protocol`].
    pub asleep: Asleep,
    pub counters: Counters,
    /// Since when an entry and a stager have been waiting for a buffer, if they are.
    starved: Option<Instant>,
}

/// Who waits to be woken. A waker strikes out whom it wakes.
#[derive(Default)]
pub(super) struct Asleep {
    pub stagers: usize,
    /// A stager was woken and is yet to look: it wakes the next one if there is more to claim.
    pub stager_called: bool,
    pub issuer: bool,
    pub host: Option<Need>,
}

/// What the host waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// An entry was handed to the engine, or never will be.
    Issued(usize),
    /// An entry came to its end.
    Arrived(usize),
    /// All entries did.
    All,
}

/// Whom a change concerns.
#[derive(Debug, Default)]
pub(super) struct Due {
    pub stager: bool,
    pub issuer: bool,
    pub host: bool,
}

pub(super) struct Entry<B, P> {
    id: ExpertId,
    bytes: usize,
    /// `None` from when it is sent.
    to: Option<P>,
    progress: Progress<B>,
}

enum Progress<B> {
    Waiting,
    Filling,
    Filled(B),
    /// The engine is being told.
    Sending,
    Sent,
    Arrived,
    /// It isn't wanted; it may be anywhere.
    Skipped,
    Failed(Failure),
}

enum Failure {
    Read(String),
    Transfer(String),
}

/// An entry with the buffer to stage it in: the right, and the duty, to fill it.
pub(super) struct Claim<B> {
    pub ticket: Ticket,
    pub id: ExpertId,
    pub bytes: usize,
    pub buffer: B,
}

/// An entry that is to be sent now.
pub(super) struct Issue<B, P> {
    pub claim: Claim<B>,
    pub to: P,
}

impl<B, P> Entry<B, P> {
    pub fn new(id: ExpertId, bytes: usize, to: P) -> Self {
        Entry { id, bytes, to: Some(to), progress: Progress::Waiting }
    }
}

impl<B, P> State<B, P> {
    pub fn new(buffers: Vec<B>) -> Self {
        State {
            free: buffers,
            generation: 0,
            entries: Vec::new(),
            next_claim: 0,
            next_issue: 0,
            next_end: 0,
            cancelled: true,
            stop: false,
            asleep: Asleep::default(),
            counters: Counters::default(),
            starved: None,
        }
    }

    /// Starts a generation; no other is current.
    pub fn begin(&mut self, entries: Vec<Entry<B, P>>) {
        self.generation += 1;
        self.entries = entries;
        (self.next_claim, self.next_issue, self.next_end) = (0, 0, 0);
        self.cancelled = false;
    }

    /// Ends the current generation, and returns its entries for the caller to drop.
    pub fn end(&mut self) -> Vec<Entry<B, P>> {
        self.cancel();
        mem::take(&mut self.entries)
    }

    /// Nothing more of the current generation is claimed or issued. What was sent goes on.
    pub fn cancel(&mut self) {
        if self.cancelled {
            return;
        }
        self.counters.cancelled += u64::from(!self.met(Need::All));
        self.cancelled = true;
        for entry in &mut self.entries {
            if matches!(entry.progress, Progress::Filled(_)) {
                // Not sent: nobody but the ring has read it.
                let Progress::Filled(buffer) = mem::replace(&mut entry.progress, Progress::Waiting) else {
                    continue;
                };
                self.free.push(buffer);
            }
        }
    }

    /// An entry isn't wanted. One that arrived already has arrived.
    pub fn skip(&mut self, entry: usize) -> Result<(), RingError> {
        let skipped = self.entry_mut(entry)?;
        if matches!(skipped.progress, Progress::Arrived | Progress::Skipped) {
            return Ok(());
        }
        if let Progress::Filled(buffer) = mem::replace(&mut skipped.progress, Progress::Skipped) {
            self.free.push(buffer);
        }
        self.counters.skipped += 1;
        Ok(())
    }

    /// Whether an entry waits to be staged.
    pub fn has_unstaged(&mut self) -> bool {
        while self.entries.get(self.next_claim).is_some_and(|e| !matches!(e.progress, Progress::Waiting)) {
            self.next_claim += 1;
        }
        !self.cancelled && self.next_claim < self.entries.len()
    }

    /// The next entry and a free buffer, where there are both.
    pub fn claim(&mut self) -> Option<Claim<B>> {
        if !self.has_unstaged() {
            return None;
        }
        let buffer = self.free.pop()?;
        let entry = &mut self.entries[self.next_claim];
        entry.progress = Progress::Filling;
        let ticket = Ticket { generation: self.generation, entry: self.next_claim };
        Some(Claim { ticket, id: entry.id, bytes: entry.bytes, buffer })
    }

    /// A claim was filled, or that failed.
    pub fn filled(&mut self, claim: Claim<B>, result: Result<(), String>) {
        self.counters.staged += u64::from(result.is_ok());
        self.counters.failed += u64::from(result.is_err());
        let wanted = !self.cancelled;
        match (self.current(claim.ticket), result) {
            (Some(progress @ Progress::Filling), Ok(())) if wanted => {
                *progress = Progress::Filled(claim.buffer);
            }
            (progress, result) => {
                if let (Some(progress @ Progress::Filling), Err(reason)) = (progress, result) {
                    *progress = Progress::Failed(Failure::Read(reason));
                }
                self.free.push(claim.buffer);
            }
        }
    }

    /// Whether an entry that isn't skipped was not issued yet.
    pub fn has_unissued(&mut self) -> bool {
        let passed = |entry: &Entry<B, P>| {
            !matches!(entry.progress, Progress::Waiting | Progress::Filling | Progress::Filled(_))
        };
        while self.entries.get(self.next_issue).is_some_and(passed) {
            self.next_issue += 1;
        }
        !self.cancelled && self.next_issue < self.entries.len()
    }

    fn issuable(&mut self) -> bool {
        self.has_unissued() && matches!(self.entries[self.next_issue].progress, Progress::Filled(_))
    }

    /// The next entry, if it was staged.
    pub fn issue(&mut self) -> Option<Issue<B, P>> {
        if !self.issuable() {
            return None;
        }
        let entry = &mut self.entries[self.next_issue];
        let to = entry.to.take()?;
        let Progress::Filled(buffer) = mem::replace(&mut entry.progress, Progress::Sending) else {
            return None;
        };
        self.counters.sent += 1;
        let ticket = Ticket { generation: self.generation, entry: self.next_issue };
        Some(Issue { claim: Claim { ticket, id: entry.id, bytes: entry.bytes, buffer }, to })
    }

    /// The engine was told of an entry.
    pub fn told(&mut self, ticket: Ticket) {
        if let Some(progress @ Progress::Sending) = self.current(ticket) {
            *progress = Progress::Sent;
        }
    }

    /// A transfer is over, of whatever generation.
    pub fn retired(&mut self, ticket: Ticket, bytes: usize, buffer: B, result: Result<(), String>) {
        self.free.push(buffer);
        match &result {
            Ok(()) => {
                self.counters.arrived += 1;
                self.counters.bytes += bytes as u64;
            }
            Err(_) => self.counters.failed += 1,
        }
        if let Some(progress @ (Progress::Sending | Progress::Sent)) = self.current(ticket) {
            *progress = match result {
                Ok(()) => Progress::Arrived,
                Err(reason) => Progress::Failed(Failure::Transfer(reason)),
            };
        }
    }

    /// Counts the time in which buffers were what was missing.
    pub fn look_at_the_clock(&mut self) {
        let starved = self.asleep.stagers > 0 && self.free.is_empty() && self.has_unstaged();
        match self.starved {
            None if starved => self.starved = Some(Instant::now()),
            Some(since) if !starved => {
                self.counters.stagers.add(since.elapsed());
                self.starved = None;
            }
            _ => {}
        }
    }

    /// Whom to wake, after any change.
    pub fn due(&mut self) -> Due {
        self.look_at_the_clock();
        let mut due = Due::default();
        let claimable = self.has_unstaged() && !self.free.is_empty();
        if claimable && self.asleep.stagers > 0 && !self.asleep.stager_called {
            self.asleep.stager_called = true;
            due.stager = true;
        }
        if self.asleep.issuer && self.issuable() {
            self.asleep.issuer = false;
            due.issuer = true;
        }
        if let Some(need) = self.asleep.host
            && self.met(need)
        {
            self.asleep.host = None;
            due.host = true;
        }
        due
    }

    /// Whether the host has what it waits for.
    pub fn met(&mut self, need: Need) -> bool {
        match need {
            Need::Issued(entry) => self.issued(entry).is_some(),
            Need::Arrived(entry) => self.arrived(entry).is_some(),
            Need::All => {
                while self.next_end < self.entries.len() && self.arrived(self.next_end).is_some() {
                    self.next_end += 1;
                }
                self.next_end == self.entries.len()
            }
        }
    }

    /// Whether the engine was told of an entry: `None` as long as that's open.
    pub fn issued(&self, entry: usize) -> Option<Result<bool, RingError>> {
        match self.entry(entry) {
            Ok(Entry { progress: Progress::Sent, .. }) => Some(Ok(true)),
            Ok(_) => self.arrived(entry),
            Err(error) => Some(Err(error)),
        }
    }

    /// Whether an entry is in its place: `None` as long as that's open.
    pub fn arrived(&self, entry: usize) -> Option<Result<bool, RingError>> {
        let entry = match self.entry(entry) {
            Ok(entry) => entry,
            Err(error) => return Some(Err(error)),
        };
        let id = entry.id;
        match &entry.progress {
            Progress::Arrived => Some(Ok(true)),
            Progress::Skipped => Some(Ok(false)),
            Progress::Failed(Failure::Read(reason)) => {
                Some(Err(RingError::Read { id, reason: reason.clone() }))
            }
            Progress::Failed(Failure::Transfer(reason)) => {
                Some(Err(RingError::Transfer { id, reason: reason.clone() }))
            }
            Progress::Sending | Progress::Sent => None,
            Progress::Waiting | Progress::Filling | Progress::Filled(_) => {
                self.cancelled.then_some(Err(RingError::Cancelled { id }))
            }
        }
    }

    fn entry(&self, entry: usize) -> Result<&Entry<B, P>, RingError> {
        self.entries.get(entry).ok_or(RingError::NoEntry { entry, entries: self.entries.len() })
    }

    fn entry_mut(&mut self, entry: usize) -> Result<&mut Entry<B, P>, RingError> {
        let entries = self.entries.len();
        self.entries.get_mut(entry).ok_or(RingError::NoEntry { entry, entries })
    }

    /// An entry, if its generation is the current one.
    fn current(&mut self, ticket: Ticket) -> Option<&mut Progress<B>> {
        if ticket.generation != self.generation {
            return None;
        }
        self.entries.get_mut(ticket.entry).map(|entry| &mut entry.progress)
    }
}
