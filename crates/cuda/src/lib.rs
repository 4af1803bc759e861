//! The CUDA backend: kernels for the op contract, and the device memory, streams and recorded graphs that they run in.
//!
//! Knows ops and bytes; not which op comes next, nor where an expert's bytes come from. The driver is loaded when it is first asked for, so the
//! same program starts on a machine without a GPU and says why it uses none.
//!
//! Invariant: every result has the bits that the CPU backend gives. Kernels follow docs/arithmetic.md to the last rounding, so that a
//! sequence may be computed in part here and in part there.

mod backend;
pub mod driver;
#[cfg(test)]
mod faults;
mod inputs;
mod memory;
pub mod ops;
mod recording;
mod scratch;
mod state;
mod tiers;
mod weights;

pub use backend::{Cuda, Room};
pub use ops::kernels_are_built;
pub use tiers::{Exchanges, ExpertCache, SpawnStager, Stagers};

use strata_backend::BackendError;

/// A broken promise between engine and backend, or a device's refusal, as the contract says it.
fn failed(reason: impl ToString) -> BackendError {
    BackendError::Device { device: "the GPU".into(), reason: reason.to_string() }
}

impl From<driver::DriverError> for Failed {
    fn from(error: driver::DriverError) -> Failed {
        Failed(failed(error))
    }
}

/// A [`BackendError`] that driver errors turn into by `?`.
#[derive(Debug)]
struct Failed(pub(crate) BackendError);

impl From<Failed> for BackendError {
    fn from(failed: Failed) -> BackendError {
        failed.0
    }
}
