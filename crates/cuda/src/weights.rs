//! The dense weights on the device, as they lie in the file; small ones as f32 too.
//!
//! Owns their places and the upload.

use strata_backend::{BackendError, Spec, Weight, WeightData};
use strata_plan::{Category, Plan, Region};
use strata_quant::{Format, dequantise};

use crate::driver::{Context, DeviceMemory, DeviceSlice, DriverError, Stream, Turns};
use crate::failed;

/// Bytes of each of the two buffers that uploads go through.
const STAGE: usize = 8 << 20;

/// A dense weight on the device: `rows` rows of `k` values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) k: usize,
    pub(crate) bytes: DeviceSlice<u8>,
    /// What finished products are multiplied with.
    pub(crate) scale: Option<DeviceSlice<f32>>,
}

struct Dense {
    name: String,
    matrix: Matrix,
    /// Vectors and convolution taps as f32, in order.
    floats: Option<DeviceSlice<f32>>,
}

/// Regions of the dense weights.
pub(crate) struct WeightRegions {
    dense: Vec<[Region; 3]>,
}

/// Whether a copy as f32 is kept: vectors, and the taps of convolutions.
fn wants_floats(spec: &Spec, w: &WeightData) -> bool {
    let gdn = spec.shape.gdn.as_ref().map(|g| g.conv_kernel);
    let ngram = spec.shape.ngram.as_ref().map(|n| n.conv_kernel);
    w.rows == 1 || w.k == 1 || (w.format.is_float() && (Some(w.k) == gdn || Some(w.k) == ngram))
}

impl WeightRegions {
    /// Lays out the dense weights.
    pub(crate) fn describe(spec: &Spec, weights: &[WeightData], plan: &mut Plan) -> WeightRegions {
        let dense = weights.iter().map(|w| {
            let floats = if wants_floats(spec, w) { 4 * w.rows * w.k } else { 0 };
            let scale = if w.scale.is_some() { 4 } else { 0 };
            [w.bytes.len(), floats, scale].map(|bytes| plan.device(Category::Weights, "dense weights", bytes))
        });
        WeightRegions { dense: dense.collect() }
    }
}

/// The dense weights.
pub(crate) struct Weights(Vec<Dense>);

impl Weights {
    /// Copies everything to its place.
    pub(crate) fn load(
        regions: &WeightRegions,
        memory: &DeviceMemory,
        list: Vec<WeightData>,
        stage: &mut Stage,
        stream: &Stream,
    ) -> Result<Weights, BackendError> {
        let place = |region: Region| memory.part::<u8>(region.offset(), region.bytes());
        let mut dense = Vec::with_capacity(list.len());
        for (data, &[bytes, floats, scale]) in list.into_iter().zip(&regions.dense) {
            stage.upload(stream, &data.bytes, place(bytes))?;
            let mut copy = None;
            if floats.bytes() > 0 {
                let mut values = vec![0.0f32; data.rows * data.k];
                dequantise(data.format, &data.bytes, &mut values);
                stage.upload(stream, bytemuck::cast_slice(&values), place(floats))?;
                copy = Some(place(floats).cast());
            }
            if let Some(value) = data.scale {
                stage.upload(stream, &value.to_le_bytes(), place(scale))?;
            }
            let matrix = Matrix {
                format: data.format,
                rows: data.rows,
                k: data.k,
                bytes: place(bytes),
                scale: data.scale.map(|_| place(scale).cast()),
            };
            dense.push(Dense { name: data.name, matrix, floats: copy });
        }
        Ok(Weights(dense))
    }

    fn get(&self, w: Weight) -> Result<&Dense, BackendError> {
        let count = self.0.len();
        self.0.get(w.0 as usize).ok_or_else(|| failed(format!("an op names weight {} of {count}", w.0)))
    }

    /// A `[rows, k]` matrix.
    pub(crate) fn matrix(&self, w: Weight, rows: usize, k: usize) -> Result<Matrix, BackendError> {
        let Dense { name, matrix, .. } = self.get(w)?;
        if (matrix.rows, matrix.k) == (rows, k) { Ok(*matrix) } else { Err(unfit(name, matrix, rows, k)) }
    }

    /// A vector of `len` values, or a convolution's taps `[channels][kernel]`, as f32.
    pub(crate) fn floats(&self, w: Weight, len: usize) -> Result<DeviceSlice<f32>, BackendError> {
        let Dense { name, matrix, floats } = self.get(w)?;
        floats.filter(|floats| floats.len() == len).ok_or_else(|| unfit(name, matrix, 1, len))
    }
}

fn unfit(name: &str, matrix: &Matrix, rows: usize, k: usize) -> BackendError {
    let Matrix { format, rows: has_rows, k: has_k, .. } = matrix;
    failed(format!("weight `{name}` is [{has_rows}, {has_k}] of {format}, but an op needs [{rows}, {k}]"))
}

/// Copies of bytes of any length.
pub(crate) struct Stage(Turns<u8>);

impl Stage {
    pub(crate) fn new(context: &Context) -> Result<Stage, DriverError> {
        Turns::new(context, STAGE).map(Stage)
    }

    /// Queues a copy of bytes, which have been read when this returns.
    pub(crate) fn upload(
        &mut self,
        stream: &Stream,
        from: &[u8],
        to: DeviceSlice<u8>,
    ) -> Result<(), BackendError> {
        let places = (0..from.len()).step_by(STAGE);
        for (start, chunk) in places.zip(from.chunks(STAGE)) {
            self.0.upload(stream, chunk, to.range(start..start + chunk.len())).map_err(failed)?;
        }
        Ok(())
    }
}
