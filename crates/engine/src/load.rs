//! From a model and a configuration to an engine: describe, check, allocate, once.
//!
//! [`Engine::plan`] and [`Engine::load`] go the same way; the first stops before the first allocation.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use strata_backend::{Buffer, BufferSpec, Build, Checkpoint, Shape, Spec, Takers};
use strata_model::Model;
use strata_plan::{Arena, Block, Category, Limits, Place, Plan, PlanError, Region, largest};
use strata_residency::{ExpertId, ExpertStore, HostCopy, RankingFile};

use crate::budget::{self, Budgeted, Keeper};
use crate::choose::Found;
use crate::config::{EngineConfig, ExpertHome};
use crate::engine::{Buffers, Engine};
use crate::error::EngineError;
use crate::fault::check_weights;
use crate::flight::Machine;
use crate::graph::Work;
use crate::lookup::Lookup;
use crate::lower::{ExpertTensors, Lowered, lower};
use crate::sampling::{Sampler, Scratch};

/// The context when none is asked for and the model allows more.
const DEFAULT_CONTEXT: usize = 16_384;
/// How long a prompt window may go on while other sequences wait for their next token.
const PROMPT_SLICE: Duration = Duration::from_millis(20);
/// Floats of the logits buffer that more rows than the sequences need may fill.
const LOGIT_FLOATS: usize = 1 << 20;

/// Starts a thread of this name.
pub type Spawn = Box<dyn Fn(&str, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>>;

/// Threads that read files.
pub struct Readers {
    /// Starts one.
    pub spawn: Spawn,
    /// How many may read at once while a model is loaded.
    pub most: usize,
}

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied.
    pub bytes: u64,
    /// Bytes to copy.
    pub of: u64,
}

/// What would be allocated, before anything is.
#[derive(Debug)]
pub struct Planned {
    /// Every byte, sized and placed.
    pub plan: Plan,
    /// What the backend was told.
    pub spec: Spec,
    /// What there is of the device's own memory, if it has some.
    pub device: Option<Limits>,
}

impl Planned {
    /// Whether it fits the machine and the device.
    pub fn check(&self, limits: &Limits) -> Result<(), PlanError> {
        self.plan.check(limits)?;
        self.device.as_ref().map_or(Ok(()), |device| self.plan.check_in(Place::Device, device))
    }
}

struct Prepared<D> {
    lowered: Lowered,
    plan: Plan,
    spec: Spec,
    buffers: Buffers,
    slots: Homes,
    described: D,
}

impl Engine {
    /// The memory plan of a model under a configuration, checked against nothing.
    pub fn plan<B: Build>(
        model: &Arc<Model>,
        config: &EngineConfig,
        limits: &Limits,
        builder: &B,
    ) -> Result<Planned, EngineError> {
        let Prepared { plan, spec, .. } = prepare(model, config, limits, builder)?;
        Ok(Planned { plan, spec, device: builder.device_limits() })
    }

    /// Loads a model: plans, refuses what doesn't fit, and allocates at once what the plan says. Later only lists come and go:
    /// of tokens, of what a request asks for and what is told of it, of a sequence saved; and, as planned, which tokens a
    /// sequence has seen, and the numbers of table rows on their way to the thread that reads ahead.
    pub fn load<B: Build>(
        model: Arc<Model>,
        config: &EngineConfig,
        limits: &Limits,
        builder: B,
        readers: Readers,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Engine, EngineError> {
        let Prepared { lowered, plan, spec, buffers, slots, described } =
            prepare(&model, config, limits, &builder)?;
        let planned = Planned { plan, spec, device: builder.device_limits() };
        planned.check(limits)?;
        check_weights(&model, &lowered)?;
        let mut arena = Arena::new(&planned.plan)?;
        // A device that has experts beside it keeps what it learns of them itself.
        let ranking = config.ranking.clone().filter(|_| planned.device.is_none()).map(|path| {
            let identity = model.fingerprint()?.to_le_bytes().to_vec();
            Ok::<_, EngineError>(RankingFile::new(path, identity))
        });
        let ranking = ranking.transpose()?;
        let Planned { plan, spec, .. } = planned;
        let (store, keeper) = store(&model, &lowered, slots, &mut arena, (&readers, ranking), progress)?;
        let backend = builder.build(spec.clone(), described, arena, lowered.weights, Arc::clone(&store))?;
        let logits = vec![0.0; logit_floats(&spec, buffers.logit_rows)];
        let scratch = Scratch::new(spec.shape.vocab);
        Ok(Engine {
            graph: lowered.graph,
            lookup: Lookup::new(&model, &spec, &readers)?,
            sequences: (0..spec.sequences).map(|_| None).collect(),
            epochs: 0,
            free: (0..spec.checkpoints as u32).map(Checkpoint).collect(),
            reading: None,
            prompt_slice: PROMPT_SLICE,
            binding: None,
            machine: Machine { backend, probe: None },
            model,
            plan,
            buffers,
            store,
            _keeper: keeper,
            logits,
            found: Found::new(spec.sequences),
            spec,
            scratch,
        })
    }
}

fn prepare<B: Build>(
    model: &Arc<Model>,
    config: &EngineConfig,
    limits: &Limits,
    builder: &B,
) -> Result<Prepared<B::Described>, EngineError> {
    let lowered = lower(model, config)?;
    let most = model.hyper.context;
    let context = config.context.unwrap_or_else(|| most.min(DEFAULT_CONTEXT));
    if context == 0 || context > most {
        let file = model.gguf.path().to_owned();
        return Err(EngineError::Context { asked: context, most, file });
    }
    if config.sequences == 0 || config.window == Some(0) {
        return Err(EngineError::Config(
            "a window must have at least one row, and there must be at least one sequence".into(),
        ));
    }
    let homes: Vec<_> = lowered.experts.iter().map(|(layer, source, _)| (*layer, source.clone())).collect();
    // A device has copies, made while loading, of everything but what it leaves to the host.
    let on_device = builder.device_limits().is_some();
    let home = if on_device { Place::File } else { Place::Mapped };
    let describe_with = |window: usize, beside: Beside| {
        let (spec, buffers) = spec(&lowered, config, context, window);
        let mut plan = Plan::new();
        // Slots come first, so that each starts at a page.
        let slots = match config.experts {
            ExpertHome::Budget(budget) if !on_device => Homes {
                copies: HeapSlots::default(),
                read: Some(Budgeted::describe(&lowered, budget, &mut plan)),
            },
            _ => place_experts(&mut plan, &lowered, home, (beside, builder.takers())),
        };
        place_weights(&mut plan, model, &lowered, home);
        place_buffers(&mut plan, model, &spec, buffers.logit_rows);
        let described = builder.describe(&spec, &lowered.weights, &homes, &mut plan)?;
        Ok::<_, EngineError>((plan, spec, buffers, slots, described))
    };
    let describe = |window: usize| {
        let copied = |copied| describe_with(window, Beside { copied, ..Beside::default() });
        let mapped = |mapped| describe_with(window, Beside { mapped, ..Beside::default() });
        if config.experts == ExpertHome::Heap {
            return copied(lowered.expert_ids().collect());
        }
        let described = describe_with(window, Beside::default())?;
        let Some(experts) = builder.experts_in_memory(&described.4) else { return Ok(described) };
        match config.experts {
            ExpertHome::Mapped => mapped(experts),
            ExpertHome::Budget(budget) => {
                let (copied, read) = budget::cut(&lowered, experts, budget, builder.takers());
                describe_with(window, Beside { copied, read, ..Beside::default() })
            }
            // Of the heap it was said above.
            ExpertHome::Auto | ExpertHome::Heap => match copied(experts.clone())? {
                heap if heap.0.check(limits).is_err() => mapped(experts),
                heap => Ok(heap),
            },
        }
    };
    let window = match config.window {
        Some(window) => window.min(context),
        None => {
            // Wide models pay by the row: at most a sixteenth of the memory that it is in goes into windows, or three tenths where a window is
            // what experts are brought for.
            let available = builder.device_limits().as_ref().unwrap_or(limits).available;
            let used = |plan: &Plan| {
                plan.by_category(Category::Window).saturating_add(plan.by_category(Category::Scratch))
            };
            let reads = |described: &B::Described| builder.experts_in_memory(described).is_some();
            let brought = describe(1).is_ok_and(|one| reads(&one.4));
            let (room, most) = match brought {
                true => (available / 10 * 3, builder.window_for_experts_in_memory()),
                false => (available / 16, builder.window()),
            };
            // Nor may a window push experts off a device that has room for all.
            let stays = |described: &B::Described| brought || !reads(described);
            let fits = |window| {
                describe(window).is_ok_and(|(plan, .., described)| used(&plan) <= room && stays(&described))
            };
            largest(1, most.min(context), fits).unwrap_or(1)
        }
    };
    let (plan, spec, buffers, slots, described) = describe(window)?;
    Ok(Prepared { lowered, plan, spec, buffers, slots, described })
}

/// What the backend is told, and the engine's names for the buffers in it.
fn spec(lowered: &Lowered, config: &EngineConfig, context: usize, window: usize) -> (Spec, Buffers) {
    let Shape { hidden, streams, vocab, .. } = lowered.shape;
    let rows = window.max(config.sequences);
    let logit_rows = (LOGIT_FLOATS / vocab).min(window).max(config.sequences);
    let mut list = Vec::new();
    let mut buffer = |name, rows, width| {
        list.push(BufferSpec { name, rows, width });
        Buffer(list.len() as u32 - 1)
    };
    let buffers = Buffers {
        prompt: buffer("residual, prompt", window, streams * hidden),
        decode: buffer("residual, decode", config.sequences, streams * hidden),
        draft: lowered.graph.draft.as_ref().map(|_| buffer("residual, draft", window, streams * hidden)),
        work: Work {
            u: buffer("mixed input", rows, hidden),
            y: buffer("layer output", rows, hidden),
            inject: buffer("inject weights", rows, streams),
            logits: buffer("logits", logit_rows, vocab),
        },
        logit_rows,
    };
    let spec = Spec {
        shape: lowered.shape.clone(),
        layers: lowered.states.clone(),
        sequences: config.sequences,
        checkpoints: config.checkpoints,
        context,
        kv: config.kv,
        window,
        buffers: list,
    };
    (spec, buffers)
}

/// Experts that have no room on a device, by where they live.
#[derive(Default)]
struct Beside {
    /// In the heap tier.
    copied: Vec<ExpertId>,
    /// In the mapped file.
    mapped: Vec<ExpertId>,
    /// In the file, from which they are read.
    read: Vec<ExpertId>,
}

/// Where experts live: those that stay, and what reads others.
struct Homes {
    copies: HeapSlots,
    read: Option<Budgeted>,
}

/// The heap tier's slots of experts that stay.
#[derive(Default)]
struct HeapSlots {
    /// Those of a layer, and the bytes of each: side by side at the arena's start, so that huge pages can hold them.
    regions: Vec<(Region, usize)>,
    /// The experts that live in them.
    experts: Vec<ExpertId>,
}

/// Dense weights in their `home`, and the n-gram table that stays in the file.
fn place_weights(plan: &mut Plan, model: &Model, lowered: &Lowered, home: Place) {
    let dense = lowered.weights.iter().map(|weight| weight.bytes.len() as u64).sum();
    plan.item(Category::Weights, "dense weights", home, dense);
    if let Some(table) = model.trunk.ngram_table.as_ref() {
        let bytes = model.gguf.tensors()[table.index].bytes;
        plan.item(Category::Table, "n-gram table", Place::File, bytes);
    }
}

/// Experts in their `home`, but for those named.
fn place_experts(
    plan: &mut Plan,
    lowered: &Lowered,
    home: Place,
    (Beside { mut copied, mapped, read }, takers): (Beside, Takers),
) -> Homes {
    // The device's order is another than the file's.
    copied.sort_unstable();
    let reads = (!read.is_empty()).then(|| Budgeted::beside(lowered, &read, takers, plan));
    let of_copies = if read.is_empty() { "routed experts" } else { "resident experts" };
    let mut regions = Vec::new();
    for (layer, source, _) in &lowered.experts {
        let count = |ids: &[ExpertId]| ids.iter().filter(|id| id.layer == *layer).count();
        let [copies, mapped, read] = [&copied, &mapped, &read].map(|ids| count(ids));
        let named = |name: &'static str| (usize::from(*layer), name);
        let (all, bytes) = (usize::from(source.experts()), source.expert_bytes());
        for (count, place) in [(all.saturating_sub(copies + mapped + read), home), (mapped, Place::Mapped)] {
            if count > 0 {
                plan.item(Category::Experts, named("routed experts"), place, (count * bytes) as u64);
            }
        }
        if copies > 0 {
            let each = source.copy_layout().bytes;
            regions.push((plan.heap(Category::Experts, named(of_copies), each * copies), each));
        }
    }
    Homes { copies: HeapSlots { regions, experts: copied }, read: reads }
}

/// Floats that are read back at a time: logits, or a row of the residual.
fn logit_floats(spec: &Spec, logit_rows: usize) -> usize {
    (logit_rows * spec.shape.vocab).max(spec.shape.streams * spec.shape.hidden)
}

/// What the engine itself keeps in memory.
fn place_buffers(plan: &mut Plan, model: &Model, spec: &Spec, logit_rows: usize) {
    let (vocab, sequences) = (spec.shape.vocab, spec.sequences);
    let logits = logit_floats(spec, logit_rows) * size_of::<f32>();
    plan.item(Category::Window, "logits on the host", Place::Heap, logits as u64);
    let each = Sampler::bytes(vocab.min(spec.context)) + Found::bytes();
    plan.item(Category::Window, "samplers", Place::Heap, (Scratch::bytes(vocab) + sequences * each) as u64);
    Lookup::describe(model, spec, plan);
}

/// The expert store, with experts copied to the heap tier's slots if there are any; and what keeps what it learns.
fn store(
    model: &Arc<Model>,
    lowered: &Lowered,
    homes: Homes,
    arena: &mut Arena,
    (readers, ranking): (&Readers, Option<RankingFile>),
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(Arc<ExpertStore>, Option<Keeper>), EngineError> {
    let Homes { copies, read } = homes;
    let mut blocks: Vec<Block<u8>> = Vec::new();
    for &(region, each) in &copies.regions {
        // A system that has none costs speed only.
        let _ = arena.ask_for_huge_pages(region);
        for slot in region.parts(each) {
            blocks.push(arena.take(slot)?);
        }
    }
    let watched = Arc::clone(model);
    let check = Box::new(move || watched.gguf.unchanged().map_err(|error| error.to_string()));
    let mut store = ExpertStore::new(blocks, check);
    for (layer, source, _) in &lowered.experts {
        store.add_layer(*layer, source.clone())?;
    }
    let learned = match read {
        Some(read) => read.load(model, lowered, arena, ranking, (&mut store, readers), progress)?,
        None => None,
    };
    let store = Arc::new(store);
    if !copies.experts.is_empty() {
        promote(model, lowered, &copies.experts, &store, readers, progress)?;
    }
    let keeper = learned.map(|(file, roster)| Keeper { file, roster, store: Arc::clone(&store) });
    Ok((store, keeper))
}

/// Experts that a reader takes at a time: consecutive ones, so that the file is read in long stretches.
const TAKEN: usize = 16;

/// Copies experts to the heap tier: by positioned reads, so that no page of the mapping becomes resident beside its copy, on as many
/// threads as there are readers. Whoever is told of the progress may end it.
fn promote(
    model: &Arc<Model>,
    lowered: &Lowered,
    ids: &[ExpertId],
    store: &Arc<ExpertStore>,
    readers: &Readers,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), EngineError> {
    let tensors: BTreeMap<u16, ExpertTensors> = lowered.experts.iter().map(|(l, _, t)| (*l, *t)).collect();
    let file = Arc::clone(model);
    let engine = Arc::new(HostCopy::new(Box::new(move |id, extent, out| {
        let tensor = &file.gguf.tensors()[tensors[&id.layer].index(extent.tensor)];
        file.gguf.read_at(tensor, extent.range.start as u64, out).map_err(|error| error.to_string())
    })));
    let (ids, next): (Arc<[ExpertId]>, _) = (ids.into(), Arc::new(AtomicUsize::new(0)));
    let (tell, told) = mpsc::channel();
    let mut threads = Vec::new();
    for _ in 0..readers.most.clamp(1, ids.len().div_ceil(TAKEN).max(1)) {
        let (ids, next, tell) = (Arc::clone(&ids), Arc::clone(&next), tell.clone());
        let (store, engine) = (Arc::clone(store), Arc::clone(&engine));
        let read = move || {
            loop {
                let from = next.fetch_add(TAKEN, Relaxed).min(ids.len());
                let taken = &ids[from..ids.len().min(from + TAKEN)];
                let done = store.promote_all(taken.iter().copied(), &*engine, |_| ControlFlow::Continue(()));
                // Where nobody listens any more, loading was ended.
                if taken.is_empty() || tell.send(done).is_err() {
                    return;
                }
            }
        };
        match (readers.spawn)("experts", Box::new(read)) {
            Ok(thread) => threads.push(thread),
            // Fewer read as well.
            Err(refused) if threads.is_empty() => return Err(EngineError::Thread(refused)),
            Err(_) => break,
        }
    }
    drop(tell);
    let lengths: BTreeMap<u16, usize> =
        lowered.experts.iter().map(|(layer, source, _)| (*layer, source.expert_bytes())).collect();
    let (mut bytes, of) = (0, ids.iter().map(|id| lengths[&id.layer] as u64).sum());
    let ended = told.iter().try_for_each(|done| {
        bytes += done?.bytes;
        match progress(Progress { bytes, of }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(EngineError::Cancelled),
        }
    });
    drop(told);
    next.store(ids.len(), Relaxed);
    for thread in threads {
        thread.join().unwrap_or_else(|panic| resume_unwind(panic));
    }
    ended
}
