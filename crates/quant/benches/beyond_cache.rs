//! How fast products with one column are on weights far beyond the caches, as experts are: pieces of a few
//! hundred rows, in no order, on every CPU at once.
//!
//!     cargo bench -p strata-quant --bench beyond_cache
//!     cargo bench -p strata-quant --bench beyond_cache -- Q4_0 IQ2_S
//!
//! Memory's rate changes from minute to minute on a shared machine, and a core's with it. So each round
//! measures in turn, on all CPUs, what a product can reach (the same kernel in the second cache; only reading
//! the same bytes) and what it does; the share is of the lower of the two, by round. Printed are medians of
//! the rounds, in GB/s: with pages of 4 KiB as mapped files have them, and with huge ones.

mod weights;

use std::hint::black_box;
use std::time::Instant;

use memmap2::{Advice, MmapMut};
use strata_quant::{Activations, Columns, Format, Isa, Matrix, Out, matmul};

const K: usize = 2048;
const BYTES: usize = 512 << 20;
const PIECE: usize = 320;
const CACHED: usize = 64;
const ROUNDS: usize = 9;

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    println!("path: {}, threads: {threads}", Isa::detect());
    println!("{:8} {:>8} | {:>6} {:>8} {:>6} | {:>6} {:>8} {:>6}", "", "", "4 KiB", "", "", "2 MiB", "", "");
    println!(
        "{:8} {:>8} | {:>6} {:>8} {:>6} | {:>6} {:>8} {:>6}",
        "format", "in cache", "read", "product", "share", "read", "product", "share"
    );
    let mut memory = [Advice::NoHugePage, Advice::HugePage].map(|pages| {
        let memory = MmapMut::map_anon(BYTES).expect("512 MiB of memory");
        // Where the system has no huge pages, both are the same.
        let _ = memory.advise(pages);
        memory
    });
    for format in Format::ALL {
        if wanted.is_empty() || wanted.iter().any(|name| *name == format.to_string()) {
            measure(format, &mut memory, threads);
        }
    }
}

fn measure(format: Format, memory: &mut [MmapMut; 2], threads: usize) {
    let row_bytes = format.row_bytes(K).expect("whole blocks");
    let pieces = BYTES / row_bytes / PIECE / threads;
    let part = pieces * PIECE * row_bytes;
    let [small, huge] = memory;
    weights::fill(format, small);
    huge.copy_from_slice(small);
    let x: Vec<f32> = (0..K).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let mut quantised = Activations::new(K, 1);
    quantised.quantise(Isa::detect(), &x, K, 1);
    let x = if format.is_float() { Columns::Float(&x) } else { Columns::Quantised(&quantised) };
    let product = |bytes: &[u8], rows: usize| {
        let w = Matrix::new(format, bytes, K, rows).expect("whole rows");
        let mut out = [0.0; PIECE];
        matmul(Isa::detect(), w, 0..rows, x, Out::new(&mut out[..rows], rows));
        black_box(out);
    };
    // GB/s of all threads, each of which goes over `part` bytes of its own.
    let rate = |memory: &[u8], f: &(dyn Fn(&[u8]) + Sync)| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            memory.chunks_exact(part).take(threads).for_each(|part| {
                scope.spawn(move || f(part));
            })
        });
        (part * threads) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let cached =
        |part: &[u8]| (0..pieces * PIECE / CACHED).for_each(|_| product(&part[..CACHED * row_bytes], CACHED));
    let read = |part: &[u8]| {
        let words = part.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight")));
        black_box(words.fold(0, |a, b| a ^ b));
    };
    let products = |part: &[u8]| {
        for i in 0..pieces {
            // Coprime to any number of pieces there can be, so that each is visited once.
            let piece = i * 1_000_003 % pieces * PIECE * row_bytes;
            product(&part[piece..][..PIECE * row_bytes], PIECE);
        }
    };
    let mut rounds: [Vec<f64>; 7] = Default::default();
    for _ in 0..ROUNDS {
        let in_cache = rate(&memory[0], &cached);
        rounds[0].push(in_cache);
        for (pages, memory) in memory.iter().enumerate() {
            let (read, product) = (rate(memory, &read), rate(memory, &products));
            let figures = [read, product, product / read.min(in_cache) * 100.0];
            figures.into_iter().enumerate().for_each(|(i, v)| rounds[1 + 3 * pages + i].push(v));
        }
    }
    let [in_cache, read, product, share, huge_read, huge_product, huge_share] = rounds.map(|mut rounds| {
        rounds.sort_by(f64::total_cmp);
        rounds[ROUNDS / 2]
    });
    println!(
        "{format:8} {in_cache:8.1} | {read:6.1} {product:8.1} {share:4.0} % | {huge_read:6.1} {huge_product:8.1} \
         {huge_share:4.0} %"
    );
}
