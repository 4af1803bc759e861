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
    out: u64,
    heads: u32,
    dim: u32,
    padded: u32,
    eps: f32,
    scale: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct QkvParams {
    conv: ConvParams,
    unit_norm: UnitNormParams,
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
    qkv: QkvParams,
    gates: GateParams,
    delta: DeltaParams,
    gated_norm: GatedNormParams,
}

/// The kernels.
pub(crate) struct Gdn {
    gates: Kernel<GateParams>,
    /// By their most taps.
    qkv: [(usize, Kernel<QkvParams>); 2],
    pub(crate) history: Kernel<ConvParams>,
    delta: [Delta; 4],
    gated_norm: Kernel<GatedNormParams>,
    /// By the units of a key's padded values; none where a GPU has too little shared memory.
    few: Vec<(usize, Kernel<FewParams>)>,
}

/// Rows of a portion, taps, and values of a head, that the kernels for short portions have room for. Twins: in `kernels/gdn.cu`.
const FEW_ROWS: usize = 8;
const FEW_TAPS: usize = 4;
const FEW_VALUES: usize = 128;
/// Rows that a block of threads walks in the convolution.
const WALK: usize = 64;

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
            Ok((parts, module.kernel(&format!("strata_gdn_few_{parts}"))?.early()))
        };
        let few_parts: &[usize] = if context.device().capability < (8, 0) { &[] } else { &[1, 2, 4] };
        let qkv = |taps: usize| -> Result<_, DriverError> {
            Ok((taps, module.kernel(&format!("strata_gdn_qkv_{taps}"))?))
        };
        Ok(Gdn {
            gates: module.kernel("strata_gdn_gates")?,
            qkv: [qkv(4)?, qkv(8)?],
            history: module.kernel("strata_history")?,
            delta: [delta(1, 12)?, delta(2, 12)?, delta(4, 12)?, delta(8, 4)?],
            gated_norm: module.kernel("strata_gated_norm")?,
            few: few_parts.iter().map(|parts| few(*parts)).collect::<Result<_, _>>()?,
        })
    }
}

/// Whether there is a kernel for these heads.
pub(crate) fn check(g: &GdnShape) -> Result<(), BackendError> {
    if g.key_dim > 256 {
        return Err(failed(format!("GDN keys of {} values; at most 256 can be run", g.key_dim)));
    }
    if g.conv_kernel > 8 {
        return Err(failed(format!("{} GDN convolution taps; at most 8 can be run", g.conv_kernel)));
    }
    Ok(())
}

/// Values of a normed key with the zeros behind them: units of 32, a power of two of them.
fn padded(g: &GdnShape) -> usize {
    32 * g.key_dim.div_ceil(32).next_power_of_two()
}

/// What the op needs while it runs.
pub(crate) struct Room {
    qkv: DeviceSlice<f32>,
    /// Queries and keys, normed; values.
    keys: DeviceSlice<f32>,
    values: DeviceSlice<f32>,
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
            keys: room.take(rows * g.key_heads * 2 * padded(g)),
            values: room.take(rows * values),
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

        let window = self.inputs.window(&self.stream, (&self.spec, &self.state), spans)?;
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
        let qkv_params = |round: &Round| QkvParams {
            conv: conv.params(state, round, room.values.address()),
            unit_norm: UnitNormParams {
                out: room.keys.address(),
                heads: g.key_heads as u32,
                dim: g.key_dim as u32,
                padded: padded(&g) as u32,
                eps,
                scale: math::rsqrt(g.key_dim as f32),
                padding: 0,
            },
        };
        let delta = |round: &Round| DeltaParams {
            state,
            portions: round.portions.address(),
            keys: room.keys.address(),
            values: room.values.address(),
            decay: room.decay.address(),
            strength: room.strength.address(),
            out: o.address(),
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
        let fits = || {
            let aligned = |n: usize| n.is_multiple_of(4);
            aligned(g.key_dim)
                && aligned(g.value_dim)
                && aligned(self.state.layers[usize::from(layer.0)].floats)
                && g.value_dim <= FEW_VALUES
                && g.conv_kernel <= FEW_TAPS
        };
        // Behind a cut a history is read and written in one version: there it is advanced behind whoever reads it.
        let few = few.filter(|_| window.rounds.len() == 1 && window.rounds[0].longest <= FEW_ROWS && fits());
        if let Some((_, few)) = few {
            let round = &window.rounds[0];
            let p = FewParams { qkv: qkv_params(round), gates, delta: delta(round), gated_norm };
            let grid = Grid { blocks: [heads as u32, round.portions.len() as u32, 1], threads: 512 };
            // SAFETY: the rows are the window's, the state is as large as `Spec` says, and each portion is of another sequence.
            unsafe { few.launch(&self.stream, grid, &p) }.map_err(Failed::from)?;
            self.save(layer, round, 0..state_floats + history)?;
        } else {
            // SAFETY: both have a value per row and head.
            unsafe { kernels.gates.launch(&self.stream, Grid::threads(rows * heads, 128), &gates) }
                .map_err(Failed::from)?;
            let by_taps = kernels.qkv.iter().find(|(taps, _)| *taps >= g.conv_kernel);
            let by_parts = kernels.delta.iter().find(|delta| delta.parts * 32 == padded(&g));
            let (Some((_, make_qkv)), Some(Delta { kernel, columns, .. })) = (by_taps, by_parts) else {
                return Err(failed("a GDN op that was checked when the backend was described"));
            };
            for round in &window.rounds {
                let portions = round.portions.len() as u32;
                let threads = g.key_dim.next_multiple_of(32);
                let groups = 2 * g.key_heads + values.div_ceil(threads);
                let blocks = [groups as u32, round.longest.div_ceil(WALK) as u32, portions];
                let grid = Grid { blocks, threads: threads as u32 };
                // SAFETY: rows, keys and values have a row for each of the window's, and the portions lie in them.
                unsafe { make_qkv.launch(&self.stream, grid, &qkv_params(round)) }.map_err(Failed::from)?;
                self.advance(&conv, state, round)?;
                let blocks = [g.value_dim.div_ceil(*columns) as u32, heads as u32, portions];
                // SAFETY: the state is as large as `Spec` says; the portions of a round are of different sequences.
                unsafe { kernel.launch(&self.stream, Grid { blocks, threads: 32 }, &delta(round)) }
                    .map_err(Failed::from)?;
                self.save(layer, round, 0..state_floats + history)?;
            }
            let warps = Grid::threads(rows * heads * 32, 128);
            // SAFETY: both are `[rows][value_heads][value_dim]`.
            unsafe { kernels.gated_norm.launch(&self.stream, warps, &gated_norm) }.map_err(Failed::from)?;
        }
        self.settle(&room.output, gated_norm.quantised, any_blocks(&[out]))?;
        self.product(&out, &room.output, y)?;
        self.state.note_pending(spans, layer);
        let matrices: usize = [qkv, gate, alpha, beta, out].iter().map(|w| w.bytes.len()).sum();
        Ok(matrices + spans.len() * 4 * (state_floats + history))
    }
}
