//! The memory plan: one description that both sizes and places.
//!
//! Whoever needs memory describes it to a [`Plan`] before anything is allocated: category, name, place, bytes. The same
//! description is shown to a person ([`std::fmt::Display`], `Serialize`), checked against what the machine has
//! ([`Plan::check`], [`Limits`]), searched for the largest setting that fits ([`largest`]), and then allocated:
//! each [`Region`] of the plan becomes one [`Block`] of the one [`Arena`].
//!
//! What of it has to be read for a token bounds how fast it can be ([`Weights`]).
//!
//! Knows bytes, names and limits; no model and no device.
//!
//! Invariant: what [`Plan::heap`] laid out is exactly what [`Arena`] can hand out. Regions are disjoint, aligned to
//! [`ALIGNMENT`] and add up to [`Plan::arena_bytes`].

mod arena;
mod bytes;
mod fit;
mod pace;
mod plan;

pub use arena::{Arena, ArenaError, Block, HUGE_PAGE};
pub use bytes::{Bytes, BytesError};
pub use fit::{Limits, PlanError, largest};
pub use pace::{Bound, Pace, Rates, Weights};
pub use plan::{ALIGNMENT, Category, DEVICE_ALIGNMENT, Item, Line, Name, Place, Plan, Region};
