//! The kernels, a file per op family: their parameters, their shapes, and their launches.
//!
//! Owns the agreement with `kernels/`: each parameter struct here has a twin there, and loading a kernel compares their sizes.

mod products;

pub use products::{Columns, Products};

use crate::driver::{Context, DriverError, Module};

/// The kernels of this build, by the name of their source; none where no compiler was found.
#[cfg(kernels)]
static IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));
#[cfg(not(kernels))]
static IMAGES: &[(&str, &[u8])] = &[];

/// Why an op can't be had.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// This build has no kernels.
    #[error(
        "this build has no GPU kernels, because no nvcc was found when it was made: build it again with CUDA_HOME set, or with nvcc on the PATH"
    )]
    NoKernels,
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Loads the kernels of one source.
fn module(context: &Context, name: &str) -> Result<Module, OpError> {
    let (_, image) = IMAGES.iter().find(|(image, _)| *image == name).ok_or(OpError::NoKernels)?;
    Ok(Module::new(context, image)?)
}
