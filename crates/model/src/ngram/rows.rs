//! Rows of the n-gram table, read from the file when they are needed.
//!
//! The table can be larger than the machine's memory and every token touches a handful of rows far apart, so it is
//! never mapped or loaded: rows are read by position, sorted, each page asked for ahead of the read that needs it, and a long
//! list by several threads. [`NgramRows::read_ahead`] hands the coming tokens' rows to an I/O thread, which pulls them into the page cache
//! while the caller computes. Reading ahead is advice: it may be dropped, and never changes what a read returns.
//!
//! The threads sleep when they have nothing to do, and end when the [`NgramRows`] is dropped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use strata_gguf::{Gguf, TensorInfo};

use super::readers::Readers;
use crate::roles::TensorRef;

/// Rows sorted and read together; bounds the scratch memory of a read.
pub(super) const BATCH: usize = 4096;
/// Pages asked for ahead of the row being read: enough to keep an SSD's queue busy.
const AHEAD: usize = 128;
/// Granularity of the page cache.
const PAGE: u64 = 4096;
/// Requests that may wait for the I/O thread.
const QUEUE: usize = 4;
/// Rows taken from one request to read ahead.
const MAX_REQUEST: usize = 1 << 19;

/// Why rows can't be read.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// A row outside the table.
    #[error("n-gram row {row} is out of range: the table has {rows} rows")]
    Range {
        /// The row.
        row: u64,
        /// Rows of the table.
        rows: u64,
    },
    /// The file can't be read.
    #[error("n-gram row {row} (byte {offset} of tensor `{tensor}`) cannot be read: {source}")]
    Read {
        /// The row.
        row: u64,
        /// Where it begins in the tensor.
        offset: u64,
        /// The table's tensor.
        tensor: String,
        /// Names the file.
        source: Box<strata_gguf::Error>,
    },
    /// An I/O thread can't be started.
    #[error("a thread that reads n-gram rows cannot be started: {source}")]
    Spawn {
        /// The operating system's reason.
        source: io::Error,
    },
}

/// What became of the rows handed to [`NgramRows::read_ahead`], in rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadAhead {
    /// Pulled into the page cache.
    pub warmed: u64,
    /// Left out because the thread was busy or the request too long.
    pub dropped: u64,
    /// Failed; reading them in earnest will say why.
    pub failed: u64,
}

#[derive(Default)]
struct Counters {
    warmed: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// The table, as all threads read it.
pub(super) struct Table {
    gguf: Arc<Gguf>,
    tensor: usize,
    pub(super) row_bytes: u64,
    rows: u64,
}

/// Reads rows of the n-gram table, and reads ahead.
pub struct NgramRows {
    table: Arc<Table>,
    readers: Readers,
    /// `None` once dropping has begun.
    requests: Option<SyncSender<Vec<u64>>>,
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
}

impl NgramRows {
    /// Opens the table `tensor` of `gguf` and starts its I/O threads with `spawn`, which gives each its role.
    ///
    /// # Errors
    /// If a thread can't be started.
    pub fn new(
        gguf: Arc<Gguf>,
        tensor: &TensorRef,
        spawn: impl Fn(Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self, RowError> {
        let table = Arc::new(Table {
            gguf,
            tensor: tensor.index,
            row_bytes: tensor.row_bytes() as u64,
            rows: tensor.rows as u64,
        });
        let readers = Readers::new(&table, &spawn).map_err(|source| RowError::Spawn { source })?;
        let (requests, receive) = sync_channel(QUEUE);
        let (stop, counters) = (Arc::new(AtomicBool::new(false)), Arc::new(Counters::default()));
        let warmer = Warmer { table: table.clone(), stop: stop.clone(), counters: counters.clone() };
        let thread =
            spawn(Box::new(move || warmer.run(&receive))).map_err(|source| RowError::Spawn { source })?;
        Ok(Self { table, readers, requests: Some(requests), thread: Some(thread), stop, counters })
    }

    /// The most memory, bytes, that reading takes while no more than `rows` of `width` bytes are read or asked for at once: the orders of
    /// batches, parts that threads read, requests that wait, the one that the thread works on, and the one being made.
    pub fn working_bytes(rows: usize, width: usize) -> usize {
        (rows.min(4 * BATCH) + (QUEUE + 2) * rows.min(MAX_REQUEST)) * size_of::<u64>()
            + Readers::working_bytes(rows, width)
    }

    /// Bytes of one row as stored.
    pub fn row_bytes(&self) -> usize {
        self.table.row_bytes as usize
    }

    /// Reads `rows` into `out`, `[rows.len(), row_bytes]`, as stored. A row that occurs repeatedly is read once per
    /// few thousand.
    ///
    /// # Errors
    /// A row out of range, or what the operating system says, with row, offset and file. `out` is then unspecified.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read(&mut self, rows: &[u64], out: &mut [u8]) -> Result<(), RowError> {
        assert_eq!(out.len(), rows.len() * self.row_bytes(), "the buffer must hold exactly the rows");
        if rows.len() <= BATCH {
            return self.table.read_batch(rows, out);
        }
        self.readers.read(&self.table, rows, out)
    }

    /// Asks for `rows` to be in the page cache soon. Never waits: when the thread is busy with earlier requests, the
    /// rows are dropped (and counted).
    pub fn read_ahead(&self, rows: &[u64]) {
        let (taken, left) = rows.split_at(rows.len().min(MAX_REQUEST));
        let mut dropped = left.len();
        let sent = match &self.requests {
            Some(requests) if !taken.is_empty() => requests.try_send(taken.to_vec()),
            _ => Ok(()),
        };
        if let Err(TrySendError::Full(rows) | TrySendError::Disconnected(rows)) = sent {
            dropped += rows.len();
        }
        self.counters.dropped.fetch_add(dropped as u64, Ordering::Relaxed);
    }

    /// What became of the rows asked for so far.
    pub fn read_ahead_counts(&self) -> ReadAhead {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReadAhead {
            warmed: count(&self.counters.warmed),
            dropped: count(&self.counters.dropped),
            failed: count(&self.counters.failed),
        }
    }
}

impl Drop for NgramRows {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported where it happened; advice has no result to lose.
            let _ = thread.join();
        }
    }
}

impl Table {
    fn info(&self) -> &TensorInfo {
        &self.gguf.tensors()[self.tensor]
    }

    /// Reads at most [`BATCH`] rows in the order of the file.
    pub(super) fn read_batch(&self, rows: &[u64], out: &mut [u8]) -> Result<(), RowError> {
        let width = self.row_bytes as usize;
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_unstable_by_key(|&i| rows[i]);
        let mut advice = Advice::default();
        for (n, &i) in order.iter().enumerate() {
            advice.keep_ahead(self, order.len(), n, |n| rows[order[n]]);
            let at = i * width..(i + 1) * width;
            match n.checked_sub(1).map(|n| order[n]).filter(|&before| rows[before] == rows[i]) {
                Some(before) => out.copy_within(before * width..(before + 1) * width, at.start),
                None => self.read(rows[i], &mut out[at])?,
            }
        }
        Ok(())
    }

    fn read(&self, row: u64, out: &mut [u8]) -> Result<(), RowError> {
        if row >= self.rows {
            return Err(RowError::Range { row, rows: self.rows });
        }
        let offset = row * self.row_bytes;
        self.gguf.read_at(self.info(), offset, out).map_err(|source| RowError::Read {
            row,
            offset,
            tensor: self.info().name.clone(),
            source: source.into(),
        })
    }

    /// The pages of the file that hold `row`.
    fn pages(&self, row: u64) -> std::ops::RangeInclusive<u64> {
        let start = self.info().offset.saturating_add(row.saturating_mul(self.row_bytes));
        start / PAGE..=start.saturating_add(self.row_bytes.saturating_sub(1)) / PAGE
    }

    /// Tells the kernel that `pages` will be read. Purely advice, so failures don't matter.
    #[cfg(target_os = "linux")]
    fn advise(&self, pages: std::ops::RangeInclusive<u64>) {
        use std::num::NonZeroU64;
        let len = NonZeroU64::new((pages.end() - pages.start() + 1) * PAGE);
        if let Some(shard) = self.gguf.shards().get(self.info().shard) {
            let _ = rustix::fs::fadvise(&shard.file, pages.start() * PAGE, len, rustix::fs::Advice::WillNeed);
        }
    }

    /// No such advice on this system: the reads themselves do the work.
    #[cfg(not(target_os = "linux"))]
    fn advise(&self, _: std::ops::RangeInclusive<u64>) {}
}

/// How far the kernel has been told about an ascending list of rows.
#[derive(Default)]
struct Advice {
    told: usize,
    /// One past the last page told.
    page: u64,
}

impl Advice {
    /// Tells about rows up to [`AHEAD`] beyond number `n` of `len`.
    fn keep_ahead(&mut self, table: &Table, len: usize, n: usize, row: impl Fn(usize) -> u64) {
        let until = len.min(n + AHEAD);
        // In halves, so that the queue is filled in bursts and not by one call per row.
        if self.told >= len || (self.told > n + AHEAD / 2) {
            return;
        }
        while self.told < until {
            let row = row(self.told);
            self.told += 1;
            if row >= table.rows {
                continue;
            }
            let pages = table.pages(row);
            let first = (*pages.start()).max(self.page);
            if first <= *pages.end() {
                self.page = pages.end() + 1;
                table.advise(first..=*pages.end());
            }
        }
    }
}

/// The I/O thread's side.
struct Warmer {
    table: Arc<Table>,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
}

impl Warmer {
    fn run(self, requests: &Receiver<Vec<u64>>) {
        let mut row_bytes = vec![0; self.table.row_bytes as usize];
        while let Ok(mut rows) = requests.recv() {
            rows.sort_unstable();
            let mut advice = Advice::default();
            for (n, &row) in rows.iter().enumerate() {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                advice.keep_ahead(&self.table, rows.len(), n, |n| rows[n]);
                let counter = match self.table.read(row, &mut row_bytes) {
                    Ok(()) => &self.counters.warmed,
                    Err(_) => &self.counters.failed,
                };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
