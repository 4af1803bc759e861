//! What the ring's tests put in place of pinned memory: buffers that can have a second owner, as real ones must not.

use std::sync::Arc;

use super::transfer::Buffer;
use crate::ExpertId;
use crate::sync::{AtomicU64, Ordering};

/// Some words that clones share.
#[derive(Clone)]
pub(super) struct Memory(Arc<Vec<AtomicU64>>);

const WORD: usize = size_of::<u64>();

impl Memory {
    pub fn new(words: usize) -> Memory {
        Memory(Arc::new((0..words).map(|_| AtomicU64::new(u64::MAX)).collect()))
    }

    /// Overwrites what no transfer reads any more: whoever does, sees it.
    #[cfg(not(loom))]
    pub fn poison(&self) {
        self.0.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }
}

impl Buffer for Memory {
    fn capacity(&self) -> usize {
        self.0.len() * WORD
    }

    fn write<R>(&mut self, bytes: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut copy = vec![0; bytes];
        let result = f(&mut copy);
        for (word, from) in self.0.iter().zip(copy.chunks(WORD)) {
            let mut padded = [0; WORD];
            padded[..from.len()].copy_from_slice(from);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        result
    }

    fn read<R>(&self, bytes: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        let copy: Vec<u8> =
            self.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(bytes).collect();
        f(&copy)
    }
}

pub(super) fn id(expert: u16) -> ExpertId {
    ExpertId { layer: 7, expert }
}

/// `len` bytes that no other expert has.
pub(super) fn pattern(id: ExpertId, len: usize) -> Vec<u8> {
    (0..len).map(|place| (usize::from(id.expert) * 37 + place * 11 + 1) as u8).collect()
}
