//! Positioned reading, and the buffered cursor that headers are parsed through.
//!
//! The cursor checks every length against what the source has left *before* it reads or allocates, so a count
//! or length from a damaged file can't ask for more memory than the file has bytes.

use crate::error::Error;
use crate::header::MAX_HEADER;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that can be read at any position: a file, or memory.
pub trait ReadAt {
    /// Number of bytes.
    ///
    /// # Errors
    /// Whatever the operating system says.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the source ends before `buf` is full.
    fn fill_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn fill_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn fill_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.get(at..)?.get(..buf.len()));
        buf.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Bytes that the first read fetches; each further one fetches twice as many as the one before,
const FIRST_READ: usize = 8 << 10;
/// up to this many.
const BUFFER: usize = 256 << 10;

/// A position in a source, with a read-ahead buffer.
///
/// Invariant: `position <= len`; `buffer` holds the bytes of the source from `buffer_at`.
pub(crate) struct Cursor<'a, S: ReadAt + ?Sized> {
    source: &'a S,
    file: &'a str,
    len: u64,
    position: u64,
    buffer: Vec<u8>,
    buffer_at: u64,
    /// What the item being read belongs to, as the rest of "string ...".
    place: String,
}

impl<'a, S: ReadAt + ?Sized> Cursor<'a, S> {
    pub(crate) fn new(source: &'a S, file: &'a str) -> Result<Self, Error> {
        let len = source.size().map_err(|source| Error::Io {
            file: file.to_owned(),
            action: "find its length",
            source,
        })?;
        Ok(Self { source, file, len, position: 0, buffer: Vec::new(), buffer_at: 0, place: String::new() })
    }

    /// Says what the items that follow belong to, for errors: as the rest of "string ...".
    pub(crate) fn enter(&mut self, place: String) {
        self.place = place;
    }

    /// The file that errors name.
    pub(crate) fn file(&self) -> &'a str {
        self.file
    }

    /// Length of the source.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Where the next byte is read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes from the position to the end.
    pub(crate) fn left(&self) -> u64 {
        self.len - self.position
    }

    /// Makes sure that `need` more bytes exist and that the header may be that long.
    pub(crate) fn demand(&self, need: u64, what: &'static str) -> Result<(), Error> {
        if need > self.left() {
            return Err(Error::Truncated {
                file: self.file.to_owned(),
                offset: self.position,
                what: format!("{what}{}", self.place),
                need,
                left: self.left(),
            });
        }
        if self.position + need > MAX_HEADER {
            return Err(Error::HeaderTooLong {
                file: self.file.to_owned(),
                offset: self.position,
                what: format!("{what}{}", self.place),
                need,
            });
        }
        Ok(())
    }

    fn fill_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        self.source.fill_at(buf, offset).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                Error::Changed { file: self.file.to_owned(), what: "became shorter" }
            }
            _ => Error::Io { file: self.file.to_owned(), action: "read it", source },
        })
    }

    /// Fills `out`, whose length must have been demanded.
    fn fill(&mut self, out: &mut [u8]) -> Result<(), Error> {
        let from = self.position.wrapping_sub(self.buffer_at);
        let buffered = usize::try_from(from).ok().and_then(|at| self.buffer.get(at..)).unwrap_or(&[]);
        if buffered.len() >= out.len() {
            out.copy_from_slice(&buffered[..out.len()]);
        } else if out.len() >= BUFFER {
            self.fill_at(out, self.position)?;
        } else {
            let ahead = (2 * self.buffer.len()).clamp(FIRST_READ, BUFFER).max(out.len());
            let size = self.left().min(ahead as u64) as usize;
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.resize(size, 0);
            self.fill_at(&mut buffer, self.position)?;
            out.copy_from_slice(&buffer[..out.len()]);
            (self.buffer, self.buffer_at) = (buffer, self.position);
        }
        self.position += out.len() as u64;
        Ok(())
    }

    /// The next `N` bytes.
    pub(crate) fn take<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        self.demand(N as u64, what)?;
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.take(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// The next `len` bytes.
    pub(crate) fn bytes(&mut self, len: u64, what: &'static str) -> Result<Vec<u8>, Error> {
        self.demand(len, what)?;
        // Below MAX_HEADER, so it fits any usize.
        let mut out = vec![0; len as usize];
        self.fill(&mut out)?;
        Ok(out)
    }

    /// The next `count` numbers of `N` bytes each; the caller has demanded them.
    pub(crate) fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        from: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        self.demand(count.saturating_mul(N as u64), "array")?;
        let mut out = Vec::with_capacity(count as usize);
        let mut chunk = [0; 8 << 10];
        let mut left = count as usize;
        while left > 0 {
            let now = left.min(chunk.len() / N);
            self.fill(&mut chunk[..now * N])?;
            out.extend(chunk[..now * N].as_chunks::<N>().0.iter().map(|&bytes| from(bytes)));
            left -= now;
        }
        Ok(out)
    }
}
