//! Copies to the device from memory that may change at once: through two pinned buffers that take turns.

use bytemuck::Pod;

use super::memory::{DeviceSlice, PinnedMemory};
use super::{Context, DriverError, Event, Stream};

/// The buffers, and where the copies from each are done.
pub struct Turns<T> {
    buffers: [PinnedMemory<T>; 2],
    done: [Event; 2],
    next: usize,
}

impl<T: Pod> Turns<T> {
    /// Two buffers of `len` values.
    pub fn new(context: &Context, len: usize) -> Result<Turns<T>, DriverError> {
        let buffer = || PinnedMemory::new(context, len);
        let event = || Event::new(context);
        Ok(Turns { buffers: [buffer()?, buffer()?], done: [event()?, event()?], next: 0 })
    }

    /// Queues a copy of values, which have been read when this returns.
    ///
    /// # Panics
    /// If there are more than a buffer has, or not as many as `to` has.
    pub fn upload(&mut self, stream: &Stream, values: &[T], to: DeviceSlice<T>) -> Result<(), DriverError> {
        assert_eq!(values.len(), to.len());
        let (buffer, done) = (&mut self.buffers[self.next], &self.done[self.next]);
        done.wait()?;
        buffer[..values.len()].copy_from_slice(values);
        // SAFETY: the buffer is written again, or freed, only after `done`, or after all that is queued; freeing waits for the copy too.
        unsafe { stream.queue_upload(buffer, to)? };
        if let Err(error) = done.record(stream) {
            // Nobody could tell when the copy is over.
            stream.synchronize()?;
            return Err(error);
        }
        self.next ^= 1;
        Ok(())
    }
}
