//! Shared immutable bytes kept alive by their owner.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A piece of bytes that belong to a mapping, a heap block or anything else, which stays alive as long as a piece does.
/// Cloning shares.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All bytes of an owner, whose `as_ref` must return the same slice every time.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Bytes {
        let range = 0..(*owner).as_ref().len();
        Bytes { owner, range }
    }

    /// A part of these bytes; `None` where `range` is not inside them.
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        let inside = start <= end && end <= self.range.end;
        inside.then(|| Bytes { owner: self.owner.clone(), range: start..end })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes::new(Arc::new(bytes))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bytes").field("len", &self.range.len()).finish_non_exhaustive()
    }
}
