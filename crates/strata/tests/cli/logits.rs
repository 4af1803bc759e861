//! `strata logits`: against the reference, and the same bits in every form.

use std::fs;
use std::path::Path;

use npyz::NpyFile;
use strata_testkit::distance;
use strata_testkit::golden::Npz;

use crate::interrupt::wait_for_files;
use crate::program::{Ended, Place, golden, pebble};

fn read(path: &Path) -> (Vec<u64>, Vec<f32>) {
    let npy = NpyFile::new(fs::File::open(path).unwrap()).unwrap();
    (npy.shape().to_vec(), npy.into_vec().unwrap())
}

fn ids() -> String {
    let ids = Npz::golden("tiny/ref.npz").ids("ids");
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Oracle: the public reference implementation's logits.
#[test]
fn are_the_references() {
    let place = Place::new();
    let (model, ids) = (golden("tiny/tiny.gguf"), ids());
    let mut z = Npz::golden("tiny/ref.npz");
    for (flags, name) in [(&[][..], "logits"), (&["--mtp"][..], "mtp_logits")] {
        let out = place.name("out.npy");
        let args = [&["logits", &model, "--ids", &ids, "--out", &out, "--kv", "f32"], flags].concat();
        assert_eq!(place.run(&args).well(), "");
        let (shape, found) = read(Path::new(&out));
        let expected = z.f32(name);
        let rows = found.len() / expected.shape[expected.shape.len() - 1];
        assert_eq!(shape, [rows as u64, 384]);
        assert_eq!(rows, if flags.is_empty() { 61 } else { 60 });
        assert!(distance(&found, &expected.data[..found.len()]) < 1e-4, "{name}");
    }
}

/// Oracle: the same command with nothing special.
#[test]
fn have_the_same_bits_in_every_form() {
    let place = Place::new();
    let (model, ids) = (golden("tiny/tiny.gguf"), ids());
    let file = format!("@{}", place.write("ids.txt", ids.replace(',', "\n")));
    let make = |ids: &str, flags: &[&str]| {
        let out = place.name("out.npy");
        place.run(&[&["logits", &model, "--ids", ids, "--out", &out], flags].concat()).well();
        fs::read(out).unwrap()
    };
    let plain = make(&ids, &[]);
    assert!(make(&file, &[]) == plain);
    for flags in [
        &["--window", "7", "--threads", "1"][..],
        &["--window", "1", "--threads", "3", "--isa", "scalar"],
        &["--experts", "heap"],
    ] {
        assert!(make(&ids, flags) == plain, "{flags:?}");
    }
    assert!(make(&ids, &["--kv", "f32"]) != plain);
}

/// Oracle: the model's bytes, under each of its names.
#[test]
fn never_replace_the_model() {
    let place = Place::new();
    let bytes = fs::read(golden("tiny/tiny.gguf")).unwrap();
    let model = place.write("model.gguf", &bytes);
    fs::hard_link(&model, place.path("hard.gguf")).unwrap();
    std::os::unix::fs::symlink("model.gguf", place.path("soft.gguf")).unwrap();
    for out in ["model.gguf", "./model.gguf", "hard.gguf", "soft.gguf"] {
        place.run(&["logits", &model, "--ids", "1,2", "--out", out]).badly(2, &[out, "model.gguf", "--out"]);
        assert!(fs::read(place.path(out)).unwrap() == bytes);
    }
    assert_eq!(place.files(), ["hard.gguf", "model.gguf", "soft.gguf"]);
}

/// Oracle: the sentence, the documented exit code, and only the files of before.
#[test]
fn a_model_that_shrinks_leaves_no_half_of_an_array() {
    let place = Place::new();
    let model = place.name("model.gguf");
    fs::copy(pebble(), &model).unwrap();
    let ids = (0..8000).map(|i| (i % 12_000).to_string()).collect::<Vec<_>>().join(",");
    let ids = format!("@{}", place.write("ids.txt", ids));
    let flags = ["logits", &model, "--ids", &ids, "--out", &place.name("out.npy"), "--window", "16"];
    let mut child = place.start(&flags);
    wait_for_files(&mut child, &place, 3);
    fs::OpenOptions::new().write(true).open(&model).unwrap().set_len(4096).unwrap();
    Ended::of(child.wait_with_output().unwrap()).badly(74, &["model.gguf"]);
    assert_eq!(place.files(), ["ids.txt", "model.gguf"]);
}

/// Oracle: the file that was there before, untouched, and no other.
#[test]
fn a_failure_leaves_the_old_file() {
    let place = Place::new();
    let out = place.write("out.npy", "old");
    let args = ["logits", &golden("tiny/tiny.gguf"), "--ids", "1,2,9999", "--out", &out];
    place.run(&args).badly(1, &["9999", "384"]);
    assert_eq!(fs::read(&out).unwrap(), b"old");
    assert_eq!(place.files(), ["out.npy"]);
}
