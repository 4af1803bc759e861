//! The CUDA driver behind safe types: devices, contexts, memory, streams, graphs, kernels.
//!
//! Owns every call into the driver, and with them the crate's lifetimes: nothing here outlives the [`Context`] it was made in.
//! Knows no model and no op. An error names the call and what the driver said of it.

mod context;
mod device;
#[cfg(test)]
pub(crate) mod fake;
mod kernel;
mod memory;
mod registered;
mod stream;
mod table;
mod turns;

pub use context::{Context, Made};
pub use device::{Device, driver_version};
pub use kernel::{Grid, Kernel, Module};
pub use memory::{DeviceMemory, DeviceSlice, PinnedMemory};
pub(crate) use memory::{LINE, PinnedPart};
pub use registered::RegisteredMemory;
pub use stream::{Event, Graph, Stream};
pub use table::NoDriver;
pub use turns::Turns;

/// A call that the driver refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// There is no usable driver.
    #[error(transparent)]
    NoDriver(#[from] NoDriver),
    /// A call failed.
    #[error("the GPU driver refused `{call}`: {reason}")]
    Call {
        /// The driver's name of the call.
        call: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// There is no memory left.
    #[error("the GPU is out of memory ({reason} from `{call}`); end other programs that use it")]
    Memory {
        /// The driver's name of the call.
        call: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Something before this call went so wrong that no later one can succeed.
    #[error(
        "the context is lost, and all that was in it ({reason} from `{call}`): start the program again; `strata selftest` checks the GPU"
    )]
    Lost {
        /// The driver's name of the call.
        call: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// The kernels are for other GPUs.
    #[error(
        "this build has no kernels for a GPU of compute capability {}.{} ({reason}): build it again with CUDA_ARCHS={}{}",
        .capability.0, .capability.1, .capability.0, .capability.1
    )]
    NoBinary {
        /// The GPU's compute capability.
        capability: (u32, u32),
        /// What the driver says.
        reason: String,
    },
}

const OUT_OF_MEMORY: table::Code = 2;
/// Errors after which the driver answers nothing but errors in this context: uncorrectable memory and link errors, contexts that are gone,
/// and whatever a kernel does that ends it.
const STICKY: [table::Code; 13] = [4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];

impl DriverError {
    /// What a code that isn't success means.
    fn of(table: &table::Table, field: &str, code: table::Code) -> DriverError {
        let (call, reason) = (table::Table::symbol(field), table.describe(code));
        match code {
            OUT_OF_MEMORY => DriverError::Memory { call, reason },
            code if STICKY.contains(&code) => DriverError::Lost { call, reason },
            _ => DriverError::Call { call, reason },
        }
    }
}

/// Calls an entry point of the table and turns its code into a result.
macro_rules! call {
    ($table:expr, $field:ident ($($argument:expr),*)) => {
        match ($table.$field)($($argument),*) {
            0 => Ok(()),
            code => Err($crate::driver::DriverError::of($table, stringify!($field), code)),
        }
    };
}
use call;
