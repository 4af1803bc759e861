//! Whole models: written, opened again by the container's reader and by the loader, and held to what is published.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use strata_gguf::Gguf;
use strata_model::{LayerKind, Model};
use strata_quant::{Format, dequantise};
use strata_synth::{Geometry, Layout, Mix, Options, Progress, Role, SynthError, layout, write};

fn options(geometry: Geometry, formats: &str) -> Options {
    Options::new(geometry, formats.parse().unwrap(), 1)
}

fn make(options: &Options, out: &Path) -> Vec<std::path::PathBuf> {
    write(options, out, &mut |_| {}, &AtomicBool::new(false)).unwrap().files
}

/// Oracle: the loader, which checks every shape and format against the metadata; and the layout. Each mix, with and without a
/// draft block and a skew, loads without a warning.
#[test]
fn every_mix_loads() {
    let folder = tempfile::tempdir().unwrap();
    for (i, mix) in Mix::all().enumerate() {
        let mut options = Options::new(Geometry::tiny(), mix, i as u64);
        options.draft = i % 2 == 0;
        options.router_skew = (i % 3 == 0).then_some(1.0);
        let path = folder.path().join("model.gguf");
        options.overwrite = true;
        assert_eq!(make(&options, &path), std::slice::from_ref(&path));
        let expected = layout(&options).unwrap();
        let model = Model::open(&path).unwrap_or_else(|e| panic!("{mix}: {e}"));
        assert!(model.warnings.is_empty(), "{mix}: {:?}", model.warnings);
        assert_eq!(model.gguf.metadata(), &expected.metadata);
        let tensors = model.gguf.tensors();
        assert_eq!(tensors.len(), expected.tensors.len());
        for (tensor, planned) in tensors.iter().zip(&expected.tensors) {
            assert_eq!((&tensor.name, &tensor.shape), (&planned.name, &planned.shape));
            assert_eq!((tensor.ty, tensor.bytes), (planned.tensor_type(), planned.bytes));
        }
        assert_eq!(model.mtp.is_some(), options.draft);
        assert_eq!(model.hyper.layers.len(), 4);
    }
}

/// Oracle: the large geometry, of which docs/performance.md measures a few layers.
#[test]
fn the_measured_geometry_is_the_large_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/flash4.json");
    let mut measured = Geometry::read(&path).unwrap();
    let large = Geometry::flash_next();
    (measured.name, measured.layers) = (large.name.clone(), large.layers);
    (measured.vocabulary, measured.special_tokens) = (large.vocabulary, large.special_tokens.clone());
    measured.ngram.as_mut().unwrap().base = large.ngram.as_ref().unwrap().base;
    assert_eq!(measured, large);
}

/// Oracle: the geometry. What the loader reads back is what went in, also for one unlike any published.
#[test]
fn the_geometry_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut odd = Geometry::tiny();
    odd.name = "odd".to_owned();
    (odd.layers, odd.streams, odd.hidden) = (5, 3, 96);
    odd.pattern = [0, 1, 1, 0]
        .map(|full| {
            if full == 1 {
                strata_synth::geometry::LayerKind::Qsa
            } else {
                strata_synth::geometry::LayerKind::Gdn
            }
        })
        .into();
    (odd.indexer.ratio, odd.indexer.budget) = (2, 6);
    (odd.gdn.key_dim, odd.gdn.value_dim, odd.gdn.conv_kernel) = (16, 24, 3);
    (odd.moe.experts, odd.moe.used) = (12, 5);
    let ngram = odd.ngram.as_mut().unwrap();
    (ngram.layer, ngram.order, ngram.heads, ngram.row) = (3, 4, 2, 16);
    for geometry in [odd, Geometry::pebble()] {
        let path = folder.path().join(format!("{}.gguf", geometry.name));
        let mut options = options(geometry.clone(), "q8_0");
        options.draft = true;
        make(&options, &path);
        let model = Model::open(&path).unwrap();
        assert!(model.warnings.is_empty(), "{:?}", model.warnings);
        let hyper = &model.hyper;
        let kinds: Vec<bool> = hyper.layers.iter().map(|kind| matches!(kind, LayerKind::Gdn)).collect();
        let wanted: Vec<bool> = (0..geometry.layers)
            .map(|l| geometry.kind(l) == strata_synth::geometry::LayerKind::Gdn)
            .collect();
        assert_eq!(kinds, wanted);
        for kind in &hyper.layers {
            assert!(
                matches!(kind, LayerKind::Gdn)
                    || *kind == LayerKind::Qsa { ratio: geometry.indexer.ratio as usize }
            );
        }
        assert_eq!(
            (hyper.vocab, hyper.width, hyper.streams),
            (geometry.vocabulary as usize, geometry.hidden as usize, geometry.streams as usize)
        );
        assert_eq!(
            (hyper.gdn.key_dim, hyper.gdn.value_dim),
            (geometry.gdn.key_dim as usize, geometry.gdn.value_dim as usize)
        );
        assert_eq!(
            (hyper.moe.experts, hyper.moe.used),
            (geometry.moe.experts as usize, geometry.moe.used as usize)
        );
        let (ple, ngram) = (hyper.ple.as_ref().unwrap(), geometry.ngram.as_ref().unwrap());
        assert_eq!(
            (ple.layers[0], ple.ngram_size, ple.heads),
            (ngram.layer as usize, ngram.order as usize, ngram.all_heads() as usize)
        );
        assert_eq!(ple.row_width, ngram.row as usize);
    }
}

/// Oracle: the tokenizer and the template of the loader. Text comes back, marks of turns are single tokens, a chat renders.
#[test]
fn the_vocabulary_tokenizes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pebble.gguf");
    let mut options = options(Geometry::pebble(), "q4_0");
    options.ngram_rows = Some(1000);
    make(&options, &path);
    let model = Model::open(&path).unwrap();
    let text = "Hello there, \u{1F600} na\u{EF}ve w\u{F6}rld!\n\n12";
    let ids = model.tokenizer.encode(text, false).unwrap();
    assert_eq!(model.tokenizer.decode(&ids).unwrap(), text);
    assert!(ids.len() < text.len(), "no merge was used: {ids:?}");
    let ids = model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>", true).unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (12_276, 12_277));
    assert!(model.template.is_some());
}

fn flash_next(formats: &str, draft: bool) -> Layout {
    let mut options = options(Geometry::flash_next(), formats);
    options.draft = draft;
    layout(&options).unwrap()
}

/// Oracle: the published sizes. Unsloth's files to a part in 10,000 (they have one tokenizer and a header more than the tensors, 11 MB,
/// added here), the experts of ISTA's to the digits given, their first files to half a percent.
#[test]
fn the_real_geometry_has_the_published_sizes() {
    for (draft, count) in [(false, 1224), (true, 1256)] {
        assert_eq!(flash_next("f32", draft).tensors.len(), count);
    }
    let header = 11_106_000.0;
    for (formats, bytes, within) in [
        ("ud-q4_k_xl", 111_334_654_784u64, 1e-5),
        ("ud-iq4_xs", 93_682_584_224, 1e-5),
        ("ud-q3_k_xl", 89_986_353_824, 1e-5),
        ("ud-iq3_xxs", 81_961_823_936, 1e-4),
        ("q8_0", 188_225_033_248, 1e-5),
        ("bf16", 354_029_930_496, 1e-4),
    ] {
        let ours = flash_next(formats, false).bytes() as f64 + header;
        assert!((ours / bytes as f64 - 1.0).abs() < within, "{formats}: {ours} for {bytes}");
    }
    const GIB: f64 = (1u64 << 30) as f64;
    for (formats, experts_gib, first_file_gb) in
        [("q2_0", 31.64, 37.6), ("iq2_xs", 33.02, 39.2), ("iq3_xxs", 40.0, 47.0), ("iq3_s", 46.8, 54.817)]
    {
        let layout = flash_next(formats, false);
        let experts = layout.expert_bytes() as f64 / GIB;
        assert!((experts - experts_gib).abs() < 0.05, "{formats}: {experts} GiB of experts");
        let table = layout.tensors.iter().find(|t| t.role == Role::Table).unwrap().bytes;
        assert_eq!(table, 28_800_138_240);
        let first = ((layout.bytes() - table) as f64 + header) / 1e9;
        assert!((first / first_file_gb - 1.0).abs() < 0.005, "{formats}: first file of {first} GB");
    }
    assert_eq!(flash_next("q2_0", false).expert_bytes(), (48 * 675) << 20);
    assert_eq!(flash_next("iq2_xs", false).expert_bytes(), 35_454_976_000);
    let iq3_xxs = flash_next("ud-iq3_xxs", false).expert_bytes() as f64 / GIB;
    assert!((45.1..45.3).contains(&iq3_xxs), "{iq3_xxs}");
    // Billions of weights in the trunk and in the n-gram block.
    let whole = flash_next("f32", false);
    let is_ngram = |role| matches!(role, Role::Table | Role::NgramKey | Role::NgramValue);
    let weights = |ngram: bool| {
        let tensors = whole.tensors.iter().filter(|t| is_ngram(t.role) == ngram);
        tensors.map(|t| t.shape.iter().product::<u64>()).sum::<u64>() as f64 / 1e9
    };
    assert!((weights(false) - 125.71).abs() < 0.005 && (weights(true) - 51.23).abs() < 0.005);
}

/// Oracle: the decoder. In every mix the experts' and the embedding's values have the same spread, whatever the format.
#[test]
fn spreads_do_not_depend_on_formats() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let spread = |mix: Mix, name: &str| {
        let mut options = Options::new(Geometry::pebble(), mix, 9);
        (options.overwrite, options.ngram_rows) = (true, Some(1000));
        make(&options, &path);
        let gguf = Gguf::open(&path).unwrap();
        let tensor = gguf.tensor(name).unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        gguf.read_at(tensor, 0, &mut bytes).unwrap();
        let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        dequantise(Format::try_from(tensor.ty).unwrap(), &bytes, &mut values);
        (values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / values.len() as f64).sqrt()
    };
    for name in ["blk.3.ffn_down_exps.weight", "blk.0.ffn_gate_exps.weight", "token_embd.weight"] {
        let exact = spread("f32".parse().unwrap(), name);
        for mix in ["ud-iq3_xxs", "q2_0", "iq3_s", "ud-q4_k_xl", "nvfp4", "mxfp4", "iq1_m"] {
            let ratio = spread(mix.parse().unwrap(), name) / exact;
            assert!((ratio - 1.0).abs() < 0.05, "{name} in {mix}: {ratio}");
        }
    }
}

/// Oracle: the bytes that one thread makes. Threads, shards and the order of anything don't show; the seed does.
#[test]
fn bytes_depend_on_the_options_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(Geometry::pebble(), "ud-iq3_xxs");
    (options.router_skew, options.draft, options.threads) = (Some(0.8), true, Some(1));
    let one = folder.path().join("one.gguf");
    make(&options, &one);
    options.threads = Some(5);
    let five = folder.path().join("five.gguf");
    make(&options, &five);
    assert!(fs::read(&one).unwrap() == fs::read(&five).unwrap());

    options.shard_bytes = Some(8 << 20);
    let files = make(&options, &folder.path().join("split.gguf"));
    assert!(files.len() > 2 && files[1].ends_with(format!("split-00002-of-{:05}.gguf", files.len())));
    let (whole, split) = (Gguf::open(&one).unwrap(), Gguf::open(&files[1]).unwrap());
    (options.seed, options.shard_bytes) = (2, None);
    let other = folder.path().join("other.gguf");
    make(&options, &other);
    let other = Gguf::open(&other).unwrap();
    let mut changed = 0;
    for tensor in whole.tensors() {
        let bytes = |gguf: &Gguf| {
            let mut bytes = vec![0; tensor.bytes as usize];
            gguf.read_at(gguf.tensor(&tensor.name).unwrap(), 0, &mut bytes).unwrap();
            bytes
        };
        let ours = bytes(&whole);
        assert!(ours == bytes(&split), "{}", tensor.name);
        changed += usize::from(ours != bytes(&other));
    }
    assert_eq!(changed, whole.tensors().len());
}

/// Oracle: the folder. Files in the way stay as they are; a cancelled or impossible model leaves nothing; progress is told from
/// nothing to all.
#[test]
fn nothing_is_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, "mine").unwrap();
    let run = |options: &Options, cancel: bool| {
        let mut told: Vec<Progress> = Vec::new();
        let result = write(options, &path, &mut |p| told.push(p), &AtomicBool::new(cancel));
        (result, told)
    };
    let mut options = options(Geometry::tiny(), "q8_0");
    let (result, _) = run(&options, false);
    assert!(matches!(result, Err(SynthError::Gguf(strata_gguf::Error::Exists { .. }))), "{result:?}");
    options.overwrite = true;
    let (result, _) = run(&options, true);
    assert!(result.unwrap_err().to_string().starts_with("stopped while writing"));
    assert_eq!(fs::read(&path).unwrap(), b"mine");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

    let (result, told) = run(&options, false);
    let summary = result.unwrap();
    assert_eq!((summary.tensors, &summary.files), (113, &vec![path.clone()]));
    assert_eq!(told[0].written, 0);
    assert!(told.is_sorted_by_key(|p| p.written) && told.iter().all(|p| p.total == summary.bytes));
    assert_eq!(told.last().unwrap().written, summary.bytes);

    // Cancelled from within.
    let cancel = AtomicBool::new(false);
    let stopped = write(&options, &path, &mut |_| cancel.store(true, Ordering::Relaxed), &cancel);
    assert!(matches!(stopped, Err(SynthError::Cancelled(_))));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Oracle: the options' ranges.
#[test]
fn bad_options_are_sentences() {
    let error = |change: fn(&mut Options)| {
        let mut options = options(Geometry::tiny(), "f32");
        change(&mut options);
        layout(&options).unwrap_err().to_string()
    };
    assert!(error(|o| o.router_skew = Some(0.0)).contains("router skew of 0"));
    assert!(error(|o| o.router_skew = Some(f64::NAN)).contains("router skew of NaN"));
    assert!(error(|o| o.shard_bytes = Some(0)).contains("every 0 bytes"));
    assert!(error(|o| o.ngram_rows = Some(3)).contains("give --ngram-rows from 16 to"));
    assert!(
        error(|o| (o.ngram_rows, o.geometry.ngram) = (Some(300), None))
            .contains("`tiny` has no n-gram table")
    );
    assert!(error(|o| o.geometry.hidden = 0).contains("`hidden` is 0"));
}
