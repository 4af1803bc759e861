//! What the pool's protocol is written over: the standard library, or a model checker's twin of it.
//!
//! `--cfg loom` and `--cfg shuttle` swap the atomics, the cell and the futex; the protocol's source stays the
//! same. The models' futex is a mutex and a condition variable: a waiter compares the word under the lock, so
//! a waker is either seen or waited for, as the kernel does it. Neither model wakes spuriously.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use native::*;

#[cfg(any(loom, shuttle))]
pub(crate) use model::*;

/// Loom's cell looks for races. Shuttle, which runs one thread at a time, has none of its own.
#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell as Cell;

/// `std::cell::UnsafeCell` with the face of loom's.
#[cfg(not(loom))]
pub(crate) struct Cell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }
    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// The real thing.
#[cfg(not(any(loom, shuttle)))]
mod native {
    use std::ops::Deref;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    /// An atomic word that threads can sleep on.
    pub(crate) struct Futex(AtomicU32);

    impl Futex {
        pub(crate) fn new(value: u32) -> Self {
            Self(AtomicU32::new(value))
        }
        /// Sleeps if the word is `expected`, until woken; may return for no reason.
        pub(crate) fn wait(&self, expected: u32) {
            atomic_wait::wait(&self.0, expected);
        }
        pub(crate) fn wake_one(&self) {
            atomic_wait::wake_one(&self.0);
        }
        pub(crate) fn wake_all(&self) {
            atomic_wait::wake_all(&self.0);
        }
    }

    impl Deref for Futex {
        type Target = AtomicU32;
        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }

    /// A bounded spin. [`Patience::again`] says whether to look once more.
    pub(crate) struct Patience {
        limit: Duration,
        looks: u32,
        since: Option<Instant>,
    }

    impl Patience {
        /// Looks between two readings of the clock; a look takes up to about 0.05 us.
        const LOOKS_PER_READING: u32 = 8;

        pub(crate) fn new(limit: Duration) -> Self {
            Self { limit, looks: 0, since: None }
        }
        #[inline]
        pub(crate) fn again(&mut self) -> bool {
            if self.limit.is_zero() {
                return false;
            }
            self.looks += 1;
            if self.looks.is_multiple_of(Self::LOOKS_PER_READING) {
                match self.since {
                    None => self.since = Some(Instant::now()),
                    Some(since) if since.elapsed() >= self.limit => return false,
                    Some(_) => {}
                }
            }
            std::hint::spin_loop();
            true
        }
    }
}

/// The model checkers' twin.
#[cfg(any(loom, shuttle))]
mod model {
    #[cfg(loom)]
    use loom as checker;
    #[cfg(shuttle)]
    use shuttle as checker;

    pub(crate) use checker::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    // Held only for a move of a pointer, with no point of the model inside: the real one does.
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};

    use std::ops::Deref;
    use std::time::Duration;

    pub(crate) struct Futex {
        word: AtomicU32,
        queue: checker::sync::Mutex<()>,
        woken: checker::sync::Condvar,
    }

    impl Futex {
        pub(crate) fn new(value: u32) -> Self {
            Self {
                word: AtomicU32::new(value),
                queue: checker::sync::Mutex::new(()),
                woken: checker::sync::Condvar::new(),
            }
        }
        /// Shuttle sees poison when one thread of its model unwinds while another holds the lock.
        fn queue(&self) -> checker::sync::MutexGuard<'_, ()> {
            self.queue.lock().unwrap_or_else(PoisonError::into_inner)
        }
        pub(crate) fn wait(&self, expected: u32) {
            let queue = self.queue();
            if self.word.load(Ordering::Relaxed) == expected {
                drop(self.woken.wait(queue));
            }
        }
        pub(crate) fn wake_one(&self) {
            let _queue = self.queue();
            self.woken.notify_one();
        }
        pub(crate) fn wake_all(&self) {
            let _queue = self.queue();
            self.woken.notify_all();
        }
    }

    impl Deref for Futex {
        type Target = AtomicU32;
        fn deref(&self) -> &AtomicU32 {
            &self.word
        }
    }

    /// No clock in a model: any patience is one more look.
    pub(crate) struct Patience(bool);

    impl Patience {
        pub(crate) fn new(limit: Duration) -> Self {
            Self(!limit.is_zero())
        }
        pub(crate) fn again(&mut self) -> bool {
            let again = std::mem::replace(&mut self.0, false);
            if again {
                checker::thread::yield_now();
            }
            again
        }
    }
}
