//! Hyper-parameters: of the files there are, of changed ones, and of those that must be refused.

use std::sync::LazyLock;

use strata_gguf::{Gguf, Metadata, Value};
use strata_model::hyper::{Attention, Draft, Gdn, HyperError, Indexer, Moe};
use strata_model::ngram::derive::{Geometry, derive};
use strata_model::ngram::{Head, NgramHash};
use strata_model::{Hyper, LayerKind, Warning};
use strata_testkit::golden;

use crate::copy::tiny;

static TINY: LazyLock<Gguf> = LazyLock::new(|| Gguf::open(&tiny()).expect("opens"));

const QSA: LayerKind = LayerKind::Qsa { ratio: 4 };

/// Reads tiny's metadata after `change`; tensors that `hide` names count as absent.
fn changed(
    change: impl FnOnce(&mut Metadata),
    hide: impl Fn(&str) -> bool,
) -> (Result<Hyper, HyperError>, Vec<Warning>) {
    let mut metadata = TINY.metadata().clone();
    change(&mut metadata);
    let mut warnings = Vec::new();
    let tensor = |name: &str| if hide(name) { None } else { TINY.tensor(name) };
    let read = Hyper::read(&metadata, &tensor, &mut warnings);
    (read, warnings)
}

fn set(key: &str, value: impl Into<Value>) -> (Result<Hyper, HyperError>, Vec<Warning>) {
    changed(|m| drop(m.insert(format!("qwen4exp.{key}"), value)), |_| false)
}

/// Oracle: the configuration of the tiny model in the spec, section 1.
#[test]
fn tiny_is_read() {
    let mut warnings = Vec::new();
    let hyper = Hyper::from_gguf(&TINY, &mut warnings).expect("reads");
    assert_eq!(warnings, []);
    assert_eq!(
        (hyper.vocab, hyper.context, hyper.width, hyper.streams, hyper.mixer_rank),
        (384, 512, 64, 4, 8)
    );
    assert_eq!((hyper.norm_eps, hyper.residual()), (1e-6, 256));
    assert_eq!(hyper.layers, [LayerKind::Gdn, LayerKind::Gdn, LayerKind::Gdn, QSA]);
    assert_eq!(hyper.draft, Some(Draft { block: 4, ratio: 4 }));
    let attention = Attention {
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        rotary: 8,
        rope_base: 1e7,
        rope_sections: [2, 1, 1],
    };
    assert_eq!(hyper.attention, attention);
    assert_eq!(hyper.indexer, Indexer { heads: 4, dim: 16, budget: 16 });
    let gdn = Gdn { key_heads: 2, value_heads: 6, key_dim: 16, value_dim: 16, conv_kernel: 4 };
    assert_eq!((hyper.gdn, hyper.gdn.channels(), hyper.gdn.inner()), (gdn, 160, 96));
    assert_eq!(hyper.moe, Moe { experts: 8, used: 2, ffn: 32, shared_ffn: 32 });
    let ple = hyper.ple.as_ref().expect("has n-grams");
    assert_eq!((ple.layers.as_slice(), ple.ngram_size, ple.row_width, ple.heads), ([1].as_slice(), 3, 8, 8));
    assert_eq!((ple.conv_kernel, ple.embedding()), (4, 64));
    assert_eq!((ple.end, ple.image_token, ple.table_rows()), (2, 250, 888));
    assert_eq!((hyper.ple_slot(1), hyper.ple_slot(0)), (Some(0), None));
}

/// Oracle: the metadata of the demo model, read with another GGUF reader.
#[test]
fn pebble_is_read() {
    let gguf = Gguf::open(&golden::pebble()).expect("opens");
    let mut warnings = Vec::new();
    let hyper = Hyper::from_gguf(&gguf, &mut warnings).expect("reads");
    assert_eq!(warnings, []);
    assert_eq!((hyper.vocab, hyper.context, hyper.width), (12288, 8192, 256));
    let full: Vec<usize> = (0..8).filter(|&l| hyper.layers[l] == QSA).collect();
    assert_eq!((hyper.layers.len(), full), (8, vec![3, 7]));
    assert_eq!((hyper.moe.experts, hyper.moe.used, hyper.moe.ffn), (64, 4, 96));
    assert_eq!(hyper.indexer.budget, 64);
    // No image token in the file: the end-of-text token stands in.
    let ple = hyper.ple.as_ref().expect("has n-grams");
    assert_eq!((ple.end, ple.image_token), (12275, 12275));
}

/// Oracle: the rule of the derivation. The constants that both files carry are exactly what it gives.
#[test]
fn the_files_constants_follow_from_their_seeds() {
    let constants = |gguf: &Gguf, geometry: Geometry| {
        let hyper = Hyper::from_gguf(gguf, &mut Vec::new()).expect("reads");
        let ple = hyper.ple.expect("has n-grams");
        let table = derive(&geometry, 1);
        let layer = &table.layers[0];
        let hash = NgramHash::new(
            layer.multipliers.clone(),
            layer.heads.clone(),
            geometry.heads_per_ngram,
            ple.end,
            hyper.vocab,
        );
        assert_eq!(ple.hashes, [hash.expect("valid")]);
        let stored = gguf.tensor("per_layer_token_embd.weight").expect("has a table").shape[1];
        assert_eq!(table.rows, stored);
    };
    let geometry =
        Geometry { vocab: 384, ngram_size: 3, heads_per_ngram: 4, vocab_base: 97, divisor: 8, seed: 1234 };
    constants(&TINY, geometry);
    let pebble = Gguf::open(&golden::pebble()).expect("opens");
    constants(&pebble, Geometry { vocab: 12288, vocab_base: 20_000, divisor: 128, ..geometry });
}

/// Oracle: the rows that the reference implementation looked up (`ref.npz`), and a hash of its own.
#[test]
fn tiny_rows_equal_the_references() {
    let mut npz = golden::Npz::golden("tiny/ref.npz");
    let (ids, expected) = (npz.ids("ids"), npz.ids("ple_rows"));
    let hyper = Hyper::from_gguf(&TINY, &mut Vec::new()).expect("reads");
    let mut rows = Vec::new();
    hyper.ple.expect("has n-grams").hashes[0].rows(&[], &ids, &mut rows);
    assert!(rows.iter().copied().eq(expected.into_iter().map(u64::from)));
}

/// Oracle: the spec: an array of layer kinds, else the interval, give the same layers for this model.
#[test]
fn layer_kinds_come_from_the_array_or_the_interval() {
    let (hyper, _) = changed(|m| drop(m.remove("qwen4exp.attention.recurrent_layers")), |_| false);
    assert_eq!(hyper.expect("reads").layers, [LayerKind::Gdn, LayerKind::Gdn, LayerKind::Gdn, QSA]);
    let pattern = |m: &mut Metadata| {
        m.insert("qwen4exp.attention.recurrent_layers", vec![false, true, true, false, false]);
        m.insert("qwen4exp.attention.compress_ratios", vec![8i32, 0, 0, 2, 0]);
    };
    let (hyper, warnings) = changed(pattern, |_| false);
    let hyper = hyper.expect("another pattern, ratio per layer");
    let kinds = [LayerKind::Qsa { ratio: 8 }, LayerKind::Gdn, LayerKind::Gdn, LayerKind::Qsa { ratio: 2 }];
    assert_eq!((hyper.layers.as_slice(), warnings.len()), (kinds.as_slice(), 0));
    // The draft block's entry is zero in some files: it follows the trunk.
    assert_eq!(hyper.draft, Some(Draft { block: 4, ratio: 8 }));
}

/// Oracle: trap 1 of the spec.
#[test]
fn zeroed_ratios_are_repaired_and_mixtures_refused() {
    let repaired = Warning::RatiosRepaired { ratio: 4 };
    for ratios in [vec![0i32, 0, 0, 0, 4], vec![0; 5], vec![0; 4]] {
        let (hyper, warnings) = set("attention.compress_ratios", ratios);
        let hyper = hyper.expect("repaired");
        assert_eq!((hyper.layers[3], hyper.draft.expect("is there").ratio), (QSA, 4));
        assert_eq!(warnings.as_slice(), std::slice::from_ref(&repaired));
    }
    let (hyper, warnings) = changed(|m| drop(m.remove("qwen4exp.attention.compress_ratios")), |_| false);
    assert_eq!((hyper.expect("repaired").layers[3], warnings), (QSA, vec![repaired]));

    let two_full = |m: &mut Metadata| {
        m.insert("qwen4exp.attention.recurrent_layers", vec![true, true, false, false, false]);
    };
    let (mixture, _) = changed(two_full, |_| false);
    assert!(mixture.expect_err("refused").to_string().contains("zero on 1 of 2"));
    let (recurrent, _) = set("attention.compress_ratios", vec![0i32, 4, 0, 4, 4]);
    assert!(recurrent.expect_err("refused").to_string().contains("layer 1"));
    let zeroed = |m: &mut Metadata| drop(m.insert("qwen4exp.attention.compress_ratios", vec![0i32; 5]));
    let (dense, _) = changed(zeroed, |name| name.starts_with("blk.3.indexer"));
    assert!(dense.expect_err("refused").to_string().contains("without an indexer"));
    // The repair needs a whole number of blocks, too.
    let odd = |m: &mut Metadata| {
        zeroed(m);
        m.insert("qwen4exp.attention.indexer.top_k", 18u32);
    };
    let (odd, _) = changed(odd, |_| false);
    assert!(odd.expect_err("refused").to_string().contains("blocks of 4"));
}

/// Oracle: trap 18 of the spec: metadata or tensors may tell of the draft block, or only one of them.
#[test]
fn the_draft_block_is_found_either_way() {
    let draft = Some(Draft { block: 4, ratio: 4 });
    let no_key = |m: &mut Metadata| drop(m.remove("qwen4exp.nextn_predict_layers"));
    let (hyper, warnings) = changed(no_key, |_| false);
    assert_eq!((hyper.expect("reads").draft, warnings.len()), (draft, 0));
    // Added to a file that doesn't count it.
    let uncounted = |m: &mut Metadata| {
        no_key(m);
        m.insert("qwen4exp.block_count", 4u32);
    };
    let (hyper, _) = changed(uncounted, |_| false);
    let hyper = hyper.expect("reads");
    assert_eq!((hyper.draft, hyper.layers.len()), (draft, 4));
    // Promised and not there.
    let (hyper, warnings) = changed(|_| (), |name| name.starts_with("blk.4."));
    assert_eq!((hyper.expect("reads").draft, warnings), (None, vec![Warning::NoDraft]));
    // There, and nothing else.
    let (alone, _) = changed(|_| (), |name| name.starts_with("blk.0"));
    assert!(matches!(alone, Err(HyperError::DraftAlone)));
    let gguf = Gguf::open(&golden::dir().join("tiny/tiny-mtp-only.gguf")).expect("opens");
    let alone = Hyper::from_gguf(&gguf, &mut Vec::new()).expect_err("refused");
    assert!(matches!(alone, HyperError::DraftAlone), "{alone}");
    assert!(alone.to_string().contains("give the file of the whole model"));
    let (recurrent, _) = set("attention.recurrent_layers", vec![true, true, true, false, true]);
    assert!(recurrent.expect_err("refused").to_string().contains("draft block"));
}

/// Oracle: a second n-gram layer continues the primes and the table.
#[test]
fn several_ngram_layers_have_their_own_constants() {
    let geometry =
        Geometry { vocab: 384, ngram_size: 2, heads_per_ngram: 3, vocab_base: 50, divisor: 8, seed: 7 };
    let table = derive(&geometry, 2);
    let all = |f: fn(&Head) -> u64| -> Vec<u64> {
        table.layers.iter().flat_map(|l| l.heads.iter().map(f)).collect()
    };
    let multipliers: Vec<u64> = table.layers.iter().flat_map(|l| l.multipliers.clone()).collect();
    let two = |m: &mut Metadata| {
        m.insert("qwen4exp.ple.layers", vec![0i32, 2]);
        m.insert("qwen4exp.ple.ngram_size", 2u32);
        m.insert("qwen4exp.ple.heads_per_ngram", 3u32);
        m.insert("qwen4exp.ple.layer_multipliers", multipliers.clone());
        m.insert("qwen4exp.ple.head_offsets", all(|h| h.offset));
        m.insert("qwen4exp.ple.head_vocab_sizes", all(|h| h.rows));
    };
    let (hyper, _) = changed(two, |_| false);
    let hyper = hyper.expect("reads");
    assert_eq!((hyper.ple_slot(0), hyper.ple_slot(1), hyper.ple_slot(2)), (Some(0), None, Some(1)));
    let ple = hyper.ple.expect("has n-grams");
    assert_eq!(ple.hashes.len(), 2);
    assert_eq!(ple.hashes[1].heads(), table.layers[1].heads);
    assert_eq!(ple.table_rows().next_multiple_of(8), table.rows);
    let (short, _) = changed(
        |m| {
            two(m);
            m.insert("qwen4exp.ple.layer_multipliers", multipliers[..2].to_vec());
        },
        |_| false,
    );
    assert!(short.expect_err("refused").to_string().contains("2 entries, but 4"));
}

/// Oracle: the sentence each mistake promises: it names the key and the rule.
#[test]
fn inconsistent_metadata_is_refused() {
    let cases: Vec<(&str, Value, &str)> = vec![
        ("attention.head_count", 5u32.into(), "not a multiple of"),
        ("attention.head_count_kv", 0u32.into(), "from 1 to"),
        ("attention.value_length", 16u32.into(), "one width"),
        ("attention.key_length", u32::MAX.into(), "from 1 to"),
        ("rope.dimension_count", 7u32.into(), "even"),
        ("rope.dimension_count", 64u32.into(), "at most 32"),
        ("rope.dimension_count", 24u32.into(), "4 pairs"),
        ("rope.dimension_sections", vec![2i32, 1, 0, 1].into(), "three sections"),
        ("rope.dimension_sections", vec![2i32, 1].into(), "3 pairs"),
        ("rope.freq_base", 0f32.into(), "positive"),
        ("rope.scaling.type", "yarn".into(), "`yarn`"),
        ("attention.indexer.key_length", 4u32.into(), "indexer's width"),
        ("attention.indexer.top_k", 15u32.into(), "blocks of 4"),
        ("attention.compress_ratios", vec![0i32, 0, 4].into(), "3 entries for 5"),
        ("attention.compress_ratios", vec![0i32, 0, 0, -4, 4].into(), "is -4"),
        ("attention.recurrent_layers", vec![true].into(), "1 entries for 5"),
        ("attention.layer_norm_rms_epsilon", f32::NAN.into(), "positive"),
        ("ssm.time_step_rank", 5u32.into(), "not a multiple of"),
        ("ssm.inner_size", 97u32.into(), "not a multiple of"),
        ("expert_used_count", 9u32.into(), "8 experts"),
        ("expert_gating_func", 2u32.into(), "gating function 2"),
        ("expert_weights_norm", false.into(), "renormalised"),
        ("expert_weights_scale", 2.5f32.into(), "scale of 2.5"),
        ("expert_group_count", 4u32.into(), "4 groups"),
        ("block_count", 0u32.into(), "from 1 to"),
        ("block_count", 1_000_000u32.into(), "4096"),
        ("nextn_predict_layers", 5u32.into(), "below block_count"),
        ("context_length", 0u32.into(), "from 1 to"),
        ("ple.layers", vec![4i32].into(), "below 4"),
        ("ple.layers", vec![1i32, 1].into(), "ascending"),
        ("ple.layers", vec![0i32; 0].into(), "n-gram table"),
        ("ple.ngram_size", 1u32.into(), "from 2 to 64"),
        ("ple.ngram_size", 4u32.into(), "3 entries, but 4"),
        ("ple.heads_per_ngram", 5u32.into(), "8 entries, but 10"),
        ("ple.eos_token_id", 384u32.into(), "384 tokens"),
        ("ple.layer_multipliers", vec![3u64, 5, 6].into(), "is even"),
        ("ple.layer_multipliers", vec![3u64, 5, 1 << 60 | 1].into(), "2^63"),
        ("ple.head_offsets", vec![0u64, 96, 198, 301, 408, 517, 630, 757].into(), "overlaps"),
    ];
    for (key, value, part) in cases {
        let (read, _) = set(key, value.clone());
        let message = read.map(|_| ()).expect_err(key).to_string();
        assert!(message.contains(part), "{key} = {value}: {message}");
        assert!(!message.contains('\n'));
    }
    let (other, _) = changed(|m| drop(m.insert("general.architecture", "llama")), |_| false);
    let message = other.expect_err("refused").to_string();
    assert!(message.contains("`llama`") && message.contains("qwen4exp"), "{message}");
    for key in ["embedding_length", "expert_count", "ple.eos_token_id", "ple.head_offsets", "block_count"] {
        let (read, _) = changed(|m| drop(m.remove(&format!("qwen4exp.{key}"))), |_| false);
        let message = read.map(|_| ()).expect_err(key).to_string();
        assert!(message.contains(key), "{message}");
    }
}
