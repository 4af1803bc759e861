//! Where the ring's stagers get experts' bytes from.

use std::sync::Arc;

use crate::copy::read_parts;
use crate::{Blob, ExpertId, ExpertStore, ReadAt, StoreError, Tier};

/// Gives experts' bytes to stagers, several at once. Errors are sentences.
pub trait Source: Send + Sync + 'static {
    /// How many bytes a copy of an expert has.
    fn bytes(&self, id: ExpertId) -> Result<usize, String>;

    /// Copies an expert to where a copy of it has room.
    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String>;
}

/// Experts are copied from memory, wherever they are: pageable memory or the mapped file.
impl Source for ExpertStore {
    fn bytes(&self, id: ExpertId) -> Result<usize, String> {
        Ok(self.home(id).map_err(sentence)?.copy_layout().bytes)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        let pinned = self.pin_current(id).map_err(sentence)?;
        let Blob { gate, up, down } = pinned.blob();
        let parts = self.home(id).map_err(sentence)?.cut_mut(to);
        parts.into_iter().zip([gate, up, down]).for_each(|(part, from)| part.copy_from_slice(from));
        Ok(())
    }
}

/// A store whose mapped experts are read from the file by positioned reads, so that the mapping's pages stay
/// untouched.
pub struct PositionedReads {
    store: Arc<ExpertStore>,
    read: ReadAt,
}

impl PositionedReads {
    /// Reads with `read` what `store` has only mapped.
    pub fn new(store: Arc<ExpertStore>, read: ReadAt) -> PositionedReads {
        PositionedReads { store, read }
    }
}

impl Source for PositionedReads {
    fn bytes(&self, id: ExpertId) -> Result<usize, String> {
        self.store.bytes(id)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        match self.store.tier(id).map_err(sentence)? {
            Tier::Heap => self.store.read(id, to),
            Tier::Mapped => {
                let home = self.store.home(id).map_err(sentence)?;
                read_parts(&self.read, id, home, home.cut_mut(to))
            }
        }
    }
}

fn sentence(error: StoreError) -> String {
    error.to_string()
}
