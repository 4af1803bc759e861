//! The products: checks shapes once, picks the path, and hands rows and columns to its kernels.
//!
//! Owns the public descriptions of a product. The definition of every result is
//! [`block::dot`](crate::block::dot) or [`lanes::dot`](crate::lanes::dot()); which kernel computes it never
//! shows.

use std::ops::Range;

use crate::block;
use crate::formats::with_block_format;
use crate::{Activations, Format, Isa, Out, float};

/// A `[rows, k]` weight matrix: rows of whole blocks, one after the other.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    format: Format,
    bytes: &'a [u8],
    k: usize,
    rows: usize,
    row_bytes: usize,
    tensor_scale: Option<f32>,
}

/// Why bytes are no matrix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// Rows have no values.
    #[error("rows of no values are no {0} matrix")]
    Empty(Format),
    /// Rows aren't whole blocks.
    #[error("rows of {k} values aren't whole {format} blocks of {}", .format.block_len())]
    PartialBlock {
        /// The weights' format.
        format: Format,
        /// Values in a row.
        k: usize,
    },
    /// The number of bytes is another.
    #[error("{rows} rows of {k} {format} values take {}, not {found} bytes", .expected.map_or("too many".into(), |n| n.to_string()))]
    Length {
        /// The weights' format.
        format: Format,
        /// Values in a row.
        k: usize,
        /// Rows.
        rows: usize,
        /// The bytes there should be; `None` if the number doesn't fit a `usize`.
        expected: Option<usize>,
        /// The bytes there are.
        found: usize,
    },
}

impl<'a> Matrix<'a> {
    /// Describes `bytes` as `rows` rows of `k` values.
    pub fn new(format: Format, bytes: &'a [u8], k: usize, rows: usize) -> Result<Matrix<'a>, MatrixError> {
        if k == 0 {
            return Err(MatrixError::Empty(format));
        }
        if !k.is_multiple_of(format.block_len()) {
            return Err(MatrixError::PartialBlock { format, k });
        }
        let row_bytes = format.row_bytes(k);
        let expected = row_bytes.and_then(|n| n.checked_mul(rows));
        match (row_bytes, expected) {
            (Some(row_bytes), Some(expected)) if expected == bytes.len() => {
                Ok(Matrix { format, bytes, k, rows, row_bytes, tensor_scale: None })
            }
            _ => Err(MatrixError::Length { format, k, rows, expected, found: bytes.len() }),
        }
    }

    /// The same matrix, with a scale that multiplies every finished sum (NVFP4's per-tensor scale).
    pub fn scaled(self, tensor_scale: f32) -> Matrix<'a> {
        Matrix { tensor_scale: Some(tensor_scale), ..self }
    }

    /// Rows `rows` as a matrix of their own.
    ///
    /// # Panics
    /// If they aren't rows of this one.
    pub fn part(self, rows: Range<usize>) -> Matrix<'a> {
        let bytes = &self.bytes[rows.start * self.row_bytes..rows.end * self.row_bytes];
        Matrix { bytes, rows: rows.len(), ..self }
    }

    /// The weights' format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Values in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }

    /// The bytes from row `row` on.
    #[cfg(x86_paths)]
    pub(crate) fn rows_from(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..]
    }

    /// Bytes of a row.
    #[cfg(x86_paths)]
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// What multiplies every finished sum.
    #[cfg(x86_paths)]
    pub(crate) fn tensor_scale(&self) -> Option<f32> {
        self.tensor_scale
    }

    /// Decodes one row into `out`, `[k]`; see [`dequantise`]. The tensor's scale, if any, multiplies every
    /// value.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        dequantise(self.format, self.row(row), out);
        if let Some(scale) = self.tensor_scale {
            out.iter_mut().for_each(|v| *v *= scale);
        }
    }
}

/// The activations of a product, one column per token.
#[derive(Clone, Copy)]
pub enum Columns<'a> {
    /// For float weights: `[cols][k]`, where `k` is the matrix's.
    Float(&'a [f32]),
    /// For block formats.
    Quantised(&'a Activations),
}

/// Decodes whole blocks into `out`, whose length says how many values.
///
/// Values are bit for bit those of the public reference: `(d * s) * w`, then plus or minus `d_min * m`.
///
/// # Panics
/// If `out` is no whole number of blocks, or `bytes` aren't the bytes of `out.len()` values.
pub fn dequantise(format: Format, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(format.row_bytes(out.len()), Some(bytes.len()), "{} {format} values", out.len());
    with_block_format!(format, F => block::decode::<F>(bytes, out), float => float::widen(format, bytes, out));
}

/// Rows `rows` of `w` times every column, into the same rows of `out`.
///
/// Contract: "Block formats", "Order", "Float weights". The same bits for every `isa`, any number of columns,
/// and any split of the rows into calls.
///
/// # Panics
/// If `rows` aren't rows of `w`, the columns are of another length, or of the wrong kind for the format
/// ([`Format::is_float`]), or `out` doesn't hold the rows of every column.
pub fn matmul(isa: Isa, w: Matrix<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>) {
    assert!(rows.start <= rows.end && rows.end <= w.rows, "rows {rows:?} of {}", w.rows);
    match x {
        Columns::Float(x) => {
            assert!(w.format.is_float(), "{} weights take quantised columns", w.format);
            assert!(x.len().is_multiple_of(w.k), "{} values are no columns of {}", x.len(), w.k);
            let cols = x.len() / w.k;
            out.check(rows.end, cols);
            #[cfg(x86_paths)]
            if crate::x86::float_product(isa, &w, rows.clone(), x, &out) {
                return;
            }
            float_product(isa, w, rows, x, out);
        }
        Columns::Quantised(x) => {
            assert!(!w.format.is_float(), "{} weights take float columns", w.format);
            assert_eq!(x.k(), w.k, "columns of {} values for rows of {}", x.k(), w.k);
            out.check(rows.end, x.cols());
            #[cfg(x86_paths)]
            if crate::x86::product(isa, &w, rows.clone(), x, &out) {
                return;
            }
            for row in rows {
                let bytes = w.row(row);
                for col in 0..x.cols() {
                    let sum = with_block_format!(w.format, F => block::dot::<F>(bytes, x.column(col)), float => 0.0);
                    out.write(row, col, &[sum], w.tensor_scale);
                }
            }
        }
    }
}

fn float_product(isa: Isa, w: Matrix<'_>, rows: Range<usize>, x: &[f32], out: Out<'_>) {
    for row in rows {
        let bytes = w.row(row);
        for (col, x) in x.chunks_exact(w.k).enumerate() {
            let sum = float::dot_bytes(isa, w.format, bytes, x);
            out.write(row, col, &[sum], w.tensor_scale);
        }
    }
}
