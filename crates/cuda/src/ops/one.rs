//! Several matrices with the same one column: `kernels/one.cuh`, `kernels/one.cu`. Owns how a block of threads is laid out: how many
//! rows it takes, how many at a time, and how much shared memory that needs.

use strata_quant::Format;

use super::products::Columns;
use super::{ByFormat, OpError, SEGMENT, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, LINE, Module, Stream};
use crate::weights::Matrix;

/// Matrices of a launch. Twin: `OneParams`.
const MOST: usize = 6;
/// Threads of a block, at most. Twin: `ONE_THREADS`.
pub(crate) const THREADS: usize = 320;
/// Warps of it that only add up, where there are several chunks.
const ADDERS: usize = 1;
/// Threads of a block, at least.
const LEAST_THREADS: usize = 128;
/// Blocks of threads that a multiprocessor has at once.
pub(crate) const BLOCKS: usize = 2;
/// Values of a float row that are brought at once. Twin: `PIECE` in `kernels/one.cuh`.
const PIECE: usize = 2560;
/// Pieces of a row that are under way at once. Twin: as above.
const PIECES: usize = 4;
/// Float rows of a block of threads, at most: each has a warp.
const FLOAT_ROWS: usize = 4;
/// Bytes of shared memory that a block takes besides what it is told to have.
const FIXED: usize = 3072;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct OneMatrix {
    weights: u64,
    out: u64,
    scale: u64,
    format: u32,
    rows: u32,
    share: u32,
    first: u32,
    row_bytes: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct OneParams {
    matrices: [OneMatrix; MOST],
    q: u64,
    d: u64,
    sums: u64,
    floats: u64,
    gate: u64,
    up: u64,
    made: u32,
    count: u32,
    chunk: u32,
    turns: u32,
    buffer: u32,
    k: u32,
    adders: u32,
    split: Split,
    padding: u32,
}

/// How threads share the groups of a row, and a warp's lanes its segments. Twin: in `kernels/one.cuh`. A number of a thread or a lane is
/// divided by multiplying it with an inverse, rounded up, and shifting: exact while numbers and divisors are below 1,024 and 32.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Split {
    lanes: u32,
    across: u32,
    inverse: u32,
    segments: u32,
    together: u32,
    inverse_segments: u32,
}

/// What the layout of a block depends on in a block format. Twin: `strata_format_*` in `kernels/one.cu`.
#[derive(Debug, Clone, Copy)]
struct Traits {
    /// Terms of a unit.
    terms: usize,
    /// Words of the code book.
    grid: usize,
    /// Units that a thread decodes together.
    together: usize,
}

/// How a block of threads takes rows of a block format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Threads of a block, and warps of them that only add up.
    pub(crate) threads: usize,
    adders: usize,
    split: Split,
    /// Rows of a chunk, and buffers for chunks: one, or two, so that the next chunk comes while one is multiplied.
    pub(crate) chunk: usize,
    pub(crate) turns: usize,
    /// Bytes of a buffer for rows, and all bytes of shared memory.
    pub(crate) buffer: usize,
    pub(crate) shared: usize,
}

/// Block formats as the kernels know them.
#[derive(Clone)]
pub(crate) struct Formats {
    traits: ByFormat<Traits>,
    /// Bytes of shared memory that a block may have.
    pub(crate) shared: usize,
    pub(crate) processors: usize,
}

/// A format of float weights as kernels know it; 0 for block formats. Twin: `Code` in `kernels/floats.cuh`.
pub(crate) fn code(format: Format) -> u32 {
    match format {
        Format::F32 => 1,
        Format::F16 => 2,
        Format::Bf16 => 3,
        _ => 0,
    }
}

/// Bytes of shared memory that so many bytes take from whatever address, whole lines. Twin: `brought` there.
pub(crate) fn brought(bytes: usize) -> usize {
    (bytes + 2 * (LINE - 1)) / LINE * LINE
}

/// Bytes of shared memory for float rows of `k` values, `rows` at a time, and the column. Twin: `float_rows` in `kernels/one.cuh`.
pub(crate) fn float_room(rows: usize, k: usize) -> usize {
    k.div_ceil(PIECE).min(PIECES) * (rows + 1) * brought(4 * PIECE)
}

impl Formats {
    pub(crate) fn new(context: &Context, module: &Module) -> Result<Formats, DriverError> {
        let of = |name: &str| -> Result<_, DriverError> {
            let [second, grid, together] = module.words(&format!("strata_format_{name}"))?;
            Ok(Traits { terms: 1 + second as usize, grid: grid as usize, together: together as usize })
        };
        Ok(Formats {
            traits: ByFormat::new(of)?,
            shared: context.device().shared_memory as usize,
            processors: context.device().processors as usize,
        })
    }

    /// Whether a block of threads can have so many bytes.
    pub(crate) fn allow(&self, bytes: usize) -> bool {
        bytes + FIXED <= self.shared
    }

    fn of(&self, format: Format) -> &Traits {
        self.traits.of(format)
    }

    /// Bytes of terms of a row, and of the code book. Twin: `One` in `kernels/one.cuh`.
    pub(crate) fn terms(&self, format: Format, units: usize) -> (usize, usize) {
        let Traits { terms, grid, .. } = self.of(format);
        (8 * terms * (units + 2).next_multiple_of(2), 4 * grid + 16)
    }

    /// Whether a block that takes its share of `rows` rows of `k` values can also have a column that it makes itself.
    fn allow_hidden(&self, format: Format, rows: usize, k: usize) -> bool {
        let share = rows.div_ceil(BLOCKS * self.processors);
        !format.is_float()
            && self
                .layout(format, k, share)
                .is_some_and(|layout| self.allow(layout.shared + 16 + made_room(k)))
    }

    /// Whether so many blocks of them can be on a multiprocessor at once.
    pub(crate) fn allow_together(&self, blocks: usize, bytes: usize) -> bool {
        bytes + FIXED <= self.shared / blocks
    }

    /// Units that a thread decodes together.
    pub(crate) fn together(&self, format: Format) -> usize {
        self.of(format).together
    }

    /// Threads for rows of `units` units, at most `most`: of those numbers of which the largest share has something to do, over all turns
    /// that a row takes, the largest.
    pub(crate) fn threads(&self, format: Format, units: usize, most: usize) -> usize {
        let groups = units / self.of(format).together;
        let share = |threads: usize| {
            let turns = groups.div_ceil(threads);
            let busy = if turns > 1 { groups } else { threads / groups * groups };
            1000 * busy / (turns * threads)
        };
        let all = (LEAST_THREADS..=most).step_by(32);
        all.max_by_key(|&threads| (share(threads), threads)).expect("there are some")
    }

    /// How so many threads share rows of `units` units.
    pub(crate) fn split(&self, format: Format, units: usize, threads: usize) -> Split {
        let lanes = (units / self.of(format).together).min(threads);
        let segments = units.div_ceil(SEGMENT);
        Split {
            lanes: lanes as u32,
            across: (threads / lanes) as u32,
            inverse: (1usize << 20).div_ceil(lanes) as u32,
            segments: segments as u32,
            together: (32 / segments) as u32,
            inverse_segments: 1024usize.div_ceil(segments) as u32,
        }
    }

    /// The layout for blocks that have `share` rows of `k` values: [`BLOCKS`] of them on a multiprocessor, if one row allows it. None if it
    /// has no room for one row.
    pub(crate) fn layout(&self, format: Format, k: usize, share: usize) -> Option<Layout> {
        let (units, raw) = (k / 32, format.row_bytes(k)?);
        if units == 0 || units > 32 * SEGMENT {
            return None;
        }
        let (terms, grid) = self.terms(format, units);
        let all = |rows: usize, turns: usize| turns * (brought(rows * raw) + rows * terms) + grid;
        let layout = |chunk: usize, turns: usize| {
            let adders = ADDERS * (turns - 1);
            let decoders = self.threads(format, units, THREADS - 32 * adders);
            let (buffer, shared) = (brought(chunk * raw), all(chunk, turns));
            let split = self.split(format, units, decoders);
            Layout { threads: decoders + 32 * adders, adders, split, chunk, turns, buffer, shared }
        };
        if self.allow_together(BLOCKS, all(share, 1)) {
            return Some(layout(share, 1));
        }
        let across = layout(1, 2).split.across as usize;
        let fit = |rows: &usize| self.allow_together(BLOCKS, all(*rows, 2));
        let several = (1..=share / across).map(|times| times * across).take_while(fit).last();
        let chunk = several.or_else(|| (1..across.min(share)).take_while(fit).last());
        match chunk {
            Some(chunk) => Some(layout(chunk, 2)),
            None => self.allow(all(1, 1)).then(|| layout(1, 1)),
        }
    }
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

impl Wanted {
    pub(crate) fn new(w: &Matrix, out: DeviceSlice<f32>) -> Wanted {
        Wanted { format: w.format, weights: w.bytes, rows: w.rows, scale: w.scale, out }
    }
}

/// What rows are multiplied with.
#[derive(Clone, Copy)]
struct Source<'c> {
    columns: Option<&'c Columns>,
    floats: Option<DeviceSlice<f32>>,
    /// The products whose SwiGLU it is, in place of columns.
    hidden: Option<[DeviceSlice<f32>; 2]>,
}

/// Bytes of shared memory of a column of `k` values that a block quantises for itself. Twin: `make_hidden` in `kernels/one.cu`.
fn made_room(k: usize) -> usize {
    k + 8 * (k / 32)
}

/// The kernels.
pub(crate) struct One {
    blocks: ByFormat<Kernel<OneParams>>,
    floats: Kernel<OneParams>,
    pub(crate) formats: Formats,
}

impl One {
    pub(crate) fn new(context: &Context) -> Result<One, OpError> {
        let module = module(context, "one")?;
        let kernel = |name: &str| -> Result<_, DriverError> {
            Ok(module.dynamic_kernel(&format!("strata_one_{name}"))?.early())
        };
        Ok(One {
            blocks: ByFormat::new(kernel)?,
            floats: kernel("floats")?,
            formats: Formats::new(context, &module)?,
        })
    }

    /// Whether a block of threads has room for rows of `k` values.
    pub(crate) fn fits(&self, format: Format, k: usize) -> bool {
        match format.is_float() {
            true => self.formats.allow(float_room(1, k)),
            false => self.formats.layout(format, k, 1).is_some(),
        }
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
        let x = Source { columns, floats, hidden: None };
        // A launch has one block format; float weights go with the first.
        let (mut rest, mut floating): (Vec<&Wanted>, Vec<&Wanted>) =
            wanted.iter().partition(|w| !w.format.is_float());
        while !rest.is_empty() || !floating.is_empty() {
            let format = rest.first().map(|w| w.format);
            let now = rest.iter().copied().filter(|w| Some(w.format) == format);
            let mut now: Vec<&Wanted> = now.collect();
            rest.retain(|w| Some(w.format) != format);
            now.append(&mut floating);
            for some in now.chunks(MOST) {
                self.launch_some(stream, some, k, x)?;
            }
        }
        Ok(())
    }

    /// The same for one matrix of a block format and `silu(gate) * up`, where that fits: whether it does.
    pub(crate) fn launch_hidden(
        &self,
        stream: &Stream,
        wanted: &Wanted,
        hidden @ [gate, up]: [DeviceSlice<f32>; 2],
    ) -> Result<bool, DriverError> {
        let k = gate.len();
        assert_eq!(k, up.len());
        if !self.formats.allow_hidden(wanted.format, wanted.rows, k) {
            return Ok(false);
        }
        let x = Source { columns: None, floats: None, hidden: Some(hidden) };
        self.launch_some(stream, &[wanted], k, x).map(|()| true)
    }

    fn launch_some(
        &self,
        stream: &Stream,
        wanted: &[&Wanted],
        k: usize,
        x: Source<'_>,
    ) -> Result<(), DriverError> {
        let format = wanted.iter().map(|w| w.format).find(|format| !format.is_float());
        let room = self.formats.shared / BLOCKS;
        let float_rows =
            (1..=FLOAT_ROWS).rev().find(|&rows| float_room(rows, k) + FIXED <= room).unwrap_or(1);
        let sum = |float: bool, of: &dyn Fn(&Wanted) -> usize| -> usize {
            wanted.iter().filter(|w| w.format.is_float() == float).map(|w| of(w)).sum()
        };
        let slots = BLOCKS * self.formats.processors;
        let float_blocks = sum(true, &|w| w.rows.div_ceil(float_rows));
        // As few rows as can be for a block, if all blocks shall be there at once.
        let left = slots.saturating_sub(float_blocks).max(slots / 2);
        let rows = sum(false, &|w| w.rows);
        let least = rows.div_ceil(left).max(1);
        let share = (least..=rows.max(1))
            .find(|&share| sum(false, &|w| w.rows.div_ceil(share)) <= left)
            .unwrap_or(rows.max(1));
        let layout = format.and_then(|format| self.formats.layout(format, k, share));
        let floats_only = Layout { threads: FLOAT_ROWS * 32, turns: 1, ..Layout::default() };
        let layout = layout.unwrap_or(floats_only);
        let shared = layout.shared.max(if float_blocks > 0 { float_room(float_rows, k) } else { 0 });
        let columns = x.columns.filter(|_| format.is_some());
        let made = shared.next_multiple_of(16);
        let shared = if x.hidden.is_some() { made + made_room(k) } else { shared };
        let mut p = OneParams {
            matrices: [OneMatrix::default(); MOST],
            q: columns.map_or(0, |x| x.q.address()),
            d: columns.map_or(0, |x| x.d.address()),
            sums: columns.map_or(0, |x| x.sums.address()),
            floats: x.floats.map_or(0, DeviceSlice::address),
            gate: x.hidden.map_or(0, |[gate, _]| gate.address()),
            up: x.hidden.map_or(0, |[_, up]| up.address()),
            made: made as u32,
            count: wanted.len() as u32,
            chunk: layout.chunk as u32,
            turns: layout.turns as u32,
            buffer: layout.buffer as u32,
            k: k as u32,
            adders: layout.adders as u32,
            split: layout.split,
            padding: 0,
        };
        let mut first = 0;
        for (w, matrix) in wanted.iter().zip(&mut p.matrices) {
            assert!(w.format.row_bytes(w.rows * k) == Some(w.weights.len()) && w.out.len() >= w.rows);
            assert!(if w.format.is_float() {
                x.floats.is_some()
            } else {
                columns.is_some() || x.hidden.is_some()
            });
            let share = if w.format.is_float() { float_rows } else { share };
            *matrix = OneMatrix {
                weights: w.weights.address(),
                out: w.out.address(),
                scale: w.scale.map_or(0, DeviceSlice::address),
                format: code(w.format),
                rows: w.rows as u32,
                share: share as u32,
                first,
                row_bytes: (w.weights.len() / w.rows) as u32,
                padding: 0,
            };
            first += w.rows.div_ceil(share) as u32;
        }
        let kernel = format.map_or(&self.floats, |format| self.blocks.of(format));
        let grid = Grid { blocks: [first, 1, 1], threads: layout.threads as u32 };
        // SAFETY: the sizes were compared above; `layout` and `float_room` count what the kernel lays out.
        unsafe { kernel.launch_with(stream, grid, shared as u32, &p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an H200 has them, with one term or two a unit, and one unit or four together.
    fn formats() -> Formats {
        let traits = |format, terms, together| (format, Traits { terms, grid: 2048, together });
        Formats {
            traits: ByFormat(vec![
                traits(Format::Q8_0, 1, 1),
                traits(Format::Q6K, 1, 4),
                traits(Format::Q2K, 2, 4),
            ]),
            shared: 227 << 10,
            processors: 132,
        }
    }

    /// Oracle: which formats have kernels for blocks; a column of a megabyte has no layout.
    #[test]
    fn columns_are_made_for_block_formats_that_leave_room() {
        let formats = formats();
        assert!(
            formats.allow_hidden(Format::Q8_0, 2560, 640) && formats.allow_hidden(Format::Q6K, 2560, 768)
        );
        assert!(
            !formats.allow_hidden(Format::F16, 2560, 640)
                && !formats.allow_hidden(Format::Q8_0, 2560, 1 << 20)
        );
    }

    /// Oracle: division, for every thread of a block and every lane of a warp.
    #[test]
    fn inverses_divide() {
        let formats = formats();
        for units in (8..=2048).step_by(8) {
            for (format, threads) in [(Format::Q8_0, 320), (Format::Q8_0, 480), (Format::Q6K, 288)] {
                let split = formats.split(format, units, threads);
                for thread in 0..512u32 {
                    assert_eq!(
                        (thread * split.inverse) >> 20,
                        thread / split.lanes,
                        "{units} units, thread {thread}"
                    );
                }
                for lane in 0..32u32 {
                    assert_eq!(
                        (lane * split.inverse_segments) >> 10,
                        lane / split.segments,
                        "{units}, lane {lane}"
                    );
                }
                assert!(
                    split.lanes * split.across <= threads as u32 && split.segments * split.together <= 32
                );
            }
        }
    }

    /// Oracle: what a layout promises. Two blocks have room on a multiprocessor, chunks are whole turns of the threads where the rows are
    /// enough, and a row that is too long has none.
    #[test]
    fn layouts_fit() {
        let formats = formats();
        for format in [Format::Q8_0, Format::Q6K, Format::Q2K] {
            for k in [256, 2560, 6144, 10240] {
                for share in [1, 2, 10, 69, 941] {
                    let layout = formats.layout(format, k, share).unwrap();
                    assert!(
                        BLOCKS * (layout.shared + FIXED) <= formats.shared,
                        "{format} {k} {share}: {layout:?}"
                    );
                    assert!(layout.threads <= THREADS && layout.threads.is_multiple_of(32), "{layout:?}");
                    let across = layout.split.across as usize;
                    assert!(
                        layout.turns == 1 || layout.chunk.is_multiple_of(across) || layout.chunk < across,
                        "{layout:?}"
                    );
                    assert!((1..=share).contains(&layout.chunk), "{layout:?}");
                }
            }
        }
        assert_eq!(formats.layout(Format::Q8_0, 1 << 20, 1), None);
    }

    /// Oracle: by hand. 20 groups of a row fill 320 and 160 threads, 80 fill 320 and 160, 320 groups as many threads, or 160 twice.
    #[test]
    fn threads_have_something_to_do() {
        let formats = formats();
        assert_eq!(formats.threads(Format::Q6K, 80, THREADS), 320);
        assert_eq!(formats.threads(Format::Q6K, 80, 288), 160);
        assert_eq!(formats.threads(Format::Q8_0, 80, 288), 160);
        assert_eq!(formats.threads(Format::Q8_0, 320, 288), 160);
        assert_eq!(formats.threads(Format::Q8_0, 320, THREADS), 320);
    }
}
