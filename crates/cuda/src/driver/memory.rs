//! Memory of the GPU, and host memory that it reads and writes by itself.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;

use super::table::DevicePtr;
use super::{Context, DriverError, call};

/// What kernels bring from memory at once, whole. Twin: in `kernels/shared.cuh`.
pub(crate) const LINE: usize = 128;

/// An allocation in device memory, of whole lines.
pub struct DeviceMemory {
    context: Context,
    at: DevicePtr,
    len: usize,
}

impl DeviceMemory {
    /// Takes `len` bytes, with whatever is in them.
    pub fn new(context: &Context, len: usize) -> Result<DeviceMemory, DriverError> {
        let mut at = 0;
        let bytes = len.max(1).checked_next_multiple_of(LINE).unwrap_or(len);
        // SAFETY: writes one address; the driver refuses zero bytes.
        unsafe { call!(context.table(), allocate(&mut at, bytes)) }?;
        context.count(|made| &made.device);
        Ok(DeviceMemory { context: context.clone(), at, len })
    }

    /// All of it.
    pub fn slice<T: Pod>(&self) -> DeviceSlice<T> {
        DeviceSlice { at: self.at, len: self.len / size_of::<T>(), of: PhantomData }
    }

    /// `len` values from byte `first` on.
    ///
    /// # Panics
    /// If they don't lie inside, or aren't aligned.
    pub fn part<T: Pod>(&self, first: usize, len: usize) -> DeviceSlice<T> {
        assert!(first.is_multiple_of(align_of::<T>()), "byte {first} is not aligned");
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(first));
        assert!(end.is_some_and(|end| end <= self.len), "{len} values at byte {first} of {} bytes", self.len);
        DeviceSlice { at: self.at + first as u64, len, of: PhantomData }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. Freeing waits for the work that still uses it.
        unsafe { (self.context.table().free)(self.at) };
    }
}

/// A place of `len` values in device memory: an address, as kernels take it. Copies are the same place, and it does not keep its memory
/// alive: whoever launches a kernel on it answers for that.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceSlice<T> {
    at: DevicePtr,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

impl<T: Pod> DeviceSlice<T> {
    /// The address.
    pub fn address(self) -> u64 {
        self.at
    }

    /// Values.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        self.len * size_of::<T>()
    }

    /// No place, for counting what would be taken.
    pub(crate) fn nowhere(len: usize) -> DeviceSlice<T> {
        DeviceSlice { at: 0, len, of: PhantomData }
    }

    /// The same bytes as values of another type.
    ///
    /// # Panics
    /// If they aren't aligned, or no whole number of them.
    pub(crate) fn cast<U: Pod>(self) -> DeviceSlice<U> {
        assert!(
            self.at.is_multiple_of(align_of::<U>() as u64) && self.bytes().is_multiple_of(size_of::<U>())
        );
        DeviceSlice { at: self.at, len: self.bytes() / size_of::<U>(), of: PhantomData }
    }

    /// With the place behind it.
    ///
    /// # Panics
    /// If `behind` is elsewhere.
    pub(crate) fn joined(self, behind: DeviceSlice<T>) -> DeviceSlice<T> {
        assert_eq!(self.at + self.bytes() as u64, behind.at);
        DeviceSlice { len: self.len + behind.len, ..self }
    }

    /// A part of it.
    ///
    /// # Panics
    /// If it isn't inside.
    pub fn range(self, range: Range<usize>) -> DeviceSlice<T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        DeviceSlice { at: self.at + (range.start * size_of::<T>()) as u64, len: range.len(), of: PhantomData }
    }
}

/// Host memory that the GPU copies from and to by itself.
pub struct PinnedMemory<T> {
    context: Context,
    at: *mut T,
    len: usize,
}

// SAFETY: it owns its memory, as a `Box<[T]>` would.
unsafe impl<T: Send> Send for PinnedMemory<T> {}

impl<T: Pod> PinnedMemory<T> {
    /// Takes room for `len` values, zeroed.
    pub fn new(context: &Context, len: usize) -> Result<PinnedMemory<T>, DriverError> {
        let mut at: *mut c_void = std::ptr::null_mut();
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the driver writes a pointer to that many bytes, aligned to a page; all-zero bytes are a value of a `Pod` type.
        unsafe {
            call!(context.table(), allocate_host(&mut at, bytes, 0))?;
            at.cast::<u8>().write_bytes(0, bytes);
        }
        context.count(|made| &made.pinned);
        Ok(PinnedMemory { context: context.clone(), at: at.cast(), len })
    }

    /// Parts of `len` values each, which may go to different owners.
    pub(crate) fn parts(self, len: usize) -> Vec<PinnedPart<T>> {
        let (all, at) = (self.len / len.max(1), self.at);
        let whole = Arc::new(self);
        // SAFETY: inside the allocation.
        let part = |i| PinnedPart { at: unsafe { at.add(i * len) }, len, _whole: Arc::clone(&whole) };
        (0..all).map(part).collect()
    }

    /// Its first value, for whoever shares it with the GPU while it works.
    pub(crate) fn pointer(&self) -> *mut T {
        self.at
    }

    /// Where kernels find it.
    pub(crate) fn address(&self) -> u64 {
        // The driver gives host memory one address for both.
        self.at.expose_provenance() as u64
    }
}

/// A part of pinned memory, which is nobody else's.
pub(crate) struct PinnedPart<T> {
    at: *mut T,
    len: usize,
    /// Only kept.
    _whole: Arc<PinnedMemory<T>>,
}

// SAFETY: parts don't overlap, and of the whole nothing is touched but to free it with the last of them.
unsafe impl<T: Send> Send for PinnedPart<T> {}

impl<T> std::ops::Deref for PinnedPart<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values of the whole, which lives as long as this, and nobody else's.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl<T> std::ops::DerefMut for PinnedPart<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl<T> std::ops::Deref for PinnedMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values that live as long as this.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl<T> std::ops::DerefMut for PinnedMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl<T> Drop for PinnedMemory<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. Freeing waits for the copies that still use it.
        unsafe { (self.context.table().free_host)(self.at.cast()) };
    }
}
