//! Experts that are read beside tours: by threads that want one at once, wherever they take it ([`Source`](crate::Source)).
//!
//! Owns the memory to read to, a room for each of them. An expert is read whole, past the page cache where the files allow that, and its parts are then
//! copied to where they are wanted. Reads are deep because several threads read.

use std::sync::{Mutex, MutexGuard, PoisonError};

use strata_plan::Block;

use crate::file::{FileCount, pieces, read_failed};
use crate::reads::Files;
use crate::{Blob, ExpertId, ExpertStore};

/// What reads them.
pub(crate) struct Aside {
    files: Files,
    rooms: Mutex<Rooms>,
}

struct Rooms {
    free: Vec<Block<u8>>,
    count: FileCount,
}

impl Aside {
    /// Reads of these files, as many at once as there are rooms.
    pub(crate) fn new(files: Files, free: Vec<Block<u8>>) -> Aside {
        Aside { files, rooms: Mutex::new(Rooms { free, count: FileCount::default() }) }
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an expert to where a copy of it has room. Errors are sentences that name the tensor and the file.
    pub(crate) fn read(&self, store: &ExpertStore, id: ExpertId, to: &mut [u8]) -> Result<(), String> {
        let home = store.home(id).map_err(|why| why.to_string())?;
        let pieces = pieces(store, id).map_err(|why| why.to_string())?;
        let taken = self.rooms().free.pop();
        let mut room = taken.ok_or("more experts are read at once than was planned")?;
        let read = self.files.read(&mut room, &pieces);
        if read.is_ok() {
            let Blob { gate, up, down } = home.cut(id.expert, &room);
            home.cut_mut(to)
                .into_iter()
                .zip([gate, up, down])
                .for_each(|(to, from)| to.copy_from_slice(from));
        }
        let mut rooms = self.rooms();
        rooms.free.push(room);
        if read.is_ok() {
            let bytes = home.expert_bytes() as u64;
            rooms.count.merge(FileCount { used: 1, read: 1, bytes, waited: 0 });
        }
        read.map_err(|(piece, why)| read_failed(store, id, piece, &why))
    }

    /// Counts an expert that was in memory.
    pub(crate) fn found(&self) {
        self.rooms().count.used += 1;
    }

    /// What was read since this was last asked. Nobody's waiting is counted here.
    pub(crate) fn take_count(&self) -> FileCount {
        std::mem::take(&mut self.rooms().count)
    }
}
