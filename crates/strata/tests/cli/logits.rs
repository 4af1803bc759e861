//! `strata logits`: against the reference, and the same bits in every form.

use std::fs;
use std::path::Path;

use npyz::NpyFile;
use strata_testkit::distance;
use strata_testkit::golden::Npz;

use crate::program::{Place, golden};

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
