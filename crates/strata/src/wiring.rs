//! From a configuration to a running engine: topology, pool, CPU backend, engine.
//!
//! Knows which rooms fit together and nothing of what they do. Steps run on a thread with the driver's role ([`on_driver`]);
//! threads that read files have theirs.

use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once, PoisonError};

use strata_cpu::{Cpu, CpuHostExperts, MEASURED, memory_rate};
use strata_cuda::driver::Device as Gpu;
use strata_cuda::{Cuda, ExpertCache, Room, Stagers};
use strata_engine::{Engine, EngineConfig, EngineError, ExpertHome, Planned, Readers};
use strata_model::Model;
use strata_plan::{Bytes, Category, Item, Limits, Place, Plan, PlanError, Rates};
use strata_topology::{Assignment, Role, Topology, refusal, spawn};

use crate::config::{Config, Device};
use crate::failure::{Failure, warn};
use crate::{interrupt, progress};

/// Threads that read a model's experts into memory, at most.
const MOST_READERS: usize = 8;

/// Threads that stage experts, at most, if not asked for more.
const MOST_STAGERS: usize = 12;

/// A backend not yet built.
enum Builder {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

/// This machine, and which threads go where on it.
pub struct Machine {
    assignment: Assignment,
    limits: Limits,
    notes: Vec<String>,
    /// All models in use.
    models: Mutex<Vec<Arc<Model>>>,
}

impl Machine {
    /// Looks at the machine.
    pub fn read(config: &Config) -> Result<Machine, Failure> {
        let topology = Topology::read();
        let mut notes = topology.notes().to_vec();
        if matches!(config.engine.experts, ExpertHome::Heap | ExpertHome::Budget(_))
            && topology.memory().huge_pages == Some(false)
        {
            notes.push(
                "experts in the heap are read more slowly than they could be: the system gives no huge pages \
                 (write `madvise` to /sys/kernel/mm/transparent_hugepage/enabled)"
                    .to_owned(),
            );
        }
        notes.iter().for_each(warn);
        let assigned = topology.assign(config.threads);
        let assignment =
            assigned.map_err(|why| Failure::usage(format!("{}: {why}", config.name("threads"))))?;
        tracing::info!("{assignment}");
        Ok(Machine { assignment, limits: limits(&topology, config), notes, models: Mutex::default() })
    }

    /// What memory there is.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// What could not be read of the machine and what is assumed for it; what it doesn't give; and that it refused to place a thread.
    pub fn notes(&self) -> Vec<String> {
        self.notes.iter().cloned().chain(refusal().map(ToString::to_string)).collect()
    }

    /// Which threads go where.
    pub fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.assignment.threads()
    }

    /// Opens a model and says what was odd about it.
    pub fn open(&self, path: &Path) -> Result<Arc<Model>, Failure> {
        let model = Arc::new(Model::open(path)?);
        self.models.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&model));
        for oddity in &model.warnings {
            warn(format_args!("{}: {oddity}", path.display()));
        }
        if !model.unused.is_empty() {
            tracing::info!("{}: {} tensors without a role here", path.display(), model.unused.len());
        }
        Ok(model)
    }

    fn cpu(&self, config: &Config) -> Cpu {
        Cpu::new(self.assignment.clone(), config.isa)
    }

    /// The backend-to-be that the configuration asks for, with a word on what has no effect there.
    fn builder(
        &self,
        model: &Arc<Model>,
        engine: &EngineConfig,
        config: &Config,
        asked: &Asked,
    ) -> Result<Builder, Failure> {
        let builder = self.choose(model, engine, config, asked)?;
        if let Builder::Cpu(_) = builder {
            let given = [
                ("cpu_experts", config.was_given("cpu_experts") && config.cpu_experts),
                ("ranking", config.was_given("ranking") && config.ranking && !budgeted(engine)),
                ("expert_cache", config.expert_cache != ExpertCache::Auto),
                ("stagers", config.was_given("stagers")),
                ("ring", config.was_given("ring")),
                ("vram_limit", config.was_given("vram_limit")),
                ("vram_reserve", config.was_given("vram_reserve")),
            ];
            // Once, however many models there are.
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                    warn(format_args!(
                        "{}: it has no effect, for all is computed on the CPU",
                        config.name(key)
                    ));
                }
            });
        }
        Ok(builder)
    }

    /// By default a GPU that everything but the experts fits.
    fn choose(
        &self,
        model: &Arc<Model>,
        engine: &EngineConfig,
        config: &Config,
        asked: &Asked,
    ) -> Result<Builder, Failure> {
        let number = match config.device {
            Device::Cpu => return Ok(Builder::Cpu(self.cpu(config))),
            Device::Auto => 0,
            Device::Cuda(number) => number,
        };
        let room = Room {
            limit: config.vram_limit,
            reserve: config.vram_reserve,
            expert_cache: config.expert_cache,
        };
        let open = || -> Result<Cuda, String> {
            let cuda = Cuda::new(&gpu(number)?, room).map_err(|error| error.to_string())?;
            let cuda = match config.ranking {
                true => {
                    let identity = model.fingerprint().map_err(|error| error.to_string())?;
                    cuda.with_ranking(ranking_of(model), identity.to_le_bytes().to_vec())
                }
                false => cuda,
            };
            let cuda = cuda.with_stagers(self.stagers(config));
            Ok(match config.cpu_experts {
                true => cuda.with_host(Box::new(CpuHostExperts(self.cpu(config))), None),
                false => cuda,
            })
        };
        if config.device != Device::Auto {
            let cuda = open().map_err(|why| Failure::failed(format!("{}: {why}", config.name("device"))))?;
            return Ok(Builder::Cuda(Box::new(cuda)));
        }
        let why = match open() {
            Ok(cuda) => {
                let fits = match Engine::plan(model, engine, &self.limits, &cuda) {
                    Ok(planned) => planned.check(&self.limits).map_err(|short| short.to_string()),
                    Err(error) => return Err(asked.refused(error)),
                };
                let Err(short) = fits else { return Ok(Builder::Cuda(Box::new(cuda))) };
                warn(format_args!("the GPU is not used: {short}"));
                return Ok(Builder::Cpu(self.cpu(config)));
            }
            Err(why) => why,
        };
        match Gpu::all() {
            // Somebody has one, and would wonder.
            Ok(gpus) if !gpus.is_empty() => warn(format_args!("the GPU is not used: {why}")),
            _ => tracing::info!("the GPU is not used: {why}"),
        }
        Ok(Builder::Cpu(self.cpu(config)))
    }

    /// Threads that stage experts. They sleep where there is nothing to copy or no buffer is free.
    fn stagers(&self, config: &Config) -> Stagers {
        let set = self.assignment.set(Role::Io).clone();
        let most = config.stagers.unwrap_or(set.len().min(MOST_STAGERS));
        let bytes = usize::try_from(config.ring).unwrap_or(usize::MAX);
        Stagers { spawn: Box::new(move |name, work| spawn(Role::Io, &set, name, work)), most, bytes }
    }

    fn readers(&self) -> Readers {
        let set = self.assignment.set(Role::Io).clone();
        // More don't read faster, but take the machine's cores.
        let most = set.len().min(MOST_READERS);
        Readers { spawn: Box::new(move |name, work| spawn(Role::Io, &set, name, work)), most }
    }

    /// Plans a model without allocating anything.
    pub fn plan(&self, model: &Arc<Model>, config: &Config, asked: &Asked) -> Result<Planned, Failure> {
        let planned = match self.builder(model, &config.engine, config, asked)? {
            Builder::Cpu(cpu) => Engine::plan(model, &config.engine, &self.limits, &cpu),
            Builder::Cuda(cuda) => Engine::plan(model, &config.engine, &self.limits, &*cuda),
        };
        let planned = planned.map_err(|error| asked.refused(error))?;
        note_mapped(&planned.plan, config);
        Ok(planned)
    }

    /// The rates at which this machine reads what was planned, as far as they are known. Host memory's is measured, where there are threads and room for
    /// that.
    pub fn rates(&self, planned: &Planned, config: &Config) -> Rates {
        let number = if let Device::Cuda(number) = config.device { number } else { 0 };
        let gpu = planned.device.as_ref().and_then(|_| gpu(number).ok());
        let device = gpu.as_ref().map(|gpu| gpu.memory_rate as f64).filter(|rate| *rate > 0.0);
        let link = gpu.as_ref().and_then(Gpu::link_rate);
        let room = self.limits.available / 4 > MEASURED as u64;
        let host = room.then(|| memory_rate(&self.assignment).ok().flatten()).flatten();
        Rates { host, device, link }
    }

    /// Loads a model, with a progress bar over what has to be copied. `engine` may differ from the configuration's own, and
    /// has the context that was `asked` for.
    pub fn load(
        &self,
        model: Arc<Model>,
        engine: &EngineConfig,
        config: &Config,
        asked: &Asked,
    ) -> Result<Engine, Failure> {
        let mut bar = None;
        let mut observe = |loaded: strata_engine::Progress| {
            let bar = bar.get_or_insert_with(|| progress::bytes(config.quiet, loaded.of, "loading"));
            bar.set_position(loaded.bytes);
            if interrupt::raised() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let (limits, readers) = (&self.limits, self.readers());
        let ranking = (config.ranking && budgeted(engine)).then(|| ranking_of(&model));
        let engine = &EngineConfig { ranking, ..engine.clone() };
        let loaded = match self.builder(&model, engine, config, asked)? {
            Builder::Cpu(cpu) => Engine::load(model, engine, limits, cpu, readers, &mut observe),
            Builder::Cuda(cuda) => Engine::load(model, engine, limits, *cuda, readers, &mut observe),
        };
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        if interrupt::raised() {
            return Err(Failure::Interrupted);
        }
        let loaded = loaded.map_err(|error| asked.refused(error))?;
        note_mapped(loaded.planned(), config);
        Ok(loaded)
    }

    /// Why work failed: if a model's file has changed meanwhile, then that is why, whatever it led to.
    fn reason(&self, failure: Failure) -> Failure {
        let Failure::Failed(_) = failure else { return failure };
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        match models.iter().try_for_each(|model| model.gguf.unchanged()).map_err(Failure::from) {
            Err(changed @ Failure::Changed(_)) => changed,
            _ => failure,
        }
    }
}

/// Whether memory holds a part of the experts.
fn budgeted(engine: &EngineConfig) -> bool {
    matches!(engine.experts, ExpertHome::Budget(_))
}

/// Where what is learned of a model's experts is kept: beside its first file, under that name and `.experts`.
fn ranking_of(model: &Model) -> PathBuf {
    let first = model.gguf.shards().first().map_or(model.gguf.path(), |shard| &shard.path);
    let mut name = first.as_os_str().to_owned();
    name.push(".experts");
    name.into()
}

/// The GPU of this number.
pub fn gpu(number: usize) -> Result<Gpu, String> {
    let devices = Gpu::all().map_err(|error| error.to_string())?;
    let count = devices.len();
    let device = devices.into_iter().nth(number);
    device.ok_or(format!("no GPU has the number {number}; there are {count}"))
}

/// How a command came to the context of its sequences.
pub struct Asked {
    /// The flag or setting that asks for it; none where it is as long as what there is to read.
    pub with: Option<String>,
    /// What makes it shorter, as advice.
    pub less: &'static str,
}

impl Asked {
    /// Asked with the setting itself.
    pub fn setting(config: &Config) -> Asked {
        Asked { with: Some(config.name("context")), less: "lower --context" }
    }

    /// Asked with flags of the command's own.
    pub fn with(flags: &str, less: &'static str) -> Asked {
        Asked { with: Some(flags.to_owned()), less }
    }

    /// Why a model is not planned or loaded: whose mistake it is, and what to do about it.
    fn refused(&self, error: EngineError) -> Failure {
        match (error, &self.with) {
            (error @ EngineError::Context { .. }, Some(with)) => Failure::usage(format!("{with}: {error}")),
            (EngineError::Plan(error), _) => self.too_large(&error),
            (error, _) => error.into(),
        }
    }

    /// That a plan doesn't fit, and which flags would make it smaller, the most promising first.
    pub fn too_large(&self, error: &PlanError) -> Failure {
        let mut worth: Vec<(&str, u64)> = Vec::new();
        for &(category, bytes) in &error.categories {
            let advice = match category {
                Category::Cache => self.less,
                Category::Window | Category::Scratch => "lower --window",
                Category::Experts if error.place == Place::Device => "give --device cpu",
                // The name that the engine's plan has for them.
                Category::Experts if error.biggest.iter().any(|line| line.name == "resident experts") => {
                    "lower --resident-budget"
                }
                Category::Experts => "give --experts mapped",
                Category::Weights | Category::Table | Category::Recurrent => continue,
            };
            match worth.iter_mut().find(|(known, _)| *known == advice) {
                Some((_, sum)) => *sum = sum.saturating_add(bytes),
                None => worth.push((advice, bytes)),
            }
        }
        worth.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        let advice: Vec<&str> = worth.into_iter().map(|(advice, _)| advice).collect();
        let lead = if advice.is_empty() { "" } else { "; " };
        Failure::failed(format!("{error}{lead}{}", advice.join(", or ")))
    }
}

/// What the plan is checked against.
fn limits(topology: &Topology, config: &Config) -> Limits {
    let memory = topology.memory();
    let group_is_tighter = memory.available.is_none_or(|machine| memory.usable() < Some(machine));
    let (available, total, source) = match (memory.usable(), group_is_tighter) {
        (None, _) => (u64::MAX, u64::MAX, "nothing known"),
        (Some(available), true) => (available, memory.ceiling().unwrap_or(available), "the control group"),
        (Some(available), false) => (available, memory.ceiling().unwrap_or(available), "this machine"),
    };
    match config.ram_limit {
        Some(limit) if limit < available => {
            Limits { available: limit, total: total.min(limit), source: config.name("ram_limit") }
        }
        _ => Limits { available, total, source: source.into() },
    }
}

/// Says so if the experts that a GPU leaves stay in the file though nobody asked for that.
fn note_mapped(plan: &Plan, config: &Config) {
    let experts = |item: &&Item| item.category == Category::Experts && item.place == Place::Mapped;
    let mapped: u64 = plan.items().iter().filter(experts).map(|item| item.bytes).sum();
    if config.engine.experts == ExpertHome::Auto && plan.device_bytes() > 0 && mapped > 0 {
        warn(format_args!(
            "memory has no room for the {} of experts that the GPU leaves: they stay in the file, and the page cache decides which of them are read again",
            Bytes(mapped)
        ));
    }
}

/// Runs `work` on a thread of its own that has the driver's role, and waits for it.
pub fn on_driver<T: Send + 'static>(
    machine: Machine,
    work: impl FnOnce(&Machine) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let set = machine.assignment.set(Role::Driver).clone();
    let thread = spawn(Role::Driver, &set, "driver", move || {
        work(&machine).map_err(|failure| machine.reason(failure))
    })
    .map_err(|error| Failure::failed(format!("the system refuses a thread: {error}")))?;
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use strata_plan::Plan;

    use super::*;

    fn sentence(plan: &Plan, asked: &Asked) -> String {
        let limits = Limits { available: 100, total: 200, source: "the test".into() };
        asked.too_large(&plan.check(&limits).unwrap_err()).to_string()
    }

    /// Oracle: the flags that each command has, by what they are worth in all.
    #[test]
    fn a_plan_that_does_not_fit_says_what_to_do() {
        let mut plan = Plan::new();
        plan.item(Category::Cache, "keys", Place::Heap, 300);
        plan.item(Category::Window, "residual", Place::Heap, 200);
        plan.item(Category::Recurrent, "states", Place::Heap, 900);
        let context = Asked::with("--context", "lower --context");
        let said = sentence(&plan, &context);
        assert!(said.ends_with("; lower --context, or lower --window"), "{said}");
        plan.item(Category::Scratch, "workers", Place::Heap, 200);
        plan.item(Category::Experts, "routed experts", Place::Heap, 350);
        plan.item(Category::Experts, "more of them", Place::Mapped, 900);
        let said = sentence(&plan, &Asked { with: None, less: "give fewer --ids" });
        assert!(said.ends_with("; lower --window, or give --experts mapped, or give fewer --ids"), "{said}");
        let mut beside = Plan::new();
        beside.item(Category::Experts, "routed experts", Place::Heap, 900);
        beside.device(Category::Weights, "dense weights", 1);
        let said = sentence(&beside, &context);
        assert!(said.ends_with("; give --experts mapped"), "{said}");
        let mut budgeted = Plan::new();
        budgeted.item(Category::Experts, "resident experts", Place::Heap, 900);
        assert!(sentence(&budgeted, &context).ends_with("; lower --resident-budget"));
        let mut states = Plan::new();
        states.item(Category::Recurrent, "states", Place::Heap, 900);
        let said = sentence(&states, &context);
        assert!(said.contains("states (recurrent)") && !said.contains("lower"), "{said}");
    }
}
