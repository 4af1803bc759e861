//! The experts of one row: `kernels/experts_one.cu`. Nothing is queued before the op that sums them: then the router, the shared expert and the
//! routed ones are known, and share launches.

use strata_backend::{BackendError, ExpertWeights, Layer};
use strata_quant::Format;

use super::experts::SharedRoom;
use super::input::{Input, Target};
use super::one::{Formats, One, Split, THREADS, Wanted, brought};
use super::route::{Routed, choice_room};
use super::{ByFormat, OpError, SEGMENT, module};
use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, LINE};
use crate::tiers::{Asked, DeskParams, LayerTable};
use crate::weights::Matrix;

#[repr(C)]
#[derive(Clone, Copy)]
struct HiddenParams {
    slots: u64,
    up: u64,
    routed: Routed,
    q: u64,
    d: u64,
    sums: u64,
    gate_scales: u64,
    up_scales: u64,
    hidden: Target,
    desk: DeskParams,
    u: u64,
    width: u32,
    k: u32,
    split: Split,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DownParams {
    slots: u64,
    offset: u64,
    routed: Routed,
    q: u64,
    d: u64,
    sums: u64,
    scales: u64,
    shared: u64,
    scalar: u64,
    y: u64,
    helped: u64,
    outputs: u64,
    rows: u32,
    share: u32,
    k: u32,
    split: Split,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AnswersParams {
    desk: DeskParams,
    made: u64,
    width: u32,
    padding: u32,
}

/// Hidden values of a block of threads, and threads of a block, at most: of formats whose units have no bytes in common, and of others.
/// Twins: in `kernels/experts_one.cu`.
const HIDDEN: usize = 32;
const HIDDEN_THREADS: [usize; 2] = [480, THREADS];
/// Threads of a block of the second kernel, at most, and blocks that a multiprocessor has at once, for the same formats. Twins: as above.
const DOWN_THREADS: usize = 256;
const DOWN_BLOCKS: [usize; 2] = [3, 2];

/// Threads that bring the host's answers. Twin: as above.
const BRINGERS: u32 = 1024;

/// The kernels of a block format.
struct OfFormat {
    hidden: Kernel<HiddenParams>,
    down: Kernel<DownParams>,
}

/// The kernels.
pub(crate) struct ExpertsOne {
    formats: ByFormat<OfFormat>,
    answers: Kernel<AnswersParams>,
}

impl ExpertsOne {
    pub(crate) fn new(context: &Context) -> Result<ExpertsOne, OpError> {
        let module = module(context, "experts_one")?;
        let of = |name: &str| -> Result<_, DriverError> {
            Ok(OfFormat {
                hidden: module.dynamic_kernel(&format!("strata_hidden_one_{name}"))?.early(),
                down: module.dynamic_kernel(&format!("strata_down_one_{name}"))?.early(),
            })
        };
        Ok(ExpertsOne { formats: ByFormat::new(of)?, answers: module.kernel("strata_answers")?.early() })
    }
}

/// Kernels that are left to do: which, and how.
#[derive(Clone, Copy)]
pub(crate) struct LeftExperts {
    router: Matrix,
    formats: [Format; 2],
    grids: [Grid; 2],
    shared: [usize; 2],
    hidden: HiddenParams,
    down: DownParams,
    /// What the host is asked, if it computes experts.
    asked: Option<Asked>,
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
        (4 * used * share).next_multiple_of(LINE) + used * (brought(share * raw) + share * terms) + grid
    };
    let even = rows.div_ceil(blocks * formats.processors);
    let share = (1..=even).rev().find(|&share| formats.allow_together(blocks, bytes(share)));
    let share = share.or_else(|| formats.allow(bytes(1)).then_some(1))?;
    let lanes = (units / together).min(DOWN_THREADS);
    let threads = (lanes * (DOWN_THREADS / lanes).min(used)).max(share).next_multiple_of(32);
    (threads <= DOWN_THREADS).then_some((share, threads, bytes(share)))
}

impl CudaBackend {
    /// What is to be done for the experts that one row is routed to by `router`; none where there are no kernels for these formats and sizes, or where the
    /// GPU can't read some and the host computes none.
    pub(crate) fn experts_one(
        &self,
        (router, layer): (Matrix, Layer),
        w: &ExpertWeights,
        scales: [Option<DeviceSlice<f32>>; 3],
        slots: &LayerTable,
        input: &Input,
        values: &Input,
    ) -> Option<LeftExperts> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        let One { formats, .. } = &self.kernels.products.one;
        let blocks = w.gate == w.up && !w.gate.is_float() && !w.down.is_float();
        if !blocks || !router.format.is_float() || !moe.width.is_multiple_of(HIDDEN) {
            return None;
        }
        let (share, down_threads, down_shared) = down_layout(formats, w.down, [d, moe.width, moe.used])?;
        let (terms, grid) = formats.terms(w.gate, d / 32);
        let rows = 2 * brought(HIDDEN * w.gate.row_bytes(d)?);
        let shared = rows.max(choice_room(moe.experts)) + 2 * HIDDEN * terms + grid;
        if !formats.allow(shared) {
            return None;
        }
        let most = HIDDEN_THREADS[usize::from(formats.together(w.gate) > 1)];
        let threads = formats.threads(w.gate, d / 32, most);
        let routed = self.routing.routed(&moe);
        // The host knows no scales.
        let desk =
            self.tiers.desk.as_ref().filter(|_| w.scales == [None; 3]).and_then(|desk| desk.params(layer));
        let asked = desk.map(|_| Asked::Compute(layer, *w));
        if asked.is_none() && self.tiers.stages() {
            return None;
        }
        let desk = desk.unwrap_or_default();
        let [q, d_x, sums] = input.quantised_addresses();
        let hidden = HiddenParams {
            slots: slots.table.address(),
            up: slots.layout.up as u64,
            routed,
            q,
            d: d_x,
            sums,
            gate_scales: scales[0].map_or(0, DeviceSlice::address),
            up_scales: scales[1].map_or(0, DeviceSlice::address),
            hidden: values.target(true, moe.width),
            desk,
            u: input.floats().address(),
            width: moe.width as u32,
            k: d as u32,
            split: formats.split(w.gate, d / 32, threads),
        };
        let [q, d_x, sums] = values.quantised_addresses();
        let down = DownParams {
            slots: slots.table.address(),
            offset: slots.layout.down as u64,
            routed,
            q,
            d: d_x,
            sums,
            scales: scales[2].map_or(0, DeviceSlice::address),
            shared: 0,
            scalar: 0,
            y: 0,
            helped: desk.helped,
            outputs: desk.outputs,
            rows: d as u32,
            share: share as u32,
            k: moe.width as u32,
            split: formats.split(w.down, moe.width / 32, down_threads),
            padding: 0,
        };
        let grids = [
            Grid { blocks: [(moe.width / HIDDEN) as u32, moe.used as u32, 1], threads: threads as u32 },
            Grid { blocks: [d.div_ceil(share) as u32, 1, 1], threads: down_threads as u32 },
        ];
        let formats = [w.gate, w.down];
        Some(LeftExperts { router, formats, grids, shared: [shared, down_shared], hidden, down, asked })
    }

    /// Queues what `experts_one` left: the router with the shared expert's first products, the routed experts' hidden values, its last product,
    /// and theirs with the sum.
    pub(crate) fn combine_one(
        &mut self,
        left: LeftExperts,
        [gate, up, down, scalar]: [Matrix; 4],
        input: &Input,
        room: &SharedRoom,
        y: DeviceSlice<f32>,
    ) -> Result<(), BackendError> {
        self.prepare(input, &[gate, up])?;
        let logits = self.routing.logits;
        let products = [(gate, room.gate), (up, room.up), (left.router, logits), (scalar, room.scalar)];
        self.products(&products, input)?;
        let hidden = &self.kernels.experts_one.formats.of(left.formats[0]).hidden;
        // SAFETY: one row is routed to `used` experts, whose slots start with the gate's rows and have those of up behind the offset; `hidden`
        // has a place for each.
        unsafe { hidden.launch_with(&self.stream, left.grids[0], left.shared[0] as u32, &left.hidden) }
            .map_err(Failed::from)?;
        if let (Some(asked), Some(desk)) = (left.asked, &mut self.tiers.desk) {
            match self.recording {
                true => desk.recorded.push(asked),
                false => desk.expect(&[asked]),
            }
        }
        let queued = self.combine_chosen(&left, down, room, y);
        if queued.is_err() {
            // The choice would be taken for the next one's.
            self.routing.start(&self.stream).map_err(Failed::from)?;
        }
        queued
    }

    /// The last products, behind the choice.
    fn combine_chosen(
        &self,
        left: &LeftExperts,
        down: Matrix,
        room: &SharedRoom,
        y: DeviceSlice<f32>,
    ) -> Result<(), BackendError> {
        // It finds room beside the kernel in front, which lets it start when the products before are there.
        let wanted = Wanted::new(&down, room.shared);
        let one = &self.kernels.products.one;
        if !one.launch_hidden(&self.stream, &wanted, [room.gate, room.up]).map_err(Failed::from)? {
            self.shared_down(&down, room)?;
        }
        if left.asked.is_some() {
            let p = AnswersParams {
                desk: left.hidden.desk,
                made: left.hidden.routed.made(),
                width: left.hidden.k,
                padding: 0,
            };
            let one = Grid { blocks: [1; 3], threads: BRINGERS };
            // SAFETY: the desk has an answer's room for each of the row's experts, on both sides.
            unsafe { self.kernels.experts_one.answers.launch(&self.stream, one, &p) }
                .map_err(Failed::from)?;
        }
        let p = DownParams {
            shared: room.shared.address(),
            scalar: room.scalar.address(),
            y: y.address(),
            ..left.down
        };
        let kernel = &self.kernels.experts_one.formats.of(left.formats[1]).down;
        // SAFETY: as above; `shared` and `y` are one row each.
        let queued = unsafe { kernel.launch_with(&self.stream, left.grids[1], left.shared[1] as u32, &p) };
        Ok(queued.map_err(Failed::from)?)
    }
}
