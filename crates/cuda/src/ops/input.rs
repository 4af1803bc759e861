//! Columns that several matrices are multiplied with, quantised once.

use strata_backend::BackendError;

use super::one::Wanted;
use super::wide::piece_bytes;
use super::{Columns, Kernels};
use crate::backend::CudaBackend;
use crate::driver::{DeviceSlice, DriverError};
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

/// Where a kernel leaves its results quantised too; zeros for none. Twin: `Target` in `kernels/contract.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Target {
    q: u64,
    d: u64,
    sums: u64,
}

impl Target {
    /// Nobody wants them.
    pub(crate) const NONE: Target = Target { q: 0, d: 0, sums: 0 };
}

impl Input {
    /// Room for columns, whose values are `floats`.
    pub(crate) fn new(floats: DeviceSlice<f32>, k: usize, cols: usize, room: &mut Scratch) -> Input {
        Input { floats, quantised: columns(k, cols, room), k, cols }
    }

    /// The same for columns whose pieces are made elsewhere.
    pub(crate) fn without_pieces(
        floats: DeviceSlice<f32>,
        k: usize,
        cols: usize,
        room: &mut Scratch,
    ) -> Input {
        Input { floats, quantised: columns_and(0, k, cols, room), k, cols }
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

    /// The quantised columns.
    pub(crate) fn quantised(&self) -> Option<&Columns> {
        self.quantised.as_ref()
    }

    /// Where whoever computes the values leaves them quantised, if any of these matrices wants that. `run` is how many consecutive values
    /// a warp has together; where that is no multiple of 32 they are quantised afterwards.
    pub(crate) fn target(&self, wanted: bool, run: usize) -> Target {
        match self.quantised.filter(|_| wanted && run.is_multiple_of(32)) {
            Some(columns) => {
                Target { q: columns.q.address(), d: columns.d.address(), sums: columns.sums.address() }
            }
            None => Target::NONE,
        }
    }

    /// The same from column `first` on.
    pub(crate) fn target_from(&self, wanted: bool, run: usize, first: usize) -> Target {
        let Target { q, d, sums } = self.target(wanted, run);
        if q == 0 {
            return Target::NONE;
        }
        let (values, blocks) = ((first * self.k) as u64, (first * self.k / 32) as u64);
        Target { q: q + values, d: d + 4 * blocks, sums: sums + 4 * blocks }
    }

    /// The values.
    pub(crate) fn floats(&self) -> DeviceSlice<f32> {
        self.floats
    }
}

/// Room for quantised columns, where `k` allows them.
pub(crate) fn columns(k: usize, cols: usize, room: &mut Scratch) -> Option<Columns> {
    columns_and(piece_bytes(k, cols), k, cols, room)
}

/// The same with so many bytes for pieces.
fn columns_and(pieces: usize, k: usize, cols: usize, room: &mut Scratch) -> Option<Columns> {
    k.is_multiple_of(32).then(|| Columns {
        q: room.take(k * cols),
        d: room.take(k / 32 * cols),
        sums: room.take(k / 32 * cols),
        pieces: room.take(pieces),
    })
}

/// Whether any of these matrices takes quantised columns.
pub(crate) fn any_blocks(matrices: &[Matrix]) -> bool {
    matrices.iter().any(|w| !w.format.is_float())
}

impl CudaBackend {
    /// A mixer's output as columns. Quantised by the mixer itself, they serve all ops that read it.
    pub(crate) fn mixed(&self, u: DeviceSlice<f32>) -> Input {
        let k = self.spec.shape.hidden;
        Input { floats: u, quantised: self.mixed, k, cols: u.len() / k }
    }

    /// Queues the quantisation of columns that a kernel before left as they are, if block formats want it.
    pub(crate) fn settle(&self, input: &Input, target: Target, wanted: bool) -> Result<(), BackendError> {
        self.prepare_for(input, wanted && target.q == 0)
    }

    /// Queues the quantisation of columns for the matrices that want it.
    pub(crate) fn prepare(&self, input: &Input, matrices: &[Matrix]) -> Result<(), BackendError> {
        self.prepare_for(input, any_blocks(matrices))
    }

    /// Queues the quantisation of columns, if block formats want it.
    pub(crate) fn prepare_for(&self, input: &Input, blocks: bool) -> Result<(), BackendError> {
        match &input.quantised {
            Some(columns) if blocks && self.fresh != Some(input.floats.address()) => {
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
        self.products(&[(*w, out)], input)
    }

    /// The same for several matrices: in one launch, where there is one column.
    pub(crate) fn products(
        &self,
        list: &[(Matrix, DeviceSlice<f32>)],
        input: &Input,
    ) -> Result<(), BackendError> {
        let Input { floats, quantised, k, cols } = *input;
        let Kernels { products, floats: float_products, .. } = &self.kernels;
        if let Some((w, _)) = list.iter().find(|(w, _)| !w.format.is_float() && quantised.is_none()) {
            return Err(failed(format!("columns of {k} values for {}", w.format)));
        }
        let (together, apart): (Vec<_>, Vec<_>) =
            list.iter().copied().partition(|(w, _)| cols == 1 && products.one.fits(w.format, k));
        let together: Vec<Wanted> = together.iter().map(|(w, out)| Wanted::new(w, *out)).collect();
        let (floats_apart, apart): (Vec<_>, Vec<_>) =
            apart.into_iter().partition(|(w, _)| w.format.is_float());
        let queue = || -> Result<(), DriverError> {
            products.one.launch(&self.stream, &together, k, quantised.as_ref(), Some(floats))?;
            let alike = floats_apart.chunk_by(|(a, _), (b, _)| a.format == b.format);
            for two in alike.flat_map(|alike| alike.chunks(2)) {
                let two: Vec<_> = two.iter().map(|(w, out)| (w, *out)).collect();
                float_products.product(&self.stream, &two, floats, cols)?;
            }
            let Some(columns) = &quantised else { return Ok(()) };
            let (few, many): (Vec<_>, Vec<_>) =
                apart.into_iter().partition(|(w, _)| products.few_fits(w.format, k, cols));
            for alike in few.chunk_by(|(a, _), (b, _)| a.format == b.format) {
                let alike: Vec<Wanted> = alike.iter().map(|(w, out)| Wanted::new(w, *out)).collect();
                products.few.launch(&self.stream, &alike, [k, cols], columns)?;
            }
            if many.is_empty() {
                return Ok(());
            }
            products.pieces(&self.stream, columns, k, cols)?;
            many.iter().try_for_each(|(w, out)| {
                let (weights, sizes) = ((w.format, w.bytes), [w.rows, w.k, cols]);
                let (stream, room) = (&self.stream, self.decoded);
                products.product_of_pieces(stream, weights, sizes, columns, w.scale, *out, room)
            })
        };
        Ok(queue().map_err(Failed::from)?)
    }
}
