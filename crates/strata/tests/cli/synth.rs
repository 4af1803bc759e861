//! `strata synth`: what it makes can be used, and is the same every time.

use std::fs;

use crate::program::Place;

/// Oracle: the program itself reads and runs the file; the seed's promise.
#[test]
fn makes_a_model_that_runs() {
    let place = Place::new();
    let (one, again, other) = (place.name("one.gguf"), place.name("again.gguf"), place.name("other.gguf"));
    let make = |seed: &str, out: &str| {
        let flags = ["--geometry", "tiny", "--formats", "ud-iq3_xxs", "--mtp", "--seed", seed];
        place.run(&[&["synth", out], &flags[..]].concat()).well()
    };
    make("7", &one);
    make("7", &again);
    make("8", &other);
    assert!(fs::read(&one).unwrap() == fs::read(&again).unwrap());
    assert!(fs::read(&one).unwrap() != fs::read(&other).unwrap());
    let out = place.name("logits.npy");
    place.run(&["logits", &one, "--ids", "1,2,3,4,5", "--out", &out, "--mtp"]).well();
    let json = place.run(&["run", &one, "x", "--raw", "-n", "4", "--greedy", "--json"]).json();
    assert!(json["answer_tokens"].as_u64().unwrap() <= 4);
}

/// Oracle: the sentences; nothing is left behind, and nothing replaced without being told to.
#[test]
fn refuses_what_makes_no_sense() {
    let place = Place::new();
    let out = place.name("out.gguf");
    let synth = |geometry: &str, formats: &str, more: &[&str]| {
        place.run(&[&["synth", &out, "--geometry", geometry, "--formats", formats], more].concat())
    };
    synth("huge", "f32", &[]).badly(2, &["--geometry", "huge", "flash-next"]);
    place.run(&["synth", ".", "--geometry", "tiny", "--formats", "f32"]).badly(1, &["is a folder"]);
    synth("flash-next", "f32", &["--ngram-rows", "1000000000000"])
        .badly(1, &["out.gguf", "GB free", "--ngram-rows"]);
    synth("tiny", "q9", &[]).badly(2, &["--formats", "q9", "ud-iq3_xxs"]);
    for skew in ["9", "0", "-1", "nan", "1e9"] {
        synth("tiny", "f32", &["--router-skew", skew]).badly(2, &["--router-skew", "above 0"]);
    }
    synth("tiny", "f32", &["--ngram-rows", "0"]).badly(2, &["--ngram-rows"]);
    synth("tiny", "f32", &["--threads", "0"]).badly(2, &["--threads", "at least 1"]);
    for size in ["5X", "0", "-1"] {
        let ended = synth("tiny", "f32", &["--split", size]);
        assert!(ended.code == Some(2) && ended.err.contains("--split"), "{ended:?}");
    }
    assert!(place.files().is_empty());
    fs::write(&out, "mine").unwrap();
    synth("tiny", "f32", &[]).badly(1, &["out.gguf", "--force"]);
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    synth("tiny", "f32", &["--force"]).well();
    assert!(fs::read(&out).unwrap().starts_with(b"GGUF"));
    assert_eq!(place.files(), ["out.gguf"]);
}

/// Oracle: the seeds. Nothing else tells the shards apart: their tensors have the same names, shapes and formats.
#[test]
fn shards_of_two_seeds_are_no_model() {
    let place = Place::new();
    for seed in ["1", "2"] {
        let out = place.name(&format!("{seed}.gguf"));
        let flags = ["--geometry", "tiny", "--formats", "f32", "--split", "1M", "--seed", seed];
        place.run(&[&["synth", &out], &flags[..]].concat()).well();
    }
    let shards: Vec<String> = place.files().into_iter().filter(|name| name.starts_with("1-")).collect();
    assert!(shards.len() > 1);
    place.run(&["inspect", &place.name(&shards[0])]).well();
    fs::copy(place.path(&shards[1].replacen('1', "2", 1)), place.path(&shards[1])).unwrap();
    for shard in &shards {
        place
            .run(&["inspect", &place.name(shard)])
            .badly(1, &[&shards[0], &shards[1], "`synth.seed`", "two models"]);
    }
}
