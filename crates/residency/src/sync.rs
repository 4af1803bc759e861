//! The primitives that the protocol in [`crate::cell`] is written over: the standard ones, or loom's when the
//! crate is compiled for model checking (`RUSTFLAGS="--cfg loom"`).

#[cfg(loom)]
pub(crate) use loom::{
    cell::{ConstPtr, UnsafeCell},
    sync::{Mutex, atomic::AtomicU64, atomic::Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};

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
