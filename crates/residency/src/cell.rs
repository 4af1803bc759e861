//! A value that moves, read without a lock: the protocol under every expert's residence.
//!
//! One word holds the epoch of the current value and how many readers pin it. There are two slots; the epoch's lowest
//! bit says which one is current. A reader adds one to the count in one instruction, and the epoch that this instruction saw decides: its own
//! epoch, and the value can't move until the count falls; another, and it takes its one back and is refused. Whoever moves the value writes the
//! *other* slot first and then replaces (epoch, no pins) by (next epoch, no pins) in one instruction, which fails while
//! anyone pins. So there is no state in between: a reader never waits, for a mover least of all.
//!
//! Invariants:
//! - the current slot is not written;
//! - the other slot is touched only by the holder of `moving`, and nobody reads it: its last readers were gone when
//!   its epoch ended, and a reader of a later epoch with its parity can't be before that epoch is published.
//!
//! This module is an island of `unsafe`.

use std::sync::PoisonError;

use crate::sync::{AtomicU64, ConstPtr, Mutex, Ordering, UnsafeCell};

/// Bits of the word that count pins. The epoch has the other 40: a million moves a second end after twelve days, and
/// a stale handle would be accepted only when its epoch comes around exactly.
const PIN_BITS: u32 = 24;
const PINS: u64 = (1 << PIN_BITS) - 1;
/// More pins than this are refused, far below where the count would spill into the epoch.
const MOST_PINS: u64 = PINS / 2;

/// Which value of a cell: it goes up by one when the value moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(u64);

/// Why a pin or a move was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The value is not of this epoch any more.
    Stale,
    /// Readers pin the value; or, for a pin, there are too many of them.
    Pinned,
}

/// A value that moves. Aligned so that two experts never share a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Cell<T> {
    word: AtomicU64,
    slots: [UnsafeCell<T>; 2],
    moving: Mutex<()>,
}

// SAFETY: a cell hands out `&T` to any thread (`T: Sync`) and passes values from one thread to another (`T: Send`); the
// module's invariants keep the two from overlapping.
unsafe impl<T: Send + Sync> Sync for Cell<T> {}

impl<T: Default> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Cell {
            word: AtomicU64::new(0),
            slots: [UnsafeCell::new(value), UnsafeCell::new(T::default())],
            moving: Mutex::new(()),
        }
    }

    /// The current epoch.
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.word.load(Ordering::Acquire) >> PIN_BITS)
    }

    /// Keeps the value of `epoch` where it is and lends it out.
    pub(crate) fn pin(&self, epoch: Epoch) -> Result<Pin<'_, T>, Refused> {
        let seen = self.word.fetch_add(1, Ordering::Acquire);
        let count = Count { word: &self.word };
        if seen >> PIN_BITS != epoch.0 {
            return Err(Refused::Stale);
        }
        if seen & PINS >= MOST_PINS {
            return Err(Refused::Pinned);
        }
        Ok(Pin { value: self.slots[slot(epoch.0)].get(), epoch, _count: count })
    }

    /// Makes `new` the current value if `epoch` still is the current epoch and nobody pins it, and returns the value
    /// that was; otherwise gives `new` back with the reason. A reader that is just being refused counts as a pin.
    pub(crate) fn replace(&self, epoch: Epoch, new: T) -> Result<T, (Refused, T)> {
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.epoch() != epoch {
            return Err((Refused::Stale, new));
        }
        let next = epoch.0 + 1;
        self.put(next, new);
        let (from, to) = (epoch.0 << PIN_BITS, next << PIN_BITS);
        // Release: readers of the next epoch see its slot written. Acquire: the last readers of this one are done.
        match self.word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(self.put(epoch.0, T::default())),
            // Only movers change the epoch, and this one holds `moving`: what differed is the count.
            Err(_) => Err((Refused::Pinned, self.put(next, T::default()))),
        }
    }

    /// Exchanges the slot of an epoch that is not current. Called only with `moving` held.
    fn put(&self, epoch: u64, value: T) -> T {
        self.slots[slot(epoch)].with_mut(|old| {
            // SAFETY: the slot is not the current one and `moving` is held, so by the module's invariants nobody else
            // touches it; the pointer comes from a cell that `self` owns.
            std::mem::replace(unsafe { &mut *old }, value)
        })
    }
}

fn slot(epoch: u64) -> usize {
    (epoch & 1) as usize
}

/// A value that can't move while this lives.
#[derive(Debug)]
pub(crate) struct Pin<'a, T> {
    // Dropped in this order: the reading ends before the count says so.
    value: ConstPtr<T>,
    epoch: Epoch,
    _count: Count<'a>,
}

impl<T> Pin<'_, T> {
    /// The epoch of the value.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }
}

// SAFETY: a pin is a `&T` and a `&AtomicU64`.
unsafe impl<T: Sync> Send for Pin<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Pin<'_, T> {}

impl<T> std::ops::Deref for Pin<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `pin` saw this slot's epoch as the current one in the same instruction that counted this reader, so
        // no mover can end the epoch, and nobody writes the slot, before `_count` is dropped, after `value`.
        unsafe { self.value.deref() }
    }
}

/// One reader in a word's count.
#[derive(Debug)]
struct Count<'a> {
    word: &'a AtomicU64,
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        // Release: what this reader read, it read before a mover sees the count without it.
        self.word.fetch_sub(1, Ordering::Release);
    }
}
