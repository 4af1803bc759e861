//! Memory maps of a model's files.
//!
//! Owns the maps and gives out tensors' bytes; the page cache decides what of them is in memory. Nothing is
//! prefaulted.
//!
//! Invariant: a map is registered with the fault guard for exactly as long as it exists.
//!
//! This is one of the crate's two modules with `unsafe`: to map a file is to promise that nobody changes it.

use crate::error::{Error, printable_path};
use crate::header::TensorInfo;
use crate::model::Shard;
use crate::sigbus::Watch;
use memmap2::{Mmap, MmapOptions};

/// One shard's map. Fields drop in order: the watch ends before the map.
#[derive(Debug)]
struct Map {
    _watch: Watch,
    bytes: Mmap,
}

/// The files of a model, mapped read-only. Share it by `Arc`.
#[derive(Debug)]
pub struct Mapping {
    maps: Vec<Map>,
}

impl Mapping {
    pub(crate) fn new(shards: &[Shard]) -> Result<Self, Error> {
        shards.iter().map(map).collect::<Result<_, _>>().map(|maps| Self { maps })
    }

    /// The data of `tensor`. Its address is a multiple of the shard's alignment (at least 8), up to a page.
    ///
    /// # Panics
    /// If `tensor` isn't one of the model that this mapping was made from.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        let start = tensor.offset as usize;
        &self.maps[tensor.shard].bytes[start..start + tensor.bytes as usize]
    }
}

#[allow(unsafe_code)]
fn map(shard: &Shard) -> Result<Map, Error> {
    shard.unchanged()?;
    let failed = |source| Error::Io { file: printable_path(&shard.path), action: "map it", source };
    let len = usize::try_from(shard.len).map_err(|_| failed(std::io::ErrorKind::FileTooLarge.into()))?;
    // SAFETY: the map is read-only. The bytes behind it can change if another process writes to the file; that
    // is a change of plain numbers that the user was told not to make, and `Gguf::unchanged` detects it. That
    // the file shrinks is what the fault guard is for.
    let bytes = unsafe { MmapOptions::new().len(len).map(&shard.file) }.map_err(failed)?;
    let watch = Watch::new(bytes.as_ptr() as usize, bytes.len(), &shard.path)?;
    Ok(Map { _watch: watch, bytes })
}
