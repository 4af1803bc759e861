//! The kernels, a file per op family: their parameters, their shapes, and their launches.
//!
//! Owns the agreement with `kernels/`: each parameter struct here has a twin there, and loading a kernel compares their sizes.

mod draft;
mod embed;
mod experts;
mod experts_one;
mod fetch;
mod few;
mod floats;
mod gdn;
mod input;
mod mixer;
mod ngram;
mod one;
mod products;
mod qsa;
mod recurrent;
mod route;
mod sample;
mod wide;

use strata_backend::{BackendError, Shape, Spec};
use strata_quant::Format;

pub(crate) use experts::most_fetched;
pub(crate) use experts_one::LeftExperts;
pub(crate) use fetch::Fetch;
pub(crate) use gdn::check as check_gdn;
pub(crate) use mixer::Left;
pub(crate) use ngram::check as check_ngram;
pub use products::{Columns, Products};
pub(crate) use qsa::check as check_attention;
pub(crate) use route::{Routing, check as check_routing};
pub use sample::{Item, Logits, Sorter, SorterRoom};

use crate::driver::{Context, DeviceSlice, DriverError, Module};
use crate::failed;
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

/// Whether this build has kernels, and if not, why.
pub fn kernels_are_built() -> Result<(), OpError> {
    if IMAGES.is_empty() { Err(OpError::NoKernels) } else { Ok(()) }
}

/// Loads the kernels of one source.
fn module(context: &Context, name: &str) -> Result<Module, OpError> {
    let image = IMAGES.iter().find(|(image, _)| *image == name).map(|(_, image)| *image);
    // A driver that computes nothing needs no kernels.
    let image = image.or(cfg!(test).then_some(&[])).ok_or(OpError::NoKernels)?;
    Ok(Module::new(context, image)?)
}

/// Units of a segment of the contract. Twin: in `kernels/contract.cuh`.
const SEGMENT: usize = 64;

/// Something of every block format.
#[derive(Clone)]
pub(crate) struct ByFormat<T>(Vec<(Format, T)>);

impl<T> ByFormat<T> {
    /// Makes it for each, whose name is that in the names of kernels.
    fn new<E>(make: impl Fn(&str) -> Result<T, E>) -> Result<ByFormat<T>, E> {
        let blocks = Format::ALL.into_iter().filter(|format| !format.is_float());
        let made = blocks.map(|format| Ok((format, make(&format.name().to_lowercase())?)));
        Ok(ByFormat(made.collect::<Result<_, E>>()?))
    }

    /// That of a format, if it is a block format.
    fn find(&self, format: Format) -> Option<&T> {
        self.0.iter().find(|(other, _)| *other == format).map(|(_, of)| of)
    }

    /// That of a block format.
    fn of(&self, format: Format) -> &T {
        self.find(format).unwrap_or_else(|| panic!("{format} is no block format"))
    }
}

/// All kernels.
pub(crate) struct Kernels {
    pub(crate) products: Products,
    pub(crate) floats: floats::Floats,
    pub(crate) mixers: mixer::Mixers,
    pub(crate) embed: embed::Embed,
    pub(crate) gdn: gdn::Gdn,
    pub(crate) ngram: ngram::Ngram,
    pub(crate) qsa: qsa::Qsa,
    pub(crate) route: route::Route,
    pub(crate) experts: experts::Experts,
    pub(crate) experts_one: experts_one::ExpertsOne,
    pub(crate) fetch: fetch::Fetch,
    pub(crate) draft: draft::Draft,
    pub(crate) sorter: Sorter,
}

impl Kernels {
    /// Loads them.
    pub(crate) fn new(context: &Context) -> Result<Kernels, OpError> {
        Ok(Kernels {
            products: Products::new(context)?,
            floats: floats::Floats::new(context)?,
            mixers: mixer::Mixers::new(context)?,
            embed: embed::Embed::new(context)?,
            gdn: gdn::Gdn::new(context)?,
            ngram: ngram::Ngram::new(context)?,
            qsa: qsa::Qsa::new(context)?,
            route: route::Route::new(context)?,
            experts: experts::Experts::new(context)?,
            experts_one: experts_one::ExpertsOne::new(context)?,
            fetch: fetch::Fetch::new(context)?,
            draft: draft::Draft::new(context)?,
            sorter: Sorter::new(context)?,
        })
    }
}

/// Whether the widest window's values can be counted as kernels count them.
pub(crate) fn check_window(spec: &Spec) -> Result<(), BackendError> {
    let (rows, &Shape { hidden, streams, .. }) = (spec.window.max(spec.sequences), &spec.shape);
    match rows.checked_mul(streams * hidden).and_then(|values| u32::try_from(values).ok()) {
        Some(_) => Ok(()),
        None => Err(failed(format!("windows of {rows} rows are more than it can count: lower the window"))),
    }
}

/// Bytes of the room that the ops take turns in: of the largest.
pub(crate) fn scratch_bytes(spec: &Spec) -> usize {
    let (shape, rows) = (&spec.shape, spec.window.max(spec.sequences));
    let u = DeviceSlice::nowhere(rows * shape.hidden);
    let mut most = 0;
    let mut op = |cut: &mut dyn FnMut(&mut Scratch)| {
        let mut room = Scratch::counting();
        cut(&mut room);
        most = most.max(room.used());
    };
    op(&mut |room| {
        mixer::Room::new(shape, rows, room);
    });
    op(&mut |room| {
        mixer::head_room(spec, rows, room);
    });
    op(&mut |room| {
        route::Room::new(spec, u, room);
    });
    op(&mut |room| {
        experts::Room::new(spec, u, room);
    });
    op(&mut |room| {
        experts::SharedRoom::new(spec, u, room);
    });
    op(&mut |room| {
        draft::Room::new(shape, rows, room);
    });
    op(&mut |room| {
        SorterRoom::take(spec, room);
    });
    if let Some(g) = &shape.gdn {
        op(&mut |room| {
            gdn::Room::new(shape, g, u, room);
        });
    }
    if let Some(g) = &shape.ngram {
        op(&mut |room| {
            ngram::Room::new(shape, g, rows, room);
        });
    }
    if let Some(q) = &shape.qsa {
        for block in spec.layers.iter().filter_map(|layer| layer.qsa) {
            op(&mut |room| {
                qsa::Room::new(spec, q, block, u, room);
            });
        }
    }
    most
}

/// A mixer's output, quantised.
pub(crate) fn mixed(spec: &Spec, room: &mut Scratch) -> Option<Columns> {
    input::columns(spec.shape.hidden, spec.window.max(spec.sequences), room)
}

/// Room for decoded rows of matrices with many columns: as large as a window's row of floats, which most matrices fit into.
pub(crate) fn decoded(spec: &Spec, in_pieces: bool, room: &mut Scratch) -> DeviceSlice<u8> {
    room.take(if in_pieces { 4 * spec.window * spec.shape.hidden } else { 0 })
}

/// Bytes of what ops leave for others behind them.
pub(crate) fn kept_bytes(spec: &Spec, in_pieces: bool) -> usize {
    let mut room = Scratch::counting();
    Routing::new(spec, &mut room);
    mixed(spec, &mut room);
    decoded(spec, in_pieces, &mut room);
    let few = spec.window.max(spec.sequences).min(experts::ASIDE);
    experts::SharedRoom::new(spec, DeviceSlice::nowhere(few * spec.shape.hidden), &mut room);
    room.used()
}
