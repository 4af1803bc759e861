//! Hyper-connection mixers and the head behind the last: `kernels/mixer.cu`.

use strata_backend::{BackendError, Buffer, MixerWeights, Shape, Spec, Weight};

use super::input::{Input, Target, any_blocks};
use super::{OpError, module};
use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::inputs::Ids;
use crate::scratch::Scratch;

#[repr(C)]
#[derive(Clone, Copy)]
struct NormParams {
    x: u64,
    rows: u64,
    gamma: u64,
    out: u64,
    quantised: Target,
    count: u32,
    groups: u32,
    width: u32,
    eps: f32,
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
struct ScatterParams {
    y: u64,
    inject: u64,
    x: u64,
    count: u32,
    streams: u32,
    width: u32,
    padding: u32,
}

/// The kernels.
pub(crate) struct Mixers {
    norm: Kernel<NormParams>,
    gates: Kernel<GatesParams>,
    mix: Kernel<MixParams>,
    scatter: Kernel<ScatterParams>,
}

impl Mixers {
    pub(crate) fn new(context: &Context) -> Result<Mixers, OpError> {
        let module = module(context, "mixer")?;
        Ok(Mixers {
            norm: module.kernel("strata_norm")?,
            gates: module.kernel("strata_mixer_gates")?,
            mix: module.kernel("strata_mix")?,
            scatter: module.kernel("strata_scatter")?,
        })
    }

    #[allow(clippy::too_many_arguments)]
    /// `out[row][group] = rms(x[rows[row]][group]) * gamma[group]`; all rows in order where none are named.
    pub(crate) fn norm(
        &self,
        stream: &Stream,
        x: DeviceSlice<f32>,
        rows: Option<DeviceSlice<u32>>,
        gamma: DeviceSlice<f32>,
        width: usize,
        eps: f32,
        out: DeviceSlice<f32>,
        quantised: Target,
    ) -> Result<(), DriverError> {
        let (count, groups) = (out.len() / width, gamma.len() / width);
        assert!(rows.is_some_and(|rows| rows.len() * groups == count) || x.len() == out.len());
        let p = NormParams {
            x: x.address(),
            rows: rows.map_or(0, DeviceSlice::address),
            gamma: gamma.address(),
            out: out.address(),
            quantised,
            count: count as u32,
            groups: groups as u32,
            width: width as u32,
            eps,
        };
        // SAFETY: the sizes were compared above; row numbers were checked against the buffer by the caller.
        unsafe { self.norm.launch(stream, Grid { blocks: [count as u32, 1, 1], threads: 256 }, &p) }
    }
}

/// What a mixer's read needs while it runs.
pub(crate) struct Room {
    normed: DeviceSlice<f32>,
    low: DeviceSlice<f32>,
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
            gates: room.take(rows * wide),
            wide: Input::new(normed, wide, rows, room),
            narrow: Input::new(low, rank, rows, room),
        }
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
        Ok(read)
    }

    /// A mixer over the rows of `x`, or over some of them; `inject` for a mixer that shall have inject weights.
    fn mix(
        &self,
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
        let Mixers { gates, mix, .. } = &self.kernels.mixers;
        let target = room.wide.target(any_blocks(&[down]), d);
        let norm = self.kernels.mixers.norm(&self.stream, x, some, gamma, d, eps, room.normed, target);
        norm.map_err(Failed::from)?;
        self.settle(&room.wide, target, any_blocks(&[down]))?;
        self.product(&down, &room.wide, room.low)?;
        if let Some((w, to)) = &inject {
            self.product(w, &room.wide, *to)?;
        }
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
        // SAFETY: `u` has a row for each of `gates` and `normed`, as `Room` made them.
        unsafe { mix.launch(&self.stream, Grid::threads(u.floats().len(), 256), &p) }
            .map_err(Failed::from)?;
        self.settle(u, p.quantised, wanted)?;
        Ok(down.bytes.len() + up.bytes.len() + inject.map_or(0, |(w, _)| w.bytes.len()))
    }

    /// Adds `y` to every stream, weighed.
    pub(crate) fn mixer_write(
        &mut self,
        rows: usize,
        y: Buffer,
        inject: Buffer,
        x: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, .. } = self.spec.shape;
        let x = self.buffer(x, rows, streams * d)?;
        let p = ScatterParams {
            y: self.buffer(y, rows, d)?.address(),
            inject: self.buffer(inject, rows, streams)?.address(),
            x: x.address(),
            count: x.len() as u32,
            streams: streams as u32,
            width: d as u32,
            padding: 0,
        };
        // SAFETY: the buffers have these sizes.
        unsafe { self.kernels.mixers.scatter.launch(&self.stream, Grid::threads(x.len(), 256), &p) }
            .map_err(Failed::from)?;
        Ok(0)
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
