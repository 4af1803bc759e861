//! Buffers that start on a cache line, allocated once.

/// `len` elements of zero, the first at a multiple of 64 bytes.
pub(crate) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    const SPARE: usize = 64 / size_of::<T>();

    /// A buffer of `len` elements.
    pub fn new(len: usize) -> Aligned<T> {
        let data = vec![T::default(); len + Self::SPARE];
        // At most `SPARE - 1`, as `T`'s size divides 64 and `data` is aligned to it.
        let start = data.as_ptr().align_offset(64).min(Self::SPARE);
        Aligned { data, start, len }
    }

    /// Bytes that `new(len)` allocates.
    pub fn bytes_for(len: usize) -> usize {
        (len + Self::SPARE) * size_of::<T>()
    }
}

impl<T> std::ops::Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..][..self.len]
    }
}

impl<T> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..][..self.len]
    }
}
