//! What a device computes, held against what the CPU does: the checks of `strata selftest`, and of the tests of backends.
//!
//! Owns the comparison. The measure is equality of bits, where one NaN is as good as another ([`Found`]): there is no tolerance, for
//! every op is defined to its last rounding (docs/arithmetic.md). Single ops are called by themselves ([`ops`]); whole models run
//! through the engine on both sides, and what every op leaves is compared ([`whole`]). Knows no kernel, and prints nothing.
//!
//! Both sides are arguments, so that the checks are checked themselves: on the CPU against the CPU, and against one that errs.

#![deny(unsafe_code)]

mod found;
pub mod ops;
mod random;
mod run;
pub mod whole;

pub use found::Found;
pub use random::{Random, ids};
pub use run::{Line, run, samplings};

/// Why a check could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The GPU refused.
    #[error(transparent)]
    Gpu(#[from] strata_cuda::ops::OpError),
    /// A model could not be run.
    #[error(transparent)]
    Engine(#[from] strata_engine::EngineError),
    /// A small model could not be made.
    #[error(transparent)]
    Synth(#[from] strata_synth::SynthError),
    /// A small model could not be opened.
    #[error(transparent)]
    Model(#[from] strata_model::ModelError),
    /// There is no place for files.
    #[error("no small model can be written to the folder for temporary files: {0}")]
    Folder(#[from] std::io::Error),
    /// This machine's CPUs could not be had.
    #[error(transparent)]
    Threads(#[from] strata_topology::AssignError),
}

impl CheckError {
    /// Whether there is nothing to check here: no GPU, or no kernels for it in this build.
    pub fn is_absence(&self) -> bool {
        use strata_cuda::driver::DriverError::{NoBinary, NoDriver};
        use strata_cuda::ops::OpError::{Driver, NoKernels};
        matches!(self, CheckError::Gpu(NoKernels | Driver(NoDriver(_) | NoBinary { .. })))
    }
}

/// For tests: what was made, or a line that says why there is nothing to test on.
///
/// # Panics
/// If there is a GPU with kernels for it, and it refuses.
pub fn or_skip<T>(made: Result<T, CheckError>) -> Option<T> {
    use std::io::Write;
    use std::sync::Once;
    static SAID: Once = Once::new();
    match made {
        Ok(made) => Some(made),
        Err(error) if error.is_absence() => {
            // Once, for every case asks. Not `eprintln!`: the test harness would swallow it.
            SAID.call_once(|| drop(writeln!(std::io::stderr(), "SKIPPED: {error}")));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

impl From<strata_cuda::driver::DriverError> for CheckError {
    fn from(error: strata_cuda::driver::DriverError) -> CheckError {
        CheckError::Gpu(error.into())
    }
}
