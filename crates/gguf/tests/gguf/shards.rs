//! Split models: opened from any shard, and refused when the shards are not those of one model.

use crate::raw::{Raw, entry, pair, string};
use std::fs;
use std::path::{Path, PathBuf};
use strata_gguf::{Gguf, TensorType};
use tempfile::TempDir;

/// Shard `no` of `count` as llama.cpp's splitter writes it: all metadata in the first, then only `split.*`.
fn shard(no: u16, count: u16, tensors: i32, names: &[&str]) -> Raw {
    let mut raw = Raw { entries: Vec::new(), data: 0, ..Raw::valid() };
    if no > 0 {
        raw.pairs.clear();
    }
    raw = raw
        .pair(pair("split.no", 2, &no.to_le_bytes()))
        .pair(pair("split.count", 2, &count.to_le_bytes()))
        .pair(pair("split.tensors.count", 5, &tensors.to_le_bytes()));
    for (i, name) in names.iter().enumerate() {
        raw = raw.entry(entry(name, &[8], 0, 32 * i as u64), 32);
    }
    raw
}

fn path(folder: &TempDir, number: usize, count: usize) -> PathBuf {
    folder.path().join(format!("m-{number:05}-of-{count:05}.gguf"))
}

/// Writes the shards under their proper names.
fn model(shards: &[Raw]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (i, shard) in shards.iter().enumerate() {
        fs::write(path(&folder, i + 1, shards.len()), shard.bytes()).unwrap();
    }
    folder
}

fn three() -> [Raw; 3] {
    [shard(0, 3, 3, &[]), shard(1, 3, 3, &["a", "b"]), shard(2, 3, 3, &["c"])]
}

/// Asserts that opening `at` fails with "`blamed`: `text`".
fn refused(at: &Path, blamed: &Path, text: &str) {
    let error = Gguf::open(at).map(|_| ()).expect_err("should be refused").to_string();
    assert_eq!(error, format!("{}: {text}", blamed.display()));
}

/// Oracle: the shards as they were made. The first has no tensors.
#[test]
fn any_shard_opens_the_model() {
    let folder = model(&three());
    for number in 1..=3 {
        let gguf = Gguf::open(&path(&folder, number, 3)).unwrap();
        assert_eq!(gguf.path(), path(&folder, number, 3));
        let places: Vec<_> = gguf.tensors().iter().map(|t| (t.name.as_str(), t.shard)).collect();
        assert_eq!(places, [("a", 1), ("b", 1), ("c", 2)]);
        assert_eq!(gguf.metadata().str("general.architecture").unwrap(), "test");
        assert_eq!(gguf.shards().len(), 3);
        let mapping = gguf.map().unwrap();
        assert_eq!(mapping.bytes(gguf.tensor("c").unwrap()), [0; 32]);
        gguf.unchanged().unwrap();
    }
}

#[test]
fn a_missing_shard_is_named() {
    let folder = model(&three());
    fs::remove_file(path(&folder, 2, 3)).unwrap();
    let (first, second) = (path(&folder, 1, 3), path(&folder, 2, 3));
    refused(&first, &second, &format!("shard 2 of 3 is missing; put it beside {}", first.display()));
}

#[test]
fn a_broken_shard_is_named() {
    let folder = model(&three());
    fs::write(path(&folder, 3, 3), b"oops").unwrap();
    refused(
        &path(&folder, 1, 3),
        &path(&folder, 3, 3),
        r#"not a GGUF file (it begins with "oops" instead of "GGUF")"#,
    );
}

#[test]
fn names_and_numbers_must_agree() {
    let [first, second, third] = three();
    let folder = model(&[first.clone(), third.clone(), second.clone()]);
    let misnamed =
        "is named shard 2 of 3, but its metadata says shard 3 of 3; give it its name back or fetch it again";
    refused(&path(&folder, 1, 3), &path(&folder, 2, 3), misnamed);
    refused(&path(&folder, 2, 3), &path(&folder, 2, 3), misnamed);

    let folder = model(&[first.clone(), second.clone()]);
    refused(
        &path(&folder, 1, 2),
        &path(&folder, 1, 2),
        "is named shard 1 of 2, but its metadata says shard 1 of 3; give it its name back or fetch it again",
    );

    let folder = model(&[first.clone(), Raw::valid(), third.clone()]);
    let no_key =
        "is named shard 2 of 3, but it has no metadata key `split.count`; it is not part of a split model";
    refused(&path(&folder, 2, 3), &path(&folder, 2, 3), no_key);
    refused(&path(&folder, 3, 3), &path(&folder, 2, 3), no_key);

    let folder = model(&[first, shard(3, 3, 3, &["a", "b"]), third]);
    let number = "metadata key `split.no` is 3, which is not below `split.count` = 3";
    refused(&path(&folder, 1, 3), &path(&folder, 2, 3), number);

    let folder = tempfile::tempdir().unwrap();
    let renamed = folder.path().join("renamed.gguf");
    fs::write(&renamed, second.bytes()).unwrap();
    refused(
        &renamed,
        &renamed,
        "this is shard 2 of 3, but it is not named ...-00002-of-00003.gguf, so the others cannot be found; \
         give it its name back",
    );

    let folder = model(&[shard(0, 1, 1, &["a"]), shard(0, 1, 1, &["a"])]);
    refused(
        &path(&folder, 1, 2),
        &path(&folder, 1, 2),
        "is named shard 1 of 2, but its metadata says shard 1 of 1; give it its name back or fetch it again",
    );
}

#[test]
fn shards_of_two_models_are_refused() {
    let [first, second, third] = three();
    let (one, two, three) = (1, 2, 3);
    let other = |raw: &Raw, key: &str, value: &str| raw.clone().pair(pair(key, 8, &string(value)));

    let folder = model(&[first.clone(), other(&second, "general.architecture", "other"), third.clone()]);
    let text = format!(
        "metadata key `general.architecture` differs from that in {}; the shards belong to two models",
        path(&folder, one, 3).display()
    );
    refused(&path(&folder, one, 3), &path(&folder, two, 3), &text);

    // Two later shards that contradict each other in a key that the first doesn't have.
    let folder =
        model(&[first.clone(), other(&second, "general.name", "x"), other(&third, "general.name", "y")]);
    let text = format!(
        "metadata key `general.name` differs from that in {}; the shards belong to two models",
        path(&folder, two, 3).display()
    );
    refused(&path(&folder, one, 3), &path(&folder, three, 3), &text);

    let folder = model(&[first.clone(), second.clone(), shard(2, 3, 4, &["c"])]);
    let text = format!(
        "metadata key `split.tensors.count` differs from that in {}; the shards belong to two models",
        path(&folder, one, 3).display()
    );
    refused(&path(&folder, two, 3), &path(&folder, three, 3), &text);

    let folder = model(&[first.clone(), second.clone(), shard(2, 3, 3, &["c", "d"])]);
    refused(
        &path(&folder, one, 3),
        &path(&folder, one, 3),
        "the 3 shards hold 4 tensors together, but `split.tensors.count` says 3; \
         a shard is from another model or an older split",
    );

    let folder = model(&[first, second, shard(2, 3, 3, &["b"])]);
    let text = format!(
        "tensor `b` is also in {}; the shards do not belong together",
        path(&folder, two, 3).display()
    );
    refused(&path(&folder, one, 3), &path(&folder, three, 3), &text);
}

/// A shard that repeats the metadata, or says a count in another integer width, is no contradiction.
#[test]
fn repeated_metadata_is_accepted() {
    let [first, second, third] = three();
    let repeated = second.pair(pair("general.architecture", 8, &string("test")));
    let mut wide = third;
    wide.pairs[1] = pair("split.count", 10, &3u64.to_le_bytes());
    let extra = wide.pair(pair("only.here", 4, &7u32.to_le_bytes()));
    let folder = model(&[first, repeated, extra]);
    let gguf = Gguf::open(&path(&folder, 1, 3)).unwrap();
    assert_eq!(gguf.metadata().u32("only.here").unwrap(), 7);
    assert_eq!(gguf.metadata().u32("split.no").unwrap(), 0);
}

/// Oracle: what was done to the file.
#[test]
fn a_file_that_changes_is_noticed() {
    let folder = model(&three());
    let target = path(&folder, 3, 3);
    let changed = |what: &str| {
        format!(
            "{}: the file {what} while in use; leave model files alone while they are open, and start again",
            target.display()
        )
    };
    let bytes = fs::read(&target).unwrap();
    let open = || Gguf::open(&path(&folder, 1, 3)).unwrap();
    let now = std::time::SystemTime::now();

    let gguf = open();
    let file = fs::File::options().write(true).open(&target).unwrap();
    file.set_len(bytes.len() as u64 - 1).unwrap();
    assert_eq!(gguf.unchanged().unwrap_err().to_string(), changed("became shorter"));
    assert_eq!(gguf.map().unwrap_err().to_string(), changed("became shorter"));
    let mut buf = [0; 32];
    let error = gguf.read_at(gguf.tensor("c").unwrap(), 0, &mut buf).unwrap_err();
    assert_eq!(error.to_string(), changed("became shorter"));

    file.set_len(bytes.len() as u64).unwrap();
    let gguf = open();
    file.set_modified(now + std::time::Duration::from_secs(5)).unwrap();
    assert_eq!(gguf.unchanged().unwrap_err().to_string(), changed("was written to"));

    let gguf = open();
    let copy = folder.path().join("copy");
    fs::write(&copy, &bytes).unwrap();
    fs::rename(&copy, &target).unwrap();
    assert_eq!(gguf.unchanged().unwrap_err().to_string(), changed("was replaced"));

    let gguf = open();
    fs::rename(&target, &copy).unwrap();
    assert_eq!(gguf.unchanged().unwrap_err().to_string(), changed("was moved or removed"));
}

/// A range outside of the tensor is an error, not the neighbour's bytes.
#[test]
fn reads_stay_inside_the_tensor() {
    let folder = model(&three());
    let gguf = Gguf::open(&path(&folder, 1, 3)).unwrap();
    let tensor = gguf.tensor("a").unwrap();
    assert_eq!(tensor.ty, TensorType::F32);
    for (offset, len) in [(0, 33), (32, 1), (u64::MAX, 2)] {
        let mut buf = vec![0; len];
        let text = gguf.read_at(tensor, offset, &mut buf).unwrap_err().to_string();
        let expected = format!(
            "{}: tensor `a` has 32 bytes; {len} bytes from {offset} are outside of it",
            path(&folder, 2, 3).display()
        );
        assert_eq!(text, expected);
    }
    gguf.read_at(tensor, 32, &mut []).unwrap();
}
