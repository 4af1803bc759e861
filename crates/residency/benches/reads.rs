//! How fast experts are read from a file, beside a plain reader at the same depth.
//!
//!     cargo bench -p strata-residency --bench reads
//!     cargo bench -p strata-residency --bench reads -- FILE         a file on another disk; it is only read
//!
//! The plain reader has as many threads as reads are under way, each with one O_DIRECT read at a time, of the same bytes in the same order
//! to memory of its own. All take turns, since a shared disk's rate changes from minute to minute: GB/s, medians of the rounds, and the
//! median of the rounds' ratios to the plain reader's.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use strata_plan::{Arena, Block, Category, Plan};
use strata_residency::*;

/// Parts of an expert of 2,560 by 640 in IQ3_XXS and IQ4_XS, bytes.
const PARTS: [usize; 3] = [627_200, 627_200, 870_400];
/// Experts under way: twice what a row of the real model uses.
const EXPERTS: usize = 20;
/// Bytes of the file that is made, and bytes read in a round.
const FILE: u64 = 2 << 30;
const ROUND: usize = 1 << 30;
const ROUNDS: usize = 7;

fn main() {
    let given = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let path = given.map_or_else(made, PathBuf::from);
    let bytes = std::fs::metadata(&path).unwrap().len();
    let experts = experts(bytes);
    let (plain, cut) = (EXPERTS * PARTS.len(), EXPERTS);
    println!(
        "{} bytes of {}, experts of {} bytes",
        experts.len() * PARTS.iter().sum::<usize>(),
        path.display(),
        PARTS.iter().sum::<usize>()
    );
    let ways = [(Way::Auto, 8), (Way::Positioned, 8), (Way::Positioned, cut)];
    let mut readers: Vec<Reader> = ways.iter().map(|&(way, threads)| reader(&path, way, threads)).collect();
    readers.iter().filter_map(Reader::fallback).for_each(|why| println!("{why}"));
    let mut memory = memory();
    let mut rates: Vec<Vec<f64>> = vec![vec![]; 1 + readers.len()];
    for _ in 0..ROUNDS {
        rates[0].push(rate(|| plainly(&path, &experts, plain)));
        for (reader, rates) in readers.iter_mut().zip(&mut rates[1..]) {
            rates.push(rate(|| read(reader, &experts, &mut memory)));
        }
    }
    println!("{:<45} {:>6}  ratio", "", "GB/s");
    println!("{:<45} {:>6.2}", format!("plain, {plain} reads under way"), median(rates[0].clone()));
    for (reader, of) in readers.iter().zip(&rates[1..]) {
        let ratios = of.iter().zip(&rates[0]).map(|(ours, plain)| ours / plain).collect();
        println!("{:<45} {:>6.2}  {:.2}", reader.to_string(), median(of.clone()), median(ratios));
    }
}

/// A file of bytes that no disk leaves out.
fn made() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("reads");
    if std::fs::metadata(&path).is_ok_and(|found| found.len() == FILE) {
        return path;
    }
    let (mut file, mut state) = (File::create(&path).unwrap(), 1u64);
    for _ in 0..FILE >> 20 {
        let mut block = vec![0u8; 1 << 20];
        for word in block.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
    path
}

/// Experts in any order, whose parts lie a third of the file from each other, as those of tensors do.
fn experts(bytes: u64) -> Vec<[Piece; 3]> {
    let third = bytes / 3;
    let places = third / PARTS[2] as u64;
    let mut state = 7u64;
    let expert = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = (state >> 33) % places;
        let mut at = 0;
        std::array::from_fn(|part| {
            let offset = (third * part as u64 + place * PARTS[part] as u64) / 32 * 32;
            let piece = Piece { file: 0, offset, bytes: PARTS[part], at };
            at += most_room(PARTS[part]);
            piece
        })
    };
    (0..ROUND / PARTS.iter().sum::<usize>()).map(expert).collect()
}

fn direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    #[cfg(not(target_os = "linux"))]
    let flags = 0;
    File::options().read(true).custom_flags(flags).open(path)
}

fn reader(path: &Path, way: Way, threads: usize) -> Reader {
    let file =
        ReadFile { name: path.display().to_string(), file: File::open(path).unwrap(), direct: direct(path) };
    let spawn = &mut |_, work: Box<dyn FnOnce() + Send>| thread::Builder::new().spawn(work);
    Reader::new(vec![file], ReaderOptions { way, direct: true, jobs: EXPERTS, threads, spawn }).unwrap()
}

/// Memory for all experts under way, one behind the other.
fn memory() -> Vec<Block<u8>> {
    let each = PARTS.iter().map(|&part| most_room(part)).sum::<usize>();
    let mut plan = Plan::new();
    let region = plan.heap(Category::Experts, "experts", EXPERTS * each);
    let mut arena = Arena::new(&plan).unwrap();
    region.parts(each).map(|part| arena.take(part).unwrap()).collect()
}

fn read(reader: &mut Reader, experts: &[[Piece; 3]], free: &mut Vec<Block<u8>>) {
    let mut experts = experts.iter();
    loop {
        while let Some(block) = free.pop() {
            let Some(pieces) = experts.next() else {
                free.push(block);
                break;
            };
            reader.begin(0, block, pieces).unwrap();
        }
        reader.send();
        let Some(done) = reader.finish().unwrap() else { return };
        done.outcome.unwrap();
        free.push(done.block);
    }
}

fn plainly(path: &Path, experts: &[[Piece; 3]], threads: usize) {
    let (file, next) = (direct(path).unwrap_or_else(|_| File::open(path).unwrap()), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut memory = vec![0u8; most_room(PARTS[2]) + PAGE];
                let start = memory.as_ptr().addr().next_multiple_of(PAGE) - memory.as_ptr().addr();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(pieces) = experts.get(at / 3) else { return };
                    let Piece { offset, bytes, .. } = pieces[at % 3];
                    let from = offset / PAGE as u64 * PAGE as u64;
                    let len = (skew(offset) + bytes).next_multiple_of(PAGE);
                    assert!(file.read_at(&mut memory[start..start + len], from).unwrap() >= bytes);
                }
            });
        }
    });
}

/// GB/s of a round.
fn rate(round: impl FnOnce()) -> f64 {
    let started = Instant::now();
    round();
    (ROUND / PARTS.iter().sum::<usize>() * PARTS.iter().sum::<usize>()) as f64
        / started.elapsed().as_secs_f64()
        / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
