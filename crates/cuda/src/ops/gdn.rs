//! Gated DeltaNet: `kernels/gdn.cu`.

use strata_backend::{BackendError, Buffer, GdnShape, GdnWeights, Layer, Shape, Span};
use strata_quant::math;

use super::input::{Input, Target, any_blocks};
use super::recurrent::{Conv, ConvParams, Recurrent};
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel};
use crate::inputs::Round;
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
    out: u64,
    stride: u64,
    count: u32,
    heads: u32,
    dim: u32,
    padded: u32,
    eps: f32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DeltaParams {
    state: Recurrent,
    portions: u64,
    keys: u64,
    values: u64,
    decay: u64,
    strength: u64,
    out: u64,
    value_stride: u64,
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    value_dim: u32,
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

/// Everything between the products, for short portions.
#[repr(C)]
#[derive(Clone, Copy)]
struct FewParams {
    conv: ConvParams,
    gates: GateParams,
    unit_norm: UnitNormParams,
    delta: DeltaParams,
    gated_norm: GatedNormParams,
}

/// The kernels.
pub(crate) struct Gdn {
    gates: Kernel<GateParams>,
    conv: Kernel<ConvParams>,
    pub(crate) history: Kernel<ConvParams>,
    unit_norm: Kernel<UnitNormParams>,
    delta: [Delta; 4],
    gated_norm: Kernel<GatedNormParams>,
    few: [(usize, Kernel<FewParams>); 3],
}

/// Rows of a portion, and values of a head, that the kernels for short portions have room for.
const FEW_ROWS: usize = 8;
const FEW_VALUES: usize = 128;

/// The delta rule for keys of up to 32 values times `parts`; a block of threads, one warp, has `columns` state columns.
struct Delta {
    parts: usize,
    columns: usize,
    kernel: Kernel<DeltaParams>,
}

impl Gdn {
    pub(crate) fn new(context: &Context) -> Result<Gdn, OpError> {
        let module = module(context, "gdn")?;
        let delta = |parts: usize, columns: usize| -> Result<_, DriverError> {
            Ok(Delta { parts, columns, kernel: module.kernel(&format!("strata_delta_{parts}"))? })
        };
        let few = |parts: usize| -> Result<_, DriverError> {
            Ok((parts, module.kernel(&format!("strata_gdn_few_{parts}"))?))
        };
        Ok(Gdn {
            gates: module.kernel("strata_gdn_gates")?,
            conv: module.kernel("strata_gdn_conv")?,
            history: module.kernel("strata_history")?,
            unit_norm: module.kernel("strata_unit_norm")?,
            delta: [delta(1, 12)?, delta(2, 12)?, delta(4, 12)?, delta(8, 4)?],
            gated_norm: module.kernel("strata_gated_norm")?,
            few: [few(1)?, few(2)?, few(4)?],
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

/// Values of a normed key with the zeros behind them: units of 32, a power of two of them.
fn padded(g: &GdnShape) -> usize {
    32 * g.key_dim.div_ceil(32).next_power_of_two()
}

/// What the op needs while it runs.
pub(crate) struct Room {
    qkv: DeviceSlice<f32>,
    conv: DeviceSlice<f32>,
    /// Queries and keys, normed.
    keys: DeviceSlice<f32>,
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
            keys: room.take(rows * g.key_heads * 2 * padded(g)),
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
        self.products(&[(qkv, room.qkv), (gate, room.z), (alpha, room.decay), (beta, room.strength)], input)?;
        let state = self.recurrent(layer, &window)?;
        let [state_floats, history] = self.state.layer(layer)?.gdn;
        if state_floats == 0 {
            return Err(failed(format!("layer {} has no GDN state", layer.0)));
        }
        let conv = Conv {
            rows: room.qkv,
            taps,
            history: state_floats,
            channels,
            kernel: g.conv_kernel,
            dilation: 1,
        };
        let gates = GateParams {
            alpha: room.decay.address(),
            beta: room.strength.address(),
            a: a.address(),
            bias: bias.address(),
            count: (rows * heads) as u32,
            heads: heads as u32,
        };
        let unit_norm = UnitNormParams {
            x: room.conv.address(),
            out: room.keys.address(),
            stride: channels as u64,
            count: (rows * 2 * g.key_heads) as u32,
            heads: g.key_heads as u32,
            dim: g.key_dim as u32,
            padded: padded(&g) as u32,
            eps,
            scale: math::rsqrt(g.key_dim as f32),
        };
        let delta = |round: &Round| DeltaParams {
            state,
            portions: round.portions.address(),
            keys: room.keys.address(),
            values: room.conv.range(channels - values..channels).address(),
            decay: room.decay.address(),
            strength: room.strength.address(),
            out: o.address(),
            value_stride: channels as u64,
            key_heads: g.key_heads as u32,
            value_heads: heads as u32,
            key_dim: g.key_dim as u32,
            value_dim: g.value_dim as u32,
        };
        let gated_norm = GatedNormParams {
            o: o.address(),
            z: room.z.address(),
            gamma: gamma.address(),
            quantised: room.output.target(any_blocks(&[out]), g.value_dim),
            count: (rows * heads) as u32,
            dim: g.value_dim as u32,
            eps,
            padding: 0,
        };
        let kernels = &self.kernels.gdn;
        let few = kernels.few.iter().find(|(parts, _)| parts * 32 == padded(&g));
        // Behind a cut a portion's history is read and written in one version: there it is advanced behind whoever reads it.
        let few = few.filter(|_| {
            window.rounds.len() == 1 && window.rounds[0].longest <= FEW_ROWS && g.value_dim <= FEW_VALUES
        });
        if let Some((_, few)) = few {
            let round = &window.rounds[0];
            let p = FewParams {
                conv: conv.params(state, round, room.conv.address()),
                gates,
                unit_norm,
                delta: delta(round),
                gated_norm,
            };
            let grid = Grid { blocks: [heads as u32, round.portions.len() as u32, 1], threads: 512 };
            // SAFETY: as below.
            unsafe { few.launch(&self.stream, grid, &p) }.map_err(Failed::from)?;
            self.save(layer, round, 0..state_floats + history)?;
        } else {
            let heads_of_rows = |count: usize| Grid::threads(count * 32, 128);
            // SAFETY: both have a value per row and head.
            unsafe { kernels.gates.launch(&self.stream, Grid::threads(rows * heads, 128), &gates) }
                .map_err(Failed::from)?;
            for round in &window.rounds {
                let p = conv.params(state, round, room.conv.address());
                // SAFETY: rows and output are `[rows][channels]`, and the portions lie in them.
                unsafe { kernels.conv.launch(&self.stream, conv.grid(round), &p) }.map_err(Failed::from)?;
                self.advance(&conv, state, round)?;
                self.save(layer, round, state_floats..state_floats + history)?;
            }
            let warps = heads_of_rows(rows * 2 * g.key_heads);
            // SAFETY: queries and keys are the first channels of every row.
            unsafe { kernels.unit_norm.launch(&self.stream, warps, &unit_norm) }.map_err(Failed::from)?;
            let by_parts = kernels.delta.iter().find(|delta| delta.parts * 32 == padded(&g));
            let Delta { kernel, columns, .. } = by_parts.expect("checked when the backend was described");
            for round in &window.rounds {
                let columns = g.value_dim.div_ceil(*columns);
                let blocks = [columns as u32, heads as u32, round.portions.len() as u32];
                // SAFETY: the state is as large as `Spec` says; the portions of a round are of different sequences.
                unsafe { kernel.launch(&self.stream, Grid { blocks, threads: 32 }, &delta(round)) }
                    .map_err(Failed::from)?;
                self.save(layer, round, 0..state_floats)?;
            }
            // SAFETY: both are `[rows][value_heads][value_dim]`.
            unsafe { kernels.gated_norm.launch(&self.stream, heads_of_rows(rows * heads), &gated_norm) }
                .map_err(Failed::from)?;
        }
        self.settle(&room.output, gated_norm.quantised, any_blocks(&[out]))?;
        self.product(&out, &room.output, y)?;
        self.state.note_pending(spans, layer);
        let matrices: usize = [qkv, gate, alpha, beta, out].iter().map(|w| w.bytes.len()).sum();
        Ok(matrices + spans.len() * 4 * (state_floats + history))
    }
}
