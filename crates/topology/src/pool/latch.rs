//! The latch: how tasks of a region wait for earlier tasks of the same region.
//!
//! Owns one word: how much is missing, one more for the work of whoever did the last of it, and whether somebody sleeps.
//! Does not know regions, nor how long to spin.
//!
//! Waiting inside a region ends because tasks are claimed in ascending order: whoever waits for tasks with lower numbers waits
//! for threads that have begun them, and that wait, if at all, for lower ones still.
//!
//! Invariant: who has seen a latch open sees everything that its parts and its [`Last`] did before. Nobody sleeps through the
//! opening: a waiter says in the word that somebody sleeps, and sleeps only on a word that says so; the opener replaces the word
//! and wakes all if it said so.

use std::marker::PhantomData;
use std::time::Duration;

use super::regions::{Sound, Variant};
use crate::sync::{Futex, Ordering, Patience};

/// The bit that says that somebody sleeps.
const ASLEEP: u32 = 1 << 31;

/// Something that many tasks do parts of, and that others wait for: [`Pool::wait_for`](crate::Pool::wait_for).
// On lines of its own: parts are done by all threads at about the same time.
#[repr(align(128))]
pub struct Latch(Word);

impl Latch {
    /// One that is open.
    pub fn new() -> Latch {
        Latch(Word::new())
    }

    /// Closes it until `parts` parts have been done.
    pub fn close(&mut self, parts: u32) {
        self.0.close(parts);
    }

    /// `parts` more are done. Whoever did the last gets to do what needs all of them; the latch opens when that is dropped.
    pub fn done(&self, parts: u32) -> Option<Last<'_>> {
        // Lazily: one that nobody gets would open the latch too.
        self.0.done(parts).then(|| Last(self))
    }

    /// Whether all that it was closed for is done.
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }

    pub(super) fn wait(&self, spin: Duration) {
        self.0.wait(spin);
    }
}

impl Default for Latch {
    fn default() -> Latch {
        Latch::new()
    }
}

/// All parts of a latch are done and their effects visible, and nobody has passed it. Opens it when dropped, by a panic too.
#[must_use = "the latch opens when this is dropped"]
pub struct Last<'a>(&'a Latch);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        self.0.0.open();
    }
}

/// The word of a latch, of which `V` takes parts out for the models.
pub(super) struct Word<V = Sound> {
    missing: Futex,
    variant: PhantomData<fn() -> V>,
}

impl<V: Variant> Word<V> {
    pub(super) fn new() -> Self {
        Self { missing: Futex::new(0), variant: PhantomData }
    }

    pub(super) fn close(&mut self, parts: u32) {
        assert!(parts > 0 && parts < ASLEEP - 1, "a latch of {parts} parts");
        let extra = if V::OPEN_BEFORE_LAST { 0 } else { 1 };
        self.missing.store(parts + extra, Ordering::Relaxed);
    }

    pub(super) fn done(&self, parts: u32) -> bool {
        let order = if V::RELAXED_PARTS { Ordering::Relaxed } else { Ordering::AcqRel };
        let extra = if V::OPEN_BEFORE_LAST { 0 } else { 1 };
        self.missing.fetch_sub(parts, order) & !ASLEEP == parts + extra
    }

    pub(super) fn open(&self) {
        if self.missing.swap(0, Ordering::AcqRel) & ASLEEP != 0 {
            self.missing.wake_all();
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.missing.load(Ordering::Acquire) & !ASLEEP == 0
    }

    /// Waits until it is open; spins at most `spin` before it sleeps.
    pub(super) fn wait(&self, spin: Duration) {
        let mut patience = Patience::new(spin);
        loop {
            if self.is_open() {
                return;
            }
            if !patience.again() {
                break;
            }
        }
        let mark = if V::SILENT_WAITER { 0 } else { ASLEEP };
        let mut now = self.missing.fetch_or(mark, Ordering::AcqRel) | mark;
        while now & !ASLEEP != 0 {
            self.missing.wait(now);
            now = self.missing.load(Ordering::Acquire);
        }
    }
}
