//! Rows of the n-gram table, off the disk.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;
use strata_gguf::{Gguf, Metadata, TensorType, write::Outline};
use strata_model::ngram::{NgramRows, RowError};
use strata_model::{Model, TensorRef};
use strata_quant::Format;
use strata_testkit::golden;
use tempfile::TempDir;

use crate::copy::tiny;

fn spawn(work: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("ngram-ahead".to_owned()).spawn(work)
}

const ROWS: u64 = 20_000;

/// A table whose row `r` holds the numbers `6r .. 6r + 6` as F32, so rows straddle pages.
fn table(folder: &TempDir) -> (Arc<Gguf>, TensorRef) {
    let mut outline = Outline::new(Metadata::new());
    outline.tensor("before", &[7], TensorType::F32).expect("a tensor");
    outline.tensor("table", &[6, ROWS], TensorType::F32).expect("a tensor");
    let path = folder.path().join("table.gguf");
    let writer = outline.create(&path).expect("creates");
    writer.write_at(0, 0, &[0; 28]).expect("writes");
    let bytes: Vec<u8> = (0..ROWS * 6).flat_map(|n| (n as f32).to_le_bytes()).collect();
    writer.write_at(1, 0, &bytes).expect("writes");
    writer.finish().expect("finishes");
    let reference =
        TensorRef { index: 1, format: Format::F32, rows: ROWS as usize, k: 6, experts: 1, scale: None };
    (Arc::new(Gguf::open(&path).expect("opens")), reference)
}

fn expected(rows: &[u64]) -> Vec<u8> {
    rows.iter().flat_map(|r| (r * 6..r * 6 + 6).flat_map(|n| (n as f32).to_le_bytes())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Oracle: the rows' contents, for any list of rows: repeated, unsorted, longer than one batch.
    #[test]
    fn any_rows_are_read(
        mut rows in prop::collection::vec(prop_oneof![0..ROWS, 100..110u64], 0..300),
        times in prop_oneof![4 => Just(1usize), 1 => Just(40)],
    ) {
        let folder = TempDir::new().expect("a folder");
        let (gguf, reference) = table(&folder);
        let mut reader = NgramRows::new(gguf, &reference, spawn).expect("opens");
        prop_assert_eq!(reader.row_bytes(), 24);
        rows = rows.repeat(times);
        let mut out = vec![0xEE; rows.len() * 24];
        reader.read_ahead(&rows);
        reader.read(&rows, &mut out).expect("reads");
        prop_assert!(out == expected(&rows));
    }
}

/// Oracle: the embedding that the reference implementation looked up (`layer1.ple.emb`).
#[test]
fn tiny_embeddings_equal_the_references() {
    let model = Model::open(&tiny()).expect("opens");
    let table = model.trunk.ngram_table.expect("a table");
    let mut reader = NgramRows::new(model.gguf.clone(), &table, spawn).expect("opens");
    let mut npz = golden::Npz::golden("tiny/ref.npz");
    let mut rows = Vec::new();
    model.hyper.ple.as_ref().expect("n-grams").hashes[0].rows(&[], &npz.ids("ids"), &mut rows);
    let mut out = vec![0; rows.len() * reader.row_bytes()];
    reader.read(&rows, &mut out).expect("reads");
    let values: Vec<f32> =
        out.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert_eq!(values, npz.f32("layer1.ple.emb").data);
}

/// Oracle: the errors' own promise: file, row, offset.
#[test]
fn errors_name_row_and_file() {
    let folder = TempDir::new().expect("a folder");
    let (gguf, reference) = table(&folder);
    let path = gguf.path().to_owned();
    let mut reader = NgramRows::new(gguf, &reference, spawn).expect("opens");
    let mut out = [0; 48];
    let error = reader.read(&[3, ROWS], &mut out).expect_err("out of range");
    assert!(matches!(error, RowError::Range { row: ROWS, rows: ROWS }), "{error}");
    assert!(reader.read(&[3, u64::MAX], &mut out).is_err());
    let len = std::fs::metadata(&path).expect("is there").len();
    std::fs::OpenOptions::new().write(true).open(&path).expect("opens").set_len(len - 2400).expect("cuts");
    let error = reader.read(&[3, ROWS - 1], &mut out).expect_err("cut short").to_string();
    assert!(
        error.contains("row 19999") && error.contains("table.gguf") && error.contains("479976"),
        "{error}"
    );
    reader.read(&[3, 4], &mut out).expect("the rest is there");
    assert_eq!(out.as_slice(), expected(&[3, 4]));
    // Of a list that several threads read, the first row that fails is told, and the next list is read in order.
    let long: Vec<u64> = (0..3 * ROWS).map(|i| if i > ROWS { ROWS + i } else { i / 2 }).collect();
    let mut out = vec![0; long.len() * 24];
    let error = reader.read(&long, &mut out).expect_err("out of range");
    assert!(matches!(error, RowError::Range { row, .. } if row == 2 * ROWS + 1), "{error}");
    let long: Vec<u64> = (0..3 * ROWS).map(|i| i * 7919 % (ROWS - 200)).collect();
    reader.read(&long, &mut out).expect("reads");
    assert!(out == expected(&long));
    // Reading ahead never fails loudly: it is counted.
    reader.read_ahead(&[ROWS - 1, 5]);
    while reader.read_ahead_counts().warmed + reader.read_ahead_counts().failed < 2 {
        thread::sleep(Duration::from_millis(1));
    }
    let counts = reader.read_ahead_counts();
    assert_eq!((counts.warmed, counts.failed, counts.dropped), (1, 1, 0));
}

/// Oracle: the definition. Every row asked for is warmed or counted as dropped, asking never waits, and dropping the
/// reader ends the thread however much is queued.
#[test]
fn reading_ahead_is_bounded_and_ends() {
    let folder = TempDir::new().expect("a folder");
    let (gguf, reference) = table(&folder);
    let reader = NgramRows::new(gguf.clone(), &reference, spawn).expect("opens");
    let rows: Vec<u64> = (0..ROWS).rev().collect();
    for _ in 0..64 {
        reader.read_ahead(&rows);
    }
    reader.read_ahead(&[]);
    let asked = 64 * ROWS;
    let dropped = reader.read_ahead_counts().dropped;
    assert!(dropped < asked && dropped.is_multiple_of(ROWS), "{dropped}");
    while reader.read_ahead_counts().warmed < asked - dropped {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(reader.read_ahead_counts().warmed, asked - dropped);
    for _ in 0..4 {
        reader.read_ahead(&rows);
    }
    drop(reader);
    assert_eq!(Arc::strong_count(&gguf), 1, "a thread still holds the file");

    let refuse = |_| Err(io::Error::other("no more threads"));
    let error = NgramRows::new(gguf, &reference, refuse).err().expect("refused").to_string();
    assert!(error.contains("no more threads"), "{error}");
}
