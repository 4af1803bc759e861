//! Block-format products, decoding and activation quantisation on whatever GPU is here. Oracle: `strata-quant`, bit for bit.
//! Without a GPU, or in a build without kernels, the tests say so and pass.

use std::io::Write;

use strata_cuda::driver::{Context, Device, DeviceMemory, Stream};
use strata_cuda::ops::{Columns, Products};
use strata_quant::{Activations, Format, Isa, Matrix, Out, dequantise, matmul};

/// The first GPU with kernels for it, or a line that says why there is none.
fn gpu() -> Option<(Context, Stream, Products)> {
    let open = || -> Result<_, Box<dyn std::error::Error>> {
        let devices = Device::all()?;
        let context = Context::new(devices.first().ok_or("the driver shows no GPU")?)?;
        let stream = Stream::new(&context)?;
        let products = Products::new(&context)?;
        Ok((context, stream, products))
    };
    // Not `eprintln!`: the test harness would swallow it.
    open().inspect_err(|error| drop(writeln!(std::io::stderr(), "SKIPPED: {error}"))).ok()
}

/// A small generator, so that the same bytes come on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Whole blocks of a format, any bytes: also scales that aren't finite.
    fn blocks(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|_| (self.next() >> 8) as u8).collect()
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| {
                let x = (self.next() as f32 / (1u64 << 30) as f32 - 1.0) * 3.0;
                // Blocks of very different sizes, one of zeros, one too small.
                x * [1.0, 1e-3, 1e4, 0.0, 1e-32][i / 32 % 5]
            })
            .collect()
    }
}

fn upload<T: bytemuck::Pod>(context: &Context, stream: &Stream, values: &[T]) -> DeviceMemory {
    let memory = DeviceMemory::new(context, size_of_val(values)).unwrap();
    stream.upload(values, memory.slice()).unwrap();
    memory
}

/// Equal bits, or NaN both.
fn same(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            "{what}: value {i} is {a:e}, not {b:e}"
        );
    }
}

#[test]
fn activations_are_quantised_alike() {
    let Some((context, stream, products)) = gpu() else { return };
    let (k, cols) = (2560, 7);
    let mut x = Random(1).floats(k * cols);
    (x[5], x[40], x[100]) = (f32::NAN, f32::INFINITY, f32::MAX);
    let mut cpu = Activations::new(k, cols);
    cpu.quantise(Isa::detect(), &x, k, cols);
    let memory = DeviceMemory::new(&context, Columns::bytes_for(k, cols)).unwrap();
    let columns = Columns::new(&memory, k, cols);
    products.quantise(&stream, upload(&context, &stream, &x).slice(), &columns).unwrap();
    let (mut q, mut d, mut sums) =
        (vec![0i8; k * cols], vec![0f32; k / 32 * cols], vec![0u32; k / 32 * cols]);
    stream.download(columns.q, &mut q).unwrap();
    stream.download(columns.d, &mut d).unwrap();
    stream.download(columns.sums, &mut sums).unwrap();
    for col in 0..cols {
        assert_eq!(cpu.q(col), &q[col * k..][..k], "column {col}");
        same(&d[col * k / 32..][..k / 32], cpu.d(col), "scales");
        let halves = sums[col * k / 32..][..k / 32]
            .iter()
            .flat_map(|s| [i32::from(*s as i16), i32::from((s >> 16) as i16)]);
        assert!(halves.eq(cpu.sums(col).iter().copied()), "sums of column {col}");
    }
}

#[test]
fn every_format_decodes_alike() {
    let Some((context, stream, products)) = gpu() else { return };
    for format in Format::ALL.into_iter().filter(|format| !format.is_float()) {
        let n = 64 * 256;
        let bytes = Random(format as u64).blocks(format.row_bytes(n).unwrap());
        let mut expected = vec![0.0; n];
        dequantise(format, &bytes, &mut expected);
        let out = DeviceMemory::new(&context, 4 * n).unwrap();
        products.decode(&stream, (format, upload(&context, &stream, &bytes).slice()), out.slice()).unwrap();
        let mut found = vec![0.0; n];
        stream.download(out.slice(), &mut found).unwrap();
        same(&found, &expected, format.name());
    }
}

/// Compares products with the CPU's.
fn multiply(
    (context, stream, products): &(Context, Stream, Products),
    (format, bytes): (Format, &[u8]),
    x: &[f32],
    [rows, k, cols]: [usize; 3],
) {
    let isa = Isa::detect();
    let mut cpu = Activations::new(k, cols);
    cpu.quantise(isa, x, k, cols);
    let mut expected = vec![0.0; rows * cols];
    let matrix = Matrix::new(format, bytes, k, rows).unwrap().scaled(0.7);
    let columns = strata_quant::Columns::Quantised(&cpu);
    matmul(isa, matrix, 0..rows, columns, Out::new(&mut expected, rows));

    let memory = DeviceMemory::new(context, Columns::bytes_for(k, cols)).unwrap();
    let columns = Columns::new(&memory, k, cols);
    let (x, weights) = (upload(context, stream, x), upload(context, stream, bytes));
    let scale = upload(context, stream, &[0.7f32]);
    products.quantise(stream, x.slice(), &columns).unwrap();
    let out = DeviceMemory::new(context, 4 * rows * cols).unwrap();
    stream.fill(out.slice::<u8>(), 0xff).unwrap();
    let weights = (format, weights.slice());
    products.product(stream, weights, [rows, k, cols], &columns, Some(scale.slice()), out.slice()).unwrap();
    let mut found = vec![0.0; rows * cols];
    stream.download(out.slice(), &mut found).unwrap();
    same(&found, &expected, &format!("{format}, {rows} rows of {k}, {cols} columns"));
}

fn block_formats() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| !format.is_float())
}

#[test]
fn every_format_multiplies_alike() {
    let Some(gpu) = gpu() else { return };
    for format in block_formats() {
        for [rows, k, cols] in [
            [37, 256, 1],
            [64, 2560, 1],
            [19, 2560, 8],
            [33, 4864, 3],
            [1, 512, 9],
            [97, 256, 16],
            [8, 768, 21],
            [129, 2560, 33],
            [200, 6144, 48],
            [130, 736, 65],
            [128, 2560, 80],
            [64, 2304, 97],
            [257, 2048, 128],
            [131, 96, 129],
            [300, 4864, 150],
            // More tiles than processors.
            [2100, 512, 1100],
        ] {
            // Rows of some formats can't be as long.
            let Some(bytes) = format.row_bytes(k) else { continue };
            let mut random = Random(format as u64 + 100);
            let (bytes, x) = (random.blocks(bytes * rows), random.floats(k * cols));
            multiply(&gpu, (format, &bytes), &x, [rows, k, cols]);
        }
    }
}

/// Sums as large as they get: weights, sub-scales and activations at their ends.
#[test]
fn extremes_multiply_alike() {
    let Some(gpu) = gpu() else { return };
    for format in block_formats() {
        for seed in 0..4 {
            let [rows, k, cols] = [256, 2560, 100];
            let mut random = Random(format as u64 + 1000 * seed);
            let mut bytes = vec![0; format.row_bytes(k).unwrap() * rows];
            let mut rest = &mut bytes[..];
            while !rest.is_empty() {
                let run = (random.next() as usize % 120 + 1).min(rest.len());
                let value = [0x00, 0x3b, 0x7f, 0x80, 0xff][random.next() as usize % 5];
                rest[..run].fill(value);
                rest = &mut rest[run..];
            }
            let x: Vec<f32> = (0..k * cols)
                .map(|i| match i / k % 4 {
                    0 => 1.0,
                    1 => -1.0,
                    _ => [1.0, -1.0, 1.0, 0.3][random.next() as usize % 4],
                })
                .collect();
            multiply(&gpu, (format, &bytes), &x, [rows, k, cols]);
        }
    }
}
