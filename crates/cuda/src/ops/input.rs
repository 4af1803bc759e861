//! Columns that several matrices are multiplied with, quantised once.

use strata_backend::BackendError;

use super::Columns;
use crate::backend::CudaBackend;
use crate::driver::DeviceSlice;
use crate::scratch::Scratch;
use crate::weights::Matrix;
use crate::{Failed, failed};

/// `cols` columns of `k` values: as they are, for float weights, and quantised, for block formats.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    floats: DeviceSlice<f32>,
    /// Absent where `k` is no multiple of 32: no block format has such rows.
    quantised: Option<Columns>,
    k: usize,
    cols: usize,
}

impl Input {
    /// Room for columns, whose values are `floats`.
    pub(crate) fn new(floats: DeviceSlice<f32>, k: usize, cols: usize, room: &mut Scratch) -> Input {
        let quantised = k.is_multiple_of(32).then(|| Columns {
            q: room.take(k * cols),
            d: room.take(k / 32 * cols),
            sums: room.take(k / 32 * cols),
        });
        Input { floats, quantised, k, cols }
    }

    /// Values of a column.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Addresses of the quantised values, scales and sums; 0 where there are none.
    pub(crate) fn quantised_addresses(&self) -> [u64; 3] {
        self.quantised
            .map_or([0; 3], |columns| [columns.q.address(), columns.d.address(), columns.sums.address()])
    }

    /// The values.
    pub(crate) fn floats(&self) -> DeviceSlice<f32> {
        self.floats
    }
}

impl CudaBackend {
    /// Queues the quantisation of columns for the matrices that want it.
    pub(crate) fn prepare(&self, input: &Input, matrices: &[Matrix]) -> Result<(), BackendError> {
        self.prepare_for(input, matrices.iter().any(|w| !w.format.is_float()))
    }

    /// Queues the quantisation of columns, if block formats want it.
    pub(crate) fn prepare_for(&self, input: &Input, blocks: bool) -> Result<(), BackendError> {
        match &input.quantised {
            Some(columns) if blocks => {
                let values = input.floats.range(0..input.k * input.cols);
                Ok(self.kernels.products.quantise(&self.stream, values, columns).map_err(Failed::from)?)
            }
            _ => Ok(()),
        }
    }

    /// Queues `out[col][row] = w[row] . input[col]`.
    pub(crate) fn product(
        &self,
        w: &Matrix,
        input: &Input,
        out: DeviceSlice<f32>,
    ) -> Result<(), BackendError> {
        let Input { floats, quantised, k, cols } = *input;
        if w.format.is_float() {
            return Ok(self
                .kernels
                .floats
                .product(&self.stream, w, floats, cols, out)
                .map_err(Failed::from)?);
        }
        let columns = quantised.ok_or_else(|| failed(format!("columns of {k} values for {}", w.format)))?;
        let (weights, sizes) = ((w.format, w.bytes), [w.rows, w.k, cols]);
        let queued = self.kernels.products.product(&self.stream, weights, sizes, &columns, w.scale, out);
        Ok(queued.map_err(Failed::from)?)
    }
}
