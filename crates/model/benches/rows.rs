//! `cargo bench -p strata-model --bench rows`: how long the n-gram rows of a window take from the page cache, by how many are read at once.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use strata_gguf::{Gguf, Metadata, TensorType, write::Outline};
use strata_model::TensorRef;
use strata_model::ngram::NgramRows;
use strata_quant::Format;

/// A table of 180 MB, rows as long as Flash-Next's.
const ROWS: usize = 2_000_000;
const WIDTH: usize = 160;

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut outline = Outline::new(Metadata::new());
    outline.tensor("table", &[WIDTH as u64, ROWS as u64], TensorType::IQ4_NL).expect("a tensor");
    let path = folder.path().join("table.gguf");
    let writer = outline.create(&path).expect("creates");
    let bytes = Format::Iq4Nl.row_bytes(WIDTH).expect("whole blocks");
    writer.write_at(0, 0, &vec![7; ROWS * bytes]).expect("writes");
    writer.finish().expect("finishes");
    let table = TensorRef { index: 0, format: Format::Iq4Nl, rows: ROWS, k: WIDTH, experts: 1, scale: None };
    let gguf = Arc::new(Gguf::open(&path).expect("opens"));
    let mut reader =
        NgramRows::new(gguf, &table, |work| thread::Builder::new().spawn(work)).expect("threads");
    for tokens in [1, 64, 256, 1024, 4096] {
        let rows: Vec<u64> = (0..16 * tokens as u64).map(|i| i * 1_299_709 % ROWS as u64).collect();
        let mut out = vec![0; rows.len() * bytes];
        let mut times: Vec<f64> = (0..21)
            .map(|_| {
                let started = Instant::now();
                reader.read(&rows, &mut out).expect("reads");
                started.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{tokens:>5} tokens, {:>6} rows {:>9.3} ms   ({:.3} to {:.3})",
            rows.len(),
            times[10],
            times[0],
            times[20]
        );
    }
}
