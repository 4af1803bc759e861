//! Routing, and grouping by expert: `kernels/route.cu`.

use std::ops::Range;

use strata_backend::{BackendError, Buffer, Layer, MoeShape, Spec, Weight};

use super::experts::many;
use super::wide::WIDE;
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::scratch::Scratch;
use crate::tiers::{Choices, LeftOut};
use crate::weights::Matrix;
use crate::{Failed, failed};

/// What the router leaves, as kernels take it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RoutingParams {
    experts: u64,
    pub(crate) shares: u64,
    places: u64,
    pub(crate) order: u64,
    counts: u64,
    pub(crate) unit_expert: u64,
    pub(crate) unit_first: u64,
    pub(crate) unit_places: u64,
    unit_ends: u64,
    rows: u32,
    used: u32,
    all: u32,
    tile: u32,
    left_out: LeftOut,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ChooseParams {
    routing: RoutingParams,
    logits: u64,
}

/// One row's experts. Twin: `kernels/experts_one.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Routed {
    logits: u64,
    experts: u64,
    shares: u64,
    made: u64,
    all: u32,
    used: u32,
}

impl Routed {
    /// The address of the flag that a choice has been made.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }
}

/// Bytes of shared memory for a choice from so many. Twin: `kernels/choose.cuh`.
pub(crate) fn choice_room(experts: usize) -> usize {
    16 * experts
}

/// The kernels.
pub(crate) struct Route {
    choose: Kernel<ChooseParams>,
    group_few: Kernel<RoutingParams>,
    count: Kernel<RoutingParams>,
    scan: Kernel<RoutingParams>,
    place: Kernel<RoutingParams>,
}

impl Route {
    pub(crate) fn new(context: &Context) -> Result<Route, OpError> {
        let module = module(context, "route")?;
        Ok(Route {
            choose: module.kernel("strata_choose")?.early(),
            group_few: module.kernel("strata_group_few")?.early(),
            count: module.kernel("strata_count")?,
            scan: module.kernel("strata_scan")?,
            place: module.kernel("strata_place")?,
        })
    }
}

/// Threads of a block that chooses. Twin: `CHOOSERS` in `kernels/route.cu`.
const CHOOSERS: u32 = 512;
/// Rows whose pairs one block groups.
const FEW: usize = 32;

/// Experts of a layer, at most. Twin: in `kernels/choose.cuh`.
const MOST_EXPERTS: usize = 2048;

/// Whether there is a kernel for so many experts a row.
pub(crate) fn check(moe: &MoeShape) -> Result<(), BackendError> {
    if moe.used > 32 {
        return Err(failed(format!("{} experts a token; at most 32 can be run", moe.used)));
    }
    if moe.experts > MOST_EXPERTS {
        return Err(failed(format!("{} experts a layer; at most {MOST_EXPERTS} can be run", moe.experts)));
    }
    Ok(())
}

/// Places of a unit where an expert has a few.
pub(crate) const FEW_PLACES: usize = 8;

/// Places of one expert that a unit of work has, at most: as many columns as a kernel takes at once. Wide units where an expert has several
/// rows to expect, for tensor cores.
pub(crate) fn tile(moe: &MoeShape, rows: usize) -> usize {
    if rows * moe.used >= 4 * moe.experts { WIDE } else { FEW_PLACES }
}

/// The most units that `rows` rows can make.
pub(crate) fn most_units(moe: &MoeShape, rows: usize) -> usize {
    let pairs = rows * moe.used;
    pairs.min(moe.experts + pairs / tile(moe, rows))
}

/// The work of consecutive experts: where their units and places start, 0 for the first, and end, as kernels find them.
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    pub(crate) units: [u64; 2],
    pub(crate) places: [u64; 2],
    /// The most units that these can be.
    pub(crate) most: usize,
}

/// A window's routing. It stays until the next one.
pub(crate) struct Routing {
    experts: DeviceSlice<u32>,
    shares: DeviceSlice<f32>,
    places: DeviceSlice<u32>,
    order: DeviceSlice<u32>,
    counts: DeviceSlice<u32>,
    /// The places of these two that every layer may use.
    shared: [DeviceSlice<u32>; 2],
    unit_expert: DeviceSlice<u32>,
    unit_first: DeviceSlice<u32>,
    unit_places: DeviceSlice<u32>,
    unit_ends: DeviceSlice<u32>,
    /// One row's logits, and whether its choice has been made: 0 between its two kernels.
    pub(crate) logits: DeviceSlice<f32>,
    made: DeviceSlice<u32>,
    /// Per place `[D]`.
    pub(crate) products: DeviceSlice<f32>,
    /// Rows of the window that was routed.
    pub(crate) rows: usize,
    /// Whether its pairs are grouped.
    grouped: bool,
    /// Experts that aren't the device's work.
    left_out: Option<LeftOut>,
}

impl Routing {
    /// Room for the widest window.
    pub(crate) fn new(spec: &Spec, room: &mut Scratch) -> Routing {
        let (moe, rows) = (spec.shape.moe, spec.window.max(spec.sequences));
        let (pairs, units) = (rows * moe.used, rows * moe.used);
        let [experts, counts] = [pairs, moe.experts].map(|len| room.take(len));
        Routing {
            experts,
            shares: room.take(pairs),
            places: room.take(pairs),
            order: room.take(pairs),
            counts,
            shared: [experts, counts],
            unit_expert: room.take(units),
            unit_first: room.take(units),
            unit_places: room.take(units),
            unit_ends: room.take(moe.experts),
            logits: room.take(moe.experts),
            made: room.take(1),
            products: room.take(pairs * spec.shape.hidden),
            rows: 0,
            grouped: false,
            left_out: None,
        }
    }

    /// A layer begins to route so many rows, with places of its own for some of what it leaves.
    fn begin(&mut self, rows: usize, own: Choices, left_out: Option<LeftOut>) {
        (self.rows, self.grouped, self.left_out) = (rows, rows <= FEW, left_out);
        let [experts, counts] = self.shared;
        (self.experts, self.counts) = (own.experts.unwrap_or(experts), own.ends.unwrap_or(counts));
    }

    /// Before the first launch, and where the second of one row's kernels will not come.
    pub(crate) fn start(&self, stream: &Stream) -> Result<(), DriverError> {
        stream.fill(self.made, 0)
    }

    /// One row's, as kernels take it that choose.
    pub(crate) fn routed(&self, moe: &MoeShape) -> Routed {
        Routed {
            logits: self.logits.address(),
            experts: self.experts.address(),
            shares: self.shares.address(),
            made: self.made.address(),
            all: moe.experts as u32,
            used: moe.used as u32,
        }
    }

    /// As kernels take it.
    pub(crate) fn params(&self, moe: &MoeShape) -> RoutingParams {
        RoutingParams {
            experts: self.experts.address(),
            shares: self.shares.address(),
            places: self.places.address(),
            order: self.order.address(),
            counts: self.counts.address(),
            unit_expert: self.unit_expert.address(),
            unit_first: self.unit_first.address(),
            unit_places: self.unit_places.address(),
            unit_ends: self.unit_ends.address(),
            rows: self.rows as u32,
            used: moe.used as u32,
            all: moe.experts as u32,
            tile: tile(moe, self.rows) as u32,
            left_out: self.left_out.unwrap_or_default(),
        }
    }

    /// Whether some experts aren't the device's work.
    pub(crate) fn leaves_out(&self) -> bool {
        self.left_out.is_some()
    }

    /// Per place its row, and per expert where its places end.
    pub(crate) fn grouped(&self) -> [DeviceSlice<u32>; 2] {
        [self.order, self.counts]
    }

    /// The work of some experts.
    pub(crate) fn stretch(&self, moe: &MoeShape, experts: Range<usize>) -> Stretch {
        let ends = |ends: DeviceSlice<u32>| {
            let end = |count: usize| if count == 0 { 0 } else { ends.address() + 4 * (count - 1) as u64 };
            [end(experts.start), end(experts.end)]
        };
        let pairs = self.rows * moe.used;
        let most = most_units(moe, self.rows).min(experts.len() + pairs / tile(moe, self.rows));
        Stretch { units: ends(self.unit_ends), places: ends(self.counts), most }
    }

    /// Whether the routing is of these rows, and grouped.
    pub(crate) fn check(&self, rows: usize) -> Result<(), BackendError> {
        if self.grouped && self.rows == rows {
            return Ok(());
        }
        Err(failed(format!("{rows} rows for the experts where {} were routed", self.rows)))
    }
}

/// What the router needs while it runs.
pub(crate) struct Room {
    logits: DeviceSlice<f32>,
}

impl Room {
    /// For the rows of `u`.
    pub(crate) fn new(spec: &Spec, u: DeviceSlice<f32>, room: &mut Scratch) -> Room {
        Room { logits: room.take(u.len() / spec.shape.hidden * spec.shape.moe.experts) }
    }
}

impl CudaBackend {
    /// Chooses each row's experts.
    pub(crate) fn route(
        &mut self,
        layer: Layer,
        router: Weight,
        rows: usize,
        u: Buffer,
    ) -> Result<usize, BackendError> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        let router = self.weights.matrix(router, moe.experts, d)?;
        let u = self.buffer(u, rows, d)?;
        if rows > self.spec.window.max(self.spec.sequences) {
            return Err(failed(format!("{rows} rows to route in windows of {}", self.spec.window)));
        }
        if many(&moe, rows) {
            self.tiers.settle(rows, &self.stream)?;
        }
        self.routing.begin(rows, self.tiers.choices(layer, rows), self.tiers.left_out(layer, rows));
        self.left_route = (rows == 1).then_some((router, u));
        match self.left_route {
            // With the experts, if there are kernels for one row.
            Some(_) => Ok(router.bytes.len()),
            None => self.route_now(router, u),
        }
    }

    /// Chooses the experts of the rows of `u`.
    pub(crate) fn route_now(&self, router: Matrix, u: DeviceSlice<f32>) -> Result<usize, BackendError> {
        let (moe, rows) = (self.spec.shape.moe, self.routing.rows);
        let (room, input) = (Room::new(&self.spec, u, &mut self.room()), self.mixed(u));
        self.prepare(&input, &[router])?;
        self.product(&router, &input, room.logits)?;
        let p = ChooseParams { routing: self.routing.params(&moe), logits: room.logits.address() };
        let Route { choose, group_few, .. } = &self.kernels.route;
        let one = Grid { blocks: [1; 3], threads: CHOOSERS };
        let queue = || -> Result<(), DriverError> {
            // SAFETY: the routing has room for the widest window.
            unsafe {
                choose.launch(&self.stream, Grid { blocks: [rows as u32, 1, 1], ..one }, &p)?;
                if rows <= FEW { group_few.launch(&self.stream, one, &p.routing) } else { Ok(()) }
            }
        };
        queue().map_err(Failed::from)?;
        Ok(router.bytes.len())
    }

    /// Orders the routing's pairs by expert.
    pub(crate) fn group(&mut self, rows: usize) -> Result<usize, BackendError> {
        if rows != self.routing.rows {
            return Err(failed(format!("{rows} rows to group where {} were routed", self.routing.rows)));
        }
        if self.routing.grouped {
            return Ok(0);
        }
        let moe = self.spec.shape.moe;
        let (p, pairs) = (self.routing.params(&moe), Grid::threads(rows * moe.used, 256));
        let Route { count, scan, place, .. } = &self.kernels.route;
        let queue = || -> Result<(), DriverError> {
            self.stream.fill(self.routing.counts, 0)?;
            // SAFETY: the routing has room for the widest window; experts' numbers are below their count.
            unsafe {
                count.launch(&self.stream, pairs, &p)?;
                scan.launch(&self.stream, Grid { blocks: [1; 3], threads: 1024 }, &p)?;
                place.launch(&self.stream, pairs, &p)
            }
        };
        queue().map_err(Failed::from)?;
        self.routing.grouped = true;
        Ok(0)
    }

    /// Groups anew, with all experts the device's work: the host knows nothing of products' scales.
    pub(crate) fn leave_nothing_out(&mut self) -> Result<(), BackendError> {
        let rows = self.routing.rows;
        self.tiers.without_portion(rows, &self.stream)?;
        (self.routing.left_out, self.routing.grouped) = (None, false);
        self.group(rows).map(|_| ())
    }
}
