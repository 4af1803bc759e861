//! Reads by io_uring: queued with one call, made by the kernel meanwhile, waited for asleep.
//!
//! An island of `unsafe`: the kernel writes to memory that the program owns, until it has answered. So blocks of jobs under way lie in
//! `held`, which nobody else reaches, and one is taken out only when each of its reads was answered. Dropping waits for all answers;
//! where they don't come any more, the ring and the blocks are never freed.

use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};
use strata_plan::Block;

#[cfg(all(test, not(loom)))]
use super::piece::Faults;
use super::piece::{MOST_PIECES, Next, Pieces};
use super::{Ended, ReadError, ReadFile};

/// Entries that a ring may have.
const MOST_ENTRIES: usize = 1 << 12;

/// Bytes of a read, at most; the rest is asked for once they are there. A multiple of every page.
const LONGEST: usize = 1 << 30;

/// A job under way.
struct Held {
    tag: u32,
    block: Block<u8>,
    pieces: Pieces,
    /// Reads of it that were queued and not answered.
    reads: usize,
    failed: Option<(usize, ReadError)>,
}

/// The ring and what it reads to.
pub(super) struct Uring {
    ring: ManuallyDrop<IoUring>,
    held: Vec<Option<Held>>,
    /// Places in `held` that are free, and those of jobs that need no answer any more.
    free: Vec<usize>,
    ended: Vec<usize>,
    /// Reads queued and not answered, of all jobs.
    reads: usize,
    #[cfg(all(test, not(loom)))]
    pub(super) faults: Option<Faults>,
}

impl Uring {
    /// A ring for so many jobs.
    pub(super) fn new(jobs: usize) -> io::Result<Uring> {
        let entries = (jobs * MOST_PIECES).next_power_of_two();
        if entries > MOST_ENTRIES {
            return Err(io::Error::other(format!("{jobs} reads at once are too many for it")));
        }
        let ring = IoUring::new(entries as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Uring {
            ring: ManuallyDrop::new(ring),
            held: (0..jobs).map(|_| None).collect(),
            free: (0..jobs).collect(),
            ended: Vec::with_capacity(jobs),
            reads: 0,
            #[cfg(all(test, not(loom)))]
            faults: None,
        })
    }

    /// Queues a job's reads. There must be a place for it: fewer jobs under way than the ring was made for.
    pub(super) fn begin(&mut self, tag: u32, block: Block<u8>, pieces: Pieces, files: &Arc<[ReadFile]>) {
        let place = self.free.pop().expect("a place for each job that may be under way");
        self.held[place] = Some(Held { tag, block, pieces, reads: 0, failed: None });
        for piece in 0..MOST_PIECES {
            self.queue(place, piece, files);
        }
        if self.held[place].as_ref().is_some_and(|held| held.reads == 0) {
            self.ended.push(place);
        }
    }

    /// Tells the kernel what was queued. What it doesn't take now it takes when somebody waits.
    pub(super) fn send(&mut self) {
        let _ = self.ring.submit();
    }

    /// Sleeps until a job has ended; one must be under way.
    pub(super) fn finish(&mut self, files: &Arc<[ReadFile]>) -> io::Result<Ended> {
        loop {
            if let Some(ended) = self.ended.pop().and_then(|place| self.release(place)) {
                return Ok(ended);
            }
            let (place, number, answer) = self.answer()?;
            #[cfg(all(test, not(loom)))]
            let answer = match &mut self.faults {
                Some(faults) => faults(answer),
                None => answer,
            };
            let Some(held) = &mut self.held[place] else { continue };
            match held.pieces[number].as_mut().map(|piece| piece.answer(answer, files)) {
                Some(Next::Again) if held.failed.is_none() => self.queue(place, number, files),
                Some(Next::Failed(why)) => held.failed = held.failed.take().or(Some((number, why))),
                _ => {}
            }
            if self.held[place].as_ref().is_some_and(|held| held.reads == 0) {
                self.ended.push(place);
            }
        }
    }

    /// Takes a job out whose reads were all answered.
    fn release(&mut self, place: usize) -> Option<Ended> {
        let Held { tag, block, failed, .. } = self.held[place].take_if(|held| held.reads == 0)?;
        self.free.push(place);
        Some(Ended { tag, block, failed })
    }

    /// Queues the next read of a piece, if the job has it.
    fn queue(&mut self, place: usize, number: usize, files: &[ReadFile]) {
        let Some(held) = &mut self.held[place] else { return };
        let Some(ask) = held.pieces[number].as_ref().map(|piece| piece.ask()) else { return };
        let file = &files[ask.file];
        let fd = types::Fd(file.direct.as_ref().unwrap_or(&file.file).as_raw_fd());
        // A range of the block: indexing checks it.
        let to = &mut held.block[ask.range];
        let read =
            opcode::Read::new(fd, to.as_mut_ptr(), to.len().min(LONGEST) as u32).offset(ask.offset).build();
        let read = read.user_data((place * MOST_PIECES + number) as u64);
        // SAFETY: the memory lies in a block that stays in `held`, where nobody touches it, until this read was answered (`reads`), and the block
        // keeps its arena. The files are open as long as the reader has them, which is longer than it has this.
        // The queue has room: it has an entry for each piece of each job, and a piece has one read at a time.
        let queued = unsafe { self.ring.submission().push(&read) };
        assert!(queued.is_ok(), "a ring has an entry for each piece of each job");
        held.reads += 1;
        self.reads += 1;
    }

    /// Sleeps for the next answer: the job's place, the piece, and what the system says of the read.
    fn answer(&mut self) -> io::Result<(usize, usize, io::Result<usize>)> {
        loop {
            if let Some(entry) = self.ring.completion().next() {
                let (of, said) = (entry.user_data() as usize, entry.result());
                let (place, number) = (of / MOST_PIECES, of % MOST_PIECES);
                if let Some(held) = &mut self.held[place] {
                    held.reads -= 1;
                }
                self.reads -= 1;
                let read = usize::try_from(said).map_err(|_| io::Error::from_raw_os_error(-said));
                return Ok((place, number, read));
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while self.reads > 0 {
            if self.answer().is_err() {
                // Nobody knows what the kernel still writes to.
                self.held.drain(..).for_each(mem::forget);
                return;
            }
        }
        // SAFETY: once, here, and the ring isn't used after it.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
    }
}
