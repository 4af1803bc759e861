//! The dense weights: where their bytes are, and small ones as f32.
//!
//! Owns the widened copies of vectors and of convolution taps, in planned memory. Matrices stay where they are and as they
//! are. Does not know which op wants which weight: an op asks with the shape it expects.

use strata_backend::{BackendError, Spec, Weight, WeightData};
use strata_plan::Block;
use strata_quant::{Matrix, dequantise};

/// All dense weights of a model.
pub(crate) struct Weights {
    list: Vec<Dense>,
    floats: Block<f32>,
}

struct Dense {
    data: WeightData,
    /// Where the f32 copy starts.
    floats: Option<usize>,
}

/// What is kept as f32 besides the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copy {
    Nothing,
    /// All values, in order.
    Vector,
    /// Transposed: `[k][rows]`.
    Taps,
}

fn copy(spec: &Spec, w: &WeightData) -> Copy {
    let gdn = spec.shape.gdn.as_ref().map(|g| g.conv_kernel);
    let ngram = spec.shape.ngram.as_ref().map(|n| n.conv_kernel);
    if w.rows == 1 || w.k == 1 {
        Copy::Vector
    } else if w.format.is_float() && (Some(w.k) == gdn || Some(w.k) == ngram) {
        Copy::Taps
    } else {
        Copy::Nothing
    }
}

/// Floats that the copies of `weights` take.
pub(crate) fn floats(spec: &Spec, weights: &[WeightData]) -> usize {
    weights.iter().filter(|w| copy(spec, w) != Copy::Nothing).map(|w| w.rows * w.k).sum()
}

impl Weights {
    /// Copies what is kept as f32 into `memory`, which has as many floats as [`floats`] says.
    pub(crate) fn new(
        spec: &Spec,
        weights: Vec<WeightData>,
        mut memory: Block<f32>,
    ) -> Result<Weights, BackendError> {
        let mut at = 0;
        let mut list = Vec::with_capacity(weights.len());
        for data in weights {
            let (rows, k, kind) = (data.rows, data.k, copy(spec, &data));
            let matrix = matrix(&data)?;
            let floats = (kind != Copy::Nothing).then_some(at);
            if let Some(at) = floats {
                let out = &mut memory[at..at + rows * k];
                match kind {
                    Copy::Taps => transpose(matrix, out),
                    _ => (0..rows).for_each(|row| matrix.dequantise_row(row, &mut out[row * k..][..k])),
                }
            }
            at += floats.map_or(0, |_| rows * k);
            list.push(Dense { data, floats });
        }
        Ok(Weights { list, floats: memory })
    }

    fn get(&self, w: Weight) -> Result<&Dense, BackendError> {
        self.list
            .get(w.0 as usize)
            .ok_or_else(|| crate::failed(format!("an op names weight {} of {}", w.0, self.list.len())))
    }

    /// A `[rows, k]` matrix.
    pub(crate) fn matrix(&self, w: Weight, rows: usize, k: usize) -> Result<Matrix<'_>, BackendError> {
        let data = &self.get(w)?.data;
        if (data.rows, data.k) != (rows, k) {
            return Err(unfit(data, rows, k));
        }
        matrix(data)
    }

    /// A vector of `len` values.
    pub(crate) fn vector(&self, w: Weight, len: usize) -> Result<&[f32], BackendError> {
        let dense = self.get(w)?;
        match dense.floats {
            Some(at) if dense.data.rows.min(dense.data.k) == 1 && dense.data.rows * dense.data.k == len => {
                Ok(&self.floats[at..at + len])
            }
            _ => Err(unfit(&dense.data, 1, len)),
        }
    }

    /// A convolution's taps, `[kernel][channels]`.
    pub(crate) fn taps(&self, w: Weight, channels: usize, kernel: usize) -> Result<&[f32], BackendError> {
        let dense = self.get(w)?;
        match dense.floats {
            Some(at) if (dense.data.rows, dense.data.k) == (channels, kernel) => {
                Ok(&self.floats[at..at + channels * kernel])
            }
            _ => Err(unfit(&dense.data, channels, kernel)),
        }
    }
}

/// Float weights as f32, `[k][rows]`.
fn transpose(w: Matrix<'_>, out: &mut [f32]) {
    let (rows, value) = (w.rows(), w.format().block_bytes());
    for row in 0..rows {
        for (j, bytes) in w.row(row).chunks_exact(value).enumerate() {
            dequantise(w.format(), bytes, &mut out[j * rows + row..][..1]);
        }
    }
}

fn matrix(data: &WeightData) -> Result<Matrix<'_>, BackendError> {
    let matrix = Matrix::new(data.format, &data.bytes, data.k, data.rows)
        .map_err(|e| crate::failed(format!("weight `{}`: {e}", data.name)))?;
    Ok(data.scale.map_or(matrix, |scale| matrix.scaled(scale)))
}

fn unfit(data: &WeightData, rows: usize, k: usize) -> BackendError {
    crate::failed(format!(
        "weight `{}` is [{}, {}] of {}, but an op needs [{rows}, {k}]",
        data.name, data.rows, data.k, data.format
    ))
}

/// A matrix's bytes.
pub(crate) fn bytes(w: &Matrix<'_>) -> usize {
    w.rows() * w.format().row_bytes(w.k()).unwrap_or(0)
}
