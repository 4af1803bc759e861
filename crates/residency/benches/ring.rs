//! What the staging ring adds to copying: experts through a ring, and the same bytes copied by the same number of
//! threads into buffers of the same size.
//!
//!     cargo bench -p strata-residency --bench ring
//!
//! The engine retires a transfer as soon as it is told of it: a device reads the buffers without the CPU. After
//! divan's table comes one of rounds in which both take turns, since memory's rate changes from minute to minute on
//! a shared machine: GB/s, and seconds of CPU time per GB, which for the ring are those of stagers, issuer and host
//! together. Medians of the rounds, and the median of the rounds' ratios.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use divan::Bencher;
use divan::counter::BytesCount;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use strata_residency::*;

/// An expert of 2,560 by 640 in Q2_0, and how many make a layer.
const BLOB: usize = 1_382_400;
const EXPERTS: usize = 256;
const BUFFERS: usize = 8;
/// The table also shows a larger ring.
const MORE_BUFFERS: usize = 32;
const ROUNDS: usize = 15;
const THREADS: [usize; 3] = [1, 2, 4];

fn main() {
    divan::main();
    println!("\nthreads buffers |  ring GB/s  copy GB/s  ratio |  ring s/GB  copy s/GB  ratio");
    let experts = Arc::new(Experts::new());
    for buffers in [BUFFERS, MORE_BUFFERS] {
        THREADS.into_iter().for_each(|threads| compare(threads, buffers, &experts));
    }
}

struct Experts(Vec<u8>);

impl Experts {
    fn new() -> Experts {
        Experts((0..BLOB * EXPERTS).map(|place| (place * 7) as u8).collect())
    }

    fn of(&self, expert: usize) -> &[u8] {
        &self.0[expert * BLOB..][..BLOB]
    }
}

impl Source for Experts {
    fn bytes(&self, _: ExpertId) -> Result<usize, String> {
        Ok(BLOB)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        to.copy_from_slice(self.of(id.expert.into()));
        Ok(())
    }
}

struct AtOnce;

impl TransferEngine for AtOnce {
    type Buffer = Vec<u8>;
    type Place = ();

    fn submit(&self, transfer: Transfer<Vec<u8>>, (): ()) {
        transfer.retire(Ok(()));
    }
}

fn ring(threads: usize, buffers: usize, experts: &Arc<Experts>) -> Ring<AtOnce> {
    let buffers = vec![vec![1; BLOB]; buffers];
    Ring::new(buffers, threads, experts.clone(), Arc::new(AtOnce), &mut |_, life| Ok(thread::spawn(life)))
        .unwrap()
}

/// All experts through the ring.
fn stage(ring: &mut Ring<AtOnce>) {
    let schedule = (0..EXPERTS as u16).map(|expert| (ExpertId { layer: 0, expert }, ()));
    ring.begin(schedule).unwrap().finish().unwrap();
}

/// All experts into the buffers, each of which belongs to one of the threads.
fn copy(buffers: &mut [Vec<u8>], threads: usize, experts: &Experts) {
    let (next, share) = (AtomicUsize::new(0), buffers.len() / threads);
    thread::scope(|scope| {
        for own in buffers.chunks_mut(share) {
            let next = &next;
            scope.spawn(move || {
                for buffer in 0.. {
                    let expert = next.fetch_add(1, Ordering::Relaxed);
                    if expert >= EXPERTS {
                        return;
                    }
                    let buffer = buffer % own.len();
                    divan::black_box(&mut own[buffer]).copy_from_slice(experts.of(expert));
                }
            });
        }
    });
}

#[divan::bench(args = THREADS)]
fn staged(bencher: Bencher, threads: usize) {
    let mut ring = ring(threads, BUFFERS, &Arc::new(Experts::new()));
    bencher.counter(BytesCount::new(BLOB * EXPERTS)).bench_local(|| stage(&mut ring));
}

#[divan::bench(args = THREADS)]
fn copied(bencher: Bencher, threads: usize) {
    let (experts, mut buffers) = (Experts::new(), vec![vec![1; BLOB]; BUFFERS]);
    bencher.counter(BytesCount::new(BLOB * EXPERTS)).bench_local(|| copy(&mut buffers, threads, &experts));
}

/// CPU time of all threads so far.
fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.try_into().unwrap())
}

fn compare(threads: usize, count: usize, experts: &Arc<Experts>) {
    let mut ring = ring(threads, count, experts);
    let mut buffers = vec![vec![1; BLOB]; count];
    let gigabytes = (BLOB * EXPERTS) as f64 / 1e9;
    // GB/s and CPU seconds per GB.
    let measure = |f: &mut dyn FnMut()| {
        let (start, cpu) = (Instant::now(), cpu_time());
        f();
        (gigabytes / start.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64() / gigabytes)
    };
    let mut rounds: [Vec<f64>; 6] = Default::default();
    for _ in 0..ROUNDS {
        let (rate, cost) = measure(&mut || stage(&mut ring));
        let (plain_rate, plain_cost) = measure(&mut || copy(&mut buffers, threads, experts));
        let figures = [rate, plain_rate, rate / plain_rate, cost, plain_cost, cost / plain_cost];
        rounds.iter_mut().zip(figures).for_each(|(round, figure)| round.push(figure));
    }
    let [rate, plain_rate, speed, cost, plain_cost, expense] = rounds.map(|mut round| {
        round.sort_by(f64::total_cmp);
        round[ROUNDS / 2]
    });
    println!(
        "{threads:7} {count:7} | {rate:10.2} {plain_rate:10.2} {speed:6.2} | {cost:10.4} {plain_cost:10.4} {expense:6.2}"
    );
    let Counters { stagers, issuer, host, arrived, .. } = ring.counters();
    println!(
        "                | of {arrived} experts: stagers slept {} times ({:.0?}), issuer {} ({:.0?}), host {} ({:.0?})",
        stagers.count, stagers.time, issuer.count, issuer.time, host.count, host.time
    );
}
