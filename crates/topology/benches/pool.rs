//! What a region costs before it computes anything: `cargo bench -p strata-topology --bench pool`.
//!
//! A decode step is one or two hundred regions, so the hot figures (inside a step, workers still spinning)
//! are the ones that matter; the cold ones are what the first region of a step pays. On a machine whose CPUs
//! are taken by others a median says more about them: look at the fastest.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use divan::Bencher;
use strata_topology::{Pool, Role, Topology, spawn};

fn main() {
    // The caller of regions is the driver.
    let assignment = Topology::read().assign(None).expect("CPUs for the bench");
    let driver = spawn(Role::Driver, assignment.set(Role::Driver), "driver", divan::main);
    driver.expect("a thread for the bench").join().expect("a bench that runs");
}

/// One, two, and as many as there are CPUs.
fn counts() -> Vec<usize> {
    let all = Topology::read().allowed().len();
    let mut counts = vec![1, 2, all / 2, all.saturating_sub(1), all];
    counts.retain(|&threads| (1..=all).contains(&threads));
    counts.sort_unstable();
    counts.dedup();
    counts
}

fn pool(threads: usize) -> Pool {
    Pool::new(&Topology::read(), threads).expect("a pool for the bench")
}

/// One region with a task per thread that does nothing, in a step.
#[divan::bench(args = counts(), sample_count = 2000, sample_size = 20)]
fn empty_region_hot(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    pool.begin_step();
    bencher.bench_local(|| pool.run(threads, &|task, worker| _ = black_box((task, worker))));
}

/// One region with a task per thread that waits for all the others, in a step: the time until the last worker
/// is there.
#[divan::bench(args = counts(), sample_count = 2000, sample_size = 20)]
fn everyone_there_hot(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    pool.begin_step();
    bencher.bench_local(|| everyone_there(&pool));
}

/// The same outside a step: everybody sleeps and is woken.
#[divan::bench(args = counts(), sample_count = 500, sample_size = 4)]
fn everyone_there_cold(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    bencher.bench_local(|| everyone_there(&pool));
}

/// The same in a step that had nothing to do for a while: longer than workers spin.
#[divan::bench(args = counts(), sample_count = 500, sample_size = 1)]
fn everyone_there_after_70_us(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    pool.begin_step();
    bencher.with_inputs(|| pause(70)).bench_local_values(|()| everyone_there(&pool));
}

/// What the caller pays for having everybody woken, who then finds nothing to do.
#[divan::bench(args = counts(), sample_count = 500, sample_size = 1)]
fn empty_region_after_70_us(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    pool.begin_step();
    bencher
        .with_inputs(|| pause(70))
        .bench_local_values(|()| pool.run(threads, &|task, worker| _ = black_box((task, worker))));
}

/// The caller is busy for so many microseconds.
fn pause(microseconds: u64) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_micros(microseconds) {
        std::hint::spin_loop();
    }
}

fn everyone_there(pool: &Pool) {
    let there = AtomicUsize::new(0);
    pool.run(pool.threads(), &|_, _| {
        there.fetch_add(1, Ordering::AcqRel);
        while there.load(Ordering::Acquire) < pool.threads() {
            std::hint::spin_loop();
        }
    });
}

/// One region of 16 tasks that do nothing, in a step.
#[divan::bench(args = counts(), sample_count = 2000, sample_size = 20)]
fn empty_region_of_16_hot(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    pool.begin_step();
    bencher.bench_local(|| pool.run(16, &|task, worker| _ = black_box((task, worker))));
}

/// One region with a task per thread of about 2 us, in a step.
#[divan::bench(args = counts(), sample_count = 2000, sample_size = 20)]
fn busy_region_hot(bencher: Bencher, threads: usize) {
    let pool = pool(threads);
    let sink = AtomicU64::new(0);
    pool.begin_step();
    bencher.bench_local(|| {
        pool.run(threads, &|task, _| {
            let sum = (0..2000u64).fold(task as u64, |sum, i| black_box(sum ^ i));
            sink.fetch_add(sum, Ordering::Relaxed);
        });
    });
}
