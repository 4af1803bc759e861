//! The primitives that the protocols in [`crate::cell`] and [`crate::ring`] are written over: the standard ones, or
//! loom's when the crate is compiled for model checking (`RUSTFLAGS="--cfg loom"`).

use std::any::Any;

#[cfg(loom)]
pub(crate) use loom::{
    cell::{ConstPtr, UnsafeCell},
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicU64, atomic::Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicU64, atomic::Ordering};

/// Runs what others wrote, and says what a panic in it said. Not under loom, which ends a schedule by unwinding its
/// threads.
pub(crate) fn contained<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    if cfg!(loom) {
        return Ok(f());
    }
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|payload| said(&*payload))
}

/// A panic's message.
pub(crate) fn said(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

/// The standard cell behind the interface of loom's, which watches for accesses that overlap.
#[cfg(not(loom))]
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

/// A pointer for reading, as long as it is kept.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct ConstPtr<T>(*const T);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> ConstPtr<T> {
        ConstPtr(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

#[cfg(not(loom))]
impl<T> ConstPtr<T> {
    /// # Safety
    /// Nobody writes the cell while the reference lives, and the cell outlives it.
    pub(crate) unsafe fn deref(&self) -> &T {
        // SAFETY: the caller's promise; the pointer came from a cell.
        unsafe { &*self.0 }
    }
}
