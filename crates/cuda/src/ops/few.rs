//! Block-format rows with a few columns: `kernels/few.cuh`, `kernels/few.cu`. Owns how many rows and segments a block of threads takes, and how
//! much shared memory that needs.

use strata_quant::Format;

use super::one::Wanted;
use super::products::Columns;
use super::{ByFormat, OpError, SEGMENT, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Columns that these kernels take rather than those for many.
pub(crate) const FEW: usize = 64;
/// Matrices of a launch. Twin: `FewParams`.
const MOST: usize = 3;
/// Rows of a strip, and units of a chunk. Twins: `Few::ROWS`, `Few::CHUNK`.
pub(crate) const ROWS: usize = 8;
const CHUNK: usize = 8;
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
    /// Stages of up to 16 columns, and of more.
    stages: [usize; 2],
}

impl Layout {
    /// Of the format of that name.
    pub(crate) fn new(module: &Module, name: &str) -> Result<Layout, DriverError> {
        let words: [u32; 6] = module.words(&format!("strata_few_{name}"))?;
        let [grid, decoded, row, column, few, more] = words.map(|word| word as usize);
        Ok(Layout { grid, decoded, row, column, stages: [few, more] })
    }

    /// Bytes for `groups` of so many strips each, with room for `cols` columns of `units` units.
    pub(crate) fn bytes(&self, strips: usize, groups: usize, cols: usize, units: usize) -> usize {
        let stage = strips * ROWS * self.row + cols * self.column;
        self.fixed(strips, groups, cols, units) + groups * self.stages(cols, units) * stage
    }

    /// The same for one group whose columns are made in place.
    pub(crate) fn resident(&self, strips: usize, cols: usize, units: usize) -> usize {
        let columns = units.div_ceil(CHUNK) * cols * self.column;
        self.fixed(strips, 1, cols, units) + columns + self.stages(cols, units) * strips * ROWS * self.row
    }

    fn fixed(&self, strips: usize, groups: usize, cols: usize, units: usize) -> usize {
        // One group adds its segments up as they come.
        let segments = if groups == 1 { 1 } else { units.div_ceil(SEGMENT) };
        self.grid + strips * groups * self.decoded + segments * cols * strips * ROWS * 4
    }

    /// Stages that rows of so many units come to.
    fn stages(&self, cols: usize, units: usize) -> usize {
        self.stages[usize::from(cols > 16)].min(units.div_ceil(CHUNK))
    }
}

/// The kernels of one format.
struct OfFormat {
    layout: Layout,
    /// By their columns.
    kernels: [(usize, Kernel<FewParams>); 3],
}

/// A launch: its kernel, for `room` columns; strips and groups of a block of threads, and its shared memory.
struct Division<'a> {
    kernel: &'a Kernel<FewParams>,
    room: usize,
    strips: usize,
    groups: usize,
    shared: usize,
}

/// Instructions of four units of a strip: decoding, and for eight columns; of an H200. What one takes in a warp alone, and in a
/// multiprocessor that has enough of them.
const UNIT_COST: usize = 110;
const COLUMN_COST: usize = 80;
const ALONE: usize = 10;
const TOGETHER: usize = 1;
/// Warps that a multiprocessor has registers for.
const RESIDENT_WARPS: usize = 16;

/// The kernels.
pub(crate) struct Few {
    formats: ByFormat<OfFormat>,
    processors: usize,
    shared: usize,
}

impl Few {
    pub(crate) fn new(context: &Context) -> Result<Few, OpError> {
        let module = module(context, "few")?;
        let of = |name: &str| -> Result<_, DriverError> {
            let kernel = |tiles: usize| -> Result<_, DriverError> {
                let kernel = module.dynamic_kernel(&format!("strata_few_{tiles}_{name}"))?.early();
                Ok((8 * tiles, kernel))
            };
            let kernels = [kernel(1)?, kernel(2)?, kernel(4)?];
            Ok(OfFormat { layout: Layout::new(&module, name)?, kernels })
        };
        Ok(Few {
            formats: ByFormat::new(of)?,
            processors: context.device().processors as usize,
            shared: context.device().shared_memory as usize,
        })
    }

    /// How a launch is divided: what takes the least time.
    fn division<'a>(
        &self,
        of: &'a OfFormat,
        wanted: &[Wanted],
        units: usize,
        cols: usize,
    ) -> Option<Division<'a>> {
        let (segments, row) = (units.div_ceil(SEGMENT), wanted[0].weights.len() / wanted[0].rows);
        let division = |&(room, ref kernel): &'a (usize, Kernel<FewParams>), strips: usize, groups: usize| {
            let shared = of.layout.bytes(strips, groups, room, units);
            let fits = strips * groups <= WARPS && groups <= segments && shared <= self.shared;
            fits.then(|| {
                let blocks: usize = wanted.iter().map(|w| w.rows.div_ceil(ROWS * strips)).sum();
                let across = cols.div_ceil(room);
                let of_each = (blocks * across).div_ceil(self.processors);
                let at_once = (self.shared / shared).min(RESIDENT_WARPS / (strips * groups)).max(1);
                let longest = (segments.div_ceil(groups) * SEGMENT).min(units);
                // A warp alone takes its time; many have the multiprocessor busy.
                let alone = of_each.div_ceil(at_once) * longest * ALONE;
                let together = of_each * strips * units * TOGETHER;
                let time = alone.max(together) * (UNIT_COST + COLUMN_COST * room / 8);
                // Among the same, less that passes into the multiprocessor that has most to do.
                let inflow = of_each * (strips * ROWS * row + room * units * 40);
                ((time, inflow), Division { kernel, room, strips, groups, shared })
            })
        };
        let shapes = of.kernels.iter().flat_map(|kernel| {
            [4, 2, 1]
                .into_iter()
                .flat_map(move |strips| (1..=WARPS).map(move |groups| (kernel, strips, groups)))
        });
        let all = shapes.filter_map(|(kernel, strips, groups)| division(kernel, strips, groups));
        all.min_by_key(|(cost, _)| *cost).map(|(_, division)| division)
    }

    /// Whether there is room for rows of `k` values.
    pub(crate) fn fits(&self, format: Format, k: usize) -> bool {
        self.formats.of(format).layout.bytes(1, 1, 8, k / 32) <= self.shared
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
        let of = self.formats.of(format);
        let Division { kernel, room, strips, groups, shared } =
            self.division(of, wanted, k / 32, cols).expect("the caller asked");
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
        let grid =
            Grid { blocks: [first, cols.div_ceil(room) as u32, 1], threads: (32 * strips * groups) as u32 };
        // SAFETY: the sizes were compared above; `Layout` counts what the kernel lays out.
        unsafe { kernel.launch_with(stream, grid, shared as u32, &p) }
    }
}
