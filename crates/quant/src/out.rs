//! Where a product goes: a column-major f32 buffer of which several threads may each write some rows.
//!
//! Owns the raw pointer and the bounds check of every write. Unsafe code: one constructor and one access.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A place for results: row `r` of column `c` is element `c * col_stride + r`.
pub struct Out<'a> {
    start: *mut f32,
    len: usize,
    col_stride: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: an `Out` stands for exclusive access to the elements it may write (constructors), as a `&mut [f32]`
// does.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    /// The whole of `buffer`, with `col_stride` elements from a row to the same row in the next column.
    pub fn new(buffer: &'a mut [f32], col_stride: usize) -> Out<'a> {
        Out { start: buffer.as_mut_ptr(), len: buffer.len(), col_stride, buffer: PhantomData }
    }

    /// A view of a buffer that other threads write at the same time.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `len` elements, all initialised, for `'a`, and during
    /// `'a` nobody else may read or write the rows, in any column, that this view is used to write (the
    /// `rows` given to [`matmul`](crate::matmul())).
    pub unsafe fn shared(start: *mut f32, len: usize, col_stride: usize) -> Out<'a> {
        Out { start, len, col_stride, buffer: PhantomData }
    }

    /// Panics unless every element of rows `..rows` and columns `..cols` exists, once.
    pub(crate) fn check(&self, rows: usize, cols: usize) {
        assert!(
            cols <= 1 || rows <= self.col_stride,
            "{rows} rows overlap at a column stride of {}",
            self.col_stride
        );
        let end = cols.checked_sub(1).and_then(|c| c.checked_mul(self.col_stride)?.checked_add(rows));
        assert!(
            cols == 0 || end.is_some_and(|end| end <= self.len),
            "{rows} rows of {cols} columns at stride {} don't fit {} results",
            self.col_stride,
            self.len
        );
    }

    /// Stores `values`, times `scale` if there is one, to rows `row ..` of a column.
    #[inline(always)]
    pub(crate) fn write(&self, row: usize, col: usize, values: &[f32], scale: Option<f32>) {
        let at = col * self.col_stride + row;
        assert!(at + values.len() <= self.len);
        // SAFETY: in bounds of memory that is valid for writes, and exclusively ours (constructors); it holds
        // floats, and no other reference to it lives while this one does.
        let results = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), values.len()) };
        for (result, &value) in results.iter_mut().zip(values) {
            *result = scale.map_or(value, |scale| value * scale);
        }
    }

    /// Where rows `row ..` of a column are; there are at least `rows` of them.
    #[cfg(x86_paths)]
    #[inline(always)]
    pub(crate) fn rows(&self, row: usize, col: usize, rows: usize) -> *mut f32 {
        let at = col * self.col_stride + row;
        assert!(at + rows <= self.len);
        self.start.wrapping_add(at)
    }
}
