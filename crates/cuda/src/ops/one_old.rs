//! Several matrices with the same one column: `kernels/one.cuh`, `kernels/products.cu`. Owns how many rows a block of threads takes, and
//! how much shared memory that needs.

use strata_quant::Format;

use crate::driver::{Context, DriverError, Module};

const THREADS: usize = 128;
/// Units of a tile, at most.
const UNITS: usize = 640;

/// What a kernel that learns its format when it runs knows of one. Twin: `strata_format_*` in `kernels/products.cu`.
#[derive(Clone, Copy)]
struct Traits {
    format: Format,
    code: u32,
    /// Terms of a unit.
    terms: usize,
    /// Words of the code book.
    grid: usize,
}

/// Formats as such kernels know them.
#[derive(Clone)]
pub(crate) struct Formats {
    traits: Vec<Traits>,
    /// Bytes of shared memory that a block may have.
    pub(crate) shared: usize,
    processors: usize,
}

impl Formats {
    pub(crate) fn new(context: &Context, module: &Module) -> Result<Formats, DriverError> {
        let of = |format: Format| -> Result<_, DriverError> {
            let [code, second, grid] =
                module.words(&format!("strata_few_format_{}", format.name().to_lowercase()))?;
            Ok(Traits { format, code, terms: 1 + second as usize, grid: grid as usize })
        };
        Ok(Formats {
            traits: Format::ALL.into_iter().map(of).collect::<Result<_, _>>()?,
            shared: context.device().shared_memory as usize,
            processors: context.device().processors as usize,
        })
    }

    fn of(&self, format: Format) -> &Traits {
        self.traits.iter().find(|traits| traits.format == format).expect("every format has traits")
    }

    /// A format's number.
    pub(crate) fn code(&self, format: Format) -> u32 {
        self.of(format).code
    }

    /// Bytes that `One` in `kernels/one.cuh` lays out for rows of a block format, the code book included, the rows themselves not.
    pub(crate) fn room(&self, format: Format, rows: usize, units: usize) -> usize {
        let Traits { terms, grid, .. } = self.of(format);
        let stride = (units + 2).next_multiple_of(2);
        40 * units + 8 + rows * (8 * terms * stride + 4 * units.div_ceil(64)) + 4 * grid
    }

    /// Rows of a block of threads, a power of two, for `rows` rows of `units` units in each of `matrices` matrices: enough blocks to fill
    /// the GPU.
    pub(crate) fn rows(&self, format: Format, rows: usize, units: usize, matrices: usize) -> usize {
        let enough = (rows * matrices / (2 * self.processors)).max(1);
        let most = (UNITS / units.max(1)).clamp(1, most_rows(format, THREADS));
        1 << enough.min(most).ilog2()
    }
}

/// Rows that so many threads can have at once: each has a unit of a block.
pub(crate) fn most_rows(format: Format, threads: usize) -> usize {
    threads / (format.block_len() / 32).max(1)
}

/// Bytes of shared memory that so many bytes take from whatever address.
pub(crate) fn brought(bytes: usize) -> usize {
    (bytes + 30) / 16 * 16
}
