//! A value that moves, read without a lock: the protocol under every expert's residence.
//!
//! One word holds the epoch of the current value and how many readers pin it. There are two slots, and the epoch's
//! lowest bit says which one is current.
//!
//! A reader adds one to the count in one instruction, and what this instruction saw decides. Its own epoch: the value
//! can't move until the count falls. Another: the reader takes its one back and is refused. A mover writes the
//! *other* slot first and then replaces (epoch, no pins) by (next epoch, no pins) in one instruction, which fails
//! while anyone pins. There is no state in between, so a reader never waits, least of all for a mover that was put to
//! sleep.
//!
//! Invariants:
//! - the current slot is not written;
//! - the other slot is touched only by the holder of `moving`, and nobody reads it: its last readers were gone when
//!   its epoch ended, and the next ones can't be before the next epoch of its parity is published.
//!
//! This module is an island of `unsafe`.

#[cfg(all(test, loom))]
mod model;

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::PoisonError;

use crate::sync::{AtomicU64, ConstPtr, Mutex, Ordering, UnsafeCell};

/// Bits of the word that count pins. The epoch has the other 40: a stale handle is taken for a good one only after
/// 2^40 moves of its expert, at a thousand moves a second after 34 years.
const PIN_BITS: u32 = 24;
const PINS: u64 = (1 << PIN_BITS) - 1;
/// More pins than this are refused, far below where the count would spill into the epoch.
const MOST_PINS: u64 = PINS / 2;

/// Which value of a cell: it goes up by one when the value moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// The word of this epoch with no pins.
    fn word(self) -> u64 {
        self.0 << PIN_BITS
    }

    fn of(word: u64) -> Epoch {
        Epoch(word >> PIN_BITS)
    }

    fn next(self) -> Epoch {
        Epoch::of((self.0 + 1) << PIN_BITS)
    }

    fn slot(self) -> usize {
        (self.0 & 1) as usize
    }
}

/// Why a pin or a move was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The value is not of this epoch any more.
    Stale,
    /// For a move: readers pin the value. For a pin: too many of them do.
    Pinned,
}

/// What the model checker may break, to show that it would notice. [`Sound`] is what runs.
pub(crate) trait Variant {
    /// A pin looks at the epoch before it counts instead of while it counts.
    const LOOKS_BEFORE_COUNTING: bool = false;
    /// A pin doesn't look at the epoch.
    const ACCEPTS_STALE: bool = false;
    /// A move doesn't look at the count.
    const MOVES_UNDER_PINS: bool = false;
    /// A move publishes the slot that it is yet to write.
    const WRITES_LATE: bool = false;
    /// The order by which a reader's last access comes before the move that sees its pin gone.
    const UNPIN: Ordering = Ordering::Release;
    /// The order by which a move comes after the old value's readers and before the new one's.
    const MOVE: Ordering = Ordering::AcqRel;
}

/// The protocol as it is meant.
#[derive(Debug)]
pub(crate) struct Sound;

impl Variant for Sound {}

/// A value that moves. Aligned so that no two share a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Cell<T, V = Sound> {
    word: AtomicU64,
    slots: [UnsafeCell<T>; 2],
    moving: Mutex<()>,
    variant: PhantomData<V>,
}

// SAFETY: a cell lends `&T` to any thread (`T: Sync`) and passes values from one thread to another (`T: Send`); the
// module's invariants keep reading and writing of a slot apart.
unsafe impl<T: Send + Sync, V> Sync for Cell<T, V> {}

impl<T: Default, V: Variant> Cell<T, V> {
    pub(crate) fn new(value: T) -> Self {
        Cell {
            word: AtomicU64::new(0),
            slots: [UnsafeCell::new(value), UnsafeCell::new(T::default())],
            moving: Mutex::new(()),
            variant: PhantomData,
        }
    }

    /// The current epoch.
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch::of(self.word.load(Ordering::Acquire))
    }

    /// Keeps the value of `epoch` where it is and lends it out.
    pub(crate) fn pin(&self, epoch: Epoch) -> Result<Pin<'_, T, V>, Refused> {
        let before = if V::LOOKS_BEFORE_COUNTING { Some(self.epoch()) } else { None };
        let seen = self.word.fetch_add(1, Ordering::Acquire);
        let count = Count { word: &self.word, variant: PhantomData };
        if before.unwrap_or(Epoch::of(seen)) != epoch && !V::ACCEPTS_STALE {
            return Err(Refused::Stale);
        }
        if seen & PINS >= MOST_PINS {
            return Err(Refused::Pinned);
        }
        Ok(Pin { value: self.slots[epoch.slot()].get(), epoch, _count: count })
    }

    /// Makes `new` the current value if `epoch` still is the current epoch and nobody pins it, and returns the value
    /// that was; otherwise gives `new` back with the reason. A reader that is just being refused counts as a pin.
    pub(crate) fn replace(&self, epoch: Epoch, new: T) -> Result<T, (Refused, T)> {
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.epoch() != epoch {
            return Err((Refused::Stale, new));
        }
        if V::WRITES_LATE {
            self.word.fetch_add(epoch.next().word() - epoch.word(), V::MOVE);
            self.put(epoch.next(), new);
            return Ok(self.put(epoch, T::default()));
        }
        self.put(epoch.next(), new);
        let mut expected = epoch.word();
        if V::MOVES_UNDER_PINS {
            expected = self.word.load(Ordering::Acquire);
        }
        let moved = epoch.next().word() | (expected & PINS);
        match self.word.compare_exchange(expected, moved, V::MOVE, Ordering::Relaxed) {
            Ok(_) => Ok(self.put(epoch, T::default())),
            // Only the holder of `moving` changes the epoch: it was the count that differed.
            Err(_) => Err((Refused::Pinned, self.put(epoch.next(), T::default()))),
        }
    }

    /// Exchanges the value in the slot of `epoch`, which is not current. Called only with `moving` held.
    fn put(&self, epoch: Epoch, value: T) -> T {
        self.slots[epoch.slot()].with_mut(|old| {
            // SAFETY: the slot is not the current one and `moving` is held, so by the module's invariants nobody else
            // touches it; the pointer comes from a cell that `self` owns.
            std::mem::replace(unsafe { &mut *old }, value)
        })
    }
}

/// A value that can't move while this lives.
#[derive(Debug)]
pub(crate) struct Pin<'a, T, V: Variant = Sound> {
    // Dropped in this order: the reading ends before the count says so.
    value: ConstPtr<T>,
    epoch: Epoch,
    _count: Count<'a, V>,
}

// SAFETY: a pin is a `&T` and a `&AtomicU64`, and both may be sent where `&T` may.
unsafe impl<T: Sync, V: Variant> Send for Pin<'_, T, V> {}
// SAFETY: as above.
unsafe impl<T: Sync, V: Variant> Sync for Pin<'_, T, V> {}

impl<T, V: Variant> Pin<'_, T, V> {
    /// The value's epoch.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl<T, V: Variant> Deref for Pin<'_, T, V> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `Cell::pin` counted this reader in the same instruction that saw the slot's epoch as the current one,
        // so no mover ends the epoch, and nobody writes the slot, before `_count` is dropped, which is after `value`;
        // the pin's lifetime keeps the cell.
        unsafe { self.value.deref() }
    }
}

/// One reader in a word's count.
#[derive(Debug)]
struct Count<'a, V: Variant> {
    word: &'a AtomicU64,
    variant: PhantomData<V>,
}

impl<V: Variant> Drop for Count<'_, V> {
    fn drop(&mut self) {
        self.word.fetch_sub(1, V::UNPIN);
    }
}
