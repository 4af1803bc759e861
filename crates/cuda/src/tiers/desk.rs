//! Experts of one row that a helper on the host computes, while the GPU computes the others: asked for and answered in memory that both see.
//!
//! A layer has its place: words, the row, room for answers. The GPU's kernel that chooses a row's experts writes which of those in host memory
//! the host gets, or that it gets none, and a later kernel waits for the answers. The host looks at the layers of a step in order ([`Desk::serve`]); it
//! spins meanwhile, for the step is running. Each word is set by one side and taken back by the other, so nothing is left of a step.
//!
//! How many of them the host gets is the [`Split`]'s choice, from how long steps take.
//!
//! This module is an island of `unsafe`: words and values that two processors share.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use strata_backend::{BackendError, ExpertHelper, ExpertWeights, Layer, Spec};
use strata_plan::{Category, Place, Plan};

use super::split::Split;
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
/// How often the GPU is asked whether it is still at work.
const LOOKS: Duration = Duration::from_millis(2);

/// Where a layer's kernels find everything. Twin: `Desk` in `kernels/desk.cuh`; all zero where no host helps.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct DeskParams {
    words: u64,
    row: u64,
    answers: u64,
    first: u64,
    end: u64,
    share: u64,
    pub(crate) helped: u64,
    pub(crate) outputs: u64,
}

/// What a step asks for in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) layer: Layer,
    pub(crate) weights: ExpertWeights,
}

/// Bytes of the device's part: the share, which experts are helped with, and their outputs.
pub(super) fn device_bytes(spec: &Spec) -> usize {
    256 + 4 * spec.shape.moe.used * spec.shape.hidden
}

/// Adds the host's part to the plan.
pub(super) fn describe(spec: &Spec, plan: &mut Plan) {
    let (layers, shape) = (spec.layers.len(), &spec.shape);
    let bytes = 4 * layers * (WORDS + (1 + shape.moe.used) * shape.hidden);
    plan.item(Category::Scratch, "experts asked for", Place::Heap, bytes as u64);
}

/// The desk.
pub(crate) struct Desk {
    helper: Box<dyn ExpertHelper>,
    /// `[layers][WORDS]`, `[layers][D]`, `[layers][used][D]`
    words: PinnedMemory<u32>,
    rows: PinnedMemory<f32>,
    answers: PinnedMemory<f32>,
    /// The share that the device was told, on its way and there.
    told: Option<u32>,
    on_its_way: PinnedMemory<u32>,
    share: DeviceSlice<u32>,
    params: DeskParams,
    width: usize,
    used: usize,
    split: Split,
    /// Layers of the step that is queued, in order.
    outstanding: Vec<Asked>,
    /// What is being recorded asks for.
    pub(crate) recorded: Vec<Asked>,
    queued: Option<Instant>,
}

impl Desk {
    /// A desk for a GPU whose own memory is `device`; `place` is its part there.
    pub(super) fn new(
        context: &Context,
        spec: &Spec,
        (helper, fixed): (Box<dyn ExpertHelper>, Option<u32>),
        device: DeviceSlice<u8>,
        place: DeviceSlice<u8>,
    ) -> Result<Desk, Failed> {
        let (layers, width, used) = (spec.layers.len(), spec.shape.hidden, spec.shape.moe.used);
        let share: DeviceSlice<u32> = place.range(0..4).cast();
        let params = DeskParams {
            first: device.address(),
            end: device.address() + device.len() as u64,
            share: share.address(),
            helped: share.address() + 128,
            outputs: share.address() + 256,
            ..DeskParams::default()
        };
        Ok(Desk {
            helper,
            words: PinnedMemory::new(context, layers * WORDS)?,
            rows: PinnedMemory::new(context, layers * width)?,
            answers: PinnedMemory::new(context, layers * used * width)?,
            told: None,
            on_its_way: PinnedMemory::new(context, 1)?,
            share,
            params,
            width,
            used,
            split: fixed.map_or_else(Split::default, Split::fixed),
            outstanding: Vec::with_capacity(layers),
            recorded: Vec::with_capacity(layers),
            queued: None,
        })
    }

    /// What a layer's kernels are given.
    pub(crate) fn params(&self, layer: Layer) -> DeskParams {
        let at = usize::from(layer.0);
        let place = |start: u64, each: usize| start + 4 * (at * each) as u64;
        DeskParams {
            words: place(self.words.address(), WORDS),
            row: place(self.rows.address(), self.width),
            answers: place(self.answers.address(), self.used * self.width),
            ..self.params
        }
    }

    /// Before a step is queued: tells the device its share.
    pub(crate) fn begin(&mut self, stream: &Stream) -> Result<(), Failed> {
        let share = self.split.share();
        // A step that is queued in part keeps the share that it began with.
        if self.told == Some(share) || !self.outstanding.is_empty() {
            return Ok(());
        }
        stream.synchronize()?;
        self.on_its_way[0] = share;
        // SAFETY: the value changes again only when nothing is queued.
        unsafe { stream.queue_upload(&self.on_its_way, self.share)? };
        self.told = Some(share);
        Ok(())
    }

    /// What was queued asks for this.
    pub(crate) fn expect(&mut self, asked: &[Asked]) {
        self.queued.get_or_insert_with(Instant::now);
        self.outstanding.extend_from_slice(asked);
    }

    fn word(&self, layer: Layer, word: usize) -> &AtomicU32 {
        let at = &raw const self.words[usize::from(layer.0) * WORDS + word];
        // SAFETY: a word of memory that lives as long as `self`, aligned, and used as an atomic by both sides.
        unsafe { AtomicU32::from_ptr(at.cast_mut()) }
    }

    /// Computes what the layers of the queued step ask for, in their order, until the GPU needs nothing more.
    ///
    /// # Errors
    /// The GPU has failed, or an expert could not be computed: its answer is zeros then, for the GPU waits for one.
    pub(crate) fn serve(&mut self, stream: &Stream) -> Result<(), BackendError> {
        if self.outstanding.is_empty() {
            return Ok(());
        }
        let asked = std::mem::take(&mut self.outstanding);
        self.helper.begin_step();
        let mut failure = None;
        let served = asked.iter().try_for_each(|asked| self.answer(asked, stream, &mut failure));
        self.helper.end_step();
        self.outstanding = asked;
        self.outstanding.clear();
        served?;
        failure.map_or(Ok(()), Err)
    }

    /// The step is done: how long it took says what the host should get of the next.
    pub(crate) fn done(&mut self) {
        if let Some(queued) = self.queued.take() {
            self.split.learn(queued.elapsed());
        }
    }

    fn answer(
        &mut self,
        asked: &Asked,
        stream: &Stream,
        failure: &mut Option<BackendError>,
    ) -> Result<(), BackendError> {
        let (mut since, mut what) = (Instant::now(), 0);
        while what == 0 {
            what = self.word(asked.layer, ASKED).load(Ordering::Acquire);
            std::hint::spin_loop();
            if what == 0 && since.elapsed() > LOOKS {
                since = Instant::now();
                if !stream.is_busy().map_err(failed)?
                    && self.word(asked.layer, ASKED).load(Ordering::Acquire) == 0
                {
                    return Err(failed("a step ended without asking for a layer's experts"));
                }
            }
        }
        self.word(asked.layer, ASKED).store(0, Ordering::Relaxed);
        if what == NOTHING {
            return Ok(());
        }
        let at = usize::from(asked.layer.0);
        let count = self.words[at * WORDS + COUNT] as usize;
        let first = at * self.used * self.width;
        let out = &mut self.answers[first..first + count * self.width];
        let experts = &self.words[at * WORDS + EXPERTS..][..count];
        let row = &self.rows[at * self.width..][..self.width];
        if let Err(error) = self.helper.outputs(asked.layer, &asked.weights, experts, row, out) {
            out.fill(0.0);
            failure.get_or_insert(error);
        }
        self.word(asked.layer, ANSWERED).store(1, Ordering::Release);
        Ok(())
    }
}
