//! Hyper-connection mixers and the head behind the last: `kernels/mixer.cu`.

use strata_backend::{BackendError, Buffer, MixerWeights, Op, Shape, Spec, Weight};

use super::experts::ASIDE;
use super::few::Layout;
use super::input::{Input, Target, any_blocks};
use super::one::{Formats, Split, THREADS, brought, code, float_room};
use super::{ByFormat, OpError, module};
use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, LINE};
use crate::inputs::Ids;
use crate::scratch::Scratch;
use crate::weights::Matrix;

/// A mixer's write that is left to do; zeros for none.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Write {
    y: u64,
    inject: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormParams {
    x: u64,
    rows: u64,
    gamma: u64,
    out: u64,
    quantised: Target,
    write: Write,
    groups: u32,
    width: u32,
    eps: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatesParams {
    low: u64,
    inject: u64,
    quantised: Target,
    low_count: u32,
    inject_count: u32,
    streams: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MixParams {
    gates: u64,
    normed: u64,
    u: u64,
    quantised: Target,
    count: u32,
    streams: u32,
    width: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WriteParams {
    write: Write,
    x: u64,
    count: u32,
    streams: u32,
    width: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DescendParams {
    x: u64,
    rows: u64,
    write: Write,
    moved: u64,
    gamma: u64,
    down: u64,
    normed: u64,
    partial: u64,
    rank: u32,
    streams: u32,
    width: u32,
    share: u32,
    row_bytes: u32,
    inverse_width: u32,
    eps: f32,
    split: Split,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NarrowParams {
    up: u64,
    scale: u64,
    partial: u64,
    down_scale: u64,
    moved: u64,
    x: u64,
    inject: u64,
    injected: u64,
    normed: u64,
    u: u64,
    quantised: Target,
    inject_format: u32,
    rank: u32,
    width: u32,
    streams: u32,
    segments: u32,
    split: Split,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NarrowFewParams {
    up: u64,
    scale: u64,
    low: u64,
    inject: u64,
    injected: u64,
    normed: u64,
    u: u64,
    quantised: Target,
    count: u32,
    rank: u32,
    width: u32,
    streams: u32,
    inject_format: u32,
    padding: u32,
}

/// Threads of a block of `strata_norm`, and the widest stream that it quantises itself. Twins: `NORMERS`, `STAGED`.
const NORMERS: u32 = 640;
const STAGED: usize = 4096;

/// Rows and streams that `strata_narrow_few` takes. Twin of the latter: `STREAMS`.
const NARROW_ROWS: usize = 32;
const NARROW_STREAMS: usize = 4;
/// Warps that it has for 32 values of a stream.
const NARROW_STRIPS: usize = 32 / super::few::ROWS;
/// Inject weights of a block of threads of it. Twin: `INJECTED`.
const NARROW_INJECTED: usize = 4;

/// `strata_narrow` for a few rows, of one block format.
struct NarrowFew {
    layout: Layout,
    /// By their rows.
    kernels: [(usize, Kernel<NarrowFewParams>); 2],
}

/// The kernels.
pub(crate) struct Mixers {
    norm: Kernel<NormParams>,
    gates: Kernel<GatesParams>,
    mix: Kernel<MixParams>,
    /// The same for rows of whole units.
    mix_many: Kernel<MixParams>,
    write: Kernel<WriteParams>,
    /// For one row: `norm` and the products with `down` by segments, and then the rest.
    descend: ByFormat<Kernel<DescendParams>>,
    narrow: ByFormat<Kernel<NarrowParams>>,
    /// The latter for a few rows.
    narrow_few: ByFormat<NarrowFew>,
}

impl Mixers {
    pub(crate) fn new(context: &Context) -> Result<Mixers, OpError> {
        let (module, few) = (module(context, "mixer")?, module(context, "mixer_few")?);
        let descend = |name: &str| -> Result<_, DriverError> {
            Ok(module.dynamic_kernel(&format!("strata_descend_{name}"))?.early())
        };
        let narrow = |name: &str| -> Result<_, DriverError> {
            Ok(module.dynamic_kernel(&format!("strata_narrow_{name}"))?.early())
        };
        let narrow_few = |name: &str| -> Result<_, DriverError> {
            let kernel = |tiles: usize| -> Result<_, DriverError> {
                Ok((8 * tiles, few.dynamic_kernel(&format!("strata_narrow_few_{tiles}_{name}"))?.early()))
            };
            Ok(NarrowFew { layout: Layout::new(&few, name)?, kernels: [kernel(1)?, kernel(4)?] })
        };
        Ok(Mixers {
            narrow_few: ByFormat::new(narrow_few)?,
            norm: module.kernel("strata_norm")?.early(),
            gates: module.kernel("strata_mixer_gates")?,
            mix: module.kernel("strata_mix")?,
            mix_many: super::module(context, "wide")?.kernel("strata_mix_many")?,
            write: module.kernel("strata_write")?.early(),
            descend: ByFormat::new(descend)?,
            narrow: ByFormat::new(narrow)?,
        })
    }
}

/// A mixer's write that is left for the norm that comes next on the same rows.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    y: DeviceSlice<f32>,
    inject: DeviceSlice<f32>,
    x: DeviceSlice<f32>,
}

impl Left {
    fn write(&self) -> Write {
        Write { y: self.y.address(), inject: self.inject.address() }
    }
}

/// What a mixer's read needs while it runs.
pub(crate) struct Room {
    normed: DeviceSlice<f32>,
    low: DeviceSlice<f32>,
    /// Of one row, the segments of `low`.
    partial: DeviceSlice<f32>,
    gates: DeviceSlice<f32>,
    wide: Input,
    narrow: Input,
}

impl Room {
    /// For so many rows.
    pub(crate) fn new(shape: &Shape, rows: usize, room: &mut Scratch) -> Room {
        let (wide, rank) = (shape.streams * shape.hidden, shape.mixer_rank);
        let (normed, low) = (room.take(rows * wide), room.take(rows * rank));
        Room {
            normed,
            low,
            partial: room.take(rank * wide.div_ceil(SEGMENT)),
            gates: room.take(rows * wide),
            wide: Input::new(normed, wide, rows, room),
            narrow: Input::new(low, rank, rows, room),
        }
    }
}

/// How the two kernels for one row are laid out.
struct OneRow {
    segments: usize,
    /// Rows of `down` that a block of the first has.
    share: usize,
    threads: [usize; 2],
    splits: [Split; 2],
    /// Bytes of shared memory.
    shared: [usize; 2],
}

impl OneRow {
    /// For these matrices, if there are kernels for them, and room for their blocks.
    fn new(
        formats: &Formats,
        [down, up]: [&Matrix; 2],
        inject: Option<Matrix>,
        shape: &Shape,
    ) -> Option<OneRow> {
        let Shape { hidden: d, streams, mixer_rank: rank, .. } = *shape;
        let (row, wide, units) = (up.format.row_bytes(rank)?, streams * d, rank / 32);
        let whole = rank.is_multiple_of(32) && d.is_multiple_of(32) && (d * row).is_multiple_of(LINE);
        let floats = inject.is_none_or(|w| w.format.is_float() && w.scale.is_none());
        let divisible = wide.checked_mul(d).is_some_and(|n| n < 1 << 32);
        if down.format.is_float() || up.format.is_float() || !whole || !floats || d < 32 || !divisible {
            return None;
        }
        // A segment has values of so many streams, at most.
        let segments = wide.div_ceil(SEGMENT);
        let spanned = (0..segments).map(|s| {
            let (from, end) = (s * SEGMENT, wide.min((s + 1) * SEGMENT));
            (end - 1) / d - from / d + 1
        });
        let spanned = spanned.max()?;
        let share = rank.div_ceil((formats.processors / segments).max(1));
        let (terms, grid) = formats.terms(down.format, SEGMENT / 32);
        let raw = brought(down.format.row_bytes(SEGMENT)?);
        let column = SEGMENT + 8 * SEGMENT / 32;
        let descend = column + share * raw + (share * terms).max(4 * spanned * d).next_multiple_of(16) + grid;
        let rows = 32 * streams;
        let (terms, grid) = formats.terms(up.format, units);
        let column = (rank + 8 * units + 4 * rows).next_multiple_of(LINE);
        let narrow = column + streams * brought(32 * row) + rows * terms + grid;
        let narrow = narrow.max(if inject.is_some() { float_room(1, wide) } else { 0 });
        let parts = [(down, SEGMENT / 32), (up, units)];
        let threads = parts.map(|(w, units)| formats.threads(w.format, units, THREADS));
        let split = |i: usize| formats.split(parts[i].0.format, parts[i].1, threads[i]);
        (formats.allow(descend) && formats.allow(narrow)).then_some(OneRow {
            segments,
            share,
            threads,
            splits: [split(0), split(1)],
            shared: [descend, narrow],
        })
    }
}

/// Values of a segment of the contract.
const SEGMENT: usize = 32 * super::SEGMENT;

impl NarrowFew {
    /// The kernel for so many rows, with the bytes of shared memory of a block, if it can be had for these matrices.
    fn fit(
        &self,
        up: &Matrix,
        inject: Option<Matrix>,
        (shape, rows, shared): (&Shape, usize, usize),
    ) -> Option<(&Kernel<NarrowFewParams>, usize)> {
        let Shape { hidden: d, streams, mixer_rank: rank, .. } = *shape;
        let (cols, kernel) = self.kernels.iter().find(|(most, _)| *most >= rows)?;
        let bytes = self.layout.resident(NARROW_STRIPS * streams, *cols, rank / 32);
        let floats = inject.is_none_or(|w| w.format.is_float() && w.scale.is_none());
        let whole = rank.is_multiple_of(32) && d.is_multiple_of(32) && up.format.row_bytes(rank).is_some();
        let fits = streams <= NARROW_STREAMS && rows <= NARROW_ROWS && bytes <= shared;
        (floats && whole && fits).then_some((kernel, bytes))
    }
}

/// What the head needs besides its mixer: the rows' inputs.
pub(crate) fn head_room(spec: &Spec, rows: usize, room: &mut Scratch) -> (Room, Input) {
    let d = spec.shape.hidden;
    let mixer = Room::new(&spec.shape, rows, room);
    let u = room.take(rows * d);
    (mixer, Input::new(u, d, rows, room))
}

impl CudaBackend {
    /// `u` and the inject weights of a mixer.
    pub(crate) fn mixer_read(
        &mut self,
        w: &MixerWeights,
        rows: usize,
        x: Buffer,
        u: Buffer,
        inject: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, .. } = self.spec.shape;
        let room = Room::new(&self.spec.shape, rows, &mut self.room());
        let x = self.buffer(x, rows, streams * d)?;
        let (u, inject) = (self.buffer(u, rows, d)?, self.buffer(inject, rows, streams)?);
        // Whatever comes next wants it quantised, or somebody behind that does.
        let (address, u) = (u.address(), self.mixed(u));
        let read = self.mix(w, x, None, &room, (&u, true), Some(inject))?;
        self.fresh = Some(address);
        if rows <= ASIDE {
            self.start_of_side.record(&self.stream).map_err(Failed::from)?;
        }
        Ok(read)
    }

    /// A mixer over the rows of `x`, or over some of them; `inject` for a mixer that shall have inject weights.
    fn mix(
        &mut self,
        w: &MixerWeights,
        x: DeviceSlice<f32>,
        some: Option<DeviceSlice<u32>>,
        room: &Room,
        (u, wanted): (&Input, bool),
        inject: Option<DeviceSlice<f32>>,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, mixer_rank: rank, norm_eps: eps, .. } = self.spec.shape;
        let wide = streams * d;
        let gamma = self.weights.floats(w.norm, wide)?;
        let (down, up) = (self.weights.matrix(w.down, rank, wide)?, self.weights.matrix(w.up, wide, rank)?);
        let inject = match (w.inject, inject) {
            (Some(w), Some(to)) => Some((self.weights.matrix(w, streams, wide)?, to)),
            _ => None,
        };
        let mixers = &self.kernels.mixers;
        let Mixers { norm, gates, mix, mix_many, descend, narrow, .. } = mixers;
        let left = self.left.take().map_or_else(Write::default, |left| left.write());
        let groups = room.normed.len() / d;
        let read = down.bytes.len() + up.bytes.len() + inject.map_or(0, |(w, _)| w.bytes.len());
        let formats = &self.kernels.products.one.formats;
        let one_row = || OneRow::new(formats, [&down, &up], inject.map(|(w, _)| w), &self.spec.shape);
        if let Some(layout) = (groups == streams).then(one_row).flatten() {
            let moved = if left.y == 0 { 0 } else { room.gates.address() };
            let p = DescendParams {
                x: x.address(),
                rows: some.map_or(0, DeviceSlice::address),
                write: left,
                moved,
                gamma: gamma.address(),
                down: down.bytes.address(),
                normed: room.normed.address(),
                partial: room.partial.address(),
                rank: rank as u32,
                streams: streams as u32,
                width: d as u32,
                share: layout.share as u32,
                row_bytes: (down.bytes.len() / rank) as u32,
                inverse_width: (1u64 << 32).div_ceil(d as u64) as u32,
                eps,
                split: layout.splits[0],
                padding: 0,
            };
            let blocks = [layout.segments as u32, rank.div_ceil(layout.share) as u32, 1];
            let grid = Grid { blocks, threads: layout.threads[0] as u32 };
            let kernel = descend.of(down.format);
            // SAFETY: one row of everything; `partial` has room for all segments, and `OneRow` counts what the kernel lays out.
            unsafe { kernel.launch_with(&self.stream, grid, layout.shared[0] as u32, &p) }
                .map_err(Failed::from)?;
            let p = NarrowParams {
                up: up.bytes.address(),
                scale: up.scale.map_or(0, DeviceSlice::address),
                partial: room.partial.address(),
                down_scale: down.scale.map_or(0, DeviceSlice::address),
                moved,
                x: x.address(),
                inject: inject.map_or(0, |(w, _)| w.bytes.address()),
                injected: inject.map_or(0, |(_, to)| to.address()),
                normed: room.normed.address(),
                u: u.floats().address(),
                quantised: u.target(wanted, d),
                inject_format: inject.map_or(0, |(w, _)| code(w.format)),
                rank: rank as u32,
                width: d as u32,
                streams: streams as u32,
                segments: layout.segments as u32,
                split: layout.splits[1],
            };
            let blocks = d / 32 + inject.map_or(0, |_| streams);
            let grid = Grid { blocks: [blocks as u32, 1, 1], threads: layout.threads[1] as u32 };
            let kernel = narrow.of(up.format);
            // SAFETY: as above.
            unsafe { kernel.launch_with(&self.stream, grid, layout.shared[1] as u32, &p) }
                .map_err(Failed::from)?;
            return Ok(read);
        }
        let target = room.wide.target(any_blocks(&[down]) && d <= STAGED, d);
        let p = NormParams {
            x: x.address(),
            rows: some.map_or(0, DeviceSlice::address),
            gamma: gamma.address(),
            out: room.normed.address(),
            quantised: target,
            write: left,
            groups: streams as u32,
            width: d as u32,
            eps,
            padding: 0,
        };
        // SAFETY: `x` has these rows, or those that are named; `Room` made the rest as large.
        unsafe { norm.launch(&self.stream, Grid { blocks: [groups as u32, 1, 1], threads: NORMERS }, &p) }
            .map_err(Failed::from)?;
        self.settle(&room.wide, target, any_blocks(&[down]))?;
        let rows = groups / streams;
        let fit = mixers
            .narrow_few
            .find(up.format)
            .and_then(|of| of.fit(&up, inject.map(|(w, _)| w), (&self.spec.shape, rows, formats.shared)));
        if let Some((kernel, shared)) = fit.filter(|_| rows > 1) {
            self.product(&down, &room.wide, room.low)?;
            let p = NarrowFewParams {
                up: up.bytes.address(),
                scale: up.scale.map_or(0, DeviceSlice::address),
                low: room.low.address(),
                inject: inject.map_or(0, |(w, _)| w.bytes.address()),
                injected: inject.map_or(0, |(_, to)| to.address()),
                normed: room.normed.address(),
                u: u.floats().address(),
                quantised: u.target(wanted, d),
                count: rows as u32,
                rank: rank as u32,
                width: d as u32,
                streams: streams as u32,
                inject_format: inject.map_or(0, |(w, _)| code(w.format)),
                padding: 0,
            };
            let warps = NARROW_STRIPS * streams;
            let injected = inject.map_or(0, |_| (rows * streams).div_ceil(NARROW_INJECTED));
            let grid = Grid { blocks: [(d / 32 + injected) as u32, 1, 1], threads: (32 * warps) as u32 };
            // SAFETY: `Room` and `inject` have these rows; `fit` counts what the kernel lays out.
            unsafe { kernel.launch_with(&self.stream, grid, shared as u32, &p) }.map_err(Failed::from)?;
            return Ok(read);
        }
        let mut products = vec![(down, room.low)];
        products.extend(inject);
        self.products(&products, &room.wide)?;
        let target = room.narrow.target(any_blocks(&[up]), rank);
        let p = GatesParams {
            low: room.low.address(),
            inject: inject.map_or(0, |(_, to)| to.address()),
            quantised: target,
            low_count: room.low.len() as u32,
            inject_count: inject.map_or(0, |(_, to)| to.len()) as u32,
            streams: streams as f32,
            padding: 0,
        };
        let count = (p.low_count + p.inject_count) as usize;
        // SAFETY: both lengths are those of the slices.
        unsafe { gates.launch(&self.stream, Grid::threads(count, 256), &p) }.map_err(Failed::from)?;
        self.settle(&room.narrow, target, any_blocks(&[up]))?;
        self.product(&up, &room.narrow, room.gates)?;
        let p = MixParams {
            gates: room.gates.address(),
            normed: room.normed.address(),
            u: u.floats().address(),
            quantised: u.target(wanted, d),
            count: u.floats().len() as u32,
            streams: streams as u32,
            width: d as u32,
            padding: 0,
        };
        let (mix, p, count) = match d.is_multiple_of(32) {
            true => {
                (mix_many, MixParams { count: p.count / 4, width: p.width / 4, ..p }, u.floats().len() / 4)
            }
            false => (mix, p, u.floats().len()),
        };
        // SAFETY: `u` has a row for each of `gates` and `normed`, as `Room` made them.
        unsafe { mix.launch(&self.stream, Grid::threads(count, 256), &p) }.map_err(Failed::from)?;
        self.settle(u, p.quantised, wanted)?;
        Ok(read)
    }

    /// Adds `y` to every stream, weighed: leaves it to the norm that comes next.
    pub(crate) fn mixer_write(
        &mut self,
        rows: usize,
        y: Buffer,
        inject: Buffer,
        x: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, .. } = self.spec.shape;
        self.left = Some(Left {
            y: self.buffer(y, rows, d)?,
            inject: self.buffer(inject, rows, streams)?,
            x: self.buffer(x, rows, streams * d)?,
        });
        Ok(0)
    }

    /// Whether an op takes over the write that is left: a mixer's read of the same rows.
    fn takes_over(&self, op: &Op<'_>) -> bool {
        let Op::MixerRead { rows, x, .. } = op else { return false };
        let Shape { hidden: d, streams, .. } = self.spec.shape;
        let x = self.buffer(*x, *rows, streams * d).map(|x| (x.address(), x.len()));
        self.left.is_some_and(|left| x.is_ok_and(|x| x == (left.x.address(), left.x.len())))
    }

    /// Does the write that is left, unless `op` does.
    pub(crate) fn write_left(&mut self, op: Option<&Op<'_>>) -> Result<(), BackendError> {
        if op.is_some_and(|op| self.takes_over(op)) {
            return Ok(());
        }
        let Some(left) = self.left.take() else { return Ok(()) };
        let Shape { hidden: d, streams, .. } = self.spec.shape;
        let p = WriteParams {
            write: left.write(),
            x: left.x.address(),
            count: left.x.len() as u32,
            streams: streams as u32,
            width: d as u32,
            padding: 0,
        };
        // SAFETY: the three have the same rows.
        let queued =
            unsafe { self.kernels.mixers.write.launch(&self.stream, Grid::threads(left.x.len(), 256), &p) };
        Ok(queued.map_err(Failed::from)?)
    }

    /// `logits[i] = output . mixer(x[rows[i]])`.
    pub(crate) fn head(
        &mut self,
        w: &MixerWeights,
        output: Weight,
        rows: &[u32],
        x: Buffer,
        logits: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, vocab, .. } = self.spec.shape;
        let output = self.weights.matrix(output, vocab, d)?;
        let last = rows.iter().max().map_or(0, |&row| row as usize + 1);
        let (x, logits) = (self.buffer(x, last, streams * d)?, self.buffer(logits, rows.len(), vocab)?);
        let some = self.inputs.ids(&self.stream, Ids::HeadRows, rows)?;
        let mut room = self.room();
        let (mixer, input) = head_room(&self.spec, rows.len(), &mut room);
        let read = self.mix(w, x, Some(some), &mixer, (&input, any_blocks(&[output])), None)?;
        self.product(&output, &input, logits)?;
        Ok(read + output.bytes.len())
    }
}
