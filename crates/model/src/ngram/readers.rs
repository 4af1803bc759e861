//! Threads that share a long read: a window of thousands of tokens looks up tens of thousands of rows, and each costs a call into the
//! system, wherever its page is.
//!
//! Owns the threads, which sleep while there is nothing to read, and end when the [`Readers`] is dropped.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::RowError;
use super::rows::{BATCH, Table};

/// Threads beside the caller's. What they gain: `cargo bench -p strata-model --bench rows`.
const READERS: usize = 3;

/// Rows, and their bytes once they are read.
struct Part {
    number: usize,
    rows: Vec<u64>,
    bytes: Vec<u8>,
    read: Result<(), RowError>,
}

/// The threads.
pub(super) struct Readers {
    /// `None` once dropping has begun.
    parts: Option<Sender<Part>>,
    done: Receiver<Part>,
    threads: Vec<JoinHandle<()>>,
    /// Of parts that were read before, for their memory.
    spare: Vec<Part>,
}

impl Readers {
    /// Starts them with `spawn`.
    pub(super) fn new(
        table: &Arc<Table>,
        spawn: &dyn Fn(Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> io::Result<Readers> {
        let (parts, receive) = channel::<Part>();
        let (send, done) = channel();
        let receive = Arc::new(Mutex::new(receive));
        let mut readers = Readers { parts: Some(parts), done, threads: Vec::new(), spare: Vec::new() };
        for _ in 0..READERS {
            let (table, receive, send) = (Arc::clone(table), Arc::clone(&receive), send.clone());
            readers.threads.push(spawn(Box::new(move || {
                // The lock is held while one waits: the others wait for the lock.
                let next = || receive.lock().ok().and_then(|parts| parts.recv().ok());
                while let Some(mut part) = next() {
                    part.read = table.read_batch(&part.rows, &mut part.bytes);
                    if send.send(part).is_err() {
                        return;
                    }
                }
            }))?);
        }
        Ok(readers)
    }

    /// The most memory, bytes, that reading `rows` rows of `width` bytes takes.
    pub(super) fn working_bytes(rows: usize, width: usize) -> usize {
        if rows <= BATCH { 0 } else { rows * (size_of::<u64>() + width) }
    }

    /// Reads rows as [`Table::read_batch`] does. Every thread has every fourth batch, the caller too.
    pub(super) fn read(&mut self, table: &Table, rows: &[u64], out: &mut [u8]) -> Result<(), RowError> {
        let width = table.row_bytes as usize;
        let own = |number: usize| number.is_multiple_of(READERS + 1);
        let parts = self.parts.as_ref().expect("not being dropped");
        let mut sent = 0;
        for (number, rows) in rows.chunks(BATCH).enumerate().filter(|(number, _)| !own(*number)) {
            let spare = self.spare.pop().map(|part| (part.rows, part.bytes));
            let (mut of, mut bytes) = spare.unwrap_or_default();
            of.clear();
            of.extend_from_slice(rows);
            bytes.resize(rows.len() * width, 0);
            parts
                .send(Part { number, rows: of, bytes, read: Ok(()) })
                .expect("the threads live as long as this");
            sent += 1;
        }
        let mut failed = None;
        for (number, rows) in rows.chunks(BATCH).enumerate().filter(|(number, _)| own(*number)) {
            let at = number * BATCH * width;
            if let Err(error) = table.read_batch(rows, &mut out[at..at + rows.len() * width]) {
                failed.get_or_insert((number, error));
            }
        }
        for _ in 0..sent {
            let part = self.done.recv().expect("the threads live as long as this");
            match &part.read {
                Ok(()) => out[part.number * BATCH * width..][..part.bytes.len()].copy_from_slice(&part.bytes),
                // The first in the order of rows is told, whoever found it.
                Err(_) if failed.as_ref().is_some_and(|(number, _)| *number < part.number) => {}
                Err(_) => {
                    failed = part.read.err().map(|error| (part.number, error));
                    continue;
                }
            }
            self.spare.push(part);
        }
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.parts = None;
        for thread in self.threads.drain(..) {
            // A panic has been reported where it happened.
            let _ = thread.join();
        }
    }
}
