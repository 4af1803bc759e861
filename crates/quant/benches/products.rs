//! How fast products are, on the fastest path of this machine, or on the one that STRATA_ISA names:
//!
//!     cargo bench -p strata-quant --bench products
//!     cargo bench -p strata-quant --bench products -- one_column --sample-count 20
//!
//! Items are blocks of 32 weights in `one_column`: cycles per block are the clock rate over items a second. In
//! `many_columns` they are multiply-adds. What memory does to products is in the bench `beyond_cache`.

mod weights;

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

fn weights(format: Format, k: usize, rows: usize) -> Vec<u8> {
    let mut bytes = vec![0; format.row_bytes(k).unwrap() * rows];
    weights::fill(format, &mut bytes);
    bytes
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
