//! Block-format rows with a few columns: `kernels/few.cuh`, `kernels/few.cu`. Owns how many rows and segments a block of threads takes, and how
//! much shared memory that needs.

use strata_quant::Format;

use super::one::Wanted;
use super::products::Columns;
use super::{OpError, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Columns that these kernels take rather than those for many.
pub(crate) const FEW: usize = 64;
/// Matrices of a launch. Twin: `FewParams`.
const MOST: usize = 3;
/// Rows of a strip, units of a chunk and of a segment. Twins: `Few::ROWS`, `Few::CHUNK`, `SEGMENT`.
pub(crate) const ROWS: usize = 16;
const CHUNK: usize = 8;
const SEGMENT: usize = 64;
/// Warps of a block of threads.
const WARPS: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FewMatrix {
    weights: u64,
    out: u64,
    scale: u64,
    rows: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FewParams {
    matrices: [FewMatrix; MOST],
    q: u64,
    d: u64,
    sums: u64,
    count: u32,
    cols: u32,
    k: u32,
    strips: u32,
    groups: u32,
    padding: u32,
}

/// Bytes of shared memory that a format's rows and columns take. Twin: `STRATA_FEW_LAYOUT`.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    grid: usize,
    /// Of a warp.
    decoded: usize,
    /// Of a stage, for a row and for a column.
    row: usize,
    column: usize,
    stages: usize,
    /// Of a unit of a column that lanes multiply.
    unit: usize,
}

/// Columns that lanes multiply at once. Twin: `Few::Each::MOST`.
const EACH: usize = 4;

impl Layout {
    pub(crate) fn new(module: &Module, format: Format) -> Result<Layout, DriverError> {
        let name = format.name().to_lowercase();
        let words: [u32; 6] = module.words(&format!("strata_few_{name}"))?;
        let [grid, decoded, row, column, stages, unit] = words.map(|word| word as usize);
        Ok(Layout { grid, decoded, row, column, stages, unit })
    }

    /// Bytes for `groups` of so many strips each, with room for `cols` columns of `units` units.
    pub(crate) fn bytes(&self, strips: usize, groups: usize, cols: usize, units: usize) -> usize {
        let stage = strips * ROWS * self.row + cols * self.column;
        self.fixed(strips, groups, cols, units) + groups * self.stages(units) * stage
    }

    /// The same for one group whose columns are made in place.
    pub(crate) fn resident(&self, strips: usize, cols: usize, units: usize) -> usize {
        let columns = units.div_ceil(CHUNK) * cols * self.column;
        self.fixed(strips, 1, cols, units) + columns + self.stages(units) * strips * ROWS * self.row
    }

    /// The same for lanes that multiply what they decode, with sums of `cols` columns.
    pub(crate) fn each(&self, strips: usize, cols: usize, units: usize) -> usize {
        let columns = (EACH * units * self.unit).next_multiple_of(16);
        let rows = self.stages(units) * strips * ROWS * self.row;
        self.grid + Self::sums(strips, cols, units) + columns + rows
    }

    fn fixed(&self, strips: usize, groups: usize, cols: usize, units: usize) -> usize {
        self.grid + strips * groups * self.decoded + Self::sums(strips, cols, units)
    }

    fn sums(strips: usize, cols: usize, units: usize) -> usize {
        units.div_ceil(SEGMENT) * cols * strips * ROWS * 4
    }

    /// Stages that rows of so many units come to.
    fn stages(&self, units: usize) -> usize {
        self.stages.min(units.div_ceil(CHUNK))
    }
}

/// The kernels of one format.
struct OfFormat {
    layout: Layout,
    /// By their columns.
    kernels: [(usize, Kernel<FewParams>); 3],
}

/// The kernels.
pub(crate) struct Few {
    formats: Vec<(Format, OfFormat)>,
    processors: usize,
    shared: usize,
}

impl Few {
    pub(crate) fn new(context: &Context) -> Result<Few, OpError> {
        let module = module(context, "few")?;
        let of = |format: Format| -> Result<_, DriverError> {
            let name = format.name().to_lowercase();
            let kernel = |tiles: usize| -> Result<_, DriverError> {
                let kernel = module.dynamic_kernel(&format!("strata_few_{tiles}_{name}"))?.early();
                Ok((8 * tiles, kernel))
            };
            let kernels = [kernel(1)?, kernel(2)?, kernel(4)?];
            Ok((format, OfFormat { layout: Layout::new(&module, format)?, kernels }))
        };
        let formats = Format::ALL.into_iter().filter(|format| !format.is_float());
        Ok(Few {
            formats: formats.map(of).collect::<Result<_, _>>()?,
            processors: context.device().processors as usize,
            shared: context.device().shared_memory as usize,
        })
    }

    fn of(&self, format: Format) -> &OfFormat {
        &self.formats.iter().find(|(other, _)| *other == format).expect("every block format has kernels").1
    }

    /// Strips and groups of a block of threads.
    fn shape(&self, of: &OfFormat, wanted: &[Wanted], units: usize, cols: usize) -> Option<[usize; 2]> {
        let strips: usize = wanted.iter().map(|w| w.rows.div_ceil(ROWS)).sum();
        let segments = units.div_ceil(SEGMENT);
        // Warps enough for latency not to matter.
        let groups = (6 * self.processors).div_ceil(strips).clamp(1, segments.min(WARPS));
        let row: usize = wanted[0].weights.len() / wanted[0].rows;
        let fits = |&[strips, groups]: &[usize; 2]| {
            strips * groups <= WARPS && of.layout.bytes(strips, groups, cols, units) <= self.shared
        };
        // What passes into the multiprocessor that has most to do.
        let cost = |&[tall, _]: &[usize; 2]| {
            let blocks: usize = wanted.iter().map(|w| w.rows.div_ceil(ROWS * tall)).sum();
            blocks.div_ceil(self.processors) * (tall * ROWS * row + cols * units * 40)
        };
        let shapes = [1, 2, 4].map(|strips| [strips, groups]).into_iter().filter(fits).min_by_key(cost);
        shapes.or_else(|| Some([1, 1]).filter(fits))
    }

    /// Whether there is room for rows of `k` values.
    pub(crate) fn fits(&self, format: Format, k: usize) -> bool {
        self.of(format).layout.bytes(1, 1, 32, k / 32) <= self.shared
    }

    /// Queues `out = w . x` for every matrix, all of one format, with `cols` columns of `k` values.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        wanted: &[Wanted],
        [k, cols]: [usize; 2],
        x: &Columns,
    ) -> Result<(), DriverError> {
        for wanted in wanted.chunks(MOST) {
            self.launch_some(stream, wanted, [k, cols], x)?;
        }
        Ok(())
    }

    fn launch_some(
        &self,
        stream: &Stream,
        wanted: &[Wanted],
        [k, cols]: [usize; 2],
        x: &Columns,
    ) -> Result<(), DriverError> {
        let format = wanted[0].format;
        let of = self.of(format);
        let (room, kernel) =
            of.kernels.iter().find(|(most, _)| *most >= cols).unwrap_or(&of.kernels[of.kernels.len() - 1]);
        let [strips, groups] = self.shape(of, wanted, k / 32, *room).expect("the caller asked");
        assert!(x.q.len() >= k * cols && x.d.len() >= k / 32 * cols && x.sums.len() >= k / 32 * cols);
        let mut p = FewParams {
            matrices: [FewMatrix::default(); MOST],
            q: x.q.address(),
            d: x.d.address(),
            sums: x.sums.address(),
            count: wanted.len() as u32,
            cols: cols as u32,
            k: k as u32,
            strips: strips as u32,
            groups: groups as u32,
            padding: 0,
        };
        let mut first = 0;
        for (w, matrix) in wanted.iter().zip(&mut p.matrices) {
            assert!(
                w.format == format
                    && format.row_bytes(k).map(|bytes| bytes * w.rows) == Some(w.weights.len())
            );
            assert!(w.out.len() >= w.rows * cols);
            *matrix = FewMatrix {
                weights: w.weights.address(),
                out: w.out.address(),
                scale: w.scale.map_or(0, DeviceSlice::address),
                rows: w.rows as u32,
                first,
            };
            first += w.rows.div_ceil(strips * ROWS) as u32;
        }
        let shared = of.layout.bytes(strips, groups, *room, k / 32);
        let grid =
            Grid { blocks: [first, cols.div_ceil(*room) as u32, 1], threads: (32 * strips * groups) as u32 };
        // SAFETY: the sizes were compared above; `Layout` counts what the kernel lays out.
        unsafe { kernel.launch_with(stream, grid, shared as u32, &p) }
    }
}
