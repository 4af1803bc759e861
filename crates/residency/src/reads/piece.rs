//! Pieces of files: where they go, and how far each has come.
//!
//! The arithmetic of direct reads and of answers that are shorter than asked for, without any I/O.

use std::io;
use std::ops::Range;

use super::{ReadError, ReadFile};

/// Direct reads start and end at multiples of this, bytes: what every block device and file system takes.
pub const PAGE: usize = 4096;

/// Pieces of a job, at most: an expert's gate, up and down rows.
pub const MOST_PIECES: usize = 3;

/// Bytes of a file that are wanted in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The file's number.
    pub file: u16,
    /// Where it starts in the file, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub bytes: usize,
    /// Where its room starts in the block, bytes: a multiple of [`PAGE`]. The first byte comes [`skew`] behind.
    pub at: usize,
}

/// How far bytes from `offset` of a file on lie behind the start of their room.
pub fn skew(offset: u64) -> usize {
    (offset % PAGE as u64) as usize
}

/// The room that `bytes` bytes need, wherever in a file they start. `usize::MAX` is more than there is.
pub fn most_room(bytes: usize) -> usize {
    bytes.saturating_add(PAGE - 1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX)
}

impl Piece {
    /// The room that it needs.
    pub(super) fn room(&self) -> Option<usize> {
        skew(self.offset).checked_add(self.bytes)?.checked_next_multiple_of(PAGE)
    }
}

/// What is asked of the system: bytes of a file, to a range of the block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) range: Range<usize>,
}

/// What comes of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The piece is there.
    Done,
    /// The rest is to be asked for.
    Again,
    /// It won't be.
    Failed(ReadError),
}

/// A piece on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    piece: Piece,
    direct: bool,
    /// What comes next, and where the last read ends, in the file.
    from: u64,
    to: u64,
}

impl Progress {
    pub(super) fn new(piece: Piece, direct: bool) -> Progress {
        let (start, end) = (piece.offset, piece.offset.saturating_add(piece.bytes as u64));
        let page = PAGE as u64;
        match direct {
            true => Progress {
                piece,
                direct,
                from: start / page * page,
                to: end.div_ceil(page).saturating_mul(page),
            },
            false => Progress { piece, direct, from: start, to: end },
        }
    }

    /// The next read.
    pub(super) fn ask(&self) -> Ask {
        let start = self.piece.offset - skew(self.piece.offset) as u64;
        let place = |offset: u64| self.piece.at + (offset - start) as usize;
        Ask { file: usize::from(self.piece.file), offset: self.from, range: place(self.from)..place(self.to) }
    }

    /// Takes the answer to [`Progress::ask`].
    pub(super) fn answer(&mut self, answer: io::Result<usize>, files: &[ReadFile]) -> Next {
        let Piece { file, offset, bytes, .. } = self.piece;
        let file = || files.get(usize::from(file)).map_or(String::new(), |file| file.name.clone());
        let read = match answer {
            Ok(read) => read as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Next::Again,
            Err(error) => {
                return Next::Failed(ReadError::System {
                    file: file(),
                    offset,
                    bytes,
                    reason: error.to_string(),
                });
            }
        };
        let reached = self.from.saturating_add(read).min(self.to);
        if reached >= offset.saturating_add(bytes as u64) {
            return Next::Done;
        }
        // Less than was asked for: the file's end, or the system's mood. Direct reads go on from a multiple, and at the end get no further.
        let from = if self.direct { reached - reached % PAGE as u64 } else { reached };
        if from == self.from {
            return Next::Failed(ReadError::Ended { file: file(), end: reached });
        }
        self.from = from;
        Next::Again
    }
}

/// The pieces of a job, each with its number; those of no bytes are there already.
pub(super) type Pieces = [Option<Progress>; MOST_PIECES];

pub(super) fn begun(pieces: &[Piece], direct: bool) -> Pieces {
    let mut all = [None; MOST_PIECES];
    for (place, piece) in all.iter_mut().zip(pieces) {
        *place = (piece.bytes > 0).then(|| Progress::new(*piece, direct));
    }
    all
}

/// What the system answers a test: what it said, and what is to be believed.
#[cfg(all(test, not(loom)))]
pub(crate) type Faults = Box<dyn FnMut(io::Result<usize>) -> io::Result<usize> + Send>;
