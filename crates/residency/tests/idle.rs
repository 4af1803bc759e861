//! That waiting sleeps: what a ring costs that has nothing to do, and whether it gets on where all of its threads
//! share one CPU. In a binary of its own, since it counts the CPU time of the whole process.
#![cfg(all(target_os = "linux", not(loom)))]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use strata_residency::*;

/// The tests take turns, so that none counts another's time.
static ALONE: Mutex<()> = Mutex::new(());

const BYTES: usize = 256 << 10;

struct Constant;

impl Source for Constant {
    fn bytes(&self, _: ExpertId) -> Result<usize, String> {
        Ok(BYTES)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        to.fill(id.expert as u8);
        Ok(())
    }
}

/// Keeps transfers until it is told to let go, or retires them at once.
struct Gate(Mutex<Option<Vec<Transfer<Vec<u8>>>>>);

impl Gate {
    fn open(&self) {
        let kept = self.0.lock().unwrap().take();
        kept.into_iter().flatten().for_each(|transfer| transfer.retire(Ok(())));
    }
}

impl TransferEngine for Gate {
    type Buffer = Vec<u8>;
    type Place = ();

    fn submit(&self, transfer: Transfer<Vec<u8>>, (): ()) {
        if let Some(kept) = &mut *self.0.lock().unwrap() {
            kept.push(transfer);
            return;
        }
        let right =
            transfer.buffer()[..transfer.bytes()].iter().all(|&byte| byte == transfer.id().expert as u8);
        transfer.retire(if right { Ok(()) } else { Err("wrong bytes".into()) });
    }
}

fn schedule(experts: u16) -> impl Iterator<Item = (ExpertId, ())> {
    (0..experts).map(|expert| (ExpertId { layer: 0, expert }, ()))
}

fn ring(
    buffers: usize,
    stagers: usize,
    gate: &Arc<Gate>,
    mut spawn: impl FnMut(RingThread, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
) -> Ring<Gate> {
    Ring::new(vec![vec![0; BYTES]; buffers], stagers, Arc::new(Constant), gate.clone(), &mut spawn).unwrap()
}

/// CPU time of all threads so far.
fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.try_into().unwrap())
}

/// What half a second of waiting costs. One thread that spun would cost all of it where it has a CPU, and each of
/// many a fair share.
fn cost_of_waiting() -> Duration {
    let before = cpu_time();
    thread::sleep(Duration::from_millis(500));
    cpu_time() - before
}

const CHEAP: Duration = Duration::from_millis(50);

/// Oracle: the system's account of CPU time. Nothing is spent while nothing happens: before a schedule, while all
/// buffers are out with stagers, issuer and host waiting, and after.
#[test]
fn waiting_costs_no_cpu_time() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let gate = Arc::new(Gate(Mutex::new(Some(Vec::new()))));
    let mut ring = ring(4, 16, &gate, |_, life| Ok(thread::spawn(life)));
    let idle = cost_of_waiting();
    let full = thread::scope(|scope| {
        let mut generation = ring.begin(schedule(40)).unwrap();
        assert!(generation.issued(3).unwrap());
        let host = scope.spawn(move || generation.finish());
        thread::sleep(Duration::from_millis(50));
        let full = cost_of_waiting();
        gate.open();
        host.join().unwrap().unwrap();
        full
    });
    let after = cost_of_waiting();
    assert!(idle.max(full).max(after) < CHEAP, "{idle:?} idle, {full:?} full, {after:?} afterwards");
    let counters = ring.counters();
    assert_eq!(counters.arrived, 40);
    assert!(counters.host.count > 0 && counters.host.time > Duration::from_millis(500), "{counters:?}");
    assert!(counters.issuer.count > 0 && counters.issuer.time > Duration::from_millis(500), "{counters:?}");
    assert!(counters.stagers.count > 0 && counters.stagers.time > Duration::from_millis(500), "{counters:?}");
}

/// Mutant: a thread that waits by spinning. The account shows it: the loop ends.
#[test]
fn a_spinning_wait_would_show() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let waited_for = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !waited_for.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let before = cpu_time();
        while cpu_time() - before < CHEAP {
            thread::sleep(Duration::from_millis(10));
        }
        waited_for.store(true, Ordering::Relaxed);
    });
}

/// Oracle: it ends. All threads, stagers, issuer and host, have the same single CPU; a generous limit, since others
/// use it too.
#[test]
fn one_cpu_is_enough() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    fn pin(cpu: usize) {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
    }
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpu = (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap();
    let (done, waits) = channel();
    thread::spawn(move || {
        pin(cpu);
        let gate = Arc::new(Gate(Mutex::new(None)));
        let mut ring = ring(3, 32, &gate, |_, life| {
            Ok(thread::spawn(move || {
                pin(cpu);
                life();
            }))
        });
        for _ in 0..20 {
            let mut generation = ring.begin(schedule(64)).unwrap();
            (0..64).step_by(3).for_each(|entry| generation.skip(entry).unwrap());
            assert!(generation.issued(31).unwrap());
            generation.finish().unwrap();
        }
        drop(ring);
        done.send(()).unwrap();
    });
    waits.recv_timeout(Duration::from_secs(60)).expect("1280 experts of 256 KiB get through within a minute");
}
