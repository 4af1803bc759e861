//! The unsafe island: a region's closure, with its lifetime erased.
//!
//! A region borrows its closure from the caller's stack, the workers are threads that outlive any stack
//! frame, and nothing is allocated per region: so a pointer whose lifetime the compiler can't see goes
//! through a cell. Its obligations are on [`Job::put`] and [`Job::call`]; `pool::regions` keeps them, and the
//! loom models check it.

use crate::sync::Cell;

/// What a region runs: `f(task, worker)`.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The closure of the current region.
pub(super) struct Job(Cell<Option<*const Task<'static>>>);

// SAFETY: the pointee is `Sync` (see `Task`), so calling it from any thread through a shared reference is
// allowed, and it is never moved or dropped through the pointer. The cell itself is reached only in `put` and
// `call`, whose obligations order every write against every read.
unsafe impl Send for Job {}
// SAFETY: as for `Send`.
unsafe impl Sync for Job {}

impl Job {
    pub(super) fn new() -> Self {
        Self(Cell::new(None))
    }

    /// Makes `f` the closure that [`Job::call`] calls.
    ///
    /// # Safety
    /// - No other `put` and no `call` runs at the same time: each earlier one happens before this one, and
    ///   each later one after it.
    /// - `f` stays borrowed until the last `call` that reads it has returned.
    pub(super) unsafe fn put(&self, f: &Task<'_>) {
        let f: *const Task<'_> = f;
        // SAFETY: only the lifetime in the type changes, the pointer's layout does not; that nobody calls `f`
        // after its real lifetime is the caller's second obligation.
        let f: *const Task<'static> =
            unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(f) };
        // SAFETY: by the first obligation this thread alone touches the cell now.
        self.0.with_mut(|cell| unsafe { *cell = Some(f) });
    }

    /// Calls the closure; does nothing before the first `put`.
    ///
    /// # Safety
    /// A `put` happens before this call, its closure is still borrowed, and no other `put` happens before
    /// this call has returned.
    #[inline]
    pub(super) unsafe fn call(&self, task: usize, worker: usize) {
        // SAFETY: no `put` runs at the same time, by the obligation.
        let f = self.0.with(|cell| unsafe { *cell });
        if let Some(f) = f {
            // SAFETY: the closure is still borrowed, by the obligation.
            let f = unsafe { &*f };
            f(task, worker);
        }
    }
}
