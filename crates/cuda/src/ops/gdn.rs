//! Gated DeltaNet: `kernels/gdn.cu`.

use strata_backend::{BackendError, Buffer, GdnShape, GdnWeights, Layer, Shape, Span};
use strata_quant::math;

use super::input::{Input, Target, any_blocks};
use super::recurrent::{Conv, ConvParams, Recurrent};
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel};
use crate::scratch::Scratch;
use crate::{Failed, failed};

#[repr(C)]
#[derive(Clone, Copy)]
struct GateParams {
    alpha: u64,
    beta: u64,
    a: u64,
    bias: u64,
    count: u32,
    heads: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UnitNormParams {
    x: u64,
    stride: u64,
    count: u32,
    heads: u32,
    dim: u32,
    eps: f32,
    scale: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DeltaParams {
    state: Recurrent,
    portions: u64,
    conv: u64,
    decay: u64,
    strength: u64,
    out: u64,
    channels: u32,
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatedNormParams {
    o: u64,
    z: u64,
    gamma: u64,
    quantised: Target,
    count: u32,
    dim: u32,
    eps: f32,
    padding: u32,
}

/// The kernels.
pub(crate) struct Gdn {
    gates: Kernel<GateParams>,
    conv: Kernel<ConvParams>,
    pub(crate) history: Kernel<ConvParams>,
    unit_norm: Kernel<UnitNormParams>,
    /// By the parts of a key that a lane has.
    delta: [(usize, Kernel<DeltaParams>); 4],
    gated_norm: Kernel<GatedNormParams>,
}

/// State columns of a block of threads.
const COLUMNS: usize = 32;

impl Gdn {
    pub(crate) fn new(context: &Context) -> Result<Gdn, OpError> {
        let module = module(context, "gdn")?;
        let delta = |parts: usize| -> Result<_, DriverError> {
            Ok((parts, module.kernel(&format!("strata_delta_{parts}"))?))
        };
        Ok(Gdn {
            gates: module.kernel("strata_gdn_gates")?,
            conv: module.kernel("strata_gdn_conv")?,
            history: module.kernel("strata_history")?,
            unit_norm: module.kernel("strata_unit_norm")?,
            delta: [delta(1)?, delta(2)?, delta(4)?, delta(8)?],
            gated_norm: module.kernel("strata_gated_norm")?,
        })
    }
}

/// Whether there is a kernel for these heads.
pub(crate) fn check(g: &GdnShape) -> Result<(), BackendError> {
    if g.key_dim <= 256 {
        return Ok(());
    }
    Err(failed(format!("GDN keys of {} values; at most 256 can be run", g.key_dim)))
}

/// What the op needs while it runs.
pub(crate) struct Room {
    qkv: DeviceSlice<f32>,
    conv: DeviceSlice<f32>,
    z: DeviceSlice<f32>,
    decay: DeviceSlice<f32>,
    strength: DeviceSlice<f32>,
    output: Input,
}

impl Room {
    /// For the rows of `u`.
    pub(crate) fn new(shape: &Shape, g: &GdnShape, u: DeviceSlice<f32>, room: &mut Scratch) -> Room {
        let (d, channels, values) = (shape.hidden, g.channels(), g.value_width());
        let rows = u.len() / d;
        let o = room.take(rows * values);
        Room {
            qkv: room.take(rows * channels),
            conv: room.take(rows * channels),
            z: room.take(rows * values),
            decay: room.take(rows * g.value_heads),
            strength: room.take(rows * g.value_heads),
            output: Input::new(o, values, rows, room),
        }
    }
}

impl CudaBackend {
    /// `y = gdn(u)`.
    pub(crate) fn gdn(
        &mut self,
        layer: Layer,
        w: &GdnWeights,
        spans: &[Span],
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, norm_eps: eps, .. } = self.spec.shape;
        let g = self.spec.shape.gdn.ok_or_else(|| failed("a GDN op for a model without GDN layers"))?;
        let (channels, heads, values) = (g.channels(), g.value_heads, g.value_width());
        let [qkv, gate] = [self.weights.matrix(w.qkv, channels, d)?, self.weights.matrix(w.gate, values, d)?];
        let [alpha, beta] = [self.weights.matrix(w.alpha, heads, d)?, self.weights.matrix(w.beta, heads, d)?];
        let out = self.weights.matrix(w.out, d, values)?;
        let [a, bias] = [self.weights.floats(w.a, heads)?, self.weights.floats(w.dt_bias, heads)?];
        let gamma = self.weights.floats(w.norm, g.value_dim)?;
        let taps = self.weights.floats(w.conv, channels * g.conv_kernel)?;

        let window = self.inputs.window(&self.stream, spans, &self.state)?;
        let rows = window.count;
        let (u, y) = (self.buffer(u, rows, d)?, self.buffer(y, rows, d)?);
        let room = Room::new(&self.spec.shape, &g, u, &mut self.room());
        let (o, input) = (room.output.floats(), &self.mixed(u));
        self.prepare(input, &[qkv, gate, alpha, beta])?;
        self.product(&qkv, input, room.qkv)?;
        self.product(&gate, input, room.z)?;
        self.product(&alpha, input, room.decay)?;
        self.product(&beta, input, room.strength)?;
        let kernels = &self.kernels.gdn;
        let p = GateParams {
            alpha: room.decay.address(),
            beta: room.strength.address(),
            a: a.address(),
            bias: bias.address(),
            count: (rows * heads) as u32,
            heads: heads as u32,
        };
        // SAFETY: both have a value per row and head.
        unsafe { kernels.gates.launch(&self.stream, Grid::threads(rows * heads, 128), &p) }
            .map_err(Failed::from)?;

        let state = self.recurrent(layer, &window)?;
        let [columns, history] = self.state.layer(layer)?.gdn;
        if columns == 0 {
            return Err(failed(format!("layer {} has no GDN state", layer.0)));
        }
        let conv =
            Conv { rows: room.qkv, taps, history: columns, channels, kernel: g.conv_kernel, dilation: 1 };
        let (_, delta) = kernels
            .delta
            .iter()
            .find(|(parts, _)| parts * 32 >= g.key_dim)
            .expect("checked when the backend was described");
        for round in &window.rounds {
            let p = conv.params(state, round, room.conv.address());
            // SAFETY: rows and output are `[rows][channels]`, and the portions lie in them.
            unsafe { kernels.conv.launch(&self.stream, conv.grid(round), &p) }.map_err(Failed::from)?;
            self.advance(&conv, state, round)?;
            self.save(layer, round, columns..columns + history)?;
        }
        let p = UnitNormParams {
            x: room.conv.address(),
            stride: channels as u64,
            count: (rows * 2 * g.key_heads) as u32,
            heads: g.key_heads as u32,
            dim: g.key_dim as u32,
            eps,
            scale: math::rsqrt(g.key_dim as f32),
            padding: 0,
        };
        let warps = Grid::threads(rows * 2 * g.key_heads * 32, 128);
        // SAFETY: queries and keys are the first channels of every row.
        unsafe { kernels.unit_norm.launch(&self.stream, warps, &p) }.map_err(Failed::from)?;
        for round in &window.rounds {
            let p = DeltaParams {
                state,
                portions: round.portions.address(),
                conv: room.conv.address(),
                decay: room.decay.address(),
                strength: room.strength.address(),
                out: o.address(),
                channels: channels as u32,
                key_heads: g.key_heads as u32,
                value_heads: heads as u32,
                key_dim: g.key_dim as u32,
                value_dim: g.value_dim as u32,
                padding: 0,
            };
            let blocks = [g.value_dim.div_ceil(COLUMNS) as u32, heads as u32, round.portions.len() as u32];
            // SAFETY: the state is as large as `Spec` says; the portions of a round are of different sequences.
            unsafe { delta.launch(&self.stream, Grid { blocks, threads: 128 }, &p) }.map_err(Failed::from)?;
            self.save(layer, round, 0..columns)?;
        }
        let p = GatedNormParams {
            o: o.address(),
            z: room.z.address(),
            gamma: gamma.address(),
            quantised: room.output.target(any_blocks(&[out]), g.value_dim),
            count: (rows * heads) as u32,
            dim: g.value_dim as u32,
            eps,
            padding: 0,
        };
        // SAFETY: both are `[rows][value_heads][value_dim]`.
        unsafe { kernels.gated_norm.launch(&self.stream, Grid::threads(rows * heads * 32, 128), &p) }
            .map_err(Failed::from)?;
        self.settle(&room.output, p.quantised, any_blocks(&[out]))?;
        self.product(&out, &room.output, y)?;
        self.state.note_pending(spans, layer);
        let matrices: usize = [qkv, gate, alpha, beta, out].iter().map(|w| w.bytes.len()).sum();
        Ok(matrices + spans.len() * 4 * (columns + history))
    }
}
