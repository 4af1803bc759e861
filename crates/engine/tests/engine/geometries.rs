//! Geometries that nobody has published: nothing of a model's shape is compiled in.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use strata_cpu::Cpu;
use strata_engine::{Engine, EngineConfig};
use strata_model::Model;
use strata_plan::Limits;
use strata_quant::{Format, Isa};
use strata_synth::geometry::LayerKind::{self, Gdn, Qsa};
use strata_synth::geometry::Ngram;
use strata_synth::{Geometry, Mix, Options, write};
use strata_testkit::oracle::Rows;
use strata_topology::Topology;
use tempfile::TempDir;

use crate::copy::Parts;
use crate::rig::{bits, ids, trunk_and_draft};
use crate::whole::Whole;

/// A geometry like `tiny` in everything that `change` leaves.
fn geometry(pattern: &[LayerKind], change: impl FnOnce(&mut Geometry)) -> Geometry {
    let mut geometry = Geometry::tiny();
    (geometry.layers, geometry.pattern) = (pattern.len() as u32, pattern.to_vec());
    change(&mut geometry);
    geometry
}

/// A model with a draft block, whose attention layers have the compress ratios `ratios` in turn, the draft block the last one.
pub fn model(folder: &TempDir, geometry: &Geometry, ratios: &[i32]) -> PathBuf {
    let mut options = Options::new(geometry.clone(), Mix::pure(Format::F32), 1);
    (options.draft, options.overwrite) = (true, true);
    let path = folder.path().join("made.gguf");
    write(&options, &path, &mut |_| {}, &AtomicBool::new(false)).unwrap();
    let mut parts = Parts::of(&path);
    let mut next = ratios.iter().copied().cycle();
    let kinds = geometry.pattern.iter().chain([&Qsa]);
    let stored: Vec<i32> = kinds.map(|kind| if *kind == Qsa { next.next().unwrap() } else { 0 }).collect();
    parts.metadata.insert("qwen4exp.attention.compress_ratios", stored);
    parts.write(folder)
}

/// The largest difference, relative to the root mean square of what is expected.
pub fn off(got: &[Vec<f32>], want: &Rows) -> f64 {
    assert_eq!(got.len(), want.len());
    let (got, want) = (got.concat(), want.concat());
    let scale = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    assert!(scale > 1e-3 && got.iter().all(|x| x.is_finite()), "an oracle that says nothing: {scale}");
    got.iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).abs()).fold(0.0, f64::max) / scale
}

/// Oracles: the whole model in f64; and, bit for bit, the same engine in windows and in single steps.
#[test]
fn other_geometries_just_work() {
    let cases: [(&str, Geometry, &[i32]); 6] = [
        ("two ratios", geometry(&[Gdn, Qsa, Gdn, Qsa], |g| g.ngram.as_mut().unwrap().layer = 0), &[2, 8, 4]),
        (
            "attention only, every layer another ratio, no n-grams",
            geometry(&[Qsa, Qsa, Qsa], |g| g.ngram = None),
            &[1, 16, 2, 8],
        ),
        (
            "one stream, one head of everything, 2-grams",
            geometry(&[Gdn, Gdn, Qsa], |g| {
                g.streams = 1;
                (g.attention.heads, g.attention.kv_heads, g.indexer.heads) = (1, 1, 1);
                (g.gdn.key_heads, g.gdn.value_heads) = (1, 1);
                (g.moe.experts, g.moe.used) = (1, 1);
                let ngram = g.ngram.as_mut().unwrap();
                (ngram.order, ngram.heads) = (2, 1);
            }),
            &[4],
        ),
        (
            "two streams, 4-grams, heads that share no keys",
            geometry(&[Gdn, Gdn, Gdn, Qsa, Qsa], |g| {
                (g.streams, g.hidden, g.low_rank) = (2, 48, 12);
                (g.attention.heads, g.attention.kv_heads, g.attention.head_dim) = (3, 3, 24);
                (g.gdn.key_heads, g.gdn.value_heads, g.gdn.value_dim) = (3, 3, 24);
                (g.moe.experts, g.moe.used, g.moe.width) = (5, 5, 24);
                let ngram = g.ngram.as_mut().unwrap();
                (ngram.layer, ngram.order, ngram.heads, ngram.row) = (2, 4, 3, 16);
            }),
            &[4, 2],
        ),
        (
            "eight streams, 5-grams, seven heads on one key head",
            geometry(&[Gdn, Qsa, Gdn], |g| {
                (g.streams, g.hidden) = (8, 32);
                (g.attention.heads, g.attention.kv_heads) = (7, 1);
                (g.gdn.key_heads, g.gdn.value_heads, g.gdn.key_dim, g.gdn.conv_kernel) = (2, 8, 24, 2);
                let ngram = g.ngram.as_mut().unwrap();
                (ngram.layer, ngram.order, ngram.heads, ngram.conv_kernel) = (2, 5, 2, 3);
            }),
            &[8, 4],
        ),
        (
            "recurrent only, the most streams and taps",
            geometry(&[Gdn, Gdn], |g| {
                (g.streams, g.hidden, g.gdn.conv_kernel) = (32, 32, 8);
                g.ngram = Some(Ngram { layer: 0, conv_kernel: 8, ..g.ngram.clone().unwrap() });
            }),
            &[16],
        ),
    ];
    for (name, geometry, ratios) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = model(&folder, &geometry, ratios);
        let run = |window| trunk_and_draft(&path, window, Isa::detect());
        let whole = run(61);
        for window in [7, 1] {
            assert!(
                run(window).map(|rows| bits(&rows)) == whole.each_ref().map(|r| bits(r)),
                "{name}: {window}"
            );
        }
        let (trunk, draft) = Whole(&Model::open(&path).unwrap()).logits(&ids());
        let found = [off(&whole[0], &trunk), off(&whole[1], &draft)];
        println!("{name}: off by {found:?}");
        assert!(found.iter().all(|&off| off < 1e-5), "{name}: off by {found:?}");
    }
}

/// Oracle: the bound in docs/ARCHITECTURE.md. What can't be run is not planned either.
#[test]
fn a_geometry_without_ops_is_not_planned() {
    let folder = tempfile::tempdir().unwrap();
    let path =
        model(&folder, &geometry(&[Gdn, Qsa], |g| (g.streams, g.hidden, g.ngram) = (33, 32, None)), &[4]);
    let cpu = Cpu::new(Topology::uniform(1).assign(Some(1)).unwrap(), Isa::detect());
    let limits = Limits { available: 4 << 30, total: 4 << 30, source: "the test".into() };
    let model = Arc::new(Model::open(&path).unwrap());
    let refused = Engine::plan(&model, &EngineConfig::default(), &limits, &cpu).unwrap_err().to_string();
    assert!(refused.contains("residual streams is 33, more than 32"), "{refused}");
}
