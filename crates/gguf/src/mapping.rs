//! Memory maps of a model's files.
//!
//! Owns the maps and gives out tensors' bytes; the page cache decides what of them is in memory. Nothing is
//! prefaulted: [`Mapping::will_need`] and [`Mapping::advise_random`] only tell the kernel what to expect.
//!
//! Invariant: a map is registered with the fault guard for exactly as long as it exists.
//!
//! This is one of the crate's two modules with `unsafe`: to map a file is to promise that nobody changes it.

use crate::error::{Error, printable_path};
use crate::header::TensorInfo;
use crate::model::Shard;
use crate::sigbus::Watch;
use memmap2::{Advice, Mmap, MmapOptions};
use std::ops::Range;

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

    /// Tells the kernel that `tensor` will be read in no order, so that reading ahead is a waste. A hint: that
    /// the kernel may not take it changes nothing but speed.
    pub fn advise_random(&self, tensor: &TensorInfo) {
        self.advise(Advice::Random, tensor, 0..tensor.bytes);
    }

    /// Tells the kernel that these bytes of `tensor` (counted from its begin) will be read soon, so that it
    /// starts to fetch them. Returns at once. A hint, like [`Mapping::advise_random`].
    ///
    /// # Panics
    /// If `range` isn't inside the tensor.
    pub fn will_need(&self, tensor: &TensorInfo, range: Range<u64>) {
        self.advise(Advice::WillNeed, tensor, range);
    }

    fn advise(&self, advice: Advice, tensor: &TensorInfo, range: Range<u64>) {
        assert!(range.start <= range.end && range.end <= tensor.bytes, "range outside of the tensor");
        let start = (tensor.offset + range.start) as usize;
        let len = (range.end - range.start) as usize;
        // Kernels without the advice, or with limits on it, refuse it: reading works all the same.
        let _ = self.maps[tensor.shard].bytes.advise_range(advice, start, len);
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
