//! Several matrices with the same one column: `kernels/one.cuh`, `kernels/products.cu`. Owns how many rows a block of threads takes, and how much
//! shared memory that needs.

use strata_quant::Format;

use super::products::Columns;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Matrices of a launch.
const MOST: usize = 6;
const THREADS: usize = 128;
/// Units of a block of threads: five a thread, so that the last round is rarely empty.
const UNITS: usize = 640;
/// Bytes of float weights of a block of threads.
const FLOATS: usize = 24 << 10;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct OneMatrix {
    weights: u64,
    out: u64,
    scale: u64,
    format: u32,
    rows: u32,
    tile: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct OneParams {
    matrices: [OneMatrix; MOST],
    q: u64,
    d: u64,
    sums: u64,
    floats: u64,
    count: u32,
    k: u32,
}

/// What a kernel that learns its format when it runs knows of one.
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
            let [code, second, grid] = module.words(&format!("strata_format_{}", format.name().to_lowercase()))?;
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

    /// Bytes that `One` lays out for rows of a block format, the code book included, the rows themselves not.
    pub(crate) fn room(&self, format: Format, rows: usize, units: usize) -> usize {
        let Traits { terms, grid, .. } = self.of(format);
        40 * units + rows * (8 * terms * (units + 1) + 4 * units.div_ceil(64)) + 4 * grid
    }

    /// Rows of a block of threads for `rows` rows of `units` units in each of `matrices` matrices: enough blocks to fill the GPU.
    pub(crate) fn rows(&self, rows: usize, units: usize, matrices: usize) -> usize {
        let most = (UNITS / units.max(1)).clamp(1, THREADS);
        (rows * matrices / (2 * self.processors)).clamp(1, most)
    }
}

/// Bytes of shared memory that so many bytes take from whatever address.
pub(crate) fn brought(bytes: usize) -> usize {
    (bytes + 30) / 16 * 16
}

/// A matrix to multiply.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) format: Format,
    pub(crate) weights: DeviceSlice<u8>,
    pub(crate) rows: usize,
    pub(crate) scale: Option<DeviceSlice<f32>>,
    pub(crate) out: DeviceSlice<f32>,
}

/// The kernel.
pub(crate) struct One {
    kernel: Kernel<OneParams>,
    pub(crate) formats: Formats,
}

impl One {
    pub(crate) fn new(context: &Context, module: &Module) -> Result<One, DriverError> {
        Ok(One { kernel: module.dynamic_kernel("strata_one")?.early(), formats: Formats::new(context, module)? })
    }

    /// Rows of a block of threads, and the bytes of shared memory that they need.
    fn tile(&self, format: Format, rows: usize, k: usize) -> (usize, usize) {
        let bytes = format.row_bytes(k).expect("rows are whole blocks");
        if format.is_float() {
            let tile = (FLOATS / bytes).clamp(1, THREADS / 32);
            return (tile, brought(tile * bytes) + brought(4 * k));
        }
        let tile = self.formats.rows(rows, k / 32, 1);
        (tile, brought(tile * bytes) + self.formats.room(format, tile, k / 32))
    }

    /// Whether a block of threads has room for rows of `k` values.
    pub(crate) fn fits(&self, format: Format, rows: usize, k: usize) -> bool {
        self.tile(format, rows, k).1 <= self.formats.shared
    }

    /// Queues `out = w . x` for every matrix. All of them fit. `columns` is for block formats, `floats` for the others.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        wanted: &[Wanted],
        k: usize,
        columns: Option<&Columns>,
        floats: Option<DeviceSlice<f32>>,
    ) -> Result<(), DriverError> {
        for wanted in wanted.chunks(MOST) {
            let mut p = OneParams {
                matrices: [OneMatrix::default(); MOST],
                q: columns.map_or(0, |x| x.q.address()),
                d: columns.map_or(0, |x| x.d.address()),
                sums: columns.map_or(0, |x| x.sums.address()),
                floats: floats.map_or(0, DeviceSlice::address),
                count: wanted.len() as u32,
                k: k as u32,
            };
            let (mut blocks, mut shared) = (0, 0);
            for (w, matrix) in wanted.iter().zip(&mut p.matrices) {
                assert!(w.format.row_bytes(w.rows * k) == Some(w.weights.len()) && w.out.len() >= w.rows);
                assert!(if w.format.is_float() { floats.is_some() } else { columns.is_some() });
                let (tile, bytes) = self.tile(w.format, w.rows, k);
                shared = bytes.max(shared);
                *matrix = OneMatrix {
                    weights: w.weights.address(),
                    out: w.out.address(),
                    scale: w.scale.map_or(0, DeviceSlice::address),
                    format: self.formats.code(w.format),
                    rows: w.rows as u32,
                    tile: tile as u32,
                    first: blocks,
                };
                blocks += w.rows.div_ceil(tile) as u32;
            }
            let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS as u32 };
            // SAFETY: the sizes were compared above; `tile` counts what the kernel lays out.
            unsafe { self.kernel.launch_with(stream, grid, shared as u32, &p) }?;
        }
        Ok(())
    }
}
