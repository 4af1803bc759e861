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
        let _step = pool.step();
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
