//! Sequences, windows, decode steps, sampling and checkpoints over the op contract.
//!
//! [`Engine`] is what a program holds: it opens sequences, gives them tokens, and steps until their answers are done. It is
//! synchronous and [`Send`]; whoever wants it asynchronous puts it on a thread and talks to it through channels.
//!
//! The crate owns the layer graph (once, in `graph/`), the order of windows, sampling, and the byte form of a saved
//! sequence. It knows no device and no weight's bytes: those belong to the backend, which it sees only as
//! [`strata_backend::Backend`].

mod budget;
pub mod chat;
mod choose;
mod config;
mod engine;
mod error;
pub mod eval;
mod event;
mod fault;
mod flight;
mod graph;
mod load;
mod lookup;
mod lower;
mod recommended;
pub mod sampling;
mod sequence;
mod snapshot;

pub use budget::BEYOND;
pub use config::{EngineConfig, ExpertHome};
pub use engine::{Engine, LogitSink, Wants};
pub use error::EngineError;
pub use event::{Constraint, Event, Reason, Request, SeqId};
pub use flight::Probe;
pub use load::{Planned, Progress, Readers};
pub use sampling::Sampling;
pub use sequence::Canceller;
pub use snapshot::SnapshotError;
