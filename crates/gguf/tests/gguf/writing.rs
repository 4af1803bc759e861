//! The writer: what it leaves on the disk, and that it leaves nothing when it fails.

use crate::raw::{Raw, array, entry, pair, string};
use std::fs;
use std::io::Write;
use std::path::Path;
use strata_gguf::write::Outline;
use strata_gguf::{Array, Gguf, Metadata, TensorType, Value};

fn metadata() -> Metadata {
    [("general.architecture", "test")].into_iter().collect()
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Byte `i` of tensor `t` in these tests.
fn byte(t: usize, i: usize) -> u8 {
    (t * 131 + i * 7 + i / 251) as u8
}

/// Oracle: the same file put together by hand from the format's description.
#[test]
fn the_bytes_are_those_of_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut metadata = metadata();
    metadata.insert("a.u64s", vec![u64::MAX, 1]);
    metadata.insert("b.nested", Array::Array(vec![Array::I16(vec![-2]), Array::String(vec!["é".into()])]));
    metadata.insert("c.f64", 0.1f64);
    metadata.insert("d.bool", true);
    let mut outline = Outline::new(metadata);
    outline.tensor("x", &[3], TensorType::F32).unwrap();
    outline.tensor("y", &[32, 2], TensorType::Q8_0).unwrap();
    let writer = outline.create(&path).unwrap();
    writer.write_at(0, 0, &[0xaa; 12]).unwrap();
    writer.write_at(1, 0, &[0xbb; 68]).unwrap();
    writer.finish().unwrap();

    let nested = [array(3, 1, &(-2i16).to_le_bytes()), array(8, 1, &string("é"))].concat();
    let mut raw = Raw { entries: Vec::new(), ..Raw::valid() }
        .pair(pair("a.u64s", 9, &array(10, 2, &[u64::MAX.to_le_bytes(), 1u64.to_le_bytes()].concat())))
        .pair(pair("b.nested", 9, &array(9, 2, &nested)))
        .pair(pair("c.f64", 12, &0.1f64.to_le_bytes()))
        .pair(pair("d.bool", 7, &[1]));
    raw.entries = vec![entry("x", &[3], 0, 0), entry("y", &[32, 2], 8, 32)];
    raw.data = 32 + 96;
    let mut expected = raw.bytes();
    let data = expected.len() - raw.data;
    expected[data..data + 12].fill(0xaa);
    expected[data + 32..data + 100].fill(0xbb);
    assert!(fs::read(&path).unwrap() == expected);
}

/// Oracle: the pattern written. Four threads write pieces of all tensors in a scrambled order.
#[test]
fn threads_write_pieces_by_position() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut outline = Outline::new(metadata());
    for t in 0..5 {
        outline.tensor(&format!("t{t}"), &[1000 + t], TensorType::I8).unwrap();
    }
    let writer = outline.create(&path).unwrap();
    let pieces: Vec<(usize, usize)> = (0..5).flat_map(|t| (0..11).map(move |p| (t, p * 100))).collect();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (writer, pieces) = (&writer, &pieces);
            scope.spawn(move || {
                for &(t, at) in pieces.iter().rev().skip(worker).step_by(4) {
                    let end = (at + 100).min(writer.tensors()[t].bytes as usize);
                    let bytes: Vec<u8> = (at..end).map(|i| byte(t, i)).collect();
                    writer.write_at(t, at as u64, &bytes).unwrap();
                }
            });
        }
    });
    assert_eq!(writer.finish().unwrap(), [path.as_path()]);
    assert_eq!(files(folder.path()), ["m.gguf"]);
    let gguf = Gguf::open(&path).unwrap();
    let mapping = gguf.map().unwrap();
    for (t, tensor) in gguf.tensors().iter().enumerate() {
        let expected: Vec<u8> = (0..1000 + t).map(|i| byte(t, i)).collect();
        assert_eq!(mapping.bytes(tensor), expected);
    }
}

/// Shards by explicit cut and by size; the first has metadata alone. Oracle: the rules of `Outline`.
#[test]
fn shards_are_cut_where_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut outline = Outline::new(metadata());
    outline.cut();
    outline.cut();
    for t in 0..7 {
        if t == 6 {
            outline.cut();
        }
        outline.tensor(&format!("t{t}"), &[1024], TensorType::I8).unwrap();
    }
    outline.cut();
    outline.split_at(2600);
    let writer = outline.create(&path).unwrap();
    let places: Vec<usize> = writer.tensors().iter().map(|t| t.shard).collect();
    assert_eq!(places, [1, 1, 2, 2, 3, 3, 4]);
    for t in 0..7 {
        let bytes: Vec<u8> = (0..1024).map(|i| byte(t, i)).collect();
        let mut sink = writer.sink(t).unwrap();
        bytes.chunks(100).for_each(|piece| sink.write_all(piece).unwrap());
        assert!(sink.write_all(b"x").is_err(), "one byte too many");
    }
    let paths = writer.finish().unwrap();
    let names: Vec<String> = (1..=5).map(|n| format!("m-{n:05}-of-00005.gguf")).collect();
    assert_eq!(files(folder.path()), names);
    assert!(paths[1..].iter().all(|path| fs::metadata(path).unwrap().len() <= 2600));
    let gguf = Gguf::open(&paths[2]).unwrap();
    assert_eq!(gguf.metadata().get("split.count"), Some(&Value::U16(5)));
    assert_eq!(gguf.metadata().get("split.no"), Some(&Value::U16(0)));
    assert_eq!(gguf.metadata().get("split.tensors.count"), Some(&Value::I32(7)));
    let mapping = gguf.map().unwrap();
    for (t, tensor) in gguf.tensors().iter().enumerate() {
        assert!(mapping.bytes(tensor).iter().enumerate().all(|(i, &b)| b == byte(t, i)));
    }
}

/// A model written from a split one is whole again: the `split.*` keys of its source don't survive.
#[test]
fn split_keys_are_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let mut old = metadata();
    old.insert("split.no", 0u16);
    old.insert("split.count", 5u16);
    old.insert("split.tensors.count", 9i32);
    let path = folder.path().join("whole.gguf");
    Outline::new(old).create(&path).unwrap().finish().unwrap();
    assert_eq!(*Gguf::open(&path).unwrap().metadata(), metadata());
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut outline = Outline::new(metadata());
    outline.cut();
    outline.tensor("t", &[64], TensorType::F32).unwrap();
    let writer = outline.create(&folder.path().join("m.gguf")).unwrap();
    assert_eq!(files(folder.path()).len(), 2);
    writer.write_at(0, 0, &[1; 10]).unwrap();
    drop(writer);
    assert!(files(folder.path()).is_empty());
}

#[test]
fn an_incomplete_tensor_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut outline = Outline::new(metadata());
    outline.tensor("t", &[64], TensorType::F32).unwrap();
    let writer = outline.create(&path).unwrap();
    writer.write_at(0, 100, &[1; 10]).unwrap();
    let text = writer.finish().unwrap_err().to_string();
    assert_eq!(text, format!("{}: tensor `t` was given 10 of its 256 bytes", path.display()));
    assert!(files(folder.path()).is_empty());
}

/// More than any disk and file system holds: the error comes before any data is written.
#[test]
fn a_full_disk_is_known_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut outline = Outline::new(metadata());
    outline.tensor("small", &[64], TensorType::F32).unwrap();
    outline.cut();
    outline.tensor("huge", &[1 << 60], TensorType::F32).unwrap();
    let text = outline.create(&path).unwrap_err().to_string();
    let second = folder.path().join("m-00002-of-00002.gguf");
    assert!(text.starts_with(&format!("{}: cannot reserve the space for it: ", second.display())), "{text}");
    assert!(files(folder.path()).is_empty());
}

#[test]
fn existing_files_are_kept_unless_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let exists = format!("{}: already exists; remove it or choose another name", path.display());
    fs::write(&path, b"precious").unwrap();
    assert_eq!(Outline::new(metadata()).create(&path).unwrap_err().to_string(), exists);
    fs::remove_file(&path).unwrap();

    // One that appears while writing is kept, too.
    let writer = Outline::new(metadata()).create(&path).unwrap();
    fs::write(&path, b"precious").unwrap();
    assert_eq!(writer.finish().unwrap_err().to_string(), exists);
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    assert_eq!(files(folder.path()), ["m.gguf"]);

    let mut outline = Outline::new(metadata());
    outline.overwrite(true);
    outline.create(&path).unwrap().finish().unwrap();
    assert_eq!(*Gguf::open(&path).unwrap().metadata(), metadata());
}

/// A shard that can't get its name takes the others' names back.
#[test]
fn shards_appear_together_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let mut outline = Outline::new(metadata());
    outline.cut();
    outline.tensor("t", &[8], TensorType::I8).unwrap();
    let writer = outline.create(&folder.path().join("m.gguf")).unwrap();
    writer.write_at(0, 0, &[0; 8]).unwrap();
    fs::write(folder.path().join("m-00002-of-00002.gguf"), b"precious").unwrap();
    writer.finish().unwrap_err();
    assert_eq!(files(folder.path()), ["m-00002-of-00002.gguf"]);
}

#[test]
fn what_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut outline = Outline::new(metadata());
    outline.tensor("t", &[8], TensorType::I8).unwrap();
    let refused = |result: Result<usize, strata_gguf::Error>| result.unwrap_err().to_string();
    assert_eq!(refused(outline.tensor("t", &[8], TensorType::I8)), "outline: tensor `t` occurs twice");
    assert_eq!(refused(outline.tensor("", &[8], TensorType::I8)), "outline: tensor `` has an empty name");
    assert_eq!(
        refused(outline.tensor("u", &[8], TensorType::Q4_0)),
        "outline: tensor `u` has rows of 8 values, which is not a multiple of the 32 of a Q4_0 block"
    );
    assert_eq!(
        outline.clone().create(&at("m-00001-of-00002.gguf")).unwrap_err().to_string(),
        format!(
            "{}: is the name of one shard of a split model; give the name of the whole, without the numbers",
            at("m-00001-of-00002.gguf").display()
        )
    );
    assert_eq!(
        outline.clone().create(&folder.path().join("..")).unwrap_err().to_string(),
        format!("{}: is a folder; give the name of a file to write", at("..").display())
    );
    assert_eq!(
        outline.clone().create(&at("absent/m.gguf")).unwrap_err().to_string(),
        format!(
            "{}: cannot create it: No such file or directory (os error 2)",
            at("absent/m.gguf").display()
        )
    );
    let mut bad = metadata();
    bad.insert("general.alignment", 12u32);
    assert_eq!(
        Outline::new(bad).create(&at("m.gguf")).unwrap_err().to_string(),
        format!(
            "{}: metadata key `general.alignment` is 12, \
             but the data alignment must be a power of two from 8 to 16777216",
            at("m.gguf").display()
        )
    );
    let mut many = Outline::new(metadata());
    for t in 0..65_536 {
        many.cut();
        many.tensor(&format!("t{t}"), &[1], TensorType::I8).unwrap();
    }
    assert_eq!(
        many.create(&at("m.gguf")).unwrap_err().to_string(),
        format!(
            "{}: 65537 shards are more than the 65535 that a split model can have; allow larger files",
            at("m.gguf").display()
        )
    );
    let writer = outline.create(&at("m.gguf")).unwrap();
    assert_eq!(
        writer.write_at(0, 4, &[0; 5]).unwrap_err().to_string(),
        format!("{}: tensor `t` has 8 bytes; 5 bytes from 4 are outside of it", at("m.gguf").display())
    );
    assert_eq!(
        writer.write_at(1, 0, &[]).unwrap_err().to_string(),
        format!("{}: there is no tensor number 1 among those declared", at("m.gguf").display())
    );
    drop(writer);
    assert!(files(folder.path()).is_empty());
}
