//! Whole models on whatever GPU is here. Oracle: the CPU backend, bit for bit, op by op. Without a GPU, or in a build without kernels, the
//! tests say so and pass.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use strata_backend::{Backend, Build, KvFormat, Op};
use strata_cpu::Cpu;
use strata_cuda::driver::Device;
use strata_cuda::{Cuda, Room};
use strata_engine::{Engine, EngineConfig, Event, Request, Sampling, Wants};
use strata_model::Model;
use strata_plan::Limits;
use strata_quant::{Format, Isa};
use strata_synth::{Geometry, Mix, Options};
use strata_testkit::golden::{self, Npz};
use strata_topology::{Role, Topology};

/// The first GPU, with this build's kernels, or a line that says why there is none.
fn gpu() -> Option<Cuda> {
    let open = || -> Result<_, Box<dyn std::error::Error>> {
        let devices = Device::all()?;
        Ok(Cuda::new(devices.first().ok_or("the driver shows no GPU")?, Room::default())?)
    };
    // Not `eprintln!`: the test harness would swallow it.
    open().inspect_err(|error| drop(writeln!(std::io::stderr(), "SKIPPED: {error}"))).ok()
}

fn cpu() -> Cpu {
    Cpu::new(Topology::read().assign(Some(2)).unwrap(), Isa::detect())
}

fn engine(path: &Path, config: &EngineConfig, builder: impl Build) -> Engine {
    let model = Arc::new(Model::open(path).unwrap());
    let limits = Limits { available: 4 << 30, total: 4 << 30, source: "the test".into() };
    let io = Topology::read().assign(Some(1)).unwrap().set(Role::Io).clone();
    let spawn = Box::new(move |f: Box<dyn FnOnce() + Send>| strata_topology::spawn(Role::Io, &io, "rows", f));
    Engine::load(model, config, &limits, builder, spawn, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// What an op wrote: its family's name and the values.
type Written = (String, Vec<f32>);

/// What ops write, while windows of up to `rows` rows run.
fn written(op: &Op<'_>, backend: &mut dyn Backend, sizes: [usize; 3]) -> Written {
    let [wide, hidden, vocab] = sizes;
    let rows_of = |spans: &[strata_backend::Span]| spans.iter().map(|span| span.rows).sum::<usize>();
    let buffers = match op {
        Op::Embed { tokens, x, .. } => vec![(*x, tokens.len() * wide)],
        Op::Ngram { spans, x, .. } => vec![(*x, rows_of(spans) * wide)],
        Op::MixerRead { rows, u, inject, .. } => vec![(*u, rows * hidden), (*inject, rows * (wide / hidden))],
        Op::MixerWrite { rows, x, .. } => vec![(*x, rows * wide)],
        Op::Gdn { spans, y, .. } | Op::Qsa { spans, y, .. } => vec![(*y, rows_of(spans) * hidden)],
        Op::Combine { rows, y, .. } => vec![(*y, rows * hidden)],
        Op::Head { rows, logits, .. } => vec![(*logits, rows.len() * vocab)],
        Op::DraftJoin { next, out, .. } => vec![(*out, next.len() * wide)],
        Op::Route { .. } | Op::Group { .. } | Op::Experts { .. } => vec![],
    };
    let mut values = Vec::new();
    for (buffer, len) in buffers {
        let at = values.len();
        values.resize(at + len, 0.0);
        backend.read(buffer, 0, &mut values[at..]).unwrap();
    }
    (op.family().name().to_owned(), values)
}

/// Runs the same tokens on both, and compares what every op writes, and the state in the end.
fn compare(path: &Path, config: &EngineConfig, tokens: &[u32], decoded: usize) {
    let Some(gpu) = gpu() else { return };
    let hyper = Model::open(path).unwrap().hyper;
    let sizes = [hyper.streams * hyper.width, hyper.width, hyper.vocab];
    let what = path.file_name().unwrap().to_string_lossy().into_owned();
    let run = |mut engine: Engine, probe: Box<dyn FnMut(Written) + Send>| {
        let probe = Mutex::new(probe);
        engine.set_probe(Some(Box::new(move |op, backend| {
            (probe.lock().unwrap())(written(op, backend, sizes));
        })));
        let seq = engine.open().unwrap();
        let (prompt, rest) = tokens.split_at(tokens.len() - decoded);
        engine.forward(seq, prompt, Wants::All, &mut |_, _| {}).unwrap();
        for token in rest.chunks(1) {
            engine.forward(seq, token, Wants::Last, &mut |_, _| {}).unwrap();
        }
        engine.save(seq).unwrap()
    };
    let expected = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&expected);
    let theirs = run(engine(path, config, cpu()), Box::new(move |written| to.lock().unwrap().push(written)));
    let expected = std::mem::take(&mut *expected.lock().unwrap());
    let mut ops = expected.into_iter().enumerate();
    let ours = run(
        engine(path, config, gpu),
        Box::new(move |(family, ours)| {
            let (i, (_, theirs)) = ops.next().expect("as many ops");
            assert_eq!(ours.len(), theirs.len(), "{what}: op {i}, {family}");
            for (at, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(same, "{what}: op {i}, {family}: value {at} of {} is {a:e}, not {b:e}", ours.len());
            }
        }),
    );
    assert!(ours == theirs, "saved state");
}

fn ids(vocab: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + i * i * 31) % vocab) as u32).collect()
}

#[test]
fn tiny_in_f32() {
    let tokens = ids(384, 40);
    for window in [40, 7] {
        let config =
            EngineConfig { window: Some(window), context: Some(64), kv: KvFormat::F32, ..Default::default() };
        compare(&golden::dir().join("tiny/tiny.gguf"), &config, &tokens, 5);
    }
}

#[test]
fn the_demo_model() {
    let mut tokens = Npz::golden("pebble/logits.npz").ids("ids3");
    tokens.truncate(200);
    for window in [200, 33] {
        let config = EngineConfig { window: Some(window), context: Some(256), ..Default::default() };
        compare(&golden::pebble(), &config, &tokens, 8);
    }
}

fn synth(folder: &Path, geometry: Geometry, mix: Mix) -> PathBuf {
    let path = folder.join(format!("{mix}.gguf"));
    let mut options = Options::new(geometry, mix, 3);
    options.overwrite = true;
    strata_synth::write(&options, &path, &mut |_| {}, &AtomicBool::new(false)).unwrap();
    path
}

#[test]
fn every_format() {
    let folder = tempfile::tempdir().unwrap();
    for format in Format::ALL {
        let path = synth(folder.path(), Geometry::tiny(), Mix::pure(format));
        let config = EngineConfig { window: Some(24), context: Some(64), ..Default::default() };
        compare(&path, &config, &ids(200, 30), 3);
    }
}

/// The kernels for the widths that real models have: many rows and few, below, at and beyond the budget, with blocks that end in a window or
/// before it.
#[test]
fn wide_heads() {
    let folder = tempfile::tempdir().unwrap();
    // Query heads, width of a head; index heads, their width.
    for [heads, dim, index_heads, index_dim] in [[24, 256, 4, 128], [8, 128, 3, 64]] {
        let mut geometry = Geometry::tiny();
        geometry.context = 640;
        geometry.attention.heads = heads;
        geometry.attention.kv_heads = 2;
        geometry.attention.head_dim = dim;
        geometry.indexer.heads = index_heads;
        geometry.indexer.dim = index_dim;
        geometry.indexer.budget = 512;
        let path = synth(folder.path(), geometry, Mix::pure(Format::Q8_0));
        for (window, tokens) in [(600, 606), (70, 580)] {
            let config = EngineConfig {
                window: Some(window),
                context: Some(640),
                kv: KvFormat::F16,
                ..Default::default()
            };
            compare(&path, &config, &ids(200, tokens), 6);
        }
    }
}

/// Runs the same work on both, with nobody looking on, so that steps are recorded and replayed.
fn replay(path: &Path, config: &EngineConfig, work: impl Fn(&mut Engine) -> Vec<u8>) {
    let Some(gpu) = gpu() else { return };
    let theirs = work(&mut engine(path, config, cpu()));
    let ours = work(&mut engine(path, config, gpu));
    assert!(!theirs.is_empty() && ours == theirs, "{}", path.display());
}

fn bytes(rows: &mut Vec<u8>) -> impl FnMut(usize, &[f32]) {
    |_, row| rows.extend(row.iter().flat_map(|x| x.to_le_bytes()))
}

/// Whole prompts, short windows, single steps, the draft block, a fork, a way back to a checkpoint.
#[test]
fn replayed_windows() {
    for window in [40, 7] {
        let config = EngineConfig {
            window: Some(window),
            context: Some(96),
            sequences: 2,
            draft: true,
            ..EngineConfig::default()
        };
        replay(&golden::dir().join("tiny/tiny.gguf"), &config, |engine| {
            let (tokens, mut rows) = (ids(384, 60), Vec::new());
            let seq = engine.open().unwrap();
            engine.forward(seq, &tokens[..40], Wants::Draft, &mut bytes(&mut rows)).unwrap();
            for token in tokens[40..].chunks(1) {
                engine.forward(seq, token, Wants::All, &mut bytes(&mut rows)).unwrap();
            }
            let fork = engine.fork(seq).unwrap();
            let other: Vec<u32> = tokens[..35].iter().copied().chain([1, 2, 3]).collect();
            let kept = engine.rewind(seq, &other).unwrap();
            engine.forward(seq, &other[kept..], Wants::All, &mut bytes(&mut rows)).unwrap();
            for seq in [seq, fork] {
                rows.extend(engine.save(seq).unwrap());
            }
            rows
        });
    }
}

/// Several sequences decode together while another's prompt is read between their tokens.
#[test]
fn replayed_neighbours() {
    let tokens = Npz::golden("pebble/logits.npz").ids("ids3");
    let prompts = [&tokens[..40], &tokens[40..57], &tokens[..130], &tokens[90..91]];
    let config = EngineConfig { window: Some(48), context: Some(256), sequences: 4, ..Default::default() };
    replay(&golden::pebble(), &config, |engine| {
        engine.set_prompt_slice(std::time::Duration::ZERO);
        let seqs = prompts.map(|_| engine.open().unwrap());
        let (mut said, mut given) = (vec![Vec::new(); prompts.len()], 0);
        while given < prompts.len() || engine.is_busy() {
            if given < prompts.len() {
                let sampling = Sampling { seed: given as u64, ..Sampling::default() };
                let request =
                    Request { max_tokens: Some(12), ..Request::new(prompts[given].to_vec(), sampling, &[]) };
                engine.submit(seqs[given], request).unwrap();
                given += 1;
            }
            for event in engine.step() {
                if let Event::Token { seq, token, .. } = event {
                    said[seqs.iter().position(|s| *s == seq).unwrap()].push(token);
                }
            }
        }
        said.iter().flatten().flat_map(|token| token.to_le_bytes()).collect()
    });
}
