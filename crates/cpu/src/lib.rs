//! The CPU backend: op implementations on the sleeping pool.
//!
//! [`Cpu`] describes the memory it needs to a plan and then becomes a backend inside the arena that the plan sized. It is
//! complete, and the twin that other backends are compared with. A file per op family holds the op and its inner loops, which are plain
//! functions over slices, compiled once per instruction set.
//!
//! - Ops: `embed`, `ngram`, `mixer`, `gdn`, `qsa` (with `select` and `attend`), `route`, `experts`, `head`, `draft`.
//! - Memory: `memory` (the description), `weights`, `buffers`, `state` (with `recurrent` and `cache`), `rope`.
//! - Work: `bench` (how rows are spread over workers), `spans` (a window in pieces), `strip` (sixteen dots at once), `taps` (convolutions), `shared` (all
//!   `unsafe`).
//!
//! Invariant: bits depend on the numbers only, never on threads, instruction set, the window's length, a row's place in it
//! or its neighbours. Every loop that rounds runs in the order that the arithmetic contract or its file's header gives.

#![deny(unsafe_code)]

mod attend;
mod backend;
mod bench;
mod buffers;
mod cache;
mod draft;
mod embed;
mod experts;
mod gdn;
mod head;
mod host;
mod memory;
mod mixer;
mod ngram;
mod norm;
mod qsa;
mod rate;
mod recurrent;
mod relay;
mod rope;
mod route;
mod select;
mod shared;
mod spans;
mod state;
mod strip;
mod taps;
mod weights;

pub use backend::Cpu;
pub use host::CpuHostExperts;
pub use memory::Described;
pub use rate::{MEASURED, memory_rate};

use strata_backend::BackendError;

/// Something that can't be computed, as this device's error.
fn failed(reason: impl std::fmt::Display) -> BackendError {
    BackendError::Device { device: "cpu".into(), reason: reason.to_string() }
}
