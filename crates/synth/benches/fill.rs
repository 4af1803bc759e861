//! What it costs to make weights: bytes per second of one core, format by format, and into a file in memory.

use std::sync::atomic::AtomicBool;

use divan::Bencher;
use divan::counter::BytesCount;
use strata_quant::Format;
use strata_synth::{Geometry, Mix, Options, Weights, write};

fn main() {
    divan::main();
}

/// A megabyte, as the writer makes them.
#[divan::bench(args = Format::ALL)]
fn make(bencher: Bencher<'_, '_>, format: Format) {
    let weights = Weights::random(format, 1, 0.02);
    let blocks = (1 << 20) / format.block_bytes();
    let mut out = vec![0; blocks * format.block_bytes()];
    bencher.counter(BytesCount::new(out.len())).bench_local(|| weights.fill(8, &mut out));
}

/// A model of about a gigabyte, by so many threads, into `/dev/shm`.
#[divan::bench(args = [1, 2], sample_count = 5, sample_size = 1)]
fn model(bencher: Bencher<'_, '_>, threads: usize) {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let mut geometry = Geometry::flash_next();
    (geometry.layers, geometry.moe.experts) = (4, 64);
    let mut options = Options::new(geometry, Mix::pure(Format::Iq2S), 1);
    (options.ngram_rows, options.threads, options.overwrite) = (Some(1_000_000), Some(threads), true);
    let bytes = strata_synth::layout(&options).map_or(0, |layout| layout.bytes());
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        write(&options, &folder.path().join("model.gguf"), &mut |_| {}, &AtomicBool::new(false)).is_ok()
    });
}
