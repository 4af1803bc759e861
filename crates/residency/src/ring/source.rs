//! Where the ring's stagers get experts' bytes from.

use crate::{Blob, ExpertId, ExpertStore, StoreError, Tier};

/// Gives experts' bytes to stagers, several at once. Errors are sentences.
pub trait Source: Send + Sync + 'static {
    /// How many bytes a copy of an expert has.
    fn bytes(&self, id: ExpertId) -> Result<usize, String>;

    /// Copies an expert to where a copy of it has room.
    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String>;
}

/// Experts are copied from memory, wherever they are: pageable memory or the mapped file. Where the store reads files, those that are not in memory are
/// read.
impl Source for ExpertStore {
    fn bytes(&self, id: ExpertId) -> Result<usize, String> {
        Ok(self.home(id).map_err(sentence)?.copy_layout().bytes)
    }

    fn read(&self, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        let pinned = self.pin_current(id).map_err(sentence)?;
        if let Some(aside) = self.aside() {
            if pinned.tier() == Tier::Mapped {
                // Who kept it would keep a tour from giving it a copy.
                drop(pinned);
                return aside.read(self, id, to);
            }
            aside.found();
        }
        let Blob { gate, up, down } = pinned.blob();
        let parts = self.home(id).map_err(sentence)?.cut_mut(to);
        parts.into_iter().zip([gate, up, down]).for_each(|(part, from)| part.copy_from_slice(from));
        Ok(())
    }
}

fn sentence(error: StoreError) -> String {
    error.to_string()
}
