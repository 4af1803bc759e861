//! What becomes of a driver's failures, on a driver that fails when it is told to ([`crate::driver::fake`]).

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use strata_backend::{
    Backend, BackendError, BuildHostExperts, ExpertWeights, GroupedRows, HostExperts, Layer, Op, Spec,
};
use strata_engine::{
    BEYOND, Engine, EngineConfig, EngineError, Event, ExpertHome, Readers, Reason, Request, Sampling, Wants,
};
use strata_model::Model;
use strata_plan::{Arena, Category, Limits, Place, Plan, Region};
use strata_residency::ExpertStore;
use strata_testkit::golden;
use strata_topology::{Role, Topology, spawn};

use crate::driver::{Device, fake};
use crate::{Cuda, Exchanges, ExpertCache, Room, Stagers};

/// The tiny model on the fake GPU.
fn load(room: Room) -> Result<Engine, String> {
    load_with(room, Exchanges::Learned)
}

fn load_with(room: Room, exchanges: Exchanges) -> Result<Engine, String> {
    load_by(room, |cuda| cuda.with_exchanges(exchanges))
}

fn load_by(room: Room, with: impl FnOnce(Cuda) -> Cuda) -> Result<Engine, String> {
    load_from(ExpertHome::Auto, room, with)
}

fn load_from(experts: ExpertHome, room: Room, with: impl FnOnce(Cuda) -> Cuda) -> Result<Engine, String> {
    load_file(&golden::dir().join("tiny/tiny.gguf"), experts, room, with)
}

fn load_file(
    path: &Path,
    experts: ExpertHome,
    room: Room,
    with: impl FnOnce(Cuda) -> Cuda,
) -> Result<Engine, String> {
    let cuda = Device::all().map_err(|error| error.to_string())?;
    let cuda = with(Cuda::new(&cuda[0], room).map_err(|error| error.to_string())?);
    let config = EngineConfig {
        window: Some(40),
        context: Some(64),
        sequences: 2,
        draft: true,
        experts,
        ..EngineConfig::default()
    };
    let model = Arc::new(Model::open(path).unwrap());
    let limits = Limits { available: 4 << 30, total: 4 << 30, source: "the test".into() };
    let io = Topology::uniform(1).assign(Some(1)).unwrap().set(Role::Io).clone();
    let readers = Readers { spawn: Box::new(move |name, work| spawn(Role::Io, &io, name, work)), most: 1 };
    let go_on = &mut |_| ControlFlow::Continue(());
    Engine::load(model, &config, &limits, cuda, readers, go_on).map_err(|error| error.to_string())
}

/// Two sequences that answer, then a fork and a way back, and one more prompt. The first sentence of what failed, and whether every request ended.
fn work(engine: &mut Engine) -> Result<(), String> {
    let said = |error: EngineError| error.to_string();
    let (one, two) = (engine.open().map_err(said)?, engine.open().map_err(said)?);
    for (seq, prompt) in [(one, vec![5; 44]), (two, vec![7, 8])] {
        let request = Request { max_tokens: Some(8), ..Request::new(prompt, Sampling::greedy(), &[]) };
        engine.submit(seq, request).map_err(said)?;
    }
    let (mut ends, mut steps, mut why) = (0, 0, None);
    while engine.is_busy() {
        steps += 1;
        assert!(steps < 100, "the requests don't end");
        for event in engine.step() {
            if let Event::Done { reason, .. } = event {
                ends += 1;
                if let Reason::Failed(reason) = reason {
                    why.get_or_insert(reason);
                }
            }
        }
    }
    assert_eq!(ends, 2);
    why.map_or(Ok(()), Err)?;
    engine.close(two).map_err(said)?;
    let fork = engine.fork(one).map_err(said)?;
    engine.rewind(one, &[5, 5, 5]).map_err(said)?;
    engine.forward(one, &[1, 2, 3], Wants::All, &mut |_, _| ()).map_err(said)?;
    engine.save(fork).map_err(said)?;
    // Experts may have moved since the last wide window.
    engine.close(fork).map_err(said)?;
    let last = engine.open().map_err(said)?;
    engine.forward(last, &[9; 40], Wants::Last, &mut |_, _| ()).map_err(said)?;
    Ok(())
}

/// Oracle: each call in turn fails, for good or once. Whatever it is, there is a sentence with its name, every request ends, nothing panics
/// or waits, and all that was made is given back. After a single failure the next engine works.
#[test]
fn every_call_may_fail() {
    fake::install();
    // Some experts come from memory, and change places.
    let room = Room { expert_cache: ExpertCache::Experts(9), ..Room::default() };
    let load = |room| load_with(room, Exchanges::Forced(3));
    let mut engine = load(room).unwrap();
    work(&mut engine).unwrap();
    let count = engine.take_counters().experts().unwrap();
    assert!(count.exchanged > 10, "{count:?}");
    drop(engine);
    let all = fake::with(|state| state.calls);
    assert!(all > 500 && fake::with(|state| state.alive()) == (0, 0, 0), "{all}");
    let (mut failed, mut ignored) = (0, std::collections::BTreeSet::new());
    for lasting in [true, false] {
        // All of the first calls, which are the ones of a kind, and every twenty-third after them.
        for at in (2..=all).filter(|at| *at < 40 || at % 23 == 0) {
            fake::install();
            fake::with(|state| state.fails = Some((state.calls + at, 700, lasting)));
            let ended = load(room).and_then(|mut engine| work(&mut engine));
            let call = fake::with(|state| state.failed);
            match (ended, call) {
                (Err(why), Some(_)) => {
                    failed += 1;
                    assert!(why.contains("`cu") && why.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{at}: {why}");
                    assert!(why.contains("lost") && why.contains("start the program again"), "{at}: {why}");
                }
                (Ok(()), call) => drop(ignored.insert(call)),
                (Err(why), None) => panic!("{at}: {why}"),
            }
            assert_eq!(fake::with(|state| state.alive()), (0, 0, 0), "left over after call {at}, {call:?}");
        }
    }
    // What is given back has no answer that counts, nor whether all is done then; flags are a wish.
    ignored.remove(&None);
    let may = [
        "destroy",
        "free",
        "free_host",
        "unregister_host",
        "stream_query",
        "context_release",
        "context_flags",
        "graph_destroy",
    ];
    assert!(failed > 100 && ignored.iter().flatten().all(|call| may.contains(call)), "{ignored:?}");
}

/// Two of them, with one buffer.
fn stagers() -> Stagers {
    let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.to_owned()).spawn(work)
    };
    Stagers { spawn: Box::new(start), most: 2, bytes: 1 }
}

/// Two wide windows.
fn windows(engine: &mut Engine) -> Result<(), EngineError> {
    for _ in 0..2 {
        let seq = engine.open()?;
        let read = engine.forward(seq, &[5; 40], Wants::Last, &mut |_, _| ());
        engine.close(seq)?;
        read?;
    }
    Ok(())
}

/// Oracle: as above, for experts that stay in the file and come to wide windows through other threads, whose calls don't fail: whatever fails here, nobody
/// is left waiting, and after it the next window works.
#[test]
fn staging_ends_with_whatever_fails() {
    // By a budget that holds some, and through the mapping.
    for experts in [ExpertHome::Budget(600 << 10), ExpertHome::Mapped] {
        ends_with_whatever_fails(experts, |cuda| cuda.with_stagers(stagers()));
    }
}

/// Oracle: the same, for windows of which the host computes a half.
#[test]
fn helping_ends_with_whatever_fails() {
    ends_with_whatever_fails(ExpertHome::Auto, |cuda| cuda.with_host(Box::new(Nobody), Some(8)));
}

fn ends_with_whatever_fails(experts: ExpertHome, with: fn(Cuda) -> Cuda) {
    let load = || {
        let room = Room { expert_cache: ExpertCache::Experts(9), ..Room::default() };
        load_from(experts, room, with)
    };
    fake::install();
    let mut engine = load().unwrap();
    let loaded = fake::with(|state| state.calls);
    windows(&mut engine).unwrap();
    drop(engine);
    let all = fake::with(|state| state.calls);
    assert!(all > loaded + 100 && fake::with(|state| state.alive()) == (0, 0, 0), "{loaded} and {all}");
    for at in (2..=all).filter(|at| at % 7 == 0 || (loaded..loaded + 40).contains(at)) {
        fake::install();
        fake::with(|state| state.fails = Some((state.calls + at, 700, false)));
        if let Ok(mut engine) = load()
            && windows(&mut engine).is_err()
        {
            windows(&mut engine).unwrap();
        }
        let call = fake::with(|state| state.failed);
        assert_eq!(fake::with(|state| state.alive()), (0, 0, 0), "left over after call {at}, {call:?}");
    }
}

/// Oracle: arithmetic. Of experts without a slot a budget has copies of the most used that fit beside what reading takes, and the others stay in the file; with a
/// byte less it holds one expert less, and with room for all it is as the heap. Where nobody on the host computes, there are no slots for tours.
#[test]
fn a_budget_holds_what_fits_beside_reading() {
    fake::install();
    // 40 experts, of three parts of 8 KiB; two of a row are used.
    let (copy, read) = (3 * (8 << 10), 3 * (12 << 10));
    let room = Room { expert_cache: ExpertCache::Experts(9), ..Room::default() };
    let of = |engine: &Engine, place, name: &str| -> u64 {
        let items = engine.planned().items().iter();
        items.filter(|item| item.place == place && item.name == name).map(|item| item.bytes).sum()
    };
    for (computes, slots) in [(false, 0), (true, 2 * 2 * 2 + 2)] {
        let load = |experts| {
            let with = |cuda: Cuda| match computes {
                true => cuda.with_stagers(stagers()).with_host(Box::new(Nobody), None),
                false => cuda.with_stagers(stagers()),
            };
            load_from(experts, room, with).unwrap()
        };
        let aside = read * (slots + 2);
        for (budget, copies) in
            [(aside + 5 * copy, 5), (aside + 5 * copy - 1, 4), (1, 0), (31 * copy - 1, u64::MAX)]
        {
            let engine = load(ExpertHome::Budget(budget));
            let copies = copies.min((budget.saturating_sub(aside)) / copy);
            let got = ["resident experts", "experts being read", "experts being staged", "routed experts"]
                .map(|name| of(&engine, Place::Heap, name));
            assert_eq!(got, [copies * copy, slots * read, 2 * read, 0], "{budget}");
            assert_eq!(of(&engine, Place::File, BEYOND), (31 - copies) * copy, "{budget}");
            assert_eq!(of(&engine, Place::File, "routed experts"), 9 * copy);
            assert_eq!(engine.planned().bytes(Place::Mapped), 0);
        }
        let (all, heap) = (load(ExpertHome::Budget(31 * copy)), load(ExpertHome::Auto));
        assert_eq!(all.planned().lines(), heap.planned().lines());
    }
    // All on the GPU.
    let all = load_from(ExpertHome::Budget(1), Room::default(), |cuda| cuda).unwrap();
    assert_eq!(of(&all, Place::File, BEYOND), 0);
}

/// Who would compute on the host.
struct Nobody;

impl BuildHostExperts for Nobody {
    fn describe(&self, _: &Spec, plan: &mut Plan) -> Region {
        plan.heap(Category::Scratch, "nobody", 0)
    }

    fn build(
        self: Box<Self>,
        _: &Spec,
        _: Region,
        _: &mut Arena,
        _: Arc<ExpertStore>,
    ) -> Result<Box<dyn HostExperts>, BackendError> {
        Ok(self)
    }
}

impl HostExperts for Nobody {
    fn begin_step(&mut self) {}

    fn rouse(&mut self) {}

    fn end_step(&mut self) {}

    fn outputs(
        &mut self,
        _: Layer,
        _: &ExpertWeights,
        _: &[u32],
        _: &[f32],
        _: &mut [f32],
    ) -> Result<(), BackendError> {
        Ok(())
    }

    fn grouped(
        &mut self,
        _: Layer,
        _: &ExpertWeights,
        _: GroupedRows<'_>,
        _: &mut [f32],
    ) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Oracle: the sentence, the counts, and the next window. The file is cut off in the middle of a window whose experts stagers read: it ends with tensor, expert and
/// file, and with the file whole again everything goes on.
#[test]
fn a_file_cut_off_under_stagers_fails_the_window() {
    fake::install();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let whole = std::fs::read(golden::dir().join("tiny/tiny.gguf")).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    // Behind the table, whose rows are read too.
    let model = Model::open(&path).unwrap();
    let last = model.gguf.tensors().iter().find(|tensor| tensor.name == "blk.3.ffn_down_exps.weight");
    let last = last.unwrap().offset;
    let room = Room { expert_cache: ExpertCache::Experts(9), ..Room::default() };
    let load = || load_file(&path, ExpertHome::Budget(400 << 10), room, |cuda| cuda.with_stagers(stagers()));
    let mut engine = load().unwrap();
    windows(&mut engine).unwrap();
    let reads = engine.take_counters().reads().unwrap();
    assert!(
        reads.read > 0 && reads.read == reads.used && reads.bytes == reads.read * (24 << 10),
        "{reads:?}"
    );
    let cut = file.try_clone().unwrap();
    engine.set_probe(Some(Box::new(move |op: &Op<'_>, _: &mut dyn Backend| {
        if matches!(op, Op::Embed { .. }) {
            cut.set_len(last).unwrap();
        }
    })));
    let why = windows(&mut engine).unwrap_err().to_string();
    for part in ["could not be read: tensor `blk.3.ffn_", "_exps.weight`", "model.gguf became shorter"] {
        assert!(why.contains(part), "no `{part}` in {why}");
    }
    engine.set_probe(None);
    std::os::unix::fs::FileExt::write_all_at(&file, &whole, 0).unwrap();
    file.set_modified(modified).unwrap();
    windows(&mut engine).unwrap();
}

/// Oracle: by hand, a sentence for each way in which a GPU can't be had.
#[test]
fn what_cannot_be_had_is_said() {
    let says = |set: &dyn Fn(&mut fake::State), room: Room, parts: &[&str]| {
        fake::with(set);
        fake::install();
        let why = load(room).err().unwrap();
        parts.iter().for_each(|part| assert!(why.contains(part), "no `{part}` in {why}"));
        fake::with(|state| (state.fails, state.refuses) = (None, None));
    };
    let refuses =
        |call: &'static str, code| move |state: &mut fake::State| state.refuses = Some((call, code));
    let room = Room::default();
    let few = Room { limit: Some(1 << 20), ..Room::default() };
    says(&|_| (), few, &["cuda:0", "1 MiB of 1 MiB"]);
    says(
        &refuses("module_load", 209),
        room,
        &["no kernels for a GPU of compute capability 0.0", "CUDA_ARCHS=00"],
    );
    says(&refuses("allocate", 2), room, &["MiB of its memory are needed, of which", "out of memory"]);
    says(&refuses("allocate_host", 2), room, &["out of memory", "`cuMemHostAlloc`"]);
    says(&refuses("context_retain", 700), room, &["lost", "`cuDevicePrimaryCtxRetain`"]);
}

/// Oracle: the driver's documented answer where there is no GPU, and one where it can't start.
#[test]
fn a_driver_that_does_not_start_is_said() {
    for (code, part) in [(100, "the NVIDIA driver shows no GPU"), (999, "does not start: error 999")] {
        let why = std::thread::spawn(move || {
            fake::with(|state| state.refuses = Some(("init", code)));
            fake::install();
            load(Room::default()).err().unwrap()
        });
        let why = why.join().unwrap();
        assert!(why.contains(part), "{why}");
    }
}

/// Oracle: by hand. Where all experts are in memory anyway, nothing is exchanged, and all goes well.
#[test]
fn experts_that_are_in_memory_anyway_stay() {
    fake::install();
    let room = Room { expert_cache: ExpertCache::Experts(9), ..Room::default() };
    for (experts, moves) in [(ExpertHome::Heap, false), (ExpertHome::Auto, true)] {
        let with = |cuda: Cuda| cuda.with_exchanges(Exchanges::Forced(1));
        let mut engine = load_from(experts, room, with).unwrap();
        work(&mut engine).unwrap();
        assert_eq!(engine.take_counters().experts().unwrap().exchanged > 0, moves);
    }
}

/// Oracle: the plan. Experts that memory has no room for stay in the file; with a little more they are in memory.
#[test]
fn experts_that_memory_has_no_room_for_stay_in_the_file() {
    fake::install();
    let room = Room { expert_cache: ExpertCache::Experts(2), ..Room::default() };
    let cuda = || Cuda::new(&Device::all().unwrap()[0], room).unwrap();
    let model = Arc::new(Model::open(&golden::dir().join("tiny/tiny.gguf")).unwrap());
    let config = EngineConfig { window: Some(40), context: Some(64), ..EngineConfig::default() };
    let plan = |available| {
        let limits = Limits { available, total: available, source: "the test".into() };
        let planned = Engine::plan(&model, &config, &limits, &cuda()).unwrap();
        let experts = |place| -> u64 {
            let of = |item: &&strata_plan::Item| item.place == place && item.name == "routed experts";
            planned.plan.items().iter().filter(of).map(|item| item.bytes).sum()
        };
        (
            planned.plan.bytes(Place::Heap),
            experts(Place::Heap),
            experts(Place::Mapped),
            planned.check(&limits).is_ok(),
        )
    };
    let (all, heap, mapped, fits) = plan(4 << 30);
    assert!(fits && heap > 0 && mapped == 0);
    assert_eq!(plan(all), (all, heap, 0, true));
    let (less, none, mapped, fits) = plan(all - 1);
    assert!(fits && none == 0 && mapped > 0 && less < all, "{less} of {all}, {mapped} mapped");
}

/// Oracle: the file system. What steps taught is written where not all experts have room, and nowhere else; a file that is damaged is replaced,
/// and a folder that can't be had is no reason to fail.
#[test]
fn what_is_learned_is_kept() {
    fake::install();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf.experts");
    let some = Room { expert_cache: ExpertCache::Experts(5), ..Room::default() };
    let load = |room, path: &Path| {
        load_by(room, |cuda| cuda.with_ranking(path.to_owned(), b"tiny".to_vec())).unwrap()
    };
    work(&mut load(Room::default(), &path)).unwrap();
    let mut engine = load(some, &path);
    let seq = engine.open().unwrap();
    engine.forward(seq, &[5; 40], Wants::Last, &mut |_, _| ()).unwrap();
    engine.close(seq).unwrap();
    drop(engine);
    assert!(!path.exists());
    work(&mut load(some, &path)).unwrap();
    let written = std::fs::read(&path).unwrap();
    std::fs::write(&path, &written[..20]).unwrap();
    work(&mut load(some, &path)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap().len(), written.len());
    work(&mut load(some, &folder.path().join("nowhere/tiny.gguf.experts"))).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Oracle: arithmetic. An expert lives in a slot or in memory, not in both; the plan says which, and everything works from there.
#[test]
fn experts_live_in_one_place() {
    fake::install();
    let bytes = |engine: &Engine, place| -> (u64, u64) {
        let experts = engine.planned().items().iter().filter(|item| item.category == Category::Experts);
        let of = |name: &str| {
            let named = experts.clone().filter(|item| item.place == place && item.name == name);
            named.map(|item| item.bytes).sum()
        };
        (of("routed experts"), of("expert slots"))
    };
    let mut all = load(Room::default()).unwrap();
    let (file, _) = bytes(&all, Place::File);
    assert!(file > 0 && bytes(&all, Place::Heap).0 == 0);
    work(&mut all).unwrap();
    assert_eq!(all.take_counters().experts(), None);
    let (_, slots) = bytes(&all, Place::Device);
    for kept in [0, 1, 5] {
        let room = Room { expert_cache: ExpertCache::Experts(kept), ..Room::default() };
        let mut engine = load(room).unwrap();
        let (heap, device) = (bytes(&engine, Place::Heap).0, bytes(&engine, Place::Device).1);
        assert_eq!(heap + device, slots, "{kept} on the GPU");
        assert!((kept == 0) == (device == 0) && bytes(&engine, Place::File).0 < file);
        work(&mut engine).unwrap();
        // On this GPU the first expert of each layer is chosen by all rows of all steps; slots begin with these.
        let count = engine.take_counters().experts().unwrap();
        let layers = engine.model().hyper.layers.len() as u64;
        assert!(count.used > 0 && count.used.is_multiple_of(layers), "{count:?}");
        assert_eq!(count.resident * layers, count.used * layers.min(kept as u64), "{count:?}");
    }
}
