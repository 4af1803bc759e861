//! Reads from files into memory of one's own, many at a time: io_uring and O_DIRECT where the system has them, else positioned
//! reads by a few threads.
//!
//! A job is a [`Block`] and up to [`MOST_PIECES`] pieces of files that go to places in it. Jobs are begun without waiting, go on while
//! their owner does something else, and end in any order; whoever wants one asks for the next that has ended, and sleeps.
//!
//! Owns the blocks of jobs that were begun: they are given up with [`Reader::begin`] and come back with [`Done`], so memory that the
//! system may still write to can't be touched, moved or freed by anybody. A reader that is dropped waits for what it began.
//!
//! Direct reads begin and end at multiples of [`PAGE`], in the file and in memory. So a piece has a place of [`most_room`] bytes that
//! starts at a multiple, and its first byte is as far behind that start as it is behind one in the file ([`skew`]). The other reads
//! bring only the bytes wanted, to the same place.
//!
//! Does not know what the bytes are. Errors are sentences that name the file.

mod piece;
mod threads;
#[cfg(target_os = "linux")]
mod uring;

#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;

use strata_plan::Block;

use piece::begun;
pub use piece::{MOST_PIECES, PAGE, Piece, most_room, skew};
use threads::Threads;
#[cfg(target_os = "linux")]
use uring::Uring;

/// A file to read from.
#[derive(Debug)]
pub struct ReadFile {
    /// What messages call it.
    pub name: String,
    /// The open file.
    pub file: File,
    /// The same file, opened with O_DIRECT; or why that is not possible.
    pub direct: io::Result<File>,
}

/// Starts a thread of this number.
pub type SpawnReader<'a> = &'a mut dyn FnMut(usize, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;

/// How files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// io_uring if the system has it, else positioned reads.
    Auto,
    /// Positioned reads.
    Positioned,
}

/// What a reader may have.
pub struct ReaderOptions<'a> {
    /// How it reads.
    pub way: Way,
    /// Whether to pass the page cache by where the files allow that.
    pub direct: bool,
    /// Jobs under way at once, at most.
    pub jobs: usize,
    /// Threads for positioned reads.
    pub threads: usize,
    /// Starts one.
    pub spawn: SpawnReader<'a>,
}

/// Why a piece could not be read: one sentence that names the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The file is shorter than it was.
    #[error(
        "the file {file} became shorter while it was in use: it ends at byte {end}, before what was to be read; run again with the whole file"
    )]
    Ended {
        /// The file.
        file: String,
        /// Where it ends.
        end: u64,
    },
    /// The system says no.
    #[error("{file}: {bytes} bytes from byte {offset} on could not be read: {reason}")]
    System {
        /// The file.
        file: String,
        /// Where the piece starts, bytes.
        offset: u64,
        /// Its length.
        bytes: usize,
        /// What the system said.
        reason: String,
    },
    /// A job that can't be begun as it was asked for.
    #[error("{0}")]
    Job(String),
}

/// A job that has ended.
#[derive(Debug)]
pub struct Done {
    /// What the job was begun with.
    pub tag: u32,
    /// Its memory.
    pub block: Block<u8>,
    /// Whether all pieces are there; else which of them failed first, and why. The block then holds anything.
    pub outcome: Result<(), (usize, ReadError)>,
}

/// Where reads go. Each holds the blocks of the jobs under way.
enum Backend {
    #[cfg(target_os = "linux")]
    Uring(Box<Uring>),
    Threads(Threads),
}

/// Reads from a fixed list of files.
pub struct Reader {
    backend: Backend,
    files: Files,
    jobs: usize,
    under_way: usize,
    fallback: Option<String>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({self})")
    }
}

/// How it reads, in words.
impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            #[cfg(target_os = "linux")]
            Backend::Uring(_) => write!(f, "io_uring")?,
            Backend::Threads(threads) => write!(f, "positioned reads by {} threads", threads.count())?,
        }
        write!(f, "{}", if self.files.direct { ", past the page cache" } else { ", through the page cache" })
    }
}

impl Reader {
    /// A reader of these files. What it can't have it does without, and says so ([`Reader::fallback`]).
    ///
    /// # Errors
    /// There is neither io_uring nor a thread to be had.
    pub fn new(files: Vec<ReadFile>, options: ReaderOptions<'_>) -> io::Result<Reader> {
        let ReaderOptions { way, direct, jobs, threads, spawn } = options;
        let (jobs, mut without) = (jobs.max(1), Vec::new());
        let direct = direct
            && files.iter().all(|file| match allows_direct(file) {
                Ok(()) => true,
                Err(why) => {
                    without.push(format!("past the page cache ({}: {why})", file.name));
                    false
                }
            });
        let files = Files { list: files.into(), direct };
        let ring = match way {
            // Through the page cache the ring's own threads would do what ours do.
            Way::Auto if direct => {
                ring(jobs).map_err(|why| without.push(format!("with io_uring ({why})"))).ok()
            }
            _ => None,
        };
        let backend = match ring {
            Some(ring) => ring,
            None => Backend::Threads(Threads::new(threads, jobs, &files, spawn)?),
        };
        let mut reader = Reader { backend, files, jobs, under_way: 0, fallback: None };
        if !without.is_empty() {
            let without = without.join(", nor ");
            reader.fallback = Some(format!("experts can't be read {without}, but are: {reader}"));
        }
        Ok(reader)
    }

    /// What it would rather have had, in a sentence; to be said once.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Jobs under way.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Begins to read pieces of files into a block, which is the reader's until the job is [`Done`]. Doesn't wait for the disk.
    ///
    /// # Errors
    /// As many jobs as there may be are under way, or a piece is of no file, starts at no multiple of [`PAGE`] in memory or has no
    /// room there. The block comes back.
    pub fn begin(
        &mut self,
        tag: u32,
        block: Block<u8>,
        pieces: &[Piece],
    ) -> Result<(), (ReadError, Block<u8>)> {
        if let Err(why) = self.check(&block, pieces) {
            return Err((ReadError::Job(why), block));
        }
        let pieces = begun(pieces, self.files.direct);
        match &mut self.backend {
            #[cfg(target_os = "linux")]
            Backend::Uring(ring) => ring.begin(tag, block, pieces, &self.files.list),
            Backend::Threads(threads) => threads.begin(tag, block, pieces),
        }
        self.under_way += 1;
        Ok(())
    }

    /// Sends what was begun on its way, if it isn't. Sleeping for a job does so too.
    pub fn send(&mut self) {
        match &mut self.backend {
            #[cfg(target_os = "linux")]
            Backend::Uring(ring) => ring.send(),
            Backend::Threads(_) => {}
        }
    }

    /// Sleeps until a job has ended; none if none is under way.
    ///
    /// # Errors
    /// The system doesn't say any more what becomes of jobs: the reader can't be used, and keeps their memory.
    pub fn finish(&mut self) -> Result<Option<Done>, ReadError> {
        if self.under_way == 0 {
            return Ok(None);
        }
        let done = match &mut self.backend {
            #[cfg(target_os = "linux")]
            Backend::Uring(ring) => ring.finish(&self.files.list).map_err(|error| {
                ReadError::Job(format!(
                    "the system does not answer reads of experts any more: {error}; start again"
                ))
            })?,
            Backend::Threads(threads) => threads.finish(),
        };
        self.under_way -= 1;
        let outcome = done.failed.map_or(Ok(()), Err);
        Ok(Some(Done { tag: done.tag, block: done.block, outcome }))
    }

    /// The files, for whoever reads single jobs at once beside this, in the same way but for io_uring.
    pub(crate) fn files(&self) -> Files {
        self.files.clone()
    }

    fn check(&self, block: &[u8], pieces: &[Piece]) -> Result<(), String> {
        if self.under_way >= self.jobs {
            return Err(format!(
                "{} reads of experts are under way, and no more were planned",
                self.under_way
            ));
        }
        self.files.check(block, pieces)
    }

    /// Has what the system answers be taken for something else.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn with_faults(mut self, faults: piece::Faults) -> Reader {
        match &mut self.backend {
            #[cfg(target_os = "linux")]
            Backend::Uring(ring) => ring.faults = Some(faults),
            Backend::Threads(threads) => threads.set_faults(faults),
        }
        self
    }
}

/// Files to read from, and how.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    list: Arc<[ReadFile]>,
    direct: bool,
}

impl Files {
    /// Reads pieces by positioned reads, all before it returns; else which of them failed first, and why.
    pub(crate) fn read(&self, to: &mut [u8], pieces: &[Piece]) -> Result<(), (usize, ReadError)> {
        self.check(to, pieces).map_err(|why| (0, ReadError::Job(why)))?;
        threads::read(&self.list, self.direct, to, begun(pieces, self.direct), |answer| answer)
    }

    fn check(&self, block: &[u8], pieces: &[Piece]) -> Result<(), String> {
        if pieces.len() > MOST_PIECES {
            return Err(format!("{} pieces are more than a read can have, {MOST_PIECES}", pieces.len()));
        }
        if self.direct && !block.as_ptr().addr().is_multiple_of(PAGE) {
            return Err("memory to read to starts at no page".into());
        }
        for piece in pieces {
            if usize::from(piece.file) >= self.list.len() {
                return Err(format!("there is no file {} to read from", piece.file));
            }
            let end = piece.room().and_then(|room| room.checked_add(piece.at));
            if !piece.at.is_multiple_of(PAGE) || end.is_none_or(|end| end > block.len()) {
                let (at, bytes, len) = (piece.at, piece.bytes, block.len());
                return Err(format!("{bytes} bytes to read have no room at {at} of {len} bytes"));
            }
        }
        Ok(())
    }
}

/// A job that has ended, as backends say it.
struct Ended {
    tag: u32,
    block: Block<u8>,
    failed: Option<(usize, ReadError)>,
}

#[cfg(target_os = "linux")]
fn ring(jobs: usize) -> Result<Backend, String> {
    Uring::new(jobs).map(|ring| Backend::Uring(Box::new(ring))).map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn ring(_: usize) -> Result<Backend, String> {
    Err("this system has none".into())
}

/// Whether a file can be read past the page cache: tried, for not every file system that opens files so reads them.
fn allows_direct(file: &ReadFile) -> Result<(), String> {
    let direct = file.direct.as_ref().map_err(ToString::to_string)?;
    let mut memory = vec![0u8; 2 * PAGE];
    let start = memory.as_ptr().addr().next_multiple_of(PAGE) - memory.as_ptr().addr();
    loop {
        match direct.read_at(&mut memory[start..start + PAGE], 0) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}
