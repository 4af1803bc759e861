//! The kernels, a file per op family: their parameters, their shapes, and their launches.
//!
//! Owns the agreement with `kernels/`: each parameter struct here has a twin there, and loading a kernel compares their sizes.

mod embed;
mod floats;
mod input;
mod mixer;
mod products;

use strata_backend::Spec;

pub use products::{Columns, Products};

use crate::driver::{Context, DriverError, Module};
use crate::scratch::Scratch;

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

/// All kernels.
pub(crate) struct Kernels {
    pub(crate) products: Products,
    pub(crate) floats: floats::Floats,
    pub(crate) mixers: mixer::Mixers,
    pub(crate) embed: embed::Embed,
}

impl Kernels {
    /// Loads them.
    pub(crate) fn new(context: &Context) -> Result<Kernels, OpError> {
        Ok(Kernels {
            products: Products::new(context)?,
            floats: floats::Floats::new(context)?,
            mixers: mixer::Mixers::new(context)?,
            embed: embed::Embed::new(context)?,
        })
    }
}

/// Bytes of the room that the ops take turns in.
pub(crate) fn scratch_bytes(spec: &Spec) -> usize {
    let rows = spec.window.max(spec.sequences);
    let size = |cut: &dyn Fn(&mut Scratch)| {
        let mut room = Scratch::counting();
        cut(&mut room);
        room.used()
    };
    [
        size(&|room| drop(mixer::Room::new(&spec.shape, rows, room))),
        size(&|room| drop(mixer::head_room(spec, rows, room))),
    ]
    .into_iter()
    .max()
    .unwrap_or(0)
}

/// Bytes of what the router leaves for the ops behind it.
pub(crate) fn routing_bytes(spec: &Spec) -> usize {
    let _ = spec;
    0
}
