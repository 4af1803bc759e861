//! Dense products of float weights with two columns or more: `kernels/floats.cu`. One alone is `ops/one.rs`'s.

use strata_quant::Format;

use super::{OpError, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::weights::Matrix;

#[repr(C)]
#[derive(Clone, Copy)]
struct FloatMatrix {
    weights: u64,
    out: u64,
    scale: u64,
    rows: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FloatParams {
    /// The second has no rows where there is one.
    matrices: [FloatMatrix; 2],
    x: u64,
    cols: u32,
    k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WidenParams {
    from: u64,
    to: u64,
    count: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScaleParams {
    x: u64,
    count: u64,
    by: f32,
    padding: u32,
}

/// Products in one way.
struct Way {
    kernel: Kernel<FloatParams>,
    /// Rows and columns of a block of threads.
    tile: [usize; 2],
    threads: u32,
    /// Blocks that a multiprocessor works on at once, and the microseconds that 2,560 values take it then; of an H200.
    pace: (usize, f32),
}

/// The kernels of one format.
struct OfFormat {
    /// A block of threads for each row and column, which is for few; for matrices of few rows, or fewer columns than the last; and that,
    /// which is for many of both.
    ways: [Way; 3],
    widen: Kernel<WidenParams>,
}

/// Products with F32, F16 and BF16 weights, bit for bit those of every other backend.
pub(crate) struct Floats {
    f32: OfFormat,
    f16: OfFormat,
    bf16: OfFormat,
    scale: Kernel<ScaleParams>,
    processors: usize,
}

impl Floats {
    pub(crate) fn new(context: &Context) -> Result<Floats, OpError> {
        let module = module(context, "floats")?;
        let of = |name: &str| -> Result<OfFormat, DriverError> {
            let way = |way: &str, tile, threads, pace| -> Result<Way, DriverError> {
                let kernel = module.kernel(&format!("strata_floats_{way}_{name}"))?;
                Ok(Way { kernel, tile, threads, pace })
            };
            Ok(OfFormat {
                ways: [
                    way("each", [1, 1], 256, (5, 2.4))?,
                    way("flat", [4, 32], 256, (2, 11.0))?,
                    way("tall", [32, 32], 256, (1, 24.0))?,
                ],
                widen: module.kernel(&format!("strata_widen_{name}"))?,
            })
        };
        Ok(Floats {
            f32: of("f32")?,
            f16: of("f16")?,
            bf16: of("bf16")?,
            scale: module.kernel("strata_scale")?,
            processors: context.device().processors as usize,
        })
    }

    fn of(&self, format: Format) -> &OfFormat {
        match format {
            Format::F32 => &self.f32,
            Format::F16 => &self.f16,
            _ => &self.bf16,
        }
    }

    /// The values of `from` as f32.
    pub(crate) fn widen(
        &self,
        stream: &Stream,
        (format, from): (Format, DeviceSlice<u8>),
        to: DeviceSlice<f32>,
    ) -> Result<(), DriverError> {
        assert_eq!(format.row_bytes(to.len()), Some(from.len()));
        let p = WidenParams { from: from.address(), to: to.address(), count: to.len() as u64 };
        // SAFETY: the sizes were compared above.
        unsafe { self.of(format).widen.launch(stream, Grid::threads(to.len(), 256), &p) }
    }

    /// `x *= by`.
    pub(crate) fn scale(&self, stream: &Stream, x: DeviceSlice<f32>, by: f32) -> Result<(), DriverError> {
        let p = ScaleParams { x: x.address(), count: x.len() as u64, by, padding: 0 };
        // SAFETY: the length is the slice's.
        unsafe { self.scale.launch(stream, Grid::threads(x.len(), 256), &p) }
    }

    /// `out[col][row] = w[row] . x[col]` for one or two matrices of a format.
    pub(crate) fn product(
        &self,
        stream: &Stream,
        matrices: &[(&Matrix, DeviceSlice<f32>)],
        x: DeviceSlice<f32>,
        cols: usize,
    ) -> Result<(), DriverError> {
        let [(Matrix { format, k, .. }, _), ..] = *matrices else { return Ok(()) };
        assert!(matrices.len() <= 2 && x.len() >= k * cols);
        let matrix = |(w, out): &(&Matrix, DeviceSlice<f32>)| {
            assert!(w.format == *format && w.k == *k && out.len() >= w.rows * cols);
            FloatMatrix {
                weights: w.bytes.address(),
                out: out.address(),
                scale: w.scale.map_or(0, DeviceSlice::address),
                rows: w.rows as u64,
            }
        };
        let none = FloatMatrix { weights: 0, out: 0, scale: 0, rows: 0 };
        let p = FloatParams {
            matrices: [matrix(&matrices[0]), matrices.get(1).map_or(none, matrix)],
            x: x.address(),
            cols: cols as u32,
            k: *k as u32,
        };
        let way = self.fastest(matrices, x, cols);
        let grid = Grid { blocks: blocks(way, matrices, cols).map(|n| n as u32), threads: way.threads };
        // SAFETY: the sizes were compared above.
        unsafe { way.kernel.launch(stream, grid, &p) }
    }

    /// The way that takes the least time.
    fn fastest(&self, matrices: &[(&Matrix, DeviceSlice<f32>)], x: DeviceSlice<f32>, cols: usize) -> &Way {
        let (w, _) = matrices[0];
        // The others copy rows and columns in pieces of 16 bytes.
        let aligned = |at: usize| at.is_multiple_of(16);
        let pieces = aligned(x.address() as usize)
            && aligned(4 * w.k)
            && w.format.row_bytes(w.k).is_some_and(aligned)
            && matrices.iter().all(|(w, _)| aligned(w.bytes.address() as usize));
        let time = |way: &&Way| {
            let (at_once, time) = way.pace;
            let blocks: usize = blocks(way, matrices, cols).iter().product();
            blocks.div_ceil(at_once * self.processors) as f32 * time
        };
        let ways = &self.of(w.format).ways[..if pieces { 3 } else { 1 }];
        ways.iter().min_by(|a, b| time(a).total_cmp(&time(b))).expect("there are ways")
    }
}

/// The blocks of threads of a launch.
fn blocks(way: &Way, matrices: &[(&Matrix, DeviceSlice<f32>)], cols: usize) -> [usize; 3] {
    let [tile_rows, tile_cols] = way.tile;
    [matrices.iter().map(|(w, _)| w.rows.div_ceil(tile_rows)).sum(), cols.div_ceil(tile_cols), 1]
}
