//! The CUDA driver behind safe types: devices, contexts, memory, streams, graphs, kernels.
//!
//! Owns every call into the driver, and with them the crate's lifetimes: nothing here outlives the [`Context`] it was made in.
//! Knows no model and no op. An error names the call and what the driver said of it.

mod context;
mod device;
mod kernel;
mod memory;
mod stream;
mod table;

pub use context::Context;
pub use device::{Device, driver_version};
pub use kernel::{Grid, Kernel, Module};
pub use memory::{DeviceMemory, DeviceSlice, PinnedMemory};
pub use stream::{Event, Graph, Stream};
pub use table::NoDriver;

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
}

/// Calls an entry point of the table and turns its code into a result.
macro_rules! call {
    ($table:expr, $field:ident ($($argument:expr),*)) => {
        match ($table.$field)($($argument),*) {
            0 => Ok(()),
            code => Err($crate::driver::DriverError::Call { call: stringify!($field), reason: $table.describe(code) }),
        }
    };
}
use call;
