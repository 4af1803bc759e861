//! How fast products are, on the fastest path of this machine, or on the one that STRATA_ISA names:
//!
//!     cargo bench -p strata-quant
//!     cargo bench -p strata-quant -- one_column --sample-count 20
//!
//! Items are blocks of 32 weights in `one_column` and `beyond_cache`: cycles per block are the clock rate
//! over items a second. In `many_columns` they are multiply-adds.

use std::sync::OnceLock;

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use strata_quant::{Activations, Columns, Format, Isa, Matrix, Out, float, matmul};

fn main() {
    println!("path: {}", isa());
    divan::main();
}

fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| match std::env::var("STRATA_ISA") {
        Ok(name) => name.parse().unwrap_or_else(|e| panic!("{e}")),
        Err(_) => Isa::detect(),
    })
}

/// Random bytes with ordinary scales: subnormal and infinite ones would be slow for reasons of their own.
fn weights(format: Format, k: usize, rows: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    let blocks = k / format.block_len();
    let one: Vec<u8> = (0..blocks * format.block_bytes())
        .map(|i| match (format, i % format.block_bytes()) {
            (Format::F32, 3) | (Format::F16 | Format::Bf16, 1) => 0x3e,
            (Format::Mxfp4, 0) => 120,
            _ => next(),
        })
        .collect();
    one.iter().copied().cycle().take(one.len() * rows).collect()
}

fn columns(k: usize, cols: usize) -> (Vec<f32>, Activations) {
    let x: Vec<f32> = (0..k * cols).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let mut quantised = Activations::new(k, cols);
    quantised.quantise(isa(), &x, k, cols);
    (x, quantised)
}

/// One column, weights in the second cache: what a kernel can do at best.
#[divan::bench(args = Format::ALL)]
fn one_column(bencher: Bencher, format: Format) {
    let (k, rows) = (2048, 64);
    let bytes = weights(format, k, rows);
    let w = Matrix::new(format, &bytes, k, rows).unwrap();
    let (x, quantised) = columns(k, 1);
    let x = if format.is_float() { Columns::Float(&x) } else { Columns::Quantised(&quantised) };
    let mut out = vec![0.0; rows];
    bencher
        .counter(ItemsCount::new(k / 32 * rows))
        .counter(BytesCount::new(bytes.len()))
        .bench_local(|| matmul(isa(), w, 0..rows, black_box(x), Out::new(&mut out, rows)));
}

/// One column, 256 MiB of weights: the machine's memory, or the kernel, whichever is slower.
#[divan::bench(args = Format::ALL, consts = [1, 2], sample_count = 8, sample_size = 1)]
fn beyond_cache<const THREADS: usize>(bencher: Bencher, format: Format) {
    let k = 2048;
    let rows = (256usize << 20) / format.row_bytes(k).unwrap() / THREADS * THREADS;
    let bytes = weights(format, k, rows);
    let w = Matrix::new(format, &bytes, k, rows).unwrap();
    let (x, quantised) = columns(k, 1);
    let x = if format.is_float() { Columns::Float(&x) } else { Columns::Quantised(&quantised) };
    let mut out = vec![0.0; rows];
    bencher.counter(ItemsCount::new(k / 32 * rows)).counter(BytesCount::new(bytes.len())).bench_local(|| {
        std::thread::scope(|scope| {
            for (i, out) in out.chunks_mut(rows / THREADS).enumerate() {
                let first = i * out.len();
                let part = &bytes[first * w.row(0).len()..][..out.len() * w.row(0).len()];
                let part = Matrix::new(format, part, k, out.len()).unwrap();
                scope.spawn(move || matmul(isa(), part, 0..out.len(), x, Out::new(out, out.len())));
            }
        })
    });
}

/// Many columns: 256 rows of 2048.
#[divan::bench(args = Format::ALL, consts = [4, 16, 64])]
fn many_columns<const COLS: usize>(bencher: Bencher, format: Format) {
    let (k, rows) = (2048, 256);
    let bytes = weights(format, k, rows);
    let w = Matrix::new(format, &bytes, k, rows).unwrap();
    let (x, quantised) = columns(k, COLS);
    let x = if format.is_float() { Columns::Float(&x) } else { Columns::Quantised(&quantised) };
    let mut out = vec![0.0; rows * COLS];
    bencher
        .counter(ItemsCount::new(k * rows * COLS))
        .bench_local(|| matmul(isa(), w, 0..rows, black_box(x), Out::new(&mut out, rows)));
}

/// Quantising (and packing) columns of 2048.
#[divan::bench(args = [1, 32])]
fn quantise(bencher: Bencher, cols: usize) {
    let (x, mut quantised) = columns(2048, cols);
    bencher
        .counter(ItemsCount::new(x.len()))
        .bench_local(|| quantised.quantise(isa(), black_box(&x), 2048, cols));
}

/// SwiGLU of 2048 elements.
#[divan::bench]
fn swiglu(bencher: Bencher) {
    let (x, _) = columns(2048, 1);
    let mut out = vec![0.0; x.len()];
    bencher
        .counter(ItemsCount::new(x.len()))
        .bench_local(|| float::swiglu(isa(), black_box(&x), &x, &mut out));
}
