//! Writing a model: first what is in it ([`Outline`]), then the tensors' bytes ([`Writer`]).
//!
//! Everything about a file but its data is known before the first byte is written, so the whole of it is
//! reserved at once (a full disk is an error at the start, where the file system can tell) and data goes to its
//! place by position: from one thread in order, or from many at a time. Memory is bounded by the headers.
//!
//! Invariant: a file has its final name only once it is complete. Until [`Writer::finish`] all bytes are in files
//! that are removed when the writer is dropped, whatever the reason ([`WholeFile`]).

use crate::encode;
use crate::error::{Error, KeyProblem, TensorProblem, WriteProblem, printable, printable_path};
use crate::header::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_HEADER, MAX_KEY, MAX_TENSOR_NAME, TensorInfo, align_up,
    alignment_is_valid, tensor_bytes,
};
use crate::metadata::Metadata;
use crate::shards::{COUNT_KEY, NUMBER_KEY, ShardName, TENSORS_KEY};
use crate::types::TensorType;
use crate::value::{Array, Value};
use crate::whole::WholeFile;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a text that every shard repeats.
const MOST_REPEATED: usize = 256;

/// What a model to be written consists of: metadata, tensors in order, and where it is cut into shards.
#[derive(Clone, Debug)]
pub struct Outline {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    /// Numbers of tensors before which a shard begins, ascending.
    cuts: Vec<usize>,
    split_bytes: Option<u64>,
    overwrite: bool,
}

impl Outline {
    /// A model with this metadata and no tensors yet.
    ///
    /// `general.alignment` sets the alignment of data if it is there (else it is 32). `split.*` keys are left
    /// out: the files that are written get their own.
    pub fn new(mut metadata: Metadata) -> Self {
        for key in [NUMBER_KEY, COUNT_KEY, TENSORS_KEY] {
            metadata.remove(key);
        }
        Self {
            metadata,
            tensors: Vec::new(),
            names: HashSet::new(),
            cuts: Vec::new(),
            split_bytes: None,
            overwrite: false,
        }
    }

    /// Adds a tensor after the others and returns its number. `shape` is in `ne` order: the row length first.
    ///
    /// # Errors
    /// [`Error::Write`] if the name is taken or no name, or if the shape doesn't suit the type.
    pub fn tensor(&mut self, name: &str, shape: &[u64], ty: TensorType) -> Result<usize, Error> {
        let problem = |problem| Error::Write {
            file: "outline".to_owned(),
            problem: WriteProblem::Tensor { tensor: printable(name), problem },
        };
        let bytes = tensor_bytes(shape, ty).map_err(problem)?;
        match name.len() as u64 {
            0 => return Err(problem(TensorProblem::Empty)),
            len if len > MAX_TENSOR_NAME => return Err(problem(TensorProblem::TooLong(len))),
            _ => {}
        }
        if !self.names.insert(name.to_owned()) {
            return Err(problem(TensorProblem::Twice));
        }
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.tensors.push(TensorInfo { name, shape, ty, shard: 0, offset: 0, bytes });
        Ok(self.tensors.len() - 1)
    }

    /// Begins a new shard: tensors added from now on go there. Before the first tensor it makes a first shard of
    /// metadata alone. No other shard is ever left empty.
    pub fn cut(&mut self) {
        self.cuts.push(self.tensors.len());
    }

    /// Also begins a new shard where a file would otherwise exceed `bytes`. A file with a single tensor (or the
    /// metadata alone) may.
    pub fn split_at(&mut self, bytes: u64) {
        self.split_bytes = Some(bytes);
    }

    /// Whether files that exist may be replaced; otherwise they are an error.
    pub fn overwrite(&mut self, yes: bool) {
        self.overwrite = yes;
    }

    /// Creates the files, writes their headers and reserves the space of the data.
    ///
    /// A model of one shard gets the name `path`; the shards of a split one get the names
    /// `NAME-00001-of-0000N.gguf`, where `path` is `NAME.gguf`.
    ///
    /// # Errors
    /// [`Error::Write`] if this is no valid model, [`Error::Exists`] if a file is in the way, else what the
    /// operating system says (a full disk among it). Nothing is left behind.
    pub fn create(self, path: &Path) -> Result<Writer, Error> {
        let file = printable_path(path);
        let wrong = |problem| Error::Write { file: file.clone(), problem };
        if path.file_name().is_none() {
            let folder = WriteProblem::NotAFile("a folder");
            return Err(wrong(if path.is_dir() { folder } else { WriteProblem::NoFileName }));
        }
        if ShardName::of(path).is_some() {
            return Err(wrong(WriteProblem::ShardName));
        }
        let alignment = check_metadata(&self.metadata)
            .map_err(|(key, problem)| wrong(WriteProblem::Key { key, problem }))?;
        let total = self.tensors.len();
        let split_total = i32::try_from(total).map_err(|_| wrong(WriteProblem::TooManyTensors(total)))?;
        let groups = self.groups(alignment);
        let count = groups.len();
        let split_count = u16::try_from(count).map_err(|_| wrong(WriteProblem::TooManyShards(count)))?;

        let mut tensors = Vec::with_capacity(total);
        let mut files = Vec::with_capacity(count);
        for (i, mut group) in groups.into_iter().enumerate() {
            let mut at = 0u64;
            for tensor in &mut group {
                tensor.offset = at;
                at = tensor.bytes.checked_add(at).and_then(|end| align_up(end, alignment)).ok_or_else(
                    || {
                        let (tensor, problem) = (printable(&tensor.name), TensorProblem::Overflow);
                        wrong(WriteProblem::Tensor { tensor, problem })
                    },
                )?;
            }
            let keys = self.keys(i as u16, split_count, split_total);
            let mut header = encode::header(keys.iter(), &group);
            if header.len() as u64 > MAX_HEADER {
                return Err(wrong(WriteProblem::HeaderTooLong(header.len() as u64)));
            }
            if !group.is_empty() {
                header.resize(header.len().next_multiple_of(alignment as usize), 0);
            }
            let len = at.saturating_add(header.len() as u64);
            let target = match count {
                1 => path.to_owned(),
                _ => ShardName::from_whole(path, count as u64).path(i as u64 + 1),
            };
            let file = WholeFile::create(&target, self.overwrite)?;
            file.reserve(len)?;
            file.write_at(0, &header)?;
            files.push(file);
            tensors.extend(group.into_iter().map(|tensor| TensorInfo {
                shard: i,
                offset: tensor.offset + header.len() as u64,
                ..tensor
            }));
        }
        let written = tensors.iter().map(|_| AtomicU64::new(0)).collect();
        Ok(Writer { files, tensors, written })
    }

    /// The metadata of shard `no`.
    fn keys(&self, no: u16, count: u16, tensors: i32) -> Metadata {
        let mut keys = Metadata::new();
        // Later shards have what is short, so that those of two models can be told apart.
        let short = |value: &Value| match value {
            Value::Array(_) => false,
            Value::String(text) => text.len() <= MOST_REPEATED,
            _ => true,
        };
        for (key, value) in self.metadata.iter().filter(|(_, value)| no == 0 || short(value)) {
            keys.insert(key, value.clone());
        }
        if count > 1 {
            keys.insert(NUMBER_KEY, no);
            keys.insert(COUNT_KEY, count);
            keys.insert(TENSORS_KEY, tensors);
        }
        keys
    }

    /// The tensors, shard by shard.
    fn groups(&self, alignment: u64) -> Vec<Vec<TensorInfo>> {
        let header_bytes = |no| encode::header(self.keys(no, 2, 0).iter(), &[]).len() as u64;
        // Saturating: an overflow is found when offsets are given out, and only ever makes more shards here.
        let file_bytes = |header: u64, data: u64| header.next_multiple_of(alignment).saturating_add(data);
        let limit = self.split_bytes.unwrap_or(u64::MAX);
        let later = header_bytes(1);
        let mut groups = vec![Vec::new()];
        let (mut header, mut data) = (header_bytes(0), 0u64);
        for (i, tensor) in self.tensors.iter().enumerate() {
            let bytes = align_up(tensor.bytes, alignment).unwrap_or(u64::MAX);
            let entry = encode::entry_bytes(&tensor.name, tensor.shape.len());
            let full = file_bytes(header + entry, data.saturating_add(bytes)) > limit;
            let occupied = groups.last().is_some_and(|group: &Vec<_>| !group.is_empty());
            if (occupied && full) || (self.cuts.binary_search(&i).is_ok() && (occupied || groups.len() == 1))
            {
                groups.push(Vec::new());
                (header, data) = (later, 0);
            }
            header += entry;
            data = data.saturating_add(bytes);
            if let Some(group) = groups.last_mut() {
                group.push(tensor.clone());
            }
        }
        groups
    }
}

/// The alignment that the metadata asks for, or the key that can't be written and why.
fn check_metadata(metadata: &Metadata) -> Result<u64, (String, KeyProblem)> {
    fn depth(array: &Array) -> usize {
        match array {
            Array::Array(inner) => 1 + inner.iter().map(depth).max().unwrap_or(0),
            _ => 1,
        }
    }
    for (key, value) in metadata.iter() {
        let problem = match value {
            _ if key.is_empty() => KeyProblem::Empty,
            _ if key.len() as u64 > MAX_KEY => KeyProblem::TooLong(key.len() as u64),
            Value::Array(array) if depth(array) > Array::MAX_DEPTH => KeyProblem::Depth,
            _ => continue,
        };
        return Err((printable(key), problem));
    }
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = value.as_integer().and_then(|v| u64::try_from(v).ok());
    alignment
        .filter(|&v| alignment_is_valid(v))
        .ok_or_else(|| (ALIGNMENT_KEY.to_owned(), KeyProblem::Alignment(value.to_string())))
}

/// The files of a model while their data is written. Shared between threads by reference.
#[derive(Debug)]
pub struct Writer {
    files: Vec<WholeFile>,
    tensors: Vec<TensorInfo>,
    written: Vec<AtomicU64>,
}

impl Writer {
    /// The tensors, by their numbers, with their places in the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The names that the files will have.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(WholeFile::path)
    }

    /// Writes `bytes` into tensor number `tensor` from `offset` (from the begin of its data). Any thread, any
    /// order; every byte once.
    ///
    /// # Errors
    /// [`Error::OutOfTensor`] if the range isn't inside the tensor, else what the operating system says.
    pub fn write_at(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let info = self.tensors.get(tensor).ok_or_else(|| self.no_tensor(tensor))?;
        let file = &self.files[info.shard];
        let len = bytes.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > info.bytes) {
            let (file, tensor) = (file.name(), printable(&info.name));
            return Err(Error::OutOfTensor { file, tensor, offset, len, bytes: info.bytes });
        }
        file.write_at(info.offset + offset, bytes)?;
        self.written[tensor].fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// A stream into tensor number `tensor`, from its begin. It doesn't buffer: write large pieces.
    ///
    /// # Errors
    /// [`Error::Write`] if there is no such tensor.
    pub fn sink(&self, tensor: usize) -> Result<Sink<'_>, Error> {
        if tensor >= self.tensors.len() {
            return Err(self.no_tensor(tensor));
        }
        Ok(Sink { writer: self, tensor, offset: 0 })
    }

    fn no_tensor(&self, tensor: usize) -> Error {
        Error::Write { file: self.files[0].name(), problem: WriteProblem::NoTensor(tensor) }
    }

    /// Waits until everything is on the disk, and gives the files their names, which it returns.
    ///
    /// # Errors
    /// [`Error::Write`] if a tensor isn't complete, [`Error::Exists`] if a file appeared under one of the names,
    /// else what the operating system says. Nothing is left behind.
    pub fn finish(mut self) -> Result<Vec<PathBuf>, Error> {
        for (tensor, written) in self.tensors.iter().zip(&mut self.written) {
            let (written, bytes) = (*written.get_mut(), tensor.bytes);
            if written != bytes {
                let problem = WriteProblem::Incomplete { tensor: printable(&tensor.name), written, bytes };
                return Err(Error::Write { file: self.files[tensor.shard].name(), problem });
            }
        }
        self.files.iter().try_for_each(WholeFile::sync)?;
        for at in 0..self.files.len() {
            if let Err(error) = self.files[at].publish() {
                // Some shards of a model are no model: take those back that have their names already.
                for file in &self.files[..at] {
                    let _ = fs::remove_file(file.path());
                }
                return Err(error);
            }
        }
        Ok(self.paths().map(Path::to_owned).collect())
    }
}

/// A stream into one tensor: see [`Writer::sink`].
#[derive(Debug)]
pub struct Sink<'w> {
    writer: &'w Writer,
    tensor: usize,
    offset: u64,
}

impl io::Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write_at(self.tensor, self.offset, bytes).map_err(io::Error::other)?;
        self.offset += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
