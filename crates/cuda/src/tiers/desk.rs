//! What the GPU asks the host for in the middle of a step, and gets: in memory that both see.
//!
//! One row's experts that are not on the GPU, or some of them, the host may compute ([`Asked::Compute`]); how many it gets is the [`Split`]'s choice,
//! from how long steps take. A few rows' experts that the GPU can't read the host brings ([`Asked::Bring`]).
//!
//! A layer has its place: words, the row, room for answers. The GPU writes what it wants of the host there, or that it wants nothing, and a later
//! kernel waits for the answer. The host looks at the layers of a step in order ([`Desk::serve`]); it spins meanwhile, for the step is running. Each
//! word is set by one side and taken back by the other, so nothing is left of a step.
//!
//! This module is an island of `unsafe`: words and values that two processors share.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use strata_backend::{BackendError, ExpertWeights, HostCount, HostExperts, Layer, Spec};
use strata_plan::{Category, Place, Plan};
use strata_residency::ExpertId;

use super::Ring;
use super::split::{Split, Table};
use crate::driver::{Context, DeviceSlice, PinnedMemory, Stream};
use crate::{Failed, failed};

/// Twins: in `kernels/desk.cuh`.
const ASKED: usize = 0;
const ANSWERED: usize = 1;
const COUNT: usize = 2;
const EXPERTS: usize = 3;
const NOTHING: u32 = 2;
/// Words of a layer: a line of their own.
const WORDS: usize = 64;
/// Experts of a row, at most: as many as there are words for.
const MOST: usize = 32;
/// How long whoever ends a failed step sleeps between two looks.
const NAP: Duration = Duration::from_micros(50);
/// So long before a layer asks the host's threads are woken: it takes about this for 15 of them (docs/experiments.md).
const LEAD: Duration = Duration::from_micros(30);
/// How often the GPU is asked whether it is still at work.
const LOOKS: Duration = Duration::from_millis(2);

/// Where a layer's kernels find everything. Twin: `Desk` in `kernels/desk.cuh`; all zero where the host computes none.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct DeskParams {
    words: u64,
    row: u64,
    answers: u64,
    first: u64,
    end: u64,
    table: u64,
    pub(crate) helped: u64,
    pub(crate) outputs: u64,
}

/// What a step asks for in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// One row's experts, computed.
    Compute(Layer, ExpertWeights),
    /// Experts, copied to the ring's memory, with the bytes of a copy.
    Bring(Layer, usize),
}

/// Where a layer's kernels ask for experts to be brought. Twin: `Wanted` in `kernels/fetch.cu`; all zero where the GPU reads all.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct WantedParams {
    words: u64,
    experts: u64,
    count: u64,
}

/// Bytes of the device's part: how many the host gets, which experts are helped with, and their outputs.
pub(super) fn device_bytes(spec: &Spec) -> usize {
    256 + 4 * spec.shape.moe.used * spec.shape.hidden
}

/// Adds the host's part to the plan.
pub(super) fn describe(spec: &Spec, plan: &mut Plan) {
    let (layers, shape) = (spec.layers.len(), &spec.shape);
    let bytes = 4 * (layers * (WORDS + (1 + shape.moe.used) * shape.hidden) + shape.moe.experts + 1);
    plan.item(Category::Experts, "experts asked for", Place::Heap, bytes as u64);
}

/// Who computes on the host, and always what share if not as is fastest.
pub(crate) type Computes = (Box<dyn HostExperts>, Option<u32>);

/// The desk.
pub(crate) struct Desk {
    /// None where it only brings.
    host: Option<Box<dyn HostExperts>>,
    /// `[layers][WORDS]`, `[layers][D]`, `[layers][used][D]`
    words: PinnedMemory<u32>,
    rows: PinnedMemory<f32>,
    answers: PinnedMemory<f32>,
    /// Experts that a layer wants brought, with their places in the upper half.
    wanted: PinnedMemory<u32>,
    /// What the device was told of how many the host gets, on its way and there.
    told: Option<Table>,
    on_its_way: PinnedMemory<u8>,
    table: DeviceSlice<u8>,
    params: DeskParams,
    width: usize,
    used: usize,
    split: Split,
    /// Layers of the step that is queued, in order.
    outstanding: Vec<Asked>,
    /// What is being recorded asks for.
    pub(crate) recorded: Vec<Asked>,
    queued: Option<Instant>,
    /// When the host was last asked or had answered, in the step that it serves; and how long after that a layer usually asks.
    last: Option<Instant>,
    gaps: Vec<Duration>,
    count: HostCount,
}

impl Desk {
    /// A desk for a GPU whose own memory is `device`; `place` is its part there.
    pub(super) fn new(
        context: &Context,
        spec: &Spec,
        (computes, each): (Option<Computes>, Duration),
        device: DeviceSlice<u8>,
        place: DeviceSlice<u8>,
    ) -> Result<Desk, Failed> {
        let (layers, width, used) = (spec.layers.len(), spec.shape.hidden, spec.shape.moe.used);
        let table = place.range(0..size_of::<Table>());
        let (host, fixed) = computes.map_or((None, None), |(host, fixed)| (Some(host), fixed));
        let params = DeskParams {
            first: device.address(),
            end: device.address() + device.len() as u64,
            table: table.address(),
            helped: place.address() + 128,
            outputs: place.address() + 256,
            ..DeskParams::default()
        };
        Ok(Desk {
            host,
            words: PinnedMemory::new(context, layers * WORDS)?,
            rows: PinnedMemory::new(context, layers * width)?,
            answers: PinnedMemory::new(context, layers * used * width)?,
            wanted: PinnedMemory::new(context, spec.shape.moe.experts)?,
            told: None,
            on_its_way: PinnedMemory::new(context, size_of::<Table>())?,
            table,
            params,
            width,
            used,
            split: Split::new(each, fixed),
            outstanding: Vec::with_capacity(layers),
            recorded: Vec::with_capacity(layers),
            queued: None,
            last: None,
            gaps: vec![Duration::ZERO; layers],
            count: HostCount::default(),
        })
    }

    /// What a layer's kernels of one row are given, if the host computes.
    pub(crate) fn params(&self, layer: Layer) -> Option<DeskParams> {
        let place = |start: u64, each: usize| start + 4 * (usize::from(layer.0) * each) as u64;
        self.host.as_ref().map(|_| DeskParams {
            words: place(self.words.address(), WORDS),
            row: place(self.rows.address(), self.width),
            answers: place(self.answers.address(), self.used * self.width),
            ..self.params
        })
    }

    /// What a layer's kernels are given that have experts brought.
    pub(crate) fn wanted(&self, layer: Layer) -> WantedParams {
        WantedParams {
            words: self.words.address() + 4 * (usize::from(layer.0) * WORDS) as u64,
            experts: self.wanted.address(),
            // What one row's kernels say there is of another step.
            count: self.params.helped,
        }
    }

    /// Before a step is queued: tells the device how many the host gets.
    pub(crate) fn begin(&mut self, stream: &Stream) -> Result<(), Failed> {
        let table = self.split.table();
        // A step that is queued in part keeps the table that it began with.
        if self.host.is_none() || self.told == Some(table) || !self.outstanding.is_empty() {
            return Ok(());
        }
        stream.synchronize()?;
        self.on_its_way.copy_from_slice(&table);
        // SAFETY: it changes again only when nothing is queued.
        unsafe { stream.queue_upload(&self.on_its_way, self.table)? };
        self.told = Some(table);
        Ok(())
    }

    /// What was queued asks for this.
    pub(crate) fn expect(&mut self, asked: &[Asked]) {
        if asked.iter().any(|asked| matches!(asked, Asked::Compute(..))) {
            self.queued.get_or_insert_with(Instant::now);
        }
        self.outstanding.extend_from_slice(asked);
    }

    /// A layer's word.
    fn word(&self, layer: usize, word: usize) -> &AtomicU32 {
        let at = layer * WORDS + word;
        assert!(at < self.words.len());
        // SAFETY: a word of memory that lives as long as `self`, aligned, and used as an atomic by both sides.
        unsafe { AtomicU32::from_ptr(self.words.pointer().add(at)) }
    }

    /// Does what the layers of the queued step ask for, in their order, until the GPU needs nothing more.
    ///
    /// # Errors
    /// The GPU has failed, or an expert could not be computed or brought: its answer is zeros or anything then, for the GPU waits for one.
    pub(crate) fn serve(&mut self, stream: &Stream, mut ring: Option<&mut Ring>) -> Result<(), BackendError> {
        if self.outstanding.is_empty() {
            return Ok(());
        }
        let computes = |asked: &Asked| matches!(asked, Asked::Compute(..));
        let computes = self.outstanding.iter().any(computes);
        if let Some(host) = self.host.as_mut().filter(|_| computes) {
            host.begin_step();
        }
        self.last = None;
        let (mut failure, mut served) = (None, Ok(()));
        while let (Ok(()), Some(&asked)) = (&served, self.outstanding.first()) {
            served = self.answer(asked, stream, ring.as_deref_mut(), &mut failure);
            self.outstanding.remove(0);
        }
        if let Some(host) = self.host.as_mut().filter(|_| computes) {
            host.end_step();
        }
        served?;
        failure.map_or(Ok(()), Err)
    }

    /// Ends what is queued, of which something failed: answers whoever asks with whatever is there, until the GPU is done or lost. Nothing is
    /// left of the step then.
    pub(crate) fn release(&mut self, stream: &Stream) {
        let layers = self.words.len() / WORDS;
        while stream.is_busy() == Ok(true) {
            for layer in 0..layers {
                if self.word(layer, ASKED).swap(0, Ordering::Acquire) == 1 {
                    self.word(layer, ANSWERED).store(1, Ordering::Release);
                }
            }
            std::thread::sleep(NAP);
        }
        for layer in 0..layers {
            for word in [ASKED, ANSWERED] {
                self.word(layer, word).store(0, Ordering::Release);
            }
        }
        self.outstanding.clear();
        self.recorded.clear();
        self.queued = None;
    }

    /// Whether something was queued and is not served.
    pub(crate) fn is_outstanding(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// The step is done: how long it took says what the host should get of the next.
    pub(crate) fn done(&mut self) {
        if let Some(queued) = self.queued.take() {
            self.split.learn(queued.elapsed());
        }
    }

    /// Who computes on the host.
    pub(super) fn host(&mut self) -> Option<&mut dyn HostExperts> {
        Some(&mut **self.host.as_mut()?)
    }

    /// What the host computed since this was last taken.
    pub(crate) fn take_count(&mut self) -> HostCount {
        std::mem::take(&mut self.count)
    }

    fn answer(
        &mut self,
        asked: Asked,
        stream: &Stream,
        ring: Option<&mut Ring>,
        failure: &mut Option<BackendError>,
    ) -> Result<(), BackendError> {
        let (Asked::Compute(layer, _) | Asked::Bring(layer, _)) = asked;
        let at = usize::from(layer.0);
        let computes = matches!(asked, Asked::Compute(..));
        if self.hear(at, computes, stream)? == NOTHING {
            return Ok(());
        }
        let heard = Instant::now();
        let count = self.word(at, COUNT).load(Ordering::Relaxed) as usize;
        let done = match asked {
            Asked::Compute(_, weights) => self.compute(layer, &weights, count.min(self.used)),
            Asked::Bring(_, bytes) => self.bring(layer, count, bytes, ring),
        };
        if let Err(error) = done {
            failure.get_or_insert(error);
        }
        self.word(at, ANSWERED).store(1, Ordering::Release);
        let answered = Instant::now();
        if computes {
            self.count.asked += 1;
            self.count.experts += count as u64;
            self.split.answered(count, answered.duration_since(heard));
            self.count.nanos += answered.duration_since(heard).as_nanos() as u64;
        }
        self.last = Some(answered);
        Ok(())
    }

    /// Waits until a layer has said what it wants.
    fn hear(&mut self, at: usize, computes: bool, stream: &Stream) -> Result<u32, BackendError> {
        let (mut since, mut what) = (Instant::now(), 0);
        // Threads are woken for what they compute.
        let last = self.last.filter(|_| computes);
        let mut due = last.map(|last| last + self.gaps[at].saturating_sub(LEAD));
        while what == 0 {
            what = self.word(at, ASKED).load(Ordering::Acquire);
            std::hint::spin_loop();
            if due.take_if(|due| Instant::now() >= *due).is_some()
                && let Some(host) = &mut self.host
            {
                host.rouse();
            }
            if what == 0 && since.elapsed() > LOOKS {
                since = Instant::now();
                if !stream.is_busy().map_err(failed)? && self.word(at, ASKED).load(Ordering::Acquire) == 0 {
                    return Err(failed("a step ended without asking for a layer's experts"));
                }
            }
        }
        self.word(at, ASKED).store(0, Ordering::Relaxed);
        if let Some(last) = last {
            let gap = &mut self.gaps[at];
            *gap = (7 * *gap + last.elapsed()) / 8;
        }
        self.last = Some(Instant::now());
        Ok(what)
    }

    /// Computes `count` experts' outputs for a layer's row; zeros if that fails.
    fn compute(&mut self, layer: Layer, weights: &ExpertWeights, count: usize) -> Result<(), BackendError> {
        let (at, width) = (usize::from(layer.0), self.width);
        let mut experts = [0; MOST];
        for (place, expert) in experts[..count].iter_mut().enumerate() {
            *expert = self.word(at, EXPERTS + place).load(Ordering::Relaxed);
        }
        // SAFETY: the layer's row was written before it asked; its answers are read when it has been answered, and not before.
        let (row, out) = unsafe {
            let answers = self.answers.pointer().add(at * self.used * width);
            let row = std::slice::from_raw_parts(self.rows.pointer().add(at * width), width);
            (row, std::slice::from_raw_parts_mut(answers, count * width))
        };
        let host = self.host.as_mut().ok_or_else(|| failed("it asks for what nobody computes"));
        let done = host.and_then(|host| host.outputs(layer, weights, &experts[..count], row, out));
        done.inspect_err(|_| out.fill(0.0))
    }

    /// Brings `count` experts that a layer wants.
    fn bring(
        &mut self,
        layer: Layer,
        count: usize,
        bytes: usize,
        ring: Option<&mut Ring>,
    ) -> Result<(), BackendError> {
        let ring = ring.ok_or_else(|| failed("it wants experts brought to nowhere"))?;
        let count = count.min(self.wanted.len());
        // SAFETY: written before the layer asked, and next when another does, which is after this was answered.
        let wanted = unsafe { std::slice::from_raw_parts(self.wanted.pointer(), count) };
        let experts = wanted
            .iter()
            .map(|both| (ExpertId { layer: layer.0, expert: *both as u16 }, (both >> 16) as usize));
        ring.bring(experts, bytes)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::thread;

    use strata_backend::{GroupedRows, KvFormat, LayerState, MoeShape, Shape};
    use strata_quant::Format;

    use super::*;
    use crate::driver::{Device, fake};

    const WIDTH: usize = 8;
    const LAYERS: u16 = 3;

    /// An expert multiplies by one more than its number; number 9 fails.
    struct Multiplies;

    impl HostExperts for Multiplies {
        fn begin_step(&mut self) {}

        fn rouse(&mut self) {}

        fn end_step(&mut self) {}

        fn outputs(
            &mut self,
            layer: Layer,
            _: &ExpertWeights,
            experts: &[u32],
            u: &[f32],
            out: &mut [f32],
        ) -> Result<(), BackendError> {
            for (expert, out) in experts.iter().zip(out.chunks_exact_mut(u.len())) {
                if *expert == 9 {
                    out.fill(7.0);
                    return Err(failed(format!("expert 9 of layer {}", layer.0)));
                }
                out.iter_mut().zip(u).for_each(|(out, u)| *out = u * (expert + 1) as f32);
            }
            Ok(())
        }

        fn grouped(
            &mut self,
            _: Layer,
            _: &ExpertWeights,
            _: GroupedRows<'_>,
            _: &mut [f32],
        ) -> Result<(), BackendError> {
            unreachable!("a step's rows are one row's")
        }
    }

    pub(in crate::tiers) fn spec() -> Spec {
        let moe = MoeShape { experts: 16, used: 4, width: 8, shared_width: 8 };
        let shape = Shape {
            hidden: WIDTH,
            streams: 1,
            mixer_rank: 8,
            vocab: 8,
            norm_eps: 1e-6,
            gdn: None,
            qsa: None,
            moe,
            ngram: None,
        };
        let layer = LayerState { gdn: false, qsa: None, ngram: false };
        Spec {
            shape,
            layers: vec![layer; usize::from(LAYERS)],
            sequences: 1,
            checkpoints: 0,
            context: 8,
            kv: KvFormat::F32,
            window: 1,
            buffers: Vec::new(),
        }
    }

    /// A desk on a driver whose stream is at work for ever, or done.
    fn desk(busy: bool) -> (Stream, Desk) {
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let stream = Stream::new(&context).unwrap();
        fake::with(|state| state.refuses = busy.then_some(("stream_query", 600)));
        let memory = DeviceSlice::nowhere(1 << 20);
        let desk = Desk::new(
            &context,
            &spec(),
            (Some((Box::new(Multiplies), None)), Duration::from_micros(40)),
            memory,
            memory,
        );
        (stream, desk.unwrap_or_else(|failed| panic!("{}", failed.0)))
    }

    fn asked() -> Vec<Asked> {
        let weights =
            ExpertWeights { gate: Format::Q8_0, up: Format::Q8_0, down: Format::Q8_0, scales: [None; 3] };
        (0..LAYERS).map(|layer| Asked::Compute(Layer(layer), weights)).collect()
    }

    fn params(desk: &Desk) -> Vec<DeskParams> {
        (0..LAYERS).map(|layer| desk.params(Layer(layer)).unwrap()).collect()
    }

    /// What a GPU does in one layer: asks for these experts with a row of ones, waits, and takes the answer.
    fn gpu(params: DeskParams, experts: &[u32]) -> Vec<f32> {
        let word = |at: usize| params.words as usize + 4 * at;
        // SAFETY: words of the desk, which lives until the thread is joined.
        let set = |at: usize, value: u32, order| unsafe {
            AtomicU32::from_ptr(word(at) as *mut u32).store(value, order)
        };
        if experts.is_empty() {
            set(ASKED, NOTHING, Ordering::Release);
            return Vec::new();
        }
        for (place, expert) in experts.iter().enumerate() {
            set(EXPERTS + place, *expert, Ordering::Relaxed);
        }
        set(COUNT, experts.len() as u32, Ordering::Relaxed);
        // SAFETY: the row and the answers of this layer, which the host looks at when it was asked, and writes until it has answered.
        unsafe {
            std::slice::from_raw_parts_mut(params.row as *mut f32, WIDTH).fill(1.0);
            set(ASKED, 1, Ordering::Release);
            while AtomicU32::from_ptr(word(ANSWERED) as *mut u32).load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            let answer =
                std::slice::from_raw_parts(params.answers as *const f32, WIDTH * experts.len()).to_vec();
            set(ANSWERED, 0, Ordering::Relaxed);
            answer
        }
    }

    /// Oracle: by hand. Layers that ask, and one that doesn't; step after step, nothing is left of the one before.
    #[test]
    fn what_is_asked_is_answered() {
        let (stream, mut desk) = desk(true);
        for step in 0..50u32 {
            let layers: [Vec<u32>; 3] = [vec![step % 8], Vec::new(), vec![1, 3, 8]];
            let params = params(&desk);
            desk.expect(&asked());
            let answers = thread::scope(|scope| {
                let gpu = scope.spawn(|| {
                    params
                        .iter()
                        .zip(&layers)
                        .map(|(params, experts)| gpu(*params, experts))
                        .collect::<Vec<_>>()
                });
                desk.serve(&stream, None).unwrap();
                gpu.join().unwrap()
            });
            for (experts, answer) in layers.iter().zip(answers) {
                let wanted = experts.iter().flat_map(|expert| [(expert + 1) as f32; WIDTH]);
                assert_eq!(answer, wanted.collect::<Vec<_>>());
            }
        }
        fake::with(|state| state.refuses = None);
    }

    /// Oracle: the host's sentence. The GPU gets zeros instead of waiting for ever, and later layers their answers.
    #[test]
    fn a_failure_leaves_nobody_waiting() {
        let (stream, mut desk) = desk(true);
        let params = params(&desk);
        desk.expect(&asked());
        let (served, answers) = thread::scope(|scope| {
            let gpu = scope.spawn(|| {
                let ask = |(params, experts): (&DeskParams, &[u32])| gpu(*params, experts);
                params.iter().zip([&[9][..], &[2], &[]]).map(ask).collect::<Vec<_>>()
            });
            (desk.serve(&stream, None), gpu.join().unwrap())
        });
        assert!(served.unwrap_err().to_string().contains("expert 9 of layer 0"));
        assert_eq!(answers, [vec![0.0; WIDTH], vec![3.0; WIDTH], Vec::new()]);
        fake::with(|state| state.refuses = None);
    }

    /// Oracle: the sentences. A GPU that is done, or lost, without having asked.
    #[test]
    fn a_gpu_that_does_not_ask_is_not_waited_for() {
        let (stream, mut desk) = desk(false);
        desk.expect(&asked());
        assert!(desk.serve(&stream, None).unwrap_err().to_string().contains("without asking"));
        // As a launch that failed behind an answered question leaves it.
        desk.word(1, ANSWERED).store(1, Ordering::Relaxed);
        desk.release(&stream);
        assert!(!desk.is_outstanding() && desk.word(1, ANSWERED).load(Ordering::Relaxed) == 0);
        desk.serve(&stream, None).unwrap();
        fake::with(|state| state.refuses = Some(("stream_query", 700)));
        desk.expect(&asked());
        assert!(desk.serve(&stream, None).unwrap_err().to_string().contains("lost"));
        fake::with(|state| state.refuses = None);
    }
}
