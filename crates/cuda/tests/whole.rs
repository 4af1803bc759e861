//! Whole models on whatever GPU is here: the checks of `strata selftest`, on more models. Oracle: the CPU backend, bit for bit, op by op.
//! Without a GPU, or in a build without kernels, the tests say so and pass.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use strata_backend::KvFormat;
use strata_cpu::CpuHostExperts;
use strata_cuda::{Cuda, ExpertCache, Room};
use strata_engine::{Engine, EngineConfig, EngineError, Wants};
use strata_quant::Format;
use strata_selftest::{CheckError, ids, ops, samplings, whole};
use strata_synth::{Geometry, Mix, Options};
use strata_testkit::golden::{self, Npz};

/// One test at a time: their threads are on the same CPUs, and would wait for each other's.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Experts on the GPU, and how many sixteenths of the others the host computes.
type Experts = (ExpertCache, Option<u32>);

/// A model on the first GPU and on the CPU, or a line that says why there is no GPU.
fn engines_with(path: &Path, config: &EngineConfig, (cache, share): Experts) -> Option<[Engine; 2]> {
    let room = Room { expert_cache: cache, ..Room::default() };
    let gpu = || -> Result<Cuda, CheckError> { Ok(Cuda::new(&ops::first()?, room)?) };
    let gpu = strata_selftest::or_skip(gpu())?;
    let gpu = match share {
        Some(_) => gpu.with_host(Box::new(CpuHostExperts(whole::cpu().unwrap())), share),
        None => gpu,
    };
    let cpu = whole::cpu().unwrap();
    Some([whole::engine(path, config, gpu).unwrap(), whole::engine(path, config, cpu).unwrap()])
}

fn engines(path: &Path, config: &EngineConfig) -> Option<[Engine; 2]> {
    engines_with(path, config, (ExpertCache::Auto, None))
}

/// Runs the same tokens on both, and compares what every op writes, and the state in the end.
fn compare_with(path: &Path, config: &EngineConfig, experts: Experts, tokens: &[u32], decoded: usize) {
    let Some(engines) = engines_with(path, config, experts) else { return };
    for (family, (found, _)) in whole::op_by_op(path, config, tokens, decoded, engines).unwrap() {
        assert!(found.equal(), "{experts:?}, {family}: {found}");
    }
}

fn compare(path: &Path, config: &EngineConfig, tokens: &[u32], decoded: usize) {
    compare_with(path, config, (ExpertCache::Auto, None), tokens, decoded);
}

#[test]
fn tiny_in_f32() {
    let _alone = alone();
    let tokens = ids(384, 40);
    // Portions of up to eight rows pass through one kernel, longer ones through several.
    for window in [40, 9, 8, 7, 2] {
        let config =
            EngineConfig { window: Some(window), context: Some(64), kv: KvFormat::F32, ..Default::default() };
        compare(&golden::dir().join("tiny/tiny.gguf"), &config, &tokens, 5);
    }
}

#[test]
fn the_demo_model() {
    let _alone = alone();
    let mut tokens = Npz::golden("pebble/logits.npz").ids("ids3");
    tokens.truncate(200);
    for window in [200, 33] {
        let config = EngineConfig { window: Some(window), context: Some(256), ..Default::default() };
        let some = ExpertCache::Bytes(7 << 20);
        for experts in [
            (ExpertCache::Auto, None),
            (ExpertCache::Experts(0), None),
            (some, None),
            (ExpertCache::Experts(0), Some(16)),
            (some, Some(6)),
        ] {
            compare_with(&golden::pebble(), &config, experts, &tokens, 8);
        }
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
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for format in Format::ALL {
        let path = synth(folder.path(), Geometry::tiny(), Mix::pure(format));
        let config = EngineConfig { window: Some(40), context: Some(64), ..Default::default() };
        for experts in
            [(ExpertCache::Auto, None), (ExpertCache::Experts(3), None), (ExpertCache::Experts(3), Some(8))]
        {
            compare_with(&path, &config, experts, &ids(200, 52), 3);
        }
    }
}

/// The kernels for the widths that real models have: many rows and few, below, at and beyond the budget, with blocks that end in a window or
/// before it.
#[test]
fn wide_heads() {
    let _alone = alone();
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
fn replay(path: &Path, config: &EngineConfig, work: impl Fn(&mut Engine) -> Result<Vec<u8>, EngineError>) {
    let Some([mut gpu, mut cpu]) = engines(path, config) else { return };
    let found = whole::unwatched(&path.display().to_string(), [&mut gpu, &mut cpu], work).unwrap();
    assert!(found.equal(), "{found}");
}

/// Whole prompts, short windows, single steps, the draft block, a fork, a way back to a checkpoint.
#[test]
fn replayed_windows() {
    let _alone = alone();
    let tokens = ids(384, 60);
    for window in [40, 7] {
        let config = EngineConfig {
            window: Some(window),
            context: Some(96),
            sequences: 2,
            draft: true,
            ..EngineConfig::default()
        };
        replay(&golden::dir().join("tiny/tiny.gguf"), &config, |engine| {
            whole::forks_and_rewinds(engine, &tokens, true)
        });
    }
}

/// Several sequences decode together while another's prompt is read between their tokens.
#[test]
fn replayed_neighbours() {
    let _alone = alone();
    let tokens = Npz::golden("pebble/logits.npz").ids("ids3");
    let prompts = [&tokens[..40], &tokens[40..57], &tokens[..130], &tokens[90..91]];
    let config = EngineConfig { window: Some(48), context: Some(256), sequences: 4, ..Default::default() };
    for (_, sampling) in samplings() {
        replay(&golden::pebble(), &config, |engine| whole::neighbours(engine, &prompts, &sampling));
    }
}

/// A synthetic model, with a tensor's bytes changed.
fn spoilt(folder: &Path, tensor: &str, spoil: impl FnOnce(&mut [u8])) -> PathBuf {
    let path = synth(folder, Geometry::tiny(), Mix::pure(Format::Q8_0));
    let gguf = strata_gguf::Gguf::open(&path).unwrap();
    let found = gguf.tensors().iter().find(|found| found.name == tensor).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    spoil(&mut bytes[found.offset as usize..][..found.bytes as usize]);
    drop(gguf);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A router of zeros: all experts are alike, and the lowest are chosen.
#[test]
fn experts_that_tie() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = spoilt(folder.path(), "blk.1.ffn_gate_inp.weight", |bytes| bytes.fill(0));
    let config = EngineConfig { window: Some(24), context: Some(64), ..Default::default() };
    compare(&path, &config, &ids(200, 30), 3);
}

/// Oracle: the CPU's sentence. A tensor of NaN is found in the same place, by long windows and by short ones, and the engine goes on.
#[test]
fn broken_weights_are_found_alike() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for tensor in [
        "token_embd.weight",
        "blk.1.ple_value.weight",
        "blk.2.attn_qkv.weight",
        "blk.3.attn_v.weight",
        "blk.2.ffn_down_exps.weight",
        "blk.0.hc_attn_down.weight",
        "output.weight",
    ] {
        // A block of Q8_0 begins with its scale, in half precision.
        let path = spoilt(folder.path(), tensor, |bytes| {
            bytes.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&0x7e00u16.to_le_bytes()));
        });
        let config = EngineConfig { window: Some(48), context: Some(64), ..Default::default() };
        let Some(engines) = engines(&path, &config) else { return };
        let [ours, theirs] = engines.map(|mut engine| {
            [40, 3].map(|tokens| {
                let seq = engine.open().unwrap();
                let why = engine.forward(seq, &ids(384, tokens), Wants::Last, &mut |_, _| ()).unwrap_err();
                engine.close(seq).unwrap();
                why.to_string()
            })
        });
        assert_eq!(ours, theirs);
        assert!(ours.iter().all(|why| why.contains(&format!("`{tensor}` there hold"))), "{ours:?}");
    }
}
