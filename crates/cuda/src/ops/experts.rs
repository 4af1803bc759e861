//! The routed experts' products, the shared expert, and the sum over all: `kernels/experts.cu`, `kernels/route.cu`.

use std::ops::Range;

use strata_backend::{BackendError, Buffer, ExpertWeights, Layer, MoeShape, Shape, SharedWeights, Spec};
use strata_quant::Format;

use super::input::{Input, Target, any_blocks};
use super::route::{FEW_PLACES, RoutingParams, Stretch, most_units, tile};
use super::wide::{Units, unit_piece_bytes};
use super::{ByFormat, OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel};
use crate::recording::MOST_ROWS;
use crate::scratch::Scratch;
use crate::tiers::{Asked, LayerTable, Tiers};
use crate::weights::Matrix;
use crate::{Failed, failed};

#[repr(C)]
#[derive(Clone, Copy)]
struct GroupedParams {
    slots: u64,
    offset: u64,
    q: u64,
    d: u64,
    sums: u64,
    floats: u64,
    order: u64,
    out: u64,
    scales: u64,
    unit_expert: u64,
    unit_first: u64,
    unit_places: u64,
    before: u64,
    units: u64,
    rows: u32,
    k: u32,
    pieces: u64,
}

/// For units of a few places.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExpertsFewParams {
    slots: u64,
    offset: u64,
    q: u64,
    d: u64,
    sums: u64,
    order: u64,
    out: u64,
    scales: u64,
    up_scales: u64,
    hidden: Target,
    unit_expert: u64,
    unit_first: u64,
    unit_places: u64,
    units: u64,
    rows: u32,
    k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SwigluParams {
    gate: u64,
    up: u64,
    quantised: Target,
    count: u64,
    before: u64,
    end: u64,
    width: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CombineParams {
    routing: RoutingParams,
    products: u64,
    shared: u64,
    scalar: u64,
    y: u64,
    width: u32,
    padding: u32,
}

/// The kernels of one block format for units of a few places.
struct Several {
    /// Bytes of shared memory of the code book, and of a warp. Twin: `strata_experts_few_*`.
    grid: usize,
    warp: usize,
    /// Products, and those of gate and up rows with their SwiGLU.
    rows: Kernel<ExpertsFewParams>,
    hidden: Kernel<ExpertsFewParams>,
}

/// Warps of a block of threads of these, at most, and the bytes of shared memory that two of them exchange hidden values by. Twins:
/// `MOST_WARPS`, `exchanged`.
const MOST_WARPS: usize = 24;
const EXCHANGED: usize = 3 * 32 * 4;

/// The kernels.
pub(crate) struct Experts {
    /// For units of a few places, of a block format.
    several: ByFormat<Several>,
    /// For units of many places; of float formats for all units.
    grouped: Vec<(Format, Kernel<GroupedParams>)>,
    swiglu: Kernel<SwigluParams>,
    combine: Kernel<CombineParams>,
}

impl Experts {
    pub(crate) fn new(context: &Context) -> Result<Experts, OpError> {
        let (experts, route) = (module(context, "experts")?, module(context, "route")?);
        let grouped = |format: Format| -> Result<_, DriverError> {
            let (name, way) =
                (format.name().to_lowercase(), if format.is_float() { "floats" } else { "wide" });
            Ok((format, experts.kernel(&format!("strata_grouped_{way}_{name}"))?))
        };
        let experts_few = module(context, "experts_few")?;
        let several = |name: &str| -> Result<_, DriverError> {
            let kernel = |what: &str| -> Result<_, DriverError> {
                Ok(experts_few.dynamic_kernel(&format!("strata_{what}_few_{name}"))?.early())
            };
            let [grid, warp] = experts_few.words(&format!("strata_experts_few_{name}"))?;
            let (grid, warp) = (grid as usize, warp as usize);
            Ok(Several { grid, warp, rows: kernel("rows")?, hidden: kernel("hidden")? })
        };
        Ok(Experts {
            several: ByFormat::new(several)?,
            grouped: Format::ALL.into_iter().map(grouped).collect::<Result<_, _>>()?,
            swiglu: route.kernel("strata_swiglu")?.early(),
            combine: route.kernel("strata_combine")?,
        })
    }
}

/// One of the three products of every expert.
struct Product {
    format: Format,
    /// The layer's residency table, and where the rows start in a slot.
    slots: DeviceSlice<u64>,
    offset: usize,
    rows: usize,
    scales: Option<DeviceSlice<f32>>,
    /// Whether the input has a column per row of the window, not per place.
    by_row: bool,
}

/// What the routed experts need while they run.
pub(crate) struct Room {
    gate: DeviceSlice<f32>,
    up: DeviceSlice<f32>,
    hidden: Input,
    /// The units' columns: those that come in, and the hidden ones.
    pieces: DeviceSlice<u8>,
    hidden_pieces: DeviceSlice<u8>,
}

impl Room {
    /// For the rows of `u`.
    pub(crate) fn new(spec: &Spec, u: DeviceSlice<f32>, room: &mut Scratch) -> Room {
        let (d, moe) = (spec.shape.hidden, spec.shape.moe);
        let rows = u.len() / d;
        let pairs = rows * moe.used;
        let gate = room.take(pairs * moe.width);
        let pieces = |k| match tile(&moe, rows) {
            FEW_PLACES => 0,
            _ => unit_piece_bytes(k, pairs, most_units(&moe, rows)),
        };
        Room {
            gate,
            up: room.take(pairs * moe.width),
            hidden: Input::without_pieces(gate, moe.width, pairs, room),
            pieces: room.take(pieces(d)),
            hidden_pieces: room.take(pieces(moe.width)),
        }
    }
}

/// Whether a window has so many rows that experts without a slot come through the ring.
pub(crate) fn many(moe: &MoeShape, rows: usize) -> bool {
    rows > MOST_ROWS && tile(moe, rows) != FEW_PLACES
}

/// The most experts' copies that a window of at most `rows` rows has fetched.
pub(crate) fn most_fetched(moe: &MoeShape, rows: usize) -> usize {
    let units = (1..=rows).filter(|&rows| !many(moe, rows)).map(|rows| most_units(moe, rows)).max();
    units.unwrap_or(0).min(moe.experts)
}

/// Rows for which the shared expert is computed beside the routed ones.
pub(crate) const ASIDE: usize = 32;

/// What the shared expert needs while it runs.
pub(crate) struct SharedRoom {
    pub(crate) gate: DeviceSlice<f32>,
    pub(crate) up: DeviceSlice<f32>,
    hidden: Input,
    pub(crate) shared: DeviceSlice<f32>,
    pub(crate) scalar: DeviceSlice<f32>,
}

impl SharedRoom {
    /// For the rows of `u`.
    pub(crate) fn new(spec: &Spec, u: DeviceSlice<f32>, room: &mut Scratch) -> SharedRoom {
        let (d, width) = (spec.shape.hidden, spec.shape.moe.shared_width);
        let rows = u.len() / d;
        let gate = room.take(rows * width);
        SharedRoom {
            gate,
            up: room.take(rows * width),
            hidden: Input::new(gate, width, rows, room),
            shared: room.take(rows * d),
            scalar: room.take(rows),
        }
    }
}

impl CudaBackend {
    /// The grouped experts' products, kept by place.
    pub(crate) fn experts(
        &mut self,
        layer: Layer,
        w: &ExpertWeights,
        rows: usize,
        u: Buffer,
    ) -> Result<usize, BackendError> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        self.routing.check(rows)?;
        // What an op that failed may have left.
        self.left_experts = None;
        // Many rows find experts in the ring.
        let many = many(&moe, rows);
        if w.scales.iter().any(Option::is_some) && self.routing.leaves_out() {
            self.leave_nothing_out()?;
        }
        let slots = match &self.tiers.ring {
            Some(ring) if many => ring.layer(layer.0),
            _ => self.tiers.layer(layer.0),
        }?;
        let mut scales = [None; 3];
        for (scale, weight) in scales.iter_mut().zip(w.scales) {
            *scale = weight.map(|w| self.weights.floats(w, moe.experts)).transpose()?;
        }
        let u = self.buffer(u, rows, d)?;
        let (room, input) = (Room::new(&self.spec, u, &mut self.room()), self.mixed(u));
        let product = |format, offset, rows, scales, by_row| Product {
            format,
            slots: slots.table,
            offset,
            rows,
            scales,
            by_row,
        };
        let gate = product(w.gate, 0, moe.width, scales[0], true);
        let up = product(w.up, slots.layout.up, moe.width, scales[1], true);
        let down = product(w.down, slots.layout.down, d, scales[2], false);
        // Which experts a window uses is known on the device only: the most that it can be.
        let read = (rows * moe.used).min(moe.experts) * slots.layout.bytes;
        if let Some((router, routed)) = self.left_route.take() {
            self.left_experts = self.experts_one((router, layer), w, scales, &slots, &input, &room.hidden);
            if self.left_experts.is_some() {
                return Ok(read);
            }
            self.route_now(router, routed)?;
        }
        // Before the products, so that the host computes beside them.
        self.tiers.bring_rows(&self.routing, u, &self.stream)?;
        let all = self.routing.stretch(&moe, 0..moe.experts);
        let fetched = self.fetched((layer, &slots), all, many)?;
        let [gate, up, down] = [gate, up, down].map(|product| Product { slots: fetched.table, ..product });
        self.prepare_for(&input, [w.gate, w.up].iter().any(|format| !format.is_float()))?;
        if self.hidden(&gate, &up, &input, &room.hidden, !w.down.is_float())? {
            self.grouped(&down, &room.hidden, self.routing.products, room.hidden_pieces, all)?;
        } else {
            self.unit_pieces(&[&gate, &up], &input, room.pieces)?;
            self.in_chunks(&[gate, up, down], &input, &room, layer)?;
        }
        self.tiers.compute_portion((layer, w), &self.routing, (&self.kernels.fetch, &self.stream))?;
        Ok(read)
    }

    /// The three products of all experts; of those that come through the ring when they are there.
    fn in_chunks(
        &mut self,
        products: &[Product; 3],
        input: &Input,
        room: &Room,
        layer: Layer,
    ) -> Result<(), BackendError> {
        let moe = self.spec.shape.moe;
        let many = many(&moe, self.routing.rows);
        let Some(mut ring) = self.tiers.ring.take_if(|_| many) else {
            return self.three(products, input, room, 0..moe.experts);
        };
        let done = ring.chunks(layer.0).try_for_each(|chunk| {
            ring.arrive(chunk, &self.stream)?;
            self.three(products, input, room, ring.experts(chunk))?;
            ring.used(chunk, &self.stream).map_err(BackendError::from)
        });
        self.tiers.ring = Some(ring);
        done
    }

    /// Where a window's experts are: fetched, if it is one for which that is worth it.
    fn fetched(
        &mut self,
        (layer, slots): (Layer, &LayerTable),
        units: Stretch,
        many: bool,
    ) -> Result<LayerTable, BackendError> {
        let Tiers { ring, desk, device, .. } = &mut self.tiers;
        let Some(ring) = ring.as_mut().filter(|_| !many) else { return Ok(*slots) };
        // What is recorded finds it lent.
        match self.recording {
            true => ring.recorded = true,
            false => ring.lend(&self.stream).map_err(failed)?,
        }
        let wanted = desk.as_mut().filter(|_| ring.stages()).map(|desk| (desk.wanted(layer), desk));
        let moe = self.spec.shape.moe;
        let of = (self.routing.params(&moe).unit_expert, units, moe.experts);
        let asks = wanted.as_ref().map(|(wanted, _)| *wanted);
        let fetched = self.kernels.fetch.all(&self.stream, slots, of, *device, ring.room(), asks);
        let fetched = fetched.map_err(Failed::from)?;
        if let Some((_, desk)) = wanted {
            let bring = Asked::Bring(layer, slots.layout.bytes);
            match self.recording {
                true => desk.recorded.push(bring),
                false => desk.expect(&[bring]),
            }
        }
        Ok(fetched.unwrap_or(*slots))
    }

    /// The three products of some experts.
    fn three(
        &self,
        [gate, up, down]: &[Product; 3],
        input: &Input,
        room: &Room,
        experts: Range<usize>,
    ) -> Result<(), BackendError> {
        let moe = self.spec.shape.moe;
        let part = self.routing.stretch(&moe, experts.clone());
        self.grouped(gate, input, room.gate, room.pieces, part)?;
        self.grouped(up, input, room.up, room.pieces, part)?;
        if !self.hidden_pieces(down, room, part)? {
            let places = if experts.len() == moe.experts { [0; 2] } else { part.places };
            self.swiglu((&room.hidden, room.up), moe.width, !down.format.is_float(), places)?;
        }
        self.grouped(down, &room.hidden, self.routing.products, room.hidden_pieces, part)
    }

    /// The kernels for units of a few places each, with their grid and the shared memory that a block needs, if this is a case for them.
    fn several(&self, format: Format) -> Option<(&Several, Grid, u32)> {
        let of = self.kernels.experts.several.find(format)?;
        let formats = &self.kernels.products.one.formats;
        let room = formats.shared.saturating_sub(MOST_WARPS * EXCHANGED + of.grid);
        // Pairs of warps.
        let warps = (room / of.warp.max(1)).min(MOST_WARPS) / 2 * 2;
        let few = tile(&self.spec.shape.moe, self.routing.rows) == FEW_PLACES;
        let grid = Grid { blocks: [formats.processors as u32, 1, 1], threads: 32 * warps as u32 };
        (few && warps > 0).then_some((of, grid, (of.grid + warps * of.warp) as u32))
    }

    /// Their parameters.
    fn several_params(&self, product: &Product, input: &Input, out: DeviceSlice<f32>) -> ExpertsFewParams {
        let moe = self.spec.shape.moe;
        let routing = self.routing.params(&moe);
        let [q, d, sums] = input.quantised_addresses();
        ExpertsFewParams {
            slots: product.slots.address(),
            offset: product.offset as u64,
            q,
            d,
            sums,
            order: if product.by_row { routing.order } else { 0 },
            out: out.address(),
            scales: product.scales.map_or(0, DeviceSlice::address),
            up_scales: 0,
            hidden: Target::NONE,
            unit_expert: routing.unit_expert,
            unit_first: routing.unit_first,
            unit_places: routing.unit_places,
            units: self.routing.stretch(&moe, 0..moe.experts).units[1],
            rows: product.rows as u32,
            k: input.k() as u32,
        }
    }

    /// Gate and up products with their SwiGLU in one launch, where units have a few places and both are of one block format; whether that
    /// was so.
    fn hidden(
        &self,
        gate: &Product,
        up: &Product,
        input: &Input,
        hidden: &Input,
        wanted: bool,
    ) -> Result<bool, BackendError> {
        let width = self.spec.shape.moe.width;
        let fit = gate.format == up.format && !gate.format.is_float() && width.is_multiple_of(32);
        let Some((of, grid, shared)) = self.several(gate.format).filter(|_| fit) else { return Ok(false) };
        let p = ExpertsFewParams {
            offset: up.offset as u64,
            up_scales: up.scales.map_or(0, DeviceSlice::address),
            hidden: hidden.target(wanted, width),
            ..self.several_params(gate, input, hidden.floats())
        };
        // SAFETY: the slots start with the gate rows, and have the up rows behind the offset; `hidden` has a place for every pair.
        unsafe { of.hidden.launch_with(&self.stream, grid, shared, &p) }.map_err(Failed::from)?;
        Ok(true)
    }

    /// Leaves the hidden values in pieces, as the products with `down` want them; whether they do.
    fn hidden_pieces(&self, down: &Product, room: &Room, part: Stretch) -> Result<bool, BackendError> {
        let (moe, rows) = (self.spec.shape.moe, self.routing.rows);
        let pieces = tile(&moe, rows) != FEW_PLACES && self.kernels.products.in_pieces();
        if down.format.is_float() || !pieces || !moe.width.is_multiple_of(32) {
            return Ok(false);
        }
        let (many, both) = (&self.kernels.products.many, [room.gate, room.up]);
        let units = (self.units(0, part), most_units(&moe, rows));
        let made = many.hidden_pieces(&self.stream, both, moe.width, units, room.hidden_pieces);
        made.map_err(Failed::from)?;
        Ok(true)
    }

    /// Some units of the routing, whose places' columns are named by `order`.
    fn units(&self, order: u64, part: Stretch) -> Units {
        let routing = self.routing.params(&self.spec.shape.moe);
        Units {
            order,
            first: routing.unit_first,
            places: routing.unit_places,
            ends: part.units,
            most: part.most,
        }
    }

    /// Leaves the units' columns in pieces, if one of these products, of the same columns, wants that.
    fn unit_pieces(
        &self,
        products: &[&Product],
        input: &Input,
        to: DeviceSlice<u8>,
    ) -> Result<(), BackendError> {
        let (moe, rows) = (self.spec.shape.moe, self.routing.rows);
        let blocks = products.iter().any(|product| !product.format.is_float());
        let Some(columns) = input.quantised().filter(|_| blocks) else { return Ok(()) };
        if tile(&moe, rows) == FEW_PLACES || !self.kernels.products.in_pieces() {
            return Ok(());
        }
        let order = if products[0].by_row { self.routing.params(&moe).order } else { 0 };
        let units = self.units(order, self.routing.stretch(&moe, 0..moe.experts));
        let sizes = [input.k(), rows * moe.used];
        let made = self.kernels.products.many.pieces(&self.stream, columns, sizes, Some(units), to);
        Ok(made.map_err(Failed::from)?)
    }

    fn grouped(
        &self,
        product: &Product,
        input: &Input,
        out: DeviceSlice<f32>,
        pieces: DeviceSlice<u8>,
        part: Stretch,
    ) -> Result<(), BackendError> {
        let routing = self.routing.params(&self.spec.shape.moe);
        let [q, d, sums] = input.quantised_addresses();
        if let Some((of, grid, shared)) = self.several(product.format) {
            let p = self.several_params(product, input, out);
            // SAFETY: the slots have rows of this format and length behind the offset, the columns and `out` a place for every pair.
            unsafe { of.rows.launch_with(&self.stream, grid, shared, &p) }.map_err(Failed::from)?;
            return Ok(());
        }
        let p = GroupedParams {
            slots: product.slots.address(),
            offset: product.offset as u64,
            q,
            d,
            sums,
            floats: input.floats().address(),
            order: if product.by_row { routing.order } else { 0 },
            out: out.address(),
            scales: product.scales.map_or(0, DeviceSlice::address),
            unit_expert: routing.unit_expert,
            unit_first: routing.unit_first,
            unit_places: routing.unit_places,
            before: part.units[0],
            units: part.units[1],
            rows: product.rows as u32,
            k: input.k() as u32,
            pieces: pieces.address(),
        };
        let found = self.kernels.experts.grouped.iter().find(|(format, _)| *format == product.format);
        let (_, kernel) = found.expect("every format has kernels");
        let grid = match product.format.is_float() {
            true => Grid { blocks: [product.rows.div_ceil(4) as u32, part.most as u32, 1], threads: 128 },
            false => self.kernels.products.wide_grid(kernel, product.rows, part.most),
        };
        // SAFETY: as above.
        let queued = unsafe { kernel.launch(&self.stream, grid, &p) };
        Ok(queued.map_err(Failed::from)?)
    }

    /// `silu(gate) * up` in place of the gate, in rows of `width`: all, or the places between two that kernels find.
    fn swiglu(
        &self,
        (gate, up): (&Input, DeviceSlice<f32>),
        width: usize,
        wanted: bool,
        [before, end]: [u64; 2],
    ) -> Result<(), BackendError> {
        let floats = gate.floats();
        assert_eq!(floats.len(), up.len());
        let quantised = gate.target(wanted, width);
        let p = SwigluParams {
            gate: floats.address(),
            up: up.address(),
            quantised,
            count: up.len() as u64,
            before,
            end,
            width: width as u32,
            padding: 0,
        };
        // SAFETY: the sizes were compared above.
        unsafe { self.kernels.experts.swiglu.launch(&self.stream, Grid::threads(up.len(), 256), &p) }
            .map_err(Failed::from)?;
        self.settle(gate, quantised, wanted)
    }

    /// The shared expert's last product, behind its first ones.
    pub(crate) fn shared_down(&self, down: &Matrix, room: &SharedRoom) -> Result<(), BackendError> {
        self.swiglu((&room.hidden, room.up), down.k, any_blocks(&[*down]), [0; 2])?;
        self.product(down, &room.hidden, room.shared)
    }

    /// The experts' products weighed and summed, with the shared expert.
    pub(crate) fn combine(
        &mut self,
        w: &SharedWeights,
        rows: usize,
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, moe, .. } = self.spec.shape;
        let width = moe.shared_width;
        let [gate, up] = [self.weights.matrix(w.gate, width, d)?, self.weights.matrix(w.up, width, d)?];
        let down = self.weights.matrix(w.down, d, width)?;
        let scalar = self.weights.floats(w.scalar, d)?;
        self.routing.check(rows)?;
        let (u, y) = (self.buffer(u, rows, d)?, self.buffer(y, rows, d)?);
        let few = rows <= ASIDE;
        let mut place = if few { self.room_aside() } else { self.room() };
        let (room, input) = (SharedRoom::new(&self.spec, u, &mut place), self.mixed(u));
        let scalar = Matrix { format: Format::F32, rows: 1, k: d, bytes: scalar.cast(), scale: None };
        let read = [gate, up, down].iter().map(|w| w.bytes.len()).sum();
        if let Some(left) = self.left_experts.take() {
            self.combine_one(left, [gate, up, down, scalar], &input, &room, y)?;
            return Ok(read);
        }
        let shared = |backend: &Self| {
            backend.prepare(&input, &[gate, up])?;
            backend.products(&[(gate, room.gate), (up, room.up), (scalar, room.scalar)], &input)?;
            backend.shared_down(&down, &room)
        };
        // It needs nothing but the mixer's output, which is there since before the routing.
        if few && self.fresh == Some(u.address()) {
            self.aside(shared)?
        } else {
            shared(self)?
        }
        let p = CombineParams {
            routing: self.routing.params(&moe),
            products: self.routing.products.address(),
            shared: room.shared.address(),
            scalar: room.scalar.address(),
            y: y.address(),
            width: d as u32,
            padding: 0,
        };
        let blocks = [d.div_ceil(128) as u32, rows.min(usize::from(u16::MAX)) as u32, 1];
        // SAFETY: the routing is of these rows.
        unsafe { self.kernels.experts.combine.launch(&self.stream, Grid { blocks, threads: 128 }, &p) }
            .map_err(Failed::from)?;
        Ok(read)
    }
}
