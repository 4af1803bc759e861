//! Positioned reads by threads that sleep where there is nothing to read.
//!
//! A job goes whole to one thread, with its memory, and comes back: as many jobs are read at once as there are threads.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use strata_plan::Block;

#[cfg(all(test, not(loom)))]
use super::piece::Faults;
use super::piece::{Next, Pieces};
use super::{Ended, Files, ReadError, ReadFile, SpawnReader};

struct Work {
    tag: u32,
    block: Block<u8>,
    pieces: Pieces,
}

struct Queue {
    wanted: VecDeque<Work>,
    ended: VecDeque<Ended>,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    /// There is work, or there never will be again.
    work: Condvar,
    /// A job has ended.
    done: Condvar,
    files: Files,
    #[cfg(all(test, not(loom)))]
    faults: Mutex<Option<Faults>>,
}

/// The threads.
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// At least one of `most` threads that read these files, for up to `jobs` jobs.
    pub(super) fn new(
        most: usize,
        jobs: usize,
        files: &Files,
        spawn: SpawnReader<'_>,
    ) -> io::Result<Threads> {
        let queue = Queue {
            wanted: VecDeque::with_capacity(jobs),
            ended: VecDeque::with_capacity(jobs),
            closed: false,
        };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            work: Condvar::new(),
            done: Condvar::new(),
            files: files.clone(),
            #[cfg(all(test, not(loom)))]
            faults: Mutex::new(None),
        });
        let mut all = Threads { shared, threads: Vec::new() };
        for number in 0..most.clamp(1, jobs) {
            let shared = Arc::clone(&all.shared);
            match spawn(number, Box::new(move || shared.live())) {
                Ok(thread) => all.threads.push(thread),
                // Fewer read as well.
                Err(refused) if all.threads.is_empty() => return Err(refused),
                Err(_) => break,
            }
        }
        Ok(all)
    }

    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    pub(super) fn begin(&mut self, tag: u32, block: Block<u8>, pieces: Pieces) {
        self.shared.lock().wanted.push_back(Work { tag, block, pieces });
        self.shared.work.notify_one();
    }

    /// Sleeps until a job has ended; one must be under way.
    pub(super) fn finish(&mut self) -> Ended {
        let mut queue = self.shared.lock();
        loop {
            if let Some(ended) = queue.ended.pop_front() {
                return ended;
            }
            queue = self.shared.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn set_faults(&mut self, faults: Faults) {
        *self.shared.faults.lock().unwrap() = Some(faults);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        queue.wanted.clear();
        drop(queue);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that reads doesn't panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life.
    fn live(&self) {
        loop {
            let mut queue = self.lock();
            let mut work = loop {
                if queue.closed {
                    return;
                }
                match queue.wanted.pop_front() {
                    Some(work) => break work,
                    None => queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            let failed = self.read(&mut work.block, work.pieces).err();
            let Work { tag, block, .. } = work;
            self.lock().ended.push_back(Ended { tag, block, failed });
            self.done.notify_one();
        }
    }

    fn read(&self, block: &mut [u8], pieces: Pieces) -> Result<(), (usize, ReadError)> {
        read(&self.files.list, self.files.direct, block, pieces, |answer| {
            #[cfg(all(test, not(loom)))]
            if let Some(faults) = &mut *self.faults.lock().unwrap() {
                return faults(answer);
            }
            answer
        })
    }
}

/// Reads all pieces by positioned reads, or says which failed first. What the system says of each read may be `heard` differently.
pub(super) fn read(
    files: &[ReadFile],
    direct: bool,
    block: &mut [u8],
    pieces: Pieces,
    heard: impl Fn(io::Result<usize>) -> io::Result<usize>,
) -> Result<(), (usize, ReadError)> {
    for (number, piece) in pieces.into_iter().enumerate() {
        let Some(mut piece) = piece else { continue };
        loop {
            let ask = piece.ask();
            let file = &files[ask.file];
            let file = file.direct.as_ref().ok().filter(|_| direct).unwrap_or(&file.file);
            match piece.answer(heard(file.read_at(&mut block[ask.range], ask.offset)), files) {
                Next::Done => break,
                Next::Again => {}
                Next::Failed(why) => return Err((number, why)),
            }
        }
    }
    Ok(())
}
