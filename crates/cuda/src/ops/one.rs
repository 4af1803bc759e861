//! Several matrices with the same one column: `kernels/one.cuh`, `kernels/products.cu`. Owns how many rows a block of threads takes, and
//! how much shared memory that needs.

use strata_quant::Format;

use super::products::Columns;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Matrices of a launch. Twin: `OneParams`.
const MOST: usize = 6;
const THREADS: usize = 128;
/// Units of a tile, at most.
const UNITS: usize = 640;
/// Values of a float row that are brought at once. Twin: `PIECE` in `kernels/one.cuh`.
const PIECE: usize = 2560;
/// Blocks of threads that a multiprocessor has registers for.
const BLOCKS: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct OneMatrix {
    weights: u64,
    out: u64,
    scale: u64,
    format: u32,
    rows: u32,
    tall: u32,
    first: u32,
    blocks: u32,
    row_bytes: u32,
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
    buffer: u32,
    k: u32,
    padding: u32,
}

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
                module.words(&format!("strata_format_{}", format.name().to_lowercase()))?;
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

/// Bytes of a buffer for a piece of a float row, and of its column.
pub(crate) fn piece_bytes() -> usize {
    2 * brought(4 * PIECE)
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
        Ok(One {
            kernel: module.dynamic_kernel("strata_one")?.early(),
            formats: Formats::new(context, module)?,
        })
    }

    /// Rows of a tile for matrices of `k` columns, bytes of a buffer, and those of all shared memory.
    fn layout<'a>(
        &self,
        formats: impl Iterator<Item = &'a Format> + Clone,
        tile: usize,
        k: usize,
    ) -> (usize, usize) {
        let bytes = |format: &Format| match format.is_float() {
            true => piece_bytes(),
            false => brought(tile * format.row_bytes(k).expect("rows are whole blocks")),
        };
        let room =
            |format: &Format| if format.is_float() { 0 } else { self.formats.room(*format, tile, k / 32) };
        let buffer = formats.clone().map(bytes).max().unwrap_or(0);
        (buffer, 2 * buffer + formats.map(room).max().unwrap_or(0))
    }

    /// Whether a block of threads has room for rows of `k` values.
    pub(crate) fn fits(&self, format: Format, k: usize) -> bool {
        self.layout([format].iter(), 1, k).1 <= self.formats.shared
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
            self.launch_some(stream, wanted, k, columns, floats)?;
        }
        Ok(())
    }

    fn launch_some(
        &self,
        stream: &Stream,
        wanted: &[Wanted],
        k: usize,
        columns: Option<&Columns>,
        floats: Option<DeviceSlice<f32>>,
    ) -> Result<(), DriverError> {
        let (formats, units) = (wanted.iter().map(|w| &w.format), k / 32);
        // What a tile costs: rounds of units, and about three more; a float row is a chain of its own.
        let cost = |w: &Wanted, tile: usize| match w.format.is_float() {
            true => 4 + k / 640,
            false => (tile * units).div_ceil(THREADS) + 3,
        };
        let tiles = |w: &Wanted, tile| if w.format.is_float() { w.rows } else { w.rows.div_ceil(tile) };
        // The tile, a power of two, with which the block of threads that has most to do has least; matrices have blocks by what they cost.
        let plan = |tile: usize| {
            let (buffer, shared) = self.layout(formats.clone(), tile, k);
            let room = self.formats.processors * (self.formats.shared / shared.max(1)).clamp(1, BLOCKS);
            let all: usize = wanted.iter().map(|w| tiles(w, tile) * cost(w, tile)).sum();
            let blocks = |w: &Wanted| {
                let tiles = tiles(w, tile);
                // Rounds, not blocks, are what there is a whole number of.
                let share = (room * tiles * cost(w, tile) / all).clamp(1, tiles);
                tiles.div_ceil(tiles.div_ceil(share))
            };
            let blocks: Vec<usize> = wanted.iter().map(blocks).collect();
            let rounds = wanted.iter().zip(&blocks);
            let longest = rounds.map(|(w, blocks)| tiles(w, tile).div_ceil(*blocks) * cost(w, tile)).max();
            (longest, tile, buffer, shared, blocks)
        };
        let most = formats.clone().map(|format| most_rows(*format, THREADS)).min().unwrap_or(1);
        let most = (UNITS / units.max(1)).clamp(1, most);
        let plans =
            (0..=most.ilog2()).map(|power| plan(1 << power)).filter(|plan| plan.3 <= self.formats.shared);
        let (_, tile, buffer, shared, blocks) = plans.min_by_key(|plan| plan.0).expect("all of them fit");
        let columns = columns.filter(|_| formats.clone().any(|format| !format.is_float()));
        let mut p = OneParams {
            matrices: [OneMatrix::default(); MOST],
            q: columns.map_or(0, |x| x.q.address()),
            d: columns.map_or(0, |x| x.d.address()),
            sums: columns.map_or(0, |x| x.sums.address()),
            floats: floats.map_or(0, DeviceSlice::address),
            count: wanted.len() as u32,
            buffer: buffer as u32,
            k: k as u32,
            padding: 0,
        };
        let mut first = 0;
        for ((w, matrix), blocks) in wanted.iter().zip(&mut p.matrices).zip(blocks) {
            assert!(w.format.row_bytes(w.rows * k) == Some(w.weights.len()) && w.out.len() >= w.rows);
            assert!(if w.format.is_float() { floats.is_some() } else { columns.is_some() });
            *matrix = OneMatrix {
                weights: w.weights.address(),
                out: w.out.address(),
                scale: w.scale.map_or(0, DeviceSlice::address),
                format: self.formats.code(w.format),
                rows: w.rows as u32,
                tall: tile.ilog2(),
                first,
                blocks: blocks as u32,
                row_bytes: (w.weights.len() / w.rows) as u32,
            };
            first += blocks as u32;
        }
        let grid = Grid { blocks: [first, 1, 1], threads: THREADS as u32 };
        // SAFETY: the sizes were compared above; `layout` counts what the kernel lays out.
        unsafe { self.kernel.launch_with(stream, grid, shared as u32, &p) }
    }
}
