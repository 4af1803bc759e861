//! Work in order: streams, points in them, and recorded graphs.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::Pod;

use super::memory::{DeviceSlice, PinnedMemory};
use super::table::{Code, Opaque, Table};
use super::{Context, DriverError, call};

const NON_BLOCKING: u32 = 1;
const CAPTURE_THREAD_LOCAL: i32 = 1;

const NOT_READY: Code = 600;
/// The shortest and the longest nap of whoever waits.
const NAPS: [Duration; 2] = [Duration::from_micros(10), Duration::from_millis(4)];
/// Which part of the time that has passed a nap takes: where the end matters, and where it doesn't much.
const SOON: u32 = 64;
const IDLY: u32 = 4;

/// Sleeps until `query` says that it's done: in naps, each a `part`th of the time that has passed. The driver's own sleep ends with the GPU's
/// interrupt, which took 244 microseconds in the middle of a hundred steps on a virtual machine, naps 51 (docs/experiments.md).
fn nap_until(
    table: &Table,
    what: &'static str,
    part: u32,
    query: impl Fn() -> Code,
) -> Result<(), DriverError> {
    let start = Instant::now();
    loop {
        match query() {
            0 => return Ok(()),
            NOT_READY => std::thread::sleep((start.elapsed() / part).clamp(NAPS[0], NAPS[1])),
            code => return Err(DriverError::of(table, what, code)),
        }
    }
}

/// A queue of work on the GPU. Shares are the same queue.
pub struct Stream(Arc<Queue>);

struct Queue {
    context: Context,
    raw: Opaque,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Queue {}

impl Stream {
    /// A new queue.
    pub fn new(context: &Context) -> Result<Stream, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(context.table(), stream_create(&mut raw, NON_BLOCKING)) }?;
        Ok(Stream(Arc::new(Queue { context: context.clone(), raw })))
    }

    /// The same queue.
    pub fn share(&self) -> Stream {
        Stream(Arc::clone(&self.0))
    }

    pub(super) fn raw(&self) -> Opaque {
        self.0.raw
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// Sleeps until everything queued is done.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let table = self.context().table();
        // SAFETY: the stream is alive.
        nap_until(table, "stream_query", SOON, || unsafe { (table.stream_query)(self.raw()) })
    }

    /// Whether something queued isn't done.
    pub fn is_busy(&self) -> Result<bool, DriverError> {
        let table = self.context().table();
        // SAFETY: the stream is alive.
        match unsafe { (table.stream_query)(self.raw()) } {
            0 => Ok(false),
            NOT_READY => Ok(true),
            code => Err(DriverError::of(table, "stream_query", code)),
        }
    }

    /// Copies to the device and waits: for loading, where the source may be any memory.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn upload<T: Pod>(&self, from: &[T], to: DeviceSlice<T>) -> Result<(), DriverError> {
        assert_eq!(from.len(), to.len());
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is borrowed until the copy is done.
        unsafe {
            call!(
                self.context().table(),
                copy_to_device(to.address(), from.as_ptr().cast(), to.bytes(), self.raw())
            )
        }?;
        self.synchronize()
    }

    /// Copies to the host and waits. What is queued is done first: the driver sleeps in its own way in a copy to memory that isn't pinned.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn download<T: Pod>(&self, from: DeviceSlice<T>, to: &mut [T]) -> Result<(), DriverError> {
        assert_eq!(from.len(), to.len());
        self.synchronize()?;
        self.copy_out(from, to)
    }

    /// Copies to the first values of pinned memory and waits.
    ///
    /// # Panics
    /// If there is less room.
    pub fn fetch<T: Pod>(&self, from: DeviceSlice<T>, to: &mut PinnedMemory<T>) -> Result<(), DriverError> {
        self.copy_out(from, &mut to[..from.len()])
    }

    /// Copies values of the same number, and waits.
    fn copy_out<T: Pod>(&self, from: DeviceSlice<T>, to: &mut [T]) -> Result<(), DriverError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: as many values; the target is borrowed until the copy is done.
        unsafe {
            call!(
                self.context().table(),
                copy_to_host(to.as_mut_ptr().cast(), from.address(), from.bytes(), self.raw())
            )
        }?;
        self.synchronize()
    }

    /// Queues a copy of the first values of (a part of) pinned memory to the device.
    ///
    /// # Safety
    /// It is pinned, and nobody writes to `from`, nor frees it, before the copy is done.
    pub unsafe fn queue_upload<T: Pod>(&self, from: &[T], to: DeviceSlice<T>) -> Result<(), DriverError> {
        assert!(to.len() <= from.len());
        // SAFETY: lengths checked; the caller keeps the source as it is.
        unsafe {
            call!(
                self.context().table(),
                copy_to_device(to.address(), from.as_ptr().cast(), to.bytes(), self.raw())
            )
        }
    }

    /// Queues a copy to the first values of pinned memory.
    ///
    /// # Safety
    /// Nobody looks at `to`, nor frees it, before the copy is done.
    pub unsafe fn queue_download<T: Pod>(
        &self,
        from: DeviceSlice<T>,
        to: &mut PinnedMemory<T>,
    ) -> Result<(), DriverError> {
        assert!(from.len() <= to.len());
        // SAFETY: lengths checked; the caller leaves the target alone.
        unsafe {
            call!(
                self.context().table(),
                copy_to_host(to.pointer().cast(), from.address(), from.bytes(), self.raw())
            )
        }
    }

    /// Queues a copy from registered memory, from the address `from` on.
    ///
    /// # Safety
    /// All of it is in one registration, which stays, and nobody writes to it before the copy is done.
    pub unsafe fn queue_registered(&self, from: usize, to: DeviceSlice<u8>) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self.context().table(),
                copy_to_device(to.address(), from as *const c_void, to.bytes(), self.raw())
            )
        }
    }

    /// Queues a copy to registered memory, from the address `to` on.
    ///
    /// # Safety
    /// All of it is in one registration, which stays, and nobody reads or writes it before the copy is done.
    pub unsafe fn queue_to_registered(&self, from: DeviceSlice<u8>, to: usize) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self.context().table(),
                copy_to_host(to as *mut c_void, from.address(), from.bytes(), self.raw())
            )
        }
    }

    /// Queues a copy from one place on the device to another. Nothing to do for no values.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy<T: Pod>(&self, from: DeviceSlice<T>, to: DeviceSlice<T>) -> Result<(), DriverError> {
        assert_eq!(from.len(), to.len());
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both places are in device memory.
        unsafe {
            call!(
                self.context().table(),
                copy_on_device(to.address(), from.address(), from.bytes(), self.raw())
            )
        }
    }

    /// Queues setting every byte.
    pub fn fill<T: Pod>(&self, to: DeviceSlice<T>, byte: u8) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the place is in device memory.
        unsafe { call!(self.context().table(), fill(to.address(), byte, to.bytes(), self.raw())) }
    }

    /// Records what `work` queues instead of running it.
    pub fn record<E: From<DriverError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let table = self.context().table();
        // SAFETY: the stream is alive; the recording ends below, whatever `work` returns.
        unsafe { call!(table, capture_begin(self.raw(), CAPTURE_THREAD_LOCAL)) }?;
        let done = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle, null for a recording that failed.
        let ended = unsafe { call!(table, capture_end(self.raw(), &mut graph)) };
        let mut exec = std::ptr::null_mut();
        let made = match (&done, &ended) {
            // SAFETY: the graph is alive.
            (Ok(()), Ok(())) => unsafe { call!(table, graph_instantiate(&mut exec, graph, 0)) },
            _ => Ok(()),
        };
        if !graph.is_null() {
            // SAFETY: made above; what was instantiated from it does not need it.
            unsafe { (table.graph_destroy)(graph) };
        }
        done?;
        ended?;
        made?;
        self.context().count(|made| &made.graphs);
        Ok(Graph { context: self.context().clone(), raw: exec })
    }

    /// Queues recorded work.
    pub fn replay(&self, graph: &Graph) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { call!(self.context().table(), graph_launch(graph.raw, self.raw())) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: created in `new`; its work goes on.
        unsafe { (self.context.table().stream_destroy)(self.raw) };
    }
}

/// Recorded work.
pub struct Graph {
    context: Context,
    raw: Opaque,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `record`; running work is finished first.
        unsafe { (self.context.table().graph_exec_destroy)(self.raw) };
    }
}

/// A point in a stream.
pub struct Event {
    context: Context,
    raw: Opaque,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Event {}

impl Event {
    /// An event that lies at no point yet.
    pub fn new(context: &Context) -> Result<Event, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(context.table(), event_create(&mut raw, 0)) }?;
        context.count(|made| &made.events);
        Ok(Event { context: context.clone(), raw })
    }

    /// Moves it after everything queued so far.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { call!(self.context.table(), event_record(self.raw, stream.raw())) }
    }

    /// Sleeps until it is reached.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.nap(SOON)
    }

    /// Sleeps until it is reached, or a fourth of that time longer: for who has time, and no CPU to spend on short naps.
    pub fn wait_idly(&self) -> Result<(), DriverError> {
        self.nap(IDLY)
    }

    fn nap(&self, part: u32) -> Result<(), DriverError> {
        let table = self.context.table();
        // SAFETY: the event is alive.
        nap_until(table, "event_query", part, || unsafe { (table.event_query)(self.raw) })
    }

    /// Whether it is reached.
    pub fn is_reached(&self) -> Result<bool, DriverError> {
        let table = self.context.table();
        // SAFETY: the event is alive.
        match unsafe { (table.event_query)(self.raw) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(DriverError::of(table, "event_query", code)),
        }
    }

    /// Has a stream wait for it.
    pub fn hold(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { call!(self.context.table(), stream_wait(stream.raw(), self.raw, 0)) }
    }

    /// Milliseconds from `earlier` to this one, both reached.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32, DriverError> {
        let mut time = 0.0;
        // SAFETY: writes one float.
        unsafe { call!(self.context.table(), event_elapsed(&mut time, earlier.raw, self.raw)) }?;
        Ok(time)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`.
        unsafe { (self.context.table().event_destroy)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::{fake, table::table};
    use super::*;

    /// Oracle: the answers of a driver that is asked. What isn't ready is asked again, everything else ends the wait.
    #[test]
    fn waits_end_when_the_driver_says_so() {
        fake::install();
        let table = table().unwrap();
        let asked = Cell::new(0);
        let answers = |last: Code| {
            asked.set(0);
            nap_until(table, "stream_query", SOON, || {
                asked.set(asked.get() + 1);
                if asked.get() < 4 { NOT_READY } else { last }
            })
        };
        assert!(answers(0).is_ok() && asked.get() == 4);
        let lost = answers(700).unwrap_err().to_string();
        assert!(lost.contains("cuStreamQuery"), "{lost}");
    }
}
