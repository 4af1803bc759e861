//! The routed experts of one row: `kernels/experts_one.cu`. Two kernels, of which the second is left to do until the shared expert is
//! there, too.

use strata_backend::{BackendError, ExpertWeights};
use strata_quant::Format;

use super::input::{Input, Target};
use super::one::{Formats, Split, THREADS, brought};
use super::{ByFormat, OpError, SEGMENT, module};
use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel};
use crate::weights::Slots;

#[repr(C)]
#[derive(Clone, Copy)]
struct HiddenParams {
    slots: u64,
    up: u64,
    experts: u64,
    q: u64,
    d: u64,
    sums: u64,
    gate_scales: u64,
    up_scales: u64,
    hidden: Target,
    width: u32,
    k: u32,
    split: Split,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DownParams {
    slots: u64,
    offset: u64,
    experts: u64,
    shares: u64,
    q: u64,
    d: u64,
    sums: u64,
    scales: u64,
    shared: u64,
    scalar: u64,
    y: u64,
    rows: u32,
    share: u32,
    used: u32,
    k: u32,
    split: Split,
}

/// Hidden values of a block of threads, and threads of a block, at most: of formats whose units have no bytes in common, and of others.
/// Twins: in `kernels/experts_one.cu`.
const HIDDEN: usize = 32;
const HIDDEN_THREADS: [usize; 2] = [480, THREADS];
/// Threads of a block of the second kernel, at most, and blocks that a multiprocessor has at once, for the same formats. Twins: as above.
const DOWN_THREADS: usize = 256;
const DOWN_BLOCKS: [usize; 2] = [3, 2];

/// The kernels of a block format.
struct OfFormat {
    hidden: Kernel<HiddenParams>,
    down: Kernel<DownParams>,
}

/// The kernels.
pub(crate) struct ExpertsOne(ByFormat<OfFormat>);

impl ExpertsOne {
    pub(crate) fn new(context: &Context) -> Result<ExpertsOne, OpError> {
        let module = module(context, "experts_one")?;
        let of = |name: &str| -> Result<_, DriverError> {
            Ok(OfFormat {
                hidden: module.dynamic_kernel(&format!("strata_hidden_one_{name}"))?.early(),
                down: module.dynamic_kernel(&format!("strata_down_one_{name}"))?.early(),
            })
        };
        Ok(ExpertsOne(ByFormat::new(of)?))
    }
}

/// The products with down and the sum over experts, which are left to do.
#[derive(Clone, Copy)]
pub(crate) struct LeftDown {
    format: Format,
    grid: Grid,
    shared: usize,
    p: DownParams,
}

/// How many rows a block of the second kernel takes, its threads and its bytes of shared memory; None without room for one row.
fn down_layout(
    formats: &Formats,
    format: Format,
    [rows, k, used]: [usize; 3],
) -> Option<(usize, usize, usize)> {
    let (raw, units) = (format.row_bytes(k)?, k / 32);
    if units == 0 || units > 32 * SEGMENT {
        return None;
    }
    let (terms, grid) = formats.terms(format, units);
    let together = formats.together(format);
    let blocks = DOWN_BLOCKS[usize::from(together > 1)];
    let bytes = |share: usize| {
        (4 * used * share).next_multiple_of(16) + used * (brought(share * raw) + share * terms) + grid
    };
    let even = rows.div_ceil(blocks * formats.processors);
    let share = (1..=even).rev().find(|&share| formats.allow_together(blocks, bytes(share)));
    let share = share.or_else(|| formats.allow(bytes(1)).then_some(1))?;
    let lanes = (units / together).min(DOWN_THREADS);
    let threads = (lanes * (DOWN_THREADS / lanes).min(used)).max(share).next_multiple_of(32);
    (threads <= DOWN_THREADS).then_some((share, threads, bytes(share)))
}

impl CudaBackend {
    /// Hidden values of the experts that one row is routed to; the rest is left to `down_left`. False, with nothing queued, where there are
    /// no kernels for these formats and sizes.
    pub(crate) fn hidden_one(
        &mut self,
        w: &ExpertWeights,
        scales: [Option<DeviceSlice<f32>>; 3],
        slots: &Slots,
        input: &Input,
        hidden: &Input,
    ) -> Result<bool, BackendError> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        let formats = &self.kernels.products.one.formats;
        let blocks = w.gate == w.up && !w.gate.is_float() && !w.down.is_float();
        if !blocks || !moe.width.is_multiple_of(HIDDEN) {
            return Ok(false);
        }
        let (Some(row), Some(down)) =
            (w.gate.row_bytes(d), down_layout(formats, w.down, [d, moe.width, moe.used]))
        else {
            return Ok(false);
        };
        let (terms, grid) = formats.terms(w.gate, d / 32);
        let shared = 2 * brought(HIDDEN * row) + 2 * HIDDEN * terms + grid;
        if !formats.allow(shared) {
            return Ok(false);
        }
        let most = HIDDEN_THREADS[usize::from(formats.together(w.gate) > 1)];
        let threads = formats.threads(w.gate, d / 32, most);
        let routing = self.routing.params(&moe);
        let [q, d_x, sums] = input.quantised_addresses();
        let p = HiddenParams {
            slots: slots.table.address(),
            up: slots.up as u64,
            experts: routing.unit_expert,
            q,
            d: d_x,
            sums,
            gate_scales: scales[0].map_or(0, DeviceSlice::address),
            up_scales: scales[1].map_or(0, DeviceSlice::address),
            hidden: hidden.target(true, moe.width),
            width: moe.width as u32,
            k: d as u32,
            split: formats.split(w.gate, d / 32, threads),
        };
        let blocks = [(moe.width / HIDDEN) as u32, moe.used as u32, 1];
        let grid = Grid { blocks, threads: threads as u32 };
        let kernel = &self.kernels.experts_one.0.of(w.gate).hidden;
        // SAFETY: one row is routed to `used` experts, whose slots start with the gate's rows and have those of up behind the offset;
        // `hidden` has a place for each.
        unsafe { kernel.launch_with(&self.stream, grid, shared as u32, &p) }.map_err(Failed::from)?;
        let (share, threads, shared) = down;
        let [q, d_x, sums] = hidden.quantised_addresses();
        let p = DownParams {
            slots: slots.table.address(),
            offset: slots.down as u64,
            experts: routing.unit_expert,
            shares: routing.shares,
            q,
            d: d_x,
            sums,
            scales: scales[2].map_or(0, DeviceSlice::address),
            shared: 0,
            scalar: 0,
            y: 0,
            rows: d as u32,
            share: share as u32,
            used: moe.used as u32,
            k: moe.width as u32,
            split: formats.split(w.down, moe.width / 32, threads),
        };
        let grid = Grid { blocks: [d.div_ceil(share) as u32, 1, 1], threads: threads as u32 };
        self.left_down = Some(LeftDown { format: w.down, grid, shared, p });
        Ok(true)
    }

    /// What `hidden_one` left: products with down, summed over experts, with the shared expert's.
    pub(crate) fn down_left(
        &self,
        left: LeftDown,
        shared: DeviceSlice<f32>,
        scalar: DeviceSlice<f32>,
        y: DeviceSlice<f32>,
    ) -> Result<(), BackendError> {
        let p = DownParams { shared: shared.address(), scalar: scalar.address(), y: y.address(), ..left.p };
        let kernel = &self.kernels.experts_one.0.of(left.format).down;
        // SAFETY: as for `hidden_one`; `shared` and `y` are one row each.
        let queued = unsafe { kernel.launch_with(&self.stream, left.grid, left.shared as u32, &p) };
        Ok(queued.map_err(Failed::from)?)
    }
}
