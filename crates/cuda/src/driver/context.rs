//! A GPU in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::table::{Opaque, RawDevice, Table, table};
use super::{Device, DriverError, call, device};

/// Host threads that wait for the GPU sleep.
const BLOCKING_SYNC: u32 = 4;

/// The process's context on a GPU. Clones are the same context; it is given up with the last of them, and everything that was
/// made in it holds one.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    table: &'static Table,
    raw: RawDevice,
    context: Opaque,
    device: Device,
    pub(super) made: Counts,
}

/// How often the driver was asked for things.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) device: AtomicU64,
    pub(super) pinned: AtomicU64,
    pub(super) events: AtomicU64,
    pub(super) graphs: AtomicU64,
}

/// What was made in a context so far, whether it is still there or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Allocations in device memory.
    pub device: u64,
    /// Allocations of host memory that the GPU reads and writes.
    pub pinned: u64,
    /// Events.
    pub events: u64,
    /// Recordings.
    pub graphs: u64,
}

// SAFETY: the driver's handles may be used from any thread; `context` is only ever passed back to the driver.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Inner {}

impl Context {
    /// Takes a GPU into use. The context becomes the calling thread's.
    pub fn new(device: &Device) -> Result<Context, DriverError> {
        let table = table()?;
        let raw = device::raw(device.number)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `raw` is a device of this driver; the retained context is released in `drop`.
        unsafe {
            // Refused where the context is already in use with other flags, which is no reason to fail.
            (table.context_flags)(raw, BLOCKING_SYNC);
            call!(table, context_retain(&mut context, raw))?;
        }
        let context =
            Context(Arc::new(Inner { table, raw, context, device: device.clone(), made: Counts::default() }));
        context.enter()?;
        Ok(context)
    }

    /// Makes this the calling thread's context. Whatever is called on a thread of its own does so first.
    pub fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is alive.
        unsafe { call!(self.0.table, context_set(self.0.context)) }
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Bytes that are free on the GPU, and all there are.
    pub fn memory(&self) -> Result<(u64, u64), DriverError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        unsafe { call!(self.0.table, memory_info(&mut free, &mut total)) }?;
        Ok((free as u64, total as u64))
    }

    /// What was made in it.
    pub fn made(&self) -> Made {
        let Counts { device, pinned, events, graphs } = &self.0.made;
        let [device, pinned, events, graphs] =
            [device, pinned, events, graphs].map(|count| count.load(Relaxed));
        Made { device, pinned, events, graphs }
    }

    /// Counts one more of a kind.
    pub(super) fn count(&self, kind: impl FnOnce(&Counts) -> &AtomicU64) {
        kind(&self.0.made).fetch_add(1, Relaxed);
    }

    pub(super) fn table(&self) -> &'static Table {
        self.0.table
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`; nothing made in the context is left, for it would hold this.
        unsafe { (self.table.context_release)(self.raw) };
    }
}
