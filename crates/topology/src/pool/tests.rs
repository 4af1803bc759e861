//! The pool with real threads.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

fn pool(threads: usize) -> Pool {
    Pool::new(&Topology::read(), threads).unwrap()
}

/// Oracle: counting. Every task runs once, by a worker that exists, for many regions of many sizes.
#[test]
fn every_task_runs_once() {
    for threads in [1, 2, 3, 7] {
        let pool = pool(threads);
        pool.begin_step();
        for tasks in (0..40).chain([1000]).cycle().take(400) {
            let ran: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|task, worker| {
                assert!(worker < threads);
                ran[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
        }
    }
}

/// Oracle: the sum. The chunks cover the range once, in pieces of the grain, wherever they are cut.
#[test]
fn ranges_cover_once() {
    let pool = pool(3);
    for (len, grain) in [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 7), (10, usize::MAX)] {
        let ran: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
        pool.run_ranges(len, grain, &|chunk, _| {
            assert!(chunk.start % grain == 0 && (chunk.len() == grain || chunk.end == len), "{chunk:?}");
            ran[chunk].iter().for_each(|n| _ = n.fetch_add(1, Ordering::Relaxed));
        });
        assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{len} by {grain}");
    }
}

/// Oracle: the promise in the docs. At no time have two threads the same worker number, in a step or not.
#[test]
fn worker_numbers_are_exclusive() {
    let pool = pool(4);
    let busy: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
    let task = |_: usize, worker: usize| {
        assert_eq!(busy[worker].swap(1, Ordering::AcqRel), 0);
        std::hint::black_box((0..500).sum::<u64>());
        busy[worker].store(0, Ordering::Release);
    };
    for _ in 0..200 {
        pool.run(23, &task);
        pool.begin_step();
        pool.run(23, &task);
        pool.run(3, &task);
        pool.end_step();
    }
}

/// Oracle: counting. Tasks that wait see what all earlier ones did, with spinning and without, also where a task panics: then
/// nobody waits for ever.
#[test]
fn tasks_wait_for_earlier_ones() {
    for threads in [1, 2, 5] {
        let pool = pool(threads);
        let mut latch = Latch::new();
        for round in 0..300 {
            let broken = round % 7 == 3;
            if round % 2 == 0 {
                pool.begin_step()
            } else {
                pool.end_step()
            }
            latch.close(12);
            let (parts, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let latch = &latch;
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(9, &|task, _| {
                    if task < 4 {
                        parts.fetch_add(3, Ordering::Relaxed);
                        if let Some(_last) = latch.done(3) {
                            made.store(parts.load(Ordering::Relaxed), Ordering::Relaxed);
                            if broken {
                                std::panic::resume_unwind(Box::new(task));
                            }
                        }
                    } else {
                        pool.wait_for(latch);
                        assert_eq!(made.load(Ordering::Relaxed), 12);
                    }
                })
            }));
            assert_eq!(outcome.is_err(), broken, "round {round} on {threads} threads");
        }
    }
}

/// Oracle: the payload. It reaches the caller whoever panicked, no task runs twice or after the return, and
/// the pool works on.
#[test]
fn a_panic_reaches_the_caller_and_the_pool_survives() {
    for threads in [1, 2, 4] {
        let pool = pool(threads);
        for which in [0, 1, 30, 63] {
            let ran: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(64, &|task, _| {
                    ran[task].fetch_add(1, Ordering::Relaxed);
                    if task == which {
                        std::panic::resume_unwind(Box::new(task));
                    }
                });
            }));
            assert_eq!(*outcome.unwrap_err().downcast::<usize>().unwrap(), which);
            assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) <= 1));
            let again = AtomicUsize::new(0);
            pool.run(64, &|_, _| _ = again.fetch_add(1, Ordering::Relaxed));
            assert_eq!(again.into_inner(), 64);
        }
    }
}

/// Every task panics, with payloads whose drop panics too: one reaches the caller, no worker dies.
#[test]
fn many_panics_at_once() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::resume_unwind(Box::new("dropped"));
        }
    }
    let pool = pool(4);
    for _ in 0..50 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, &|_, _| std::panic::resume_unwind(Box::new(Bomb)));
        }));
        std::mem::forget(outcome.unwrap_err());
    }
    let all = AtomicUsize::new(0);
    pool.run(8, &|_, _| _ = all.fetch_add(1, Ordering::Relaxed));
    assert_eq!(all.into_inner(), 8);
    assert!(pool.workers.iter().all(|worker| !worker.is_finished()));
}

/// Oracle: the documented panic, from inside a task and from a second thread, also for one thread and one
/// task, where nobody else would be disturbed.
#[test]
fn regions_neither_nest_nor_overlap() {
    let message = |outcome: std::thread::Result<()>| *outcome.unwrap_err().downcast::<&str>().unwrap();
    for (threads, tasks) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let pool = pool(threads);
        let nested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(tasks, &|_, _| pool.run(tasks, &|_, _| {}));
        }));
        assert!(message(nested).contains("neither nest nor overlap"));
        let overlapping = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(tasks, &|_, _| {
                std::thread::scope(|s| s.spawn(|| pool.run(1, &|_, _| {})).join())
                    .unwrap_or_else(|e| std::panic::resume_unwind(e));
            });
        }));
        assert!(message(overlapping).contains("neither nest nor overlap"));
        pool.run(tasks, &|_, _| {});
    }
}

/// Callers may change, one after the other; the pool may be dropped by another thread than made it.
#[test]
fn callers_take_turns() {
    let pool = std::sync::Mutex::new(pool(3));
    let ran = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..100 {
                    let pool = pool.lock().unwrap();
                    pool.begin_step();
                    pool.run(5, &|_, _| _ = ran.fetch_add(1, Ordering::Relaxed));
                    pool.end_step();
                }
            });
        }
    });
    assert_eq!(ran.into_inner(), 4 * 100 * 5);
    std::thread::spawn(move || drop(pool)).join().unwrap();
}

/// Oracle: the rule of the module: no spinning when there are more threads than CPUs, or a quota.
#[test]
fn crowded_pools_do_not_spin() {
    let topology = Topology::read();
    let cpus = topology.allowed().len();
    let spin = Pool::new(&topology, cpus).unwrap().spin;
    assert!(spin < Pool::SPIN_LIMIT);
    assert_eq!(spin.is_zero(), topology.quota().is_some());
    assert!(Pool::new(&topology, cpus + 1).unwrap().spin.is_zero());
    assert!(matches!(Pool::new(&topology, 0), Err(PoolError::Assign(AssignError::NoThreads))));
}

/// CPU time of one thread of this process, in clock ticks of 10 ms.
#[cfg(target_os = "linux")]
fn ticks(thread: &str) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    let after_name: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    after_name[11].parse::<u64>().unwrap() + after_name[12].parse::<u64>().unwrap()
}

/// Oracle: the kernel's account of the workers' own CPU time. After a region, in a step that goes on without
/// another and outside of one, waiting workers use next to nothing: a spin through the pause would be its
/// whole length.
#[cfg(target_os = "linux")]
#[test]
fn waiting_workers_use_no_cpu() {
    let pool = pool(2);
    let worker = std::sync::Mutex::new(String::new());
    while worker.lock().unwrap().is_empty() {
        // Until the worker gets one of the tasks, which is soon: the caller sleeps in them.
        pool.run(2, &|_, number| {
            if number == 1 {
                let link = std::fs::read_link("/proc/thread-self").unwrap();
                *worker.lock().unwrap() = link.file_name().unwrap().to_string_lossy().into_owned();
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        });
    }
    let worker = worker.into_inner().unwrap();
    let pause = std::time::Duration::from_millis(200);
    for in_step in [false, true] {
        if in_step {
            pool.begin_step();
        }
        (0..20).for_each(|_| pool.run(2, &|_, _| {}));
        let before = ticks(&worker);
        std::thread::sleep(pause);
        let used = ticks(&worker) - before;
        assert!(used <= 2, "{used} ticks of 10 ms in {pause:?}, in a step: {in_step}");
        pool.end_step();
    }
}

/// Oracle: the kernel. Workers have the compute set, whatever the set of the thread that makes the pool.
#[cfg(target_os = "linux")]
#[test]
fn workers_do_not_inherit_a_pin() {
    let topology = Topology::read();
    let assignment = topology.assign(Some(2)).unwrap();
    let compute = assignment.set(Role::Compute).clone();
    let first = crate::CpuSet::from_iter(topology.allowed().first());
    let pinned = spawn(Role::Driver, &first, "pinned", move || {
        let pool = Pool::with(&assignment).unwrap();
        let seen = std::sync::Mutex::new(None);
        while seen.lock().unwrap().is_none() {
            pool.run(2, &|_, worker| {
                if worker == 1 {
                    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
                    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
                    *seen.lock().unwrap() = Some(list.unwrap().parse::<crate::CpuSet>().unwrap());
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            });
        }
        seen.into_inner().unwrap().unwrap()
    });
    assert_eq!(pinned.unwrap().join().unwrap(), compute);
}

/// Whether so many workers sleep at some time within so many milliseconds.
fn sleeps(regions: &Regions, workers: u32, milliseconds: u32) -> bool {
    (0..milliseconds).any(|_| {
        let found = regions.asleep() == workers;
        if !found {
            std::thread::sleep(Duration::from_millis(1));
        }
        found
    })
}

/// Oracle: who sleeps. A worker that sleeps in a step is awake after it was roused, for as long as it may spin.
#[test]
fn roused_workers_are_awake() {
    let regions: Regions = Regions::new(1);
    std::thread::scope(|scope| {
        regions.begin_step();
        scope.spawn(|| regions.serve(1, Duration::from_millis(100)));
        let slept = sleeps(&regions, 1, 5000);
        // Whoever looks may be late.
        let awake = (0..20).any(|_| {
            regions.rouse();
            sleeps(&regions, 0, 90)
        });
        regions.stop();
        assert!(slept && awake, "slept {slept}, awake {awake}");
    });
}
