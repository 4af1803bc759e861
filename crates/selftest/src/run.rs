//! All checks of one GPU, in order.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use strata_cpu::CpuHostExperts;
use strata_cuda::driver::Device;
use strata_cuda::{Cuda, Exchanges, ExpertCache, Room, Stagers};
use strata_engine::{BEYOND, EngineConfig, ExpertHome, Sampling};
use strata_model::Model;
use strata_quant::{Format, Isa};
use strata_synth::geometry::{Attention, Gdn, Indexer, LayerKind, Moe};
use strata_synth::{Geometry, Mix, Options};
use strata_topology::{Role, Topology, spawn};

use crate::ops::{self, Multiplies, OnCpu, OnGpu};
use crate::random::ids;
use crate::whole::{self, PerFamily};
use crate::{CheckError, Found};

/// One line of the report.
#[derive(Debug, Clone)]
pub struct Line {
    /// The op, or the model.
    pub of: String,
    /// The format, or the family of ops.
    pub what: String,
    /// What was found.
    pub found: Found,
    /// How long it took.
    pub time: Duration,
}

/// Checks a GPU and tells line by line; whoever is told may end it.
pub fn run(device: &Device, tell: &mut dyn FnMut(Line) -> ControlFlow<()>) -> Result<(), CheckError> {
    let (mut gpu, mut cpu) = (OnGpu::new(device)?, OnCpu(Isa::detect()));
    if single_ops(&mut gpu, &mut cpu, tell)?.is_break() {
        return Ok(());
    }
    drop(gpu);
    let folder = tempfile::tempdir()?;
    for (name, geometry, mix) in models() {
        let path = model(folder.path(), geometry, mix)?;
        if small_model(&path, &name, device, tell)?.is_break() {
            return Ok(());
        }
    }
    Ok(())
}

/// Quantisation, decoding, and products.
fn single_ops(
    ours: &mut dyn Multiplies,
    theirs: &mut dyn Multiplies,
    tell: &mut dyn FnMut(Line) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, CheckError> {
    type Check = fn(Format, &mut dyn Multiplies, &mut dyn Multiplies) -> Result<Found, CheckError>;
    let quantisation: Check = |_, ours, theirs| ops::quantisation(ours, theirs);
    let largest: Check = |_, ours, theirs| ops::largest(ours, theirs);
    let of_formats = |name, check: Check| ops::block_formats().map(move |format| (name, Some(format), check));
    let checks = [("quantise", None, quantisation), ("largest", None, largest)]
        .into_iter()
        .chain(of_formats("decode", ops::decoding))
        .chain(of_formats("product", ops::products));
    for (of, format, check) in checks {
        let started = Instant::now();
        let found = check(format.unwrap_or(Format::Q8_0), ours, theirs)?;
        let what = format.map_or("f32", Format::name);
        let line = Line { of: of.into(), what: what.into(), found, time: started.elapsed() };
        if tell(line).is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The small models: in two mixes that published files have, and one without block formats; and one whose layers are as wide inside as a real
/// model's, for the kernels of those widths.
fn models() -> Vec<(String, Geometry, Mix)> {
    let mix = |name: &str| name.parse::<Mix>().expect("a mix that exists");
    let all = ["ud-iq3_xxs", "ud-q4_k_xl", "bf16"].map(|name| (name.to_owned(), geometry(), mix(name)));
    all.into_iter().chain([("wide".to_owned(), wide_geometry(), mix("ud-iq3_xxs"))]).collect()
}

/// A model with every part, wide enough for blocks of 256, whose attention selects beyond 32 tokens.
fn geometry() -> Geometry {
    Geometry {
        name: "selftest".to_owned(),
        hidden: 256,
        low_rank: 32,
        attention: Attention {
            head_dim: 64,
            rotary: 16,
            rope_sections: [3, 3, 2],
            ..Geometry::tiny().attention
        },
        indexer: Indexer { heads: 2, dim: 32, budget: 32, ratio: 4 },
        gdn: Gdn { key_heads: 4, value_heads: 8, key_dim: 32, value_dim: 32, conv_kernel: 4 },
        moe: Moe { experts: 16, used: 4, width: 256, shared_width: 256 },
        ..Geometry::tiny()
    }
}

/// Flash-Next inside a layer: the widths of streams, heads, keys and experts. Few of everything.
fn wide_geometry() -> Geometry {
    Geometry {
        name: "wide".to_owned(),
        hidden: 2560,
        layers: 3,
        pattern: vec![LayerKind::Gdn, LayerKind::Gdn, LayerKind::Qsa],
        low_rank: 320,
        attention: Attention {
            heads: 24,
            kv_heads: 2,
            head_dim: 256,
            rotary: 64,
            rope_sections: [11, 11, 10],
            ..Geometry::tiny().attention
        },
        indexer: Indexer { heads: 4, dim: 128, budget: 64, ratio: 4 },
        gdn: Gdn { key_heads: 2, value_heads: 6, key_dim: 128, value_dim: 128, conv_kernel: 4 },
        moe: Moe { experts: 8, used: 2, width: 640, shared_width: 640 },
        ..Geometry::tiny()
    }
}

/// Writes a small model of this mix, with a draft block, into a folder.
pub(crate) fn model(folder: &Path, geometry: Geometry, mix: Mix) -> Result<PathBuf, CheckError> {
    let path = folder.join(format!("{}-{mix}.gguf", geometry.name));
    let options = Options { draft: true, overwrite: true, ..Options::new(geometry, mix, 3) };
    strata_synth::write(&options, &path, &mut |_| {}, &AtomicBool::new(false))?;
    Ok(path)
}

/// Ways of choosing a token: from all logits' mass, and from the largest, which a GPU finds itself, as they are and adjusted.
pub fn samplings() -> [(&'static str, Sampling); 4] {
    let few = Sampling { top_k: 20, top_p: 0.9, ..Sampling::default() };
    let adjusted = Sampling {
        top_p: 0.95,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        logit_bias: vec![(5, 2.0), (6, f32::NEG_INFINITY)],
        ..Sampling::default()
    };
    let greedy = Sampling::greedy();
    [("all", Sampling::default()), ("greedy", greedy), ("top 20", few), ("penalties", adjusted)]
}

/// The model, op by op below and beyond what attention selects, in long windows and in short ones; then unwatched.
fn small_model(
    path: &Path,
    name: &str,
    device: &Device,
    tell: &mut dyn FnMut(Line) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, CheckError> {
    let tokens = ids(384, 120);
    let mut families: PerFamily = BTreeMap::new();
    let mut steps = (Found::default(), Duration::ZERO);
    // With all experts on the GPU, with some, with none: the others are read from memory, or come through the ring, or the CPU computes them; those
    // that stay in the file are staged; and of a budget some are in memory, and some are read from the file.
    use ExpertCache::{Auto, Experts};
    use ExpertHome::{Budget, Heap, Mapped};
    let most = expert_bytes(path)? / 10 * 7;
    for (window, read, expert_cache, share, experts) in [
        (120, 120, Auto, None, ExpertHome::Auto),
        (120, 24, Experts(0), None, ExpertHome::Auto),
        (7, 60, Experts(17), Some(8), ExpertHome::Auto),
        (90, 120, Experts(30), None, Heap),
        (120, 120, Experts(0), Some(16), ExpertHome::Auto),
        (120, 24, Experts(0), Some(5), ExpertHome::Auto),
        (120, 120, Experts(0), None, Mapped),
        (7, 60, Experts(17), Some(8), Mapped),
        (90, 120, Experts(30), Some(5), Mapped),
        (120, 120, Experts(0), None, Budget(most)),
        (7, 60, Experts(5), Some(8), Budget(most)),
        (90, 120, Experts(5), Some(5), Budget(most)),
    ] {
        let config = EngineConfig {
            window: Some(window),
            context: Some(160),
            sequences: 4,
            draft: true,
            experts,
            ..EngineConfig::default()
        };
        let engines = || -> Result<_, CheckError> {
            let gpu = Cuda::new(device, Room { expert_cache, ..Room::default() })?.with_stagers(stagers());
            let gpu = match share {
                Some(_) => gpu.with_host(Box::new(CpuHostExperts(whole::cpu()?)), share),
                None => gpu,
            };
            Ok([whole::engine(path, &config, gpu)?, whole::engine(path, &config, whole::cpu()?)?])
        };
        for (family, (found, time)) in whole::op_by_op(path, &config, &tokens[..read], 6, engines()?)? {
            let (all, of_all) = families.entry(family).or_default();
            all.add(found);
            *of_all += time;
        }
        let started = Instant::now();
        let [mut ours, mut theirs] = engines()?;
        let mut unwatched = |what: &str, work: &dyn Fn(&mut strata_engine::Engine) -> _| {
            whole::unwatched(&format!("{name}, {what}"), [&mut ours, &mut theirs], work)
        };
        let tokens = &tokens[..read];
        steps
            .0
            .add(unwatched("forks and rewinds", &|engine| whole::forks_and_rewinds(engine, tokens, true))?);
        let prompts = [&tokens[..20], &tokens[3..9], &tokens[..read - 14], &tokens[1..2]];
        for (what, sampling) in samplings() {
            let what = format!("sequences side by side, {what}");
            steps.0.add(unwatched(&what, &|engine| whole::neighbours(engine, &prompts, &sampling))?);
        }
        if let Budget(_) = experts {
            let items = ours.planned().items();
            let planned = |name| items.iter().any(|item| item.name == name && item.bytes > 0);
            let some = [planned("resident experts"), planned(BEYOND)];
            let read = ours.take_counters().reads().is_some_and(|count| count.read > 0);
            let what = format_args!("{name}, whether some experts are in memory, and some were read");
            steps.0.exactly(what, &[some[0], some[1], read], &[true; 3]);
        }
        steps.1 += started.elapsed();
    }
    families.insert("replayed steps", steps);
    families.insert("experts that change places", exchanges(path, name, device, &tokens)?);
    for (family, (found, time)) in families {
        let line = Line { of: name.to_owned(), what: family.into(), found, time };
        if tell(line).is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// What a model's experts take in its file.
fn expert_bytes(path: &Path) -> Result<u64, CheckError> {
    let model = Model::open(path)?;
    let experts = model.gguf.tensors().iter().filter(|tensor| tensor.name.contains("_exps."));
    Ok(experts.map(|tensor| tensor.bytes).sum())
}

/// Few threads and few buffers, so that they are waited for.
fn stagers() -> Stagers {
    let all = Topology::read().allowed().clone();
    let start = move |name: &str, work: Box<dyn FnOnce() + Send>| spawn(Role::Io, &all, name, work);
    Stagers { spawn: Box::new(start), most: 2, bytes: 1 << 20 }
}

/// The model with few experts on the GPU, as many of which as can change places in every step: single steps, several sequences at once, prompts in
/// between that are wide, and the CPU with a share of the experts or without. That any changed places is checked too.
fn exchanges(
    path: &Path,
    name: &str,
    device: &Device,
    tokens: &[u32],
) -> Result<(Found, Duration), CheckError> {
    let (mut found, started) = (Found::default(), Instant::now());
    for (seed, share) in [(1, None), (2, Some(8))] {
        let config = EngineConfig {
            window: Some(90),
            context: Some(160),
            sequences: 4,
            draft: true,
            ..EngineConfig::default()
        };
        let room = Room { expert_cache: ExpertCache::Experts(12), ..Room::default() };
        let gpu = Cuda::new(device, room)?.with_exchanges(Exchanges::Forced(seed));
        let gpu = match share {
            Some(_) => gpu.with_host(Box::new(CpuHostExperts(whole::cpu()?)), share),
            None => gpu,
        };
        let mut ours = whole::engine(path, &config, gpu)?;
        let mut theirs = whole::engine(path, &config, whole::cpu()?)?;
        let prompts = [&tokens[..100], &tokens[3..9], &tokens[..70], &tokens[1..2]];
        // The second time, steps are replayed from the start.
        for round in 0..2 {
            let what =
                format!("{name}, experts that change places, {share:?} sixteenths on the CPU, {round}");
            let both = [&mut ours, &mut theirs];
            let steps = |engine: &mut strata_engine::Engine| whole::forks_and_rewinds(engine, tokens, false);
            found.add(whole::unwatched(&what, both, steps)?);
            let both = [&mut ours, &mut theirs];
            let together =
                |engine: &mut strata_engine::Engine| whole::neighbours(engine, &prompts, &Sampling::greedy());
            found.add(whole::unwatched(&format!("{what}, side by side"), both, together)?);
        }
        let exchanged = ours.take_counters().experts().map_or(0, |count| count.exchanged);
        found.exactly(format_args!("{name}, whether any did"), &[exchanged > 0], &[true]);
    }
    Ok((found, started.elapsed()))
}

#[cfg(test)]
mod tests {
    use strata_engine::Wants;

    use super::*;

    /// Oracle: the CPU backend, which takes any geometry that makes sense: all models can be written and read, with a budget that has no room for all experts.
    #[test]
    fn the_models_can_be_run() {
        let folder = tempfile::tempdir().unwrap();
        for (name, geometry, mix) in models() {
            let path = model(folder.path(), geometry, mix).unwrap();
            let experts = ExpertHome::Budget(expert_bytes(&path).unwrap() / 10 * 7);
            let config = EngineConfig { context: Some(16), draft: true, experts, ..EngineConfig::default() };
            let mut engine = whole::engine(&path, &config, whole::cpu().unwrap()).unwrap();
            let seq = engine.open().unwrap();
            let read = engine
                .forward(seq, &ids(384, 3), Wants::Last, &mut |_, logits| assert!(logits[0].is_finite()));
            assert!(read.is_ok(), "{name}: {read:?}");
            let beyond = engine.planned().items().iter().find(|item| item.name == BEYOND).unwrap().bytes;
            assert!(beyond > 0, "{name}");
        }
    }
}
