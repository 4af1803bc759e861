//! The n-gram block: `kernels/ngram.cu`.

use strata_backend::{BackendError, Buffer, Layer, NgramShape, NgramWeights, Shape, Span};
use strata_quant::Format;

use super::input::Input;
use super::recurrent::{Conv, ConvParams};
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, Grid, Kernel};
use crate::scratch::Scratch;
use crate::{Failed, failed};

#[repr(C)]
#[derive(Clone, Copy)]
struct GatedValueParams {
    keys: u64,
    x: u64,
    values: u64,
    norm_key: u64,
    norm_query: u64,
    norm_conv: u64,
    gates: u64,
    normed: u64,
    streams: u32,
    width: u32,
    eps: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddConvParams {
    conv: ConvParams,
    gates: u64,
    values: u64,
    x: u64,
    streams: u32,
    width: u32,
}

/// Whether a block of threads has room for what `strata_gated_value` keeps, where it may have so many bytes of shared memory.
pub(crate) fn check(shape: &Shape, shared: usize) -> Result<(), BackendError> {
    let most = (shared.saturating_sub(64)) / 12;
    if shape.ngram.is_some() && shape.hidden > most {
        let d = shape.hidden;
        return Err(failed(format!(
            "an n-gram block of {d} values a stream; at most {most} can be run on this GPU"
        )));
    }
    Ok(())
}

/// The kernels.
pub(crate) struct Ngram {
    gated_value: Kernel<GatedValueParams>,
    conv: Kernel<AddConvParams>,
}

impl Ngram {
    pub(crate) fn new(context: &Context) -> Result<Ngram, OpError> {
        let module = module(context, "ngram")?;
        Ok(Ngram {
            gated_value: module.dynamic_kernel("strata_gated_value")?,
            conv: module.kernel("strata_ngram_conv")?,
        })
    }
}

/// What the op needs while it runs.
pub(crate) struct Room {
    embedded: Input,
    keys: DeviceSlice<f32>,
    values: DeviceSlice<f32>,
    gates: DeviceSlice<f32>,
    normed: DeviceSlice<f32>,
}

impl Room {
    /// For so many rows.
    pub(crate) fn new(shape: &Shape, g: &NgramShape, rows: usize, room: &mut Scratch) -> Room {
        let (wide, embedded) = (shape.streams * shape.hidden, g.heads * g.row);
        let e = room.take(rows * embedded);
        Room {
            embedded: Input::new(e, embedded, rows, room),
            keys: room.take(rows * wide),
            values: room.take(rows * shape.hidden),
            gates: room.take(rows * shape.streams),
            normed: room.take(rows * wide),
        }
    }
}

impl CudaBackend {
    /// `x += ngram(x, table rows)`.
    pub(crate) fn ngram(
        &mut self,
        layer: Layer,
        w: &NgramWeights,
        (format, scale, table_rows): (Format, Option<f32>, &[u8]),
        spans: &[Span],
        x: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, norm_eps: eps, .. } = self.spec.shape;
        let g = self.spec.shape.ngram.ok_or_else(|| failed("an n-gram op for a model without n-grams"))?;
        let (wide, embedded) = (streams * d, g.heads * g.row);
        let [key, value] =
            [self.weights.matrix(w.key, wide, embedded)?, self.weights.matrix(w.value, d, embedded)?];
        let norms = [w.norm_key, w.norm_query, w.norm_conv].map(|w| self.weights.floats(w, wide));
        let [norm_key, norm_query, norm_conv] = norms;
        let taps = self.weights.floats(w.conv, wide * g.conv_kernel)?;
        let window = self.inputs.window(&self.stream, (&self.spec, &self.state), spans)?;
        let rows = window.count;
        if format.row_bytes(g.row).map(|n| n * g.heads * rows) != Some(table_rows.len()) {
            let found = table_rows.len();
            return Err(failed(format!("{found} bytes of n-gram rows in {format} for {rows} tokens")));
        }
        let x = self.buffer(x, rows, wide)?;
        let room = Room::new(&self.spec.shape, &g, rows, &mut self.room());
        let from = (format, self.inputs.table_rows(&self.stream, table_rows)?);
        let to = room.embedded.floats();
        let decoded = match format.is_float() {
            true => self.kernels.floats.widen(&self.stream, from, to),
            false => self.kernels.products.decode(&self.stream, from, to),
        };
        decoded.map_err(Failed::from)?;
        if let Some(by) = scale {
            self.kernels.floats.scale(&self.stream, to, by).map_err(Failed::from)?;
        }
        self.prepare(&room.embedded, &[key, value])?;
        self.products(&[(key, room.keys), (value, room.values)], &room.embedded)?;
        let p = GatedValueParams {
            keys: room.keys.address(),
            x: x.address(),
            values: room.values.address(),
            norm_key: norm_key?.address(),
            norm_query: norm_query?.address(),
            norm_conv: norm_conv?.address(),
            gates: room.gates.address(),
            normed: room.normed.address(),
            streams: streams as u32,
            width: d as u32,
            eps,
            padding: 0,
        };
        let Ngram { gated_value, conv: kernel } = &self.kernels.ngram;
        let grid = Grid { blocks: [(rows * streams) as u32, 1, 1], threads: 512 };
        // SAFETY: `Room` made them as large as the window is; a block keeps three streams of a row.
        unsafe { gated_value.launch_with(&self.stream, grid, 12 * d as u32, &p) }.map_err(Failed::from)?;
        let state = self.recurrent(layer, &window)?;
        let floats = self.state.layer(layer)?;
        let history: usize = floats.gdn.iter().sum();
        if floats.floats != history + g.history() * wide {
            return Err(failed(format!("layer {} has no n-gram state", layer.0)));
        }
        let conv = Conv {
            rows: room.normed,
            taps,
            history,
            channels: wide,
            kernel: g.conv_kernel,
            dilation: g.dilation,
        };
        for round in &window.rounds {
            let p = AddConvParams {
                conv: conv.params(state, round, 0),
                gates: room.gates.address(),
                values: room.values.address(),
                x: x.address(),
                streams: streams as u32,
                width: d as u32,
            };
            // SAFETY: as above, and the portions lie in the window.
            unsafe { kernel.launch(&self.stream, conv.grid(round), &p) }.map_err(Failed::from)?;
            self.advance(&conv, state, round)?;
            self.save(layer, round, history..floats.floats)?;
        }
        self.state.note_pending(spans, layer);
        Ok(key.bytes.len() + value.bytes.len() + table_rows.len() + spans.len() * 4 * g.history() * wide)
    }
}
