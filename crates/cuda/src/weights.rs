//! Weights on the device: the dense ones as they lie in the file, small ones as f32 too, and every layer's experts in slots.
//!
//! Owns their places and the upload. An expert is found through the residency table on the device, `[layers][experts]` addresses of slots,
//! never through an address that was baked into a launch.

use strata_backend::{BackendError, Spec, Weight, WeightData};
use strata_plan::{Category, DEVICE_ALIGNMENT, Plan, Region};
use strata_quant::{Format, dequantise};
use strata_residency::{ExpertId, ExpertStore, LayerSource};

use crate::driver::{Context, DeviceMemory, DeviceSlice, PinnedMemory, Stream};
use crate::{Failed, failed};

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

/// A layer's experts: the offset of the up and down rows in a slot, behind the gate rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    /// Bytes of a slot.
    pub(crate) stride: usize,
    /// Where the up rows start.
    pub(crate) up: usize,
    /// Where the down rows start.
    pub(crate) down: usize,
    /// The layer's row of the residency table: the slot's address of each expert, 0 where it has none.
    pub(crate) table: DeviceSlice<u64>,
}

/// Regions of all weights.
pub(crate) struct WeightRegions {
    dense: Vec<[Region; 3]>,
    experts: Vec<ExpertRegion>,
    table: Region,
    experts_of_layer: usize,
}

/// A layer's slots.
struct ExpertRegion {
    layer: u16,
    experts: u16,
    region: Region,
    /// Offsets of the up and down rows in a slot, and the slot's length.
    slot: [usize; 3],
}

/// Whether a copy as f32 is kept: vectors, and the taps of convolutions.
fn wants_floats(spec: &Spec, w: &WeightData) -> bool {
    let gdn = spec.shape.gdn.as_ref().map(|g| g.conv_kernel);
    let ngram = spec.shape.ngram.as_ref().map(|n| n.conv_kernel);
    w.rows == 1 || w.k == 1 || (w.format.is_float() && (Some(w.k) == gdn || Some(w.k) == ngram))
}

/// Offsets of an expert's up and down rows in its slot, and the slot's length.
fn slot(source: &LayerSource) -> [usize; 3] {
    let blob = source.blob(0);
    let up = blob.gate.len().next_multiple_of(DEVICE_ALIGNMENT);
    let down = up + blob.up.len().next_multiple_of(DEVICE_ALIGNMENT);
    [up, down, down + blob.down.len().next_multiple_of(DEVICE_ALIGNMENT)]
}

impl WeightRegions {
    /// Lays out all weights.
    pub(crate) fn describe(
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> WeightRegions {
        let mut region = |category, name: &str, bytes| plan.device(category, name, bytes);
        let dense = weights.iter().map(|w| {
            let floats = if wants_floats(spec, w) { 4 * w.rows * w.k } else { 0 };
            let scale = if w.scale.is_some() { 4 } else { 0 };
            [w.bytes.len(), floats, scale].map(|bytes| region(Category::Weights, "dense weights", bytes))
        });
        let dense = dense.collect();
        let slots = experts.iter().map(|(layer, source)| {
            let (slot, experts) = (slot(source), source.experts());
            let bytes = slot[2].saturating_mul(experts.into());
            ExpertRegion { layer: *layer, experts, region: region(Category::Experts, "experts", bytes), slot }
        });
        WeightRegions {
            dense,
            experts: slots.collect(),
            table: region(
                Category::Experts,
                "residency table",
                8 * spec.layers.len() * spec.shape.moe.experts,
            ),
            experts_of_layer: spec.shape.moe.experts,
        }
    }
}

/// All weights.
pub(crate) struct Weights {
    dense: Vec<Dense>,
    slots: Vec<Option<Slots>>,
}

impl Weights {
    /// Copies everything to its place.
    pub(crate) fn load(
        spec: &Spec,
        regions: &WeightRegions,
        memory: &DeviceMemory,
        list: Vec<WeightData>,
        store: &ExpertStore,
        context: &Context,
        stream: &Stream,
    ) -> Result<Weights, BackendError> {
        let mut stage = Stage::new(context).map_err(failed)?;
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
        let count = regions.experts_of_layer;
        let table: DeviceSlice<u64> = place(regions.table).cast();
        let mut addresses = vec![0u64; table.len()];
        let mut slots = vec![None; spec.layers.len()];
        for &ExpertRegion { layer, experts, region, slot: [up, down, stride] } in &regions.experts {
            let row = usize::from(layer) * count..(usize::from(layer) + 1) * count;
            for (expert, address) in (0..experts).zip(&mut addresses[row.clone()]) {
                let pinned = store.pin_current(ExpertId { layer, expert })?;
                let blob = pinned.blob();
                let to =
                    place(region).range(usize::from(expert) * stride..(usize::from(expert) + 1) * stride);
                stage.upload(stream, blob.gate, to.range(0..blob.gate.len()))?;
                stage.upload(stream, blob.up, to.range(up..up + blob.up.len()))?;
                stage.upload(stream, blob.down, to.range(down..down + blob.down.len()))?;
                *address = to.address();
            }
            slots[usize::from(layer)] = Some(Slots { stride, up, down, table: table.range(row) });
        }
        stage.upload(stream, bytemuck::cast_slice(&addresses), table.cast())?;
        stream.synchronize().map_err(failed)?;
        Ok(Weights { dense, slots })
    }

    fn get(&self, w: Weight) -> Result<&Dense, BackendError> {
        let count = self.dense.len();
        self.dense.get(w.0 as usize).ok_or_else(|| failed(format!("an op names weight {} of {count}", w.0)))
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

    /// A layer's experts.
    pub(crate) fn slots(&self, layer: u16) -> Result<&Slots, BackendError> {
        let slots = self.slots.get(usize::from(layer)).and_then(Option::as_ref);
        slots.ok_or_else(|| failed(format!("layer {layer} has no experts")))
    }
}

fn unfit(name: &str, matrix: &Matrix, rows: usize, k: usize) -> BackendError {
    let Matrix { format, rows: has_rows, k: has_k, .. } = matrix;
    failed(format!("weight `{name}` is [{has_rows}, {has_k}] of {format}, but an op needs [{rows}, {k}]"))
}

/// Two pinned buffers that take turns.
struct Stage {
    buffers: [PinnedMemory<u8>; 2],
    done: [crate::driver::Event; 2],
    next: usize,
}

impl Stage {
    fn new(context: &Context) -> Result<Stage, crate::driver::DriverError> {
        let buffer = || PinnedMemory::new(context, STAGE);
        let event = || crate::driver::Event::new(context);
        Ok(Stage { buffers: [buffer()?, buffer()?], done: [event()?, event()?], next: 0 })
    }

    /// Queues a copy of bytes, which have been read when this returns.
    fn upload(&mut self, stream: &Stream, from: &[u8], to: DeviceSlice<u8>) -> Result<(), BackendError> {
        let queue = |stage: &mut Stage, chunk: &[u8], to| -> Result<(), Failed> {
            let (buffer, done) = (&mut stage.buffers[stage.next], &stage.done[stage.next]);
            done.wait()?;
            buffer[..chunk.len()].copy_from_slice(chunk);
            // SAFETY: the buffer is written again, or freed, only after `done`; freeing waits for the copy too.
            unsafe { stream.queue_upload(buffer, to)? };
            done.record(stream)?;
            stage.next ^= 1;
            Ok(())
        };
        let mut at = 0;
        for chunk in from.chunks(STAGE) {
            queue(self, chunk, to.range(at..at + chunk.len()))?;
            at += chunk.len();
        }
        Ok(())
    }
}
