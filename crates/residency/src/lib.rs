//! Where every expert's bytes are and how they move.
//!
//! A model's routed experts are most of its bytes, and each has a home: a place inside three big tensors of the model
//! file, read in place ([`Tier::Mapped`]). The [`ExpertStore`] knows these homes, keeps copies of some experts in
//! anonymous memory ([`Tier::Heap`]), and gives the bytes to whoever computes with them, wherever they are.
//!
//! A reader takes an [`ExpertHandle`], which names an expert and the epoch of its residence, and pins it for as long
//! as it reads ([`Pinned`]). An expert that moves starts a new epoch, so an old handle is refused, never misread; an
//! expert that is pinned can't move. The protocol is the few lines of the `cell` module, and model-checked.
//!
//! Copies are made by a [`CopyEngine`]; [`HostCopy`] is the one for host memory. What a device can't read where it
//! is goes through a [`Ring`] of buffers that it can.
//!
//! Which expert is worth a better place is decided by plain data and pure functions that know neither bytes nor threads:
//! the [`Roster`] numbers a model's experts, [`Heat`] counts how often they are used, [`Slots`] accounts for a tier's places,
//! [`plan_moves`] says which experts change places, and a [`Ranking`] keeps what was learned across restarts, in a [`RankingFile`].
//!
//! Where memory has no room for all, and the page cache shall not decide, a [`FileTier`] reads experts with a [`Reader`] when a window
//! has chosen them, many at a time, and a [`Tour`] says which of them can be computed with. Whoever takes single experts ([`Source`]) has them read aside.
//!
//! Does not know what the bytes mean, how they are computed with, or any device.
//!
//! Invariant: the bytes behind a handle that was pinned are those of its expert, in whatever tier, until the pin is
//! dropped.

mod aside;
mod bytes;
mod cell;
mod copy;
mod error;
mod file;
mod heat;
mod kept;
mod moves;
mod ranking;
mod reads;
mod ring;
mod roster;
mod slots;
mod source;
mod store;
mod sync;

pub use bytes::Bytes;
pub use copy::{CopyEngine, CopyError, HeapSlot, HostCopy, ReadAt};
pub use error::{LayerError, RingError, StoreError};
pub use file::{FileCount, FileTier, Tour};
pub use heat::{Heat, Pace, STEP};
pub use kept::RankingFile;
pub use moves::{Caution, Cost, Costs, Move, Swap, plan_moves};
pub use ranking::{Ranking, RankingError};
pub use reads::{
    Done, MOST_PIECES, PAGE, Piece, ReadError, ReadFile, Reader, ReaderOptions, SpawnReader, Way, most_room,
    skew,
};
pub use ring::{
    Buffer, Canceller, Counters, Generation, Ring, RingThread, Source, Spawn, Transfer, TransferEngine,
    Waits, buffers_in,
};
pub use roster::{LayerExperts, Roster};
pub use slots::{Content, SlotError, SlotId, Slots};
pub use source::{Blob, CopyLayout, Extent, LayerSource, Tensor, TensorPlace};
pub use store::{Check, ExpertHandle, ExpertId, ExpertStore, Pinned, Progress, Tier};
