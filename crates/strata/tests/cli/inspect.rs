//! `strata inspect`.

use strata_gguf::Gguf;

use crate::program::{Place, golden, pebble};

/// Oracle: the container's own reader.
#[test]
fn adds_up() {
    let json = Place::new().run(&["inspect", &pebble(), "--json", "--tensors"]).json();
    let gguf = Gguf::open(&strata_testkit::golden::pebble()).unwrap();
    let bytes: u64 = gguf.tensors().iter().map(|t| t.bytes).sum();
    assert_eq!(json["total"]["tensors"], gguf.tensors().len());
    assert_eq!(json["total"]["bytes"], bytes);
    assert_eq!(json["file_bytes"], std::fs::metadata(pebble()).unwrap().len());
    for by in ["by_format", "by_role"] {
        let sum: u64 = json[by].as_object().unwrap().values().map(|s| s["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sum, bytes, "{by}");
    }
    assert_eq!(json["tensors"].as_array().unwrap().len(), gguf.tensors().len());
    assert_eq!(json["metadata"]["general.architecture"], "qwen4exp");
    assert_eq!(json["metadata"]["tokenizer.ggml.tokens"].as_array().unwrap().len(), 12_288);
    // Whole multipliers, which a float would round.
    let multipliers = json["metadata"]["qwen4exp.ple.layer_multipliers"].as_array().unwrap();
    assert!(multipliers.iter().all(|m| m.as_u64().unwrap() % 2 == 1), "{multipliers:?}");
    assert!(json["by_role"].get("other").is_none(), "{}", json["by_role"]);
}

/// Oracle: the numbers of the description of the model.
#[test]
fn reads_well() {
    let text = Place::new().run(&["inspect", &pebble()]).well();
    for part in [
        "GGUF version 3",
        "general.architecture",
        "qwen4exp",
        "IQ4_XS",
        "experts",
        "n-gram table",
        "bits per value",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() < 180), "{text}");
    assert!(!text.contains("\nTensors\n"));
    let listed = Place::new().run(&["inspect", &golden("tiny/tiny.gguf"), "--tensors"]).well();
    assert!(listed.contains("\nTensors\n") && listed.contains("blk.0.ssm_out.weight"), "{listed}");
}

/// Oracle: any one of several files shows the whole model.
#[test]
fn shards_are_one_model() {
    let place = Place::new();
    let out = place.name("split.gguf");
    place.run(&["synth", "--geometry", "tiny", "--formats", "f32", "--split", "400K", &out]).well();
    let shards = place.files();
    assert!(shards.len() > 2, "{shards:?}");
    let whole: Vec<_> =
        shards.iter().map(|shard| place.run(&["inspect", &place.name(shard), "--json"]).json()).collect();
    assert!(whole.iter().all(|json| json == &whole[0]));
    assert_eq!(whole[0]["shards"].as_array().unwrap().len(), shards.len());
}
