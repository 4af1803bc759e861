//! The backend itself: what it is built from, and the dispatch of ops.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use strata_backend::{
    Backend, BackendError, Buffer, Build, BuildHostExperts, Checkpoint, Counters, Family, Fence, Largest,
    MOST_LARGEST, Op, SeqSlot, Span, Spec, Takers, WeightData,
};
use strata_plan::{Arena, Limits, Plan};
use strata_residency::{ExpertId, ExpertStore, LayerSource, RankingFile};

use crate::driver::{Context, Device, DeviceMemory, DeviceSlice, DriverError, Event, PinnedMemory, Stream};
use crate::inputs::{Ids, Inputs};
use crate::memory::{self, Described};
use crate::ops::{self, Columns, Kernels, Left, LeftExperts, OpError, Routing, SorterRoom};
use crate::recording::{self, Cost, MOST_ROWS, Recordings, Waiting, rows};
use crate::scratch::Scratch;
use crate::state::State;
use crate::tiers::{Budget, Computes, Exchanges, ExpertCache, Stagers, Tiers, describe_portion};
use crate::weights::{Matrix, Stage, Weights};
use crate::{Failed, failed};

/// A GPU, not yet built into a backend.
pub struct Cuda {
    context: Context,
    kernels: Kernels,
    limits: Limits,
    expert_cache: ExpertCache,
    exchanges: Exchanges,
    /// What was learned of the model's experts before, and is from now on.
    ranking: Option<RankingFile>,
    /// Who computes experts that have no room on it, and a fixed share of them.
    host: Option<(Box<dyn BuildHostExperts>, Option<u32>)>,
    stagers: Option<Stagers>,
    /// Bytes free on the GPU before anything of the model was there.
    free: u64,
}

/// How much of a GPU's memory may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// As if the GPU had only so many bytes.
    pub limit: Option<u64>,
    /// Bytes to leave to others.
    pub reserve: u64,
    /// Experts that are kept there.
    pub expert_cache: ExpertCache,
}

impl Cuda {
    /// A backend-to-be on `device`, with its kernels loaded.
    pub fn new(device: &Device, room: Room) -> Result<Cuda, OpError> {
        let context = Context::new(device)?;
        let kernels = Kernels::new(&context)?;
        let (free, total) = context.memory()?;
        // What others and this context itself have taken counts against the limit too.
        let total = room.limit.map_or(total, |limit| limit.min(total));
        let taken = device.memory.saturating_sub(free);
        let limits = Limits {
            available: total.saturating_sub(taken).saturating_sub(room.reserve),
            total,
            source: format!("cuda:{}", device.number),
        };
        let (expert_cache, exchanges) = (room.expert_cache, Exchanges::default());
        Ok(Cuda {
            context,
            kernels,
            limits,
            expert_cache,
            exchanges,
            ranking: None,
            host: None,
            stagers: None,
            free,
        })
    }

    /// With the host computing a share of one row's experts that have no room on it: so many sixteenths, or as many as is fastest.
    #[must_use]
    pub fn with_host(self, host: Box<dyn BuildHostExperts>, share: Option<u32>) -> Cuda {
        Cuda { host: Some((host, share)), ..self }
    }

    /// With another choice of the experts that change places.
    #[must_use]
    pub fn with_exchanges(self, exchanges: Exchanges) -> Cuda {
        Cuda { exchanges, ..self }
    }

    /// With a file at `path` of what is learned of the experts' use: read before they are placed, and written in the end. Only for the model that
    /// `identity` tells from others, and only where not all experts have room on the GPU.
    #[must_use]
    pub fn with_ranking(self, path: PathBuf, identity: Vec<u8>) -> Cuda {
        Cuda { ranking: Some(RankingFile::new(path, identity)), ..self }
    }

    /// With threads that stage experts in memory that it can't read: mapped, or refused to be pinned.
    #[must_use]
    pub fn with_stagers(self, stagers: Stagers) -> Cuda {
        Cuda { stagers: Some(stagers), ..self }
    }

    /// Where everything will be made.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Build for Cuda {
    type Described = Described;

    fn window(&self) -> usize {
        4096
    }

    fn window_for_experts_in_memory(&self) -> usize {
        8192
    }

    fn device_limits(&self) -> Option<Limits> {
        Some(self.limits.clone())
    }

    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Described, BackendError> {
        spec.shape.qsa.as_ref().map_or(Ok(()), ops::check_attention)?;
        spec.shape.gdn.as_ref().map_or(Ok(()), ops::check_gdn)?;
        ops::check_routing(&spec.shape.moe)?;
        ops::check_window(spec)?;
        ops::check_ngram(&spec.shape, self.kernels.products.one.formats.shared)?;
        let budget = Budget {
            available: self.limits.available,
            cache: self.expert_cache,
            exchanges: self.exchanges,
            ranking: self.ranking.as_ref(),
            staging: self.stagers.as_ref().map_or(0, |stagers| stagers.bytes),
        };
        let in_pieces = self.kernels.products.in_pieces();
        let described = memory::describe(spec, weights, experts, plan, (in_pieces, budget));
        let host = self.host.as_ref().filter(|_| described.tiers.reads_host());
        let describe = |(host, _): &(Box<dyn BuildHostExperts>, _)| {
            describe_portion(spec, plan);
            host.describe(spec, plan)
        };
        Ok(Described { host: host.map(describe), ..described })
    }

    fn experts_in_memory(&self, described: &Described) -> Option<Vec<ExpertId>> {
        described.tiers.reads_host().then(|| described.tiers.without_slots())
    }

    fn takers(&self) -> Takers {
        let stagers = self.stagers.as_ref().map_or(0, |stagers| stagers.most.max(1));
        Takers { stagers, computes: self.host.is_some() }
    }

    fn build(
        self,
        spec: Spec,
        described: Described,
        mut arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError> {
        let mut cuda = self;
        let host = match (cuda.host.take(), described.host) {
            (Some((host, share)), Some(region)) => {
                Some((host.build(&spec, region, &mut arena, Arc::clone(&store))?, share))
            }
            _ => None,
        };
        Ok(Box::new(CudaBackend::new(cuda, spec, described, weights, (&store, host))?))
    }
}

/// Work whose time isn't known yet.
struct Timed {
    start: Event,
    end: Event,
    costs: Vec<Cost>,
}

/// Computes ops on a GPU. Made by [`Cuda`]. `submit` queues an op; it is done when a fence behind it is reached.
pub(crate) struct CudaBackend {
    pub(crate) spec: Spec,
    pub(crate) kernels: Kernels,
    pub(crate) stream: Stream,
    /// For work beside the stream's, with where it starts and where it is done.
    side: Stream,
    pub(crate) start_of_side: Event,
    end_of_side: Event,
    pub(crate) weights: Weights,
    pub(crate) tiers: Tiers,
    pub(crate) state: State,
    pub(crate) inputs: Inputs,
    pub(crate) routing: Routing,
    /// A mixer's output, quantised; and the address of the buffer that it is of, while it is.
    pub(crate) mixed: Option<Columns>,
    pub(crate) fresh: Option<u64>,
    /// Room for decoded rows.
    pub(crate) decoded: DeviceSlice<u8>,
    /// A mixer's write that is queued with the next norm.
    pub(crate) left: Option<Left>,
    /// One row's routing that is left to its experts, and experts that are left to the sum over them.
    pub(crate) left_route: Option<(Matrix, DeviceSlice<f32>)>,
    pub(crate) left_experts: Option<LeftExperts>,
    /// Bytes of what is left.
    left_bytes: usize,
    /// `[context][cos, sin][rotary / 2]`
    pub(crate) rope: DeviceSlice<f32>,
    scratch: DeviceSlice<u8>,
    /// What is left of the room that stays: for the shared expert of a few rows, which is computed aside.
    kept: Scratch,
    buffers: Vec<DeviceSlice<f32>>,
    /// Of the largest logits and masses, on their way to the host.
    pub(crate) found: PinnedMemory<u64>,
    timed: Vec<Timed>,
    spare: Vec<Event>,
    counters: Counters,
    /// Points in the order of ops that nobody has waited for yet, and how many there were.
    fences: VecDeque<(Fence, Event)>,
    fenced: u64,
    /// Ops of short windows that wait for somebody to want their results.
    waiting: Vec<Waiting>,
    recordings: Recordings,
    /// Whether the first ops since a fence are under way.
    started: bool,
    /// Whether ops are being recorded.
    pub(crate) recording: bool,
    /// Bytes free on the GPU before anything of the model was there.
    free: u64,
    /// Behind everything that uses it.
    context: Context,
    _memory: DeviceMemory,
}

impl CudaBackend {
    fn new(
        cuda: Cuda,
        spec: Spec,
        described: Described,
        weights: Vec<WeightData>,
        (store, host): (&Arc<ExpertStore>, Option<Computes>),
    ) -> Result<CudaBackend, BackendError> {
        let Cuda { context, kernels, free, ranking, stagers, .. } = cuda;
        context.enter().map_err(failed)?;
        let memory = DeviceMemory::new(&context, described.bytes).map_err(|error| {
            let (free, all) = context.memory().unwrap_or_default();
            failed(format!(
                "{} MiB of its memory are needed, of which {} of {} MiB are free: {error}",
                described.bytes >> 20,
                free >> 20,
                all >> 20
            ))
        })?;
        let stream = Stream::new(&context).map_err(failed)?;
        let mut stage = Stage::new(&context).map_err(failed)?;
        let weights = Weights::load(&described.weights, &memory, weights, &mut stage, &stream)?;
        let tiers = Tiers::load(
            (&spec, described.tiers),
            (host, stagers, ranking),
            &memory,
            store,
            &mut stage,
            &context,
            &stream,
        )?;
        let state = State::new(&spec, &described.layers, &memory, &stream)?;
        let inputs = Inputs::new(&context, &described.inputs, &memory).map_err(failed)?;
        let rope: DeviceSlice<f32> = memory.part(described.rope.offset(), described.rope.bytes() / 4);
        if let Some(q) = &spec.shape.qsa {
            let mut table = vec![0.0; rope.len()];
            strata_backend::rope::fill(q, 0, &mut table);
            stream.upload(&table, rope).map_err(failed)?;
        }
        let mut kept = Scratch::of(memory.part(described.kept.offset(), described.kept.bytes()));
        let buffers = described.buffers.iter().map(|region| memory.part(region.offset(), region.bytes() / 4));
        let [.., found] = SorterRoom::sizes(spec.shape.vocab, spec.sequences, MOST_LARGEST);
        let routing = Routing::new(&spec, &mut kept);
        routing.start(&stream).map_err(failed)?;
        Ok(CudaBackend {
            weights,
            tiers,
            state,
            inputs,
            routing,
            mixed: ops::mixed(&spec, &mut kept),
            decoded: ops::decoded(&spec, kernels.products.in_pieces(), &mut kept),
            kept,
            side: Stream::new(&context).map_err(failed)?,
            start_of_side: Event::new(&context).map_err(failed)?,
            end_of_side: Event::new(&context).map_err(failed)?,
            fresh: None,
            left: None,
            left_route: None,
            left_experts: None,
            left_bytes: 0,
            rope,
            scratch: memory.part(described.scratch.offset(), described.scratch.bytes()),
            buffers: buffers.collect(),
            found: PinnedMemory::new(&context, found).map_err(failed)?,
            timed: Vec::new(),
            spare: Vec::new(),
            counters: Counters::default(),
            fences: VecDeque::new(),
            fenced: 0,
            waiting: Vec::new(),
            recordings: Recordings::default(),
            started: false,
            recording: false,
            stream,
            free,
            context,
            kernels,
            spec,
            _memory: memory,
        })
    }

    /// Room for the op that is being submitted.
    pub(crate) fn room(&self) -> Scratch {
        Scratch::of(self.scratch)
    }

    /// Room for work aside.
    pub(crate) fn room_aside(&self) -> Scratch {
        self.kept.clone()
    }

    /// Queues work beside what was queued since `start_of_side` was recorded; what is queued next waits for both.
    pub(crate) fn aside(
        &mut self,
        work: impl FnOnce(&Self) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.start_of_side.hold(&self.side).map_err(failed)?;
        std::mem::swap(&mut self.stream, &mut self.side);
        let done = work(self);
        let done = self.end_of_side.record(&self.stream).map_err(failed).and(done);
        std::mem::swap(&mut self.stream, &mut self.side);
        // Also for what was queued before a failure: it uses the same memory.
        done.and(self.end_of_side.hold(&self.stream).map_err(failed))
    }

    /// The first `rows` rows of a buffer of `width` floats each.
    pub(crate) fn buffer(
        &self,
        buffer: Buffer,
        rows: usize,
        width: usize,
    ) -> Result<DeviceSlice<f32>, BackendError> {
        let found = self.buffers.get(buffer.0 as usize);
        let found = found
            .ok_or_else(|| failed(format!("an op names buffer {} of {}", buffer.0, self.buffers.len())))?;
        if rows * width > found.len() {
            return Err(failed(format!(
                "an op wants [{rows}, {width}] floats of a buffer of {}",
                found.len()
            )));
        }
        Ok(found.range(0..rows * width))
    }

    /// Queues an op; the bytes of weights and state that it reads.
    fn queue(&mut self, op: &Op<'_>) -> Result<usize, BackendError> {
        self.write_left(Some(op))?;
        match op {
            Op::Embed { table, tokens, x } => self.embed(*table, tokens, *x),
            Op::Ngram { layer, weights, format, scale, table_rows, spans, x } => {
                self.ngram(*layer, weights, (*format, *scale, table_rows), spans, *x)
            }
            Op::MixerRead { weights, rows, x, u, inject } => self.mixer_read(weights, *rows, *x, *u, *inject),
            Op::MixerWrite { rows, y, inject, x } => self.mixer_write(*rows, *y, *inject, *x),
            Op::Gdn { layer, weights, spans, u, y } => self.gdn(*layer, weights, spans, *u, *y),
            Op::Qsa { layer, weights, spans, u, y } => self.qsa(*layer, weights, spans, *u, *y),
            Op::Route { layer, router, rows, u } => self.route(*layer, *router, *rows, *u),
            Op::Group { rows } => self.group(*rows),
            Op::Experts { layer, weights, rows, u } => self.experts(*layer, weights, *rows, *u),
            Op::Combine { shared, rows, u, y } => self.combine(shared, *rows, *u, *y),
            Op::Head { mixer, output, rows, x, logits } => self.head(mixer, *output, rows, *x, *logits),
            Op::DraftJoin { table, eh_proj, e_norm, h_norm, next, x, out } => {
                self.draft_join([*table, *eh_proj, *e_norm, *h_norm], next, *x, *out)
            }
        }
    }

    /// Queues an op with the time that it takes.
    fn queue_timed(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        self.fresh = self.fresh.filter(|_| reads_mixed(op));
        let (start, end) = (self.event()?, self.event()?);
        start.record(&self.stream).map_err(failed)?;
        let bytes = self.queue(op)?;
        end.record(&self.stream).map_err(failed)?;
        // What one row's experts are made of is queued together, by the last of its ops.
        if self.left_route.is_some() || self.left_experts.is_some() {
            self.left_bytes += bytes;
            self.spare.extend([start, end]);
        } else {
            let left = std::mem::take(&mut self.left_bytes);
            let family = if left > 0 { Family::Experts } else { op.family() };
            self.timed.push(Timed { start, end, costs: vec![(family, 1.0, left + bytes)] });
        }
        // At once: a stream takes so many launches only, and who queues more waits for it, while it waits for an answer.
        self.serve()
    }

    /// Queues all that was submitted.
    fn flush(&mut self) -> Result<(), BackendError> {
        self.context.enter().map_err(failed)?;
        let queued = self.flush_waiting().and_then(|()| self.write_left(None)).and_then(|()| self.serve());
        queued.inspect_err(|_| self.forget())
    }

    /// Computes what is queued asks the host for.
    fn serve(&mut self) -> Result<(), BackendError> {
        let Tiers { desk, ring, .. } = &mut self.tiers;
        desk.as_mut().map_or(Ok(()), |desk| desk.serve(&self.stream, ring.as_mut()))
    }

    /// Drops what ops have left for others: one of their window failed.
    fn forget(&mut self) {
        self.waiting.clear();
        if let Some(desk) = &mut self.tiers.desk {
            desk.release(&self.stream);
        }
        self.tiers.forget();
        (self.left, self.left_route, self.left_experts, self.fresh) = (None, None, None, None);
        self.left_bytes = 0;
    }

    /// Queues what waits: as a recording, where the same work came before.
    fn flush_waiting(&mut self) -> Result<(), BackendError> {
        let ops = std::mem::take(&mut self.waiting);
        if ops.is_empty() {
            return Ok(());
        }
        if let Some(desk) = &mut self.tiers.desk {
            desk.begin(&self.stream)?;
        }
        // A list that is replayed finds nothing quantised.
        self.fresh = None;
        if !Recordings::worth(&ops) {
            return ops.iter().try_for_each(|waiting| self.queue_timed(&waiting.op()));
        }
        let mut recordings = std::mem::take(&mut self.recordings);
        let done = self.flush_into(&mut recordings, ops);
        self.recordings = recordings;
        done
    }

    fn flush_into(&mut self, recordings: &mut Recordings, ops: Vec<Waiting>) -> Result<(), BackendError> {
        let Some(known) = recordings.find(&ops) else {
            // The first time tells what each op costs.
            self.serve()?;
            self.add_times()?;
            ops.iter().try_for_each(|waiting| self.queue_timed(&waiting.op()))?;
            self.write_left(None)?;
            self.serve()?;
            self.stream.synchronize().map_err(failed)?;
            let mut costs = Vec::with_capacity(ops.len());
            for Timed { start, end, costs: of } in &self.timed {
                let time = f64::from(end.milliseconds_since(start).map_err(failed)?);
                costs.extend(of.iter().map(|&(family, _, bytes)| (family, time, bytes)));
            }
            let all: f64 = costs.iter().map(|cost| cost.1).sum();
            costs.iter_mut().for_each(|cost| cost.1 /= all);
            recordings.note(ops, costs);
            return Ok(());
        };
        if known.graph.is_none() {
            // Nothing is recorded while the GPU waits for the host: the driver may wait for the GPU.
            self.serve()?;
        }
        // Inputs first: what is there already is not copied again, so that no copy gets into the recording.
        ops.iter().try_for_each(|waiting| self.bring(waiting))?;
        if known.graph.is_none() {
            let stream = self.stream.share();
            self.recording = true;
            let recorded = stream.record(|| {
                ops.iter().try_for_each(|waiting| {
                    let op = waiting.op();
                    self.fresh = self.fresh.filter(|_| reads_mixed(&op));
                    self.queue(&op).map(|_| ()).map_err(Failed)
                })?;
                self.write_left(None).map_err(Failed)
            });
            self.recording = false;
            if let Some(desk) = &mut self.tiers.desk {
                known.asked = std::mem::take(&mut desk.recorded);
            }
            if let Some(ring) = &mut self.tiers.ring {
                known.lends = std::mem::take(&mut ring.recorded);
            }
            known.graph = Some(recorded?);
        }
        for waiting in &ops {
            if let Op::Ngram { layer, spans, .. }
            | Op::Gdn { layer, spans, .. }
            | Op::Qsa { layer, spans, .. } = waiting.op()
            {
                self.state.note_pending(spans, layer);
            }
        }
        self.fresh = None;
        if let Some(ring) = self.tiers.ring.as_mut().filter(|_| known.lends) {
            ring.lend(&self.stream).map_err(failed)?;
        }
        let (start, end) = (self.event()?, self.event()?);
        start.record(&self.stream).map_err(failed)?;
        let graph = known.graph.as_ref().expect("recorded above");
        self.stream.replay(graph).map_err(failed)?;
        if let Some(desk) = &mut self.tiers.desk {
            desk.expect(&known.asked);
        }
        end.record(&self.stream).map_err(failed)?;
        self.timed.push(Timed { start, end, costs: known.costs.clone() });
        Ok(())
    }

    /// Copies an op's data to its place on the device.
    fn bring(&mut self, waiting: &Waiting) -> Result<(), BackendError> {
        match waiting.op() {
            Op::Embed { tokens, .. } => self.tokens(Ids::Tokens, tokens).map(|_| ()),
            Op::DraftJoin { next, .. } => self.tokens(Ids::Next, next).map(|_| ()),
            Op::Head { rows, .. } => self.inputs.ids(&self.stream, Ids::HeadRows, rows).map(|_| ()),
            Op::Ngram { spans, table_rows, .. } => {
                self.inputs.table_rows(&self.stream, table_rows)?;
                self.inputs.window(&self.stream, (&self.spec, &self.state), spans).map(|_| ())
            }
            Op::Gdn { spans, .. } | Op::Qsa { spans, .. } => {
                self.inputs.window(&self.stream, (&self.spec, &self.state), spans).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    fn event(&mut self) -> Result<Event, BackendError> {
        match self.spare.pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.context).map_err(failed),
        }
    }

    /// Queues what waits, waits for everything, and adds up the times.
    fn finish(&mut self) -> Result<(), BackendError> {
        self.flush()?;
        self.add_times()?;
        if let Some(desk) = &mut self.tiers.desk {
            desk.done();
        }
        if let Some(count) = self.tiers.end_step()? {
            self.counters.add_experts(count);
        }
        Ok(())
    }

    /// Sleeps in some way until everything before `fence` is done.
    fn reach(
        &mut self,
        fence: Fence,
        wait: impl Fn(&Event) -> Result<(), DriverError>,
    ) -> Result<(), BackendError> {
        self.context.enter().map_err(failed)?;
        while let Some((_, event)) = self.fences.pop_front_if(|(set, _)| *set <= fence) {
            wait(&event).map_err(failed)?;
            self.spare.push(event);
        }
        Ok(())
    }

    fn add_times(&mut self) -> Result<(), BackendError> {
        self.stream.synchronize().map_err(failed)?;
        for Timed { start, end, costs } in self.timed.drain(..) {
            let nanoseconds = f64::from(end.milliseconds_since(&start).map_err(failed)?) * 1e6;
            for (family, share, bytes) in costs {
                self.counters.add(family, (nanoseconds * share) as u64, bytes as u64);
            }
            self.spare.extend([start, end]);
        }
        if let Some(ring) = &mut self.tiers.ring {
            self.counters.link.merge(ring.take_count().map_err(failed)?);
        }
        Ok(())
    }
}

/// Whether an op leaves a mixer's output as it is: those between one mixer's read and the next.
fn reads_mixed(op: &Op<'_>) -> bool {
    matches!(
        op,
        Op::Gdn { .. }
            | Op::Qsa { .. }
            | Op::Route { .. }
            | Op::Group { .. }
            | Op::Experts { .. }
            | Op::Combine { .. }
    )
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        if let Some(desk) = &mut self.tiers.desk {
            desk.release(&self.stream);
        }
        // What fails here has failed before. Host memory is read by what is queued.
        let _ = self.stream.synchronize();
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        let device = self.context.device();
        format!("cuda:{} ({})", device.number, device.name)
    }

    fn begin_step(&mut self) {}

    fn end_step(&mut self) {
        // A window that was given up behind its first layers.
        if let Some(desk) = self.tiers.desk.as_mut().filter(|desk| desk.is_outstanding()) {
            desk.release(&self.stream);
        }
    }

    fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        self.context.enter().map_err(failed)?;
        if matches!(op, Op::Embed { .. }) && rows(op) <= MOST_ROWS {
            self.tiers.begin_step().inspect_err(|_| self.forget())?;
        }
        self.tiers.see(op);
        if rows(op) > MOST_ROWS {
            // Whoever waits for the host has its answer before the ring is used otherwise.
            let queued = self.flush_waiting().and_then(|()| self.serve()).and_then(|()| self.queue_timed(op));
            return queued.inspect_err(|_| self.forget());
        }
        let waiting = Waiting::new(op);
        if waiting.collides(&self.waiting) {
            self.flush()?;
        }
        let ends_start = !self.started && recording::ends_start(&self.waiting, op);
        self.waiting.push(waiting);
        if ends_start {
            self.started = true;
            // The rest comes before anybody is asked.
            let queued = self.flush_waiting().and_then(|()| self.write_left(None));
            queued.inspect_err(|_| self.forget())?;
        }
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence, BackendError> {
        self.started = false;
        self.flush()?;
        let event = self.event()?;
        event.record(&self.stream).map_err(failed)?;
        self.fenced += 1;
        self.fences.push_back((Fence(self.fenced), event));
        Ok(Fence(self.fenced))
    }

    fn wait(&mut self, fence: Fence) -> Result<(), BackendError> {
        self.reach(fence, Event::wait)
    }

    fn wait_idly(&mut self, fence: Fence) -> Result<(), BackendError> {
        self.reach(fence, Event::wait_idly)
    }

    fn read(&mut self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError> {
        self.flush()?;
        let all = self.buffer(buffer, 1, first + out.len())?;
        self.tiers.bring_choices(&self.stream)?;
        self.stream.download(all.range(first..first + out.len()), out).map_err(failed)?;
        self.finish()
    }

    fn largest(
        &mut self,
        buffer: Buffer,
        wanted: Largest<'_>,
        out: &mut [(u32, f32)],
        masses: &mut [u64],
    ) -> Result<bool, BackendError> {
        self.context.enter().map_err(failed)?;
        self.flush()?;
        self.tiers.bring_choices(&self.stream)?;
        let done = self.largest_of(buffer, wanted, out, masses)?;
        self.finish().map(|()| done)
    }

    fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        self.flush()?;
        let rows = spans.iter().map(|span| span.rows).sum();
        if let Some(count) = self.tiers.count_committed(rows, &self.stream)? {
            self.counters.add_experts(count);
        }
        self.state.commit(spans)
    }

    fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError> {
        self.flush()?;
        self.state.clear(&self.stream, slot)
    }

    fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError> {
        self.flush()?;
        self.state.fork(&self.stream, from, to, tokens)
    }

    fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError> {
        self.flush()?;
        self.state.restore(&self.stream, from, slot)
    }

    fn export(&mut self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError> {
        self.flush()?;
        self.state.export(&self.stream, slot, tokens, out)
    }

    fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.flush()?;
        self.state.import(&self.stream, slot, tokens, bytes)
    }

    fn take_counters(&mut self) -> Counters {
        let mut counters = std::mem::take(&mut self.counters);
        counters.host = self.tiers.take_host_count();
        if let Some(count) = self.tiers.take_file_count() {
            counters.add_reads(count);
        }
        counters
    }

    fn device_bytes(&self) -> Option<u64> {
        self.context.enter().ok()?;
        Some(self.free.saturating_sub(self.context.memory().ok()?.0))
    }
}
