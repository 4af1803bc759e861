//! An opened model: the files of all its shards, their headers joined, and reads from them.
//!
//! Opening reads headers only. Tensor data is read by position ([`Gguf::read_at`]) or mapped
//! ([`Gguf::map`]); neither is ever done ahead of a request.
//!
//! Invariant: every [`TensorInfo`] of [`Gguf::tensors`] lies inside its shard as it was when it was opened;
//! [`Gguf::unchanged`] says whether it still is.

use crate::error::{Error, ShardProblem, printable, printable_path};
use crate::header::{Header, TensorInfo};
use crate::mapping::Mapping;
use crate::metadata::Metadata;
use crate::shards::{ShardName, Split, join, misnamed, shard_error};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What tells a file from a changed or another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// One opened file of a model.
#[derive(Debug)]
pub struct Shard {
    /// Its path.
    pub path: PathBuf,
    /// Its length in bytes when it was opened.
    pub len: u64,
    /// The open file.
    pub file: File,
    /// GGUF version: 2 or 3.
    pub version: u32,
    /// What offsets of data are multiples of.
    pub alignment: u64,
    /// Where data begins.
    pub data_offset: u64,
    stamp: Stamp,
}

impl Shard {
    /// The path as errors name it.
    pub(crate) fn name(&self) -> String {
        printable_path(&self.path)
    }

    /// Opens the same file once more, for reads past the page cache. Reads then have to start and end at multiples of the device's blocks, in the
    /// file and in memory; not every file system that opens files so can read them.
    ///
    /// # Errors
    /// What the operating system says, or that another file has this path by now.
    pub fn reopen_direct(&self) -> io::Result<File> {
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::fs::OpenOptionsExt;
            let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(&self.path)?;
            let found = file.metadata()?;
            if (found.dev(), found.ino()) != (self.stamp.device, self.stamp.inode) {
                return Err(io::Error::other("another file has its name by now"));
            }
            Ok(file)
        }
        #[cfg(not(target_os = "linux"))]
        Err(io::ErrorKind::Unsupported.into())
    }

    fn changed(&self, what: &'static str) -> Error {
        Error::Changed { file: self.name(), what }
    }

    /// One sentence if the file isn't what it was when it was opened.
    pub(crate) fn unchanged(&self) -> Result<(), Error> {
        // The open file tells of changes in place, the path of a replacement.
        let open = self.file.metadata().map(|m| Stamp::of(&m));
        let open = open.map_err(|source| Error::Io {
            file: self.name(),
            action: "see whether it has changed",
            source,
        })?;
        if open.len < self.len {
            return Err(self.changed("became shorter"));
        }
        if open != self.stamp {
            return Err(self.changed("was written to"));
        }
        match fs::metadata(&self.path) {
            Ok(found) if Stamp::of(&found) == self.stamp => Ok(()),
            Ok(_) => Err(self.changed("was replaced")),
            Err(_) => Err(self.changed("was moved or removed")),
        }
    }
}

/// A model: all its shards, opened, with their headers read and joined.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    shards: Vec<Shard>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

impl Gguf {
    /// Opens the model at `path`: a whole file, or any one shard of a split one; the others must lie beside it.
    ///
    /// # Errors
    /// One sentence about the first thing that is wrong with any of the files.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let (shard, header) = open_shard(path)?;
        let split = Split::of(&header)?;
        let (shards, headers) = match (split, ShardName::of(path)) {
            (None, Some(name)) if name.count > 1 => {
                return Err(misnamed(&header, name.number, name.count, None));
            }
            (None, _) => (vec![shard], vec![header]),
            (Some(Split { no, count }), None) => {
                return Err(shard_error(&header, ShardProblem::Unnamed { number: no + 1, count }));
            }
            (Some(split), Some(name)) => open_siblings(shard, header, split, &name)?,
        };
        let (metadata, tensors) = join(headers)?;
        let index = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Gguf { path: path.to_owned(), shards, metadata, tensors, index })
    }

    /// The key-value pairs of all shards: those of the first, then those that only later ones hold.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors of all shards, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The files, in the order of their numbers.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the bytes of `tensor` from `offset` (from the begin of its data) into all of `buf`.
    ///
    /// # Errors
    /// [`Error::OutOfTensor`] if the range isn't inside the tensor, [`Error::Changed`] if the file became
    /// shorter, else what the operating system says.
    pub fn read_at(&self, tensor: &TensorInfo, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let shard = self.shards.get(tensor.shard);
        let len = buf.len() as u64;
        let inside = offset.checked_add(len).is_some_and(|end| end <= tensor.bytes);
        let Some(shard) = shard.filter(|_| inside) else {
            return Err(Error::OutOfTensor {
                file: printable_path(shard.map_or(&self.path, |shard| &shard.path)),
                tensor: printable(&tensor.name),
                offset,
                len,
                bytes: tensor.bytes,
            });
        };
        shard.file.read_exact_at(buf, tensor.offset.saturating_add(offset)).map_err(|source| {
            match source.kind() {
                io::ErrorKind::UnexpectedEof => shard.changed("became shorter"),
                _ => Error::Io { file: shard.name(), action: "read it", source },
            }
        })
    }

    /// Maps the files into memory, read-only. Nothing is read ahead.
    ///
    /// The process should have [installed](crate::sigbus::install) the fault guard, which turns a file that
    /// shrinks while it is mapped into a sentence instead of a crash.
    ///
    /// # Errors
    /// [`Error::Changed`] if a file isn't what it was when it was opened, else what the operating system says.
    pub fn map(&self) -> Result<Mapping, Error> {
        Mapping::new(&self.shards)
    }

    /// Whether the files still have the length, modification time and identity that they had when they were
    /// opened.
    ///
    /// # Errors
    /// [`Error::Changed`] names the first that hasn't.
    pub fn unchanged(&self) -> Result<(), Error> {
        self.shards.iter().try_for_each(Shard::unchanged)
    }
}

/// Opens one file and reads its header.
fn open_shard(path: &Path) -> Result<(Shard, Header), Error> {
    let name = printable_path(path);
    let failed = |source| Error::Io { file: name.clone(), action: "open it", source };
    // Asked before opening, because opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::NotAFile { file: name });
    }
    let file = File::open(path).map_err(failed)?;
    let stamp = Stamp::of(&file.metadata().map_err(failed)?);
    let header = Header::parse(&file, &name)?;
    let shard = Shard {
        path: path.to_owned(),
        len: header.len,
        file,
        version: header.version,
        alignment: header.alignment,
        data_offset: header.data_offset,
        stamp,
    };
    Ok((shard, header))
}

/// Opens the other shards of a model of which one is open; returns all in order.
fn open_siblings(
    shard: Shard,
    header: Header,
    split: Split,
    name: &ShardName,
) -> Result<(Vec<Shard>, Vec<Header>), Error> {
    let (number, count) = (name.number, name.count);
    if split.no + 1 != number || split.count != count {
        return Err(misnamed(&header, number, count, Some(split)));
    }
    let beside = header.file.clone();
    let mut opened = Some((shard, header));
    let (mut shards, mut headers) = (Vec::new(), Vec::new());
    for i in 1..=count {
        let this = if i == number { opened.take() } else { None };
        let (shard, header) = match this {
            Some(this) => this,
            None => {
                let path = name.path(i);
                open_shard(&path).map_err(|error| match error {
                    Error::Io { file, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                        let problem = ShardProblem::Missing { number: i, count, beside: beside.clone() };
                        Error::Shard { file, problem }
                    }
                    other => other,
                })?
            }
        };
        shards.push(shard);
        headers.push(header);
    }
    Ok((shards, headers))
}
