//! Products of many columns on GPUs that take columns in pieces (Hopper): the pieces, and matrices that are decoded once for all columns:
//! `kernels/wide.cu`. Owns how large the pieces and the decoded rows are.

use strata_quant::Format;

use super::products::Columns;
use super::{ByFormat, OpError, SEGMENT, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module, Stream};

/// Columns of a tile, which is one piece for each chunk. Twin: `TILE_COLS` in `kernels/multiply.cuh`.
pub(crate) const WIDE: usize = 128;
/// Units of a chunk, and bytes of a column of it. Twins: `CHUNK`, `COLUMN_BYTES`.
const CHUNK: usize = 2;
const COLUMN_BYTES: usize = CHUNK * 68;
/// Rows of a decoded tile, and those that a block of threads decodes. Twins: `DENSE_ROWS`, `DECODED_ROWS` in `kernels/decoded.cuh`.
const ROWS: usize = 192;
const DECODED: usize = 64;
/// Units that a block of threads decodes. Twin: `Rows::BROUGHT`.
const BROUGHT: usize = 8;
/// Columns from which on it pays to decode a matrix before.
const MANY: usize = 256;
/// By a kind's number. Twin: `NUMBER` in `kernels/wide.cu`.
const KINDS: [&str; 6] = ["plain", "scaled", "large", "minimum", "scaled_minimum", "split"];

#[repr(C)]
#[derive(Clone, Copy)]
struct PiecesParams {
    q: u64,
    d: u64,
    out: u64,
    order: u64,
    unit_first: u64,
    unit_places: u64,
    count: u64,
    cols: u32,
    units: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeRowsParams {
    weights: u64,
    out: u64,
    rows: u32,
    units: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DecodedParams {
    rows: u64,
    pieces: u64,
    out: u64,
    scale: u64,
    count: u32,
    stride: u32,
    cols: u32,
    units: u32,
    apart: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddSegmentsParams {
    sums: u64,
    out: u64,
    count: u32,
    segments: u32,
}

/// A routing's `silu(gate) * up`, in pieces.
#[repr(C)]
#[derive(Clone, Copy)]
struct HiddenPiecesParams {
    gate: u64,
    up: u64,
    out: u64,
    unit_first: u64,
    unit_places: u64,
    before: u64,
    count: u64,
    units: u32,
    padding: u32,
}

/// Whose columns a routing's units have: all addresses on the device.
#[derive(Clone, Copy)]
pub(crate) struct Units {
    /// Per place its column, or 0 where places are columns.
    pub(crate) order: u64,
    pub(crate) first: u64,
    pub(crate) places: u64,
    /// Where they start, 0 for the first, and end.
    pub(crate) ends: [u64; 2],
    /// The most that there can be.
    pub(crate) most: usize,
}

/// Bytes of the pieces of `cols` columns of `k` values.
pub(crate) fn piece_bytes(k: usize, cols: usize) -> usize {
    cols.next_multiple_of(16) * COLUMN_BYTES * (k / 32).div_ceil(CHUNK)
}

/// The same for the columns of a routing's units, which each start anew. Twin: `first_piece` in `kernels/multiply.cuh`.
pub(crate) fn unit_piece_bytes(k: usize, places: usize, units: usize) -> usize {
    piece_bytes(k, places.next_multiple_of(16) + 16 * (units + 1))
}

/// What a decoded matrix is made of.
struct OfFormat {
    decode: Kernel<DecodeRowsParams>,
    kind: usize,
    /// Bytes of `ROWS` rows of a chunk.
    bytes: usize,
}

/// The kernels.
pub(crate) struct Wide {
    pieces: Kernel<PiecesParams>,
    hidden: Kernel<HiddenPiecesParams>,
    add_segments: Kernel<AddSegmentsParams>,
    decoded: Vec<Kernel<DecodedParams>>,
    formats: ByFormat<OfFormat>,
    processors: usize,
}

impl Wide {
    pub(crate) fn new(context: &Context) -> Result<Wide, OpError> {
        let module: Module = module(context, "wide")?;
        let of = |name: &str| -> Result<_, DriverError> {
            let [kind, bytes] = module.words(&format!("strata_kind_{name}"))?;
            let decode = module.kernel(&format!("strata_decode_rows_{name}"))?;
            Ok(OfFormat { decode, kind: kind as usize, bytes: (bytes as usize).max(1) })
        };
        let decoded = KINDS.iter().map(|kind| module.kernel(&format!("strata_decoded_{kind}")));
        Ok(Wide {
            pieces: module.kernel("strata_pieces")?,
            hidden: module.kernel("strata_hidden_pieces")?,
            add_segments: module.kernel("strata_add_segments")?,
            decoded: decoded.collect::<Result<_, _>>()?,
            formats: ByFormat::new(of)?,
            processors: context.device().processors as usize,
        })
    }

    /// Leaves the quantised columns of `k` values in pieces: `cols` of them, or those of a routing's units.
    ///
    /// # Panics
    /// If there is no room for them.
    pub(crate) fn pieces(
        &self,
        stream: &Stream,
        x: &Columns,
        [k, cols]: [usize; 2],
        units: Option<Units>,
        to: DeviceSlice<u8>,
    ) -> Result<(), DriverError> {
        let wanted =
            units.map_or_else(|| piece_bytes(k, cols), |units| unit_piece_bytes(k, cols, units.most));
        assert!(wanted <= to.len() && (units.is_some() || k * cols <= x.q.len()));
        let p = PiecesParams {
            q: x.q.address(),
            d: x.d.address(),
            out: to.address(),
            order: units.map_or(0, |units| units.order),
            unit_first: units.map_or(0, |units| units.first),
            unit_places: units.map_or(0, |units| units.places),
            count: units.map_or(0, |units| units.ends[1]),
            cols: cols as u32,
            units: (k / 32) as u32,
        };
        let tiles = units.map_or(cols.div_ceil(WIDE), |units| units.most);
        let blocks = [(k / 32).div_ceil(CHUNK) as u32, tiles as u32, 1];
        // SAFETY: the sizes were compared above; a routing's units name columns that are there.
        unsafe { self.pieces.launch(stream, Grid { blocks, threads: 256 }, &p) }
    }

    /// Leaves `silu(gate) * up` of a routing's places, `k` values each, in pieces: of some units, where `all` is the most that all can be.
    ///
    /// # Panics
    /// If there is no room for them.
    pub(crate) fn hidden_pieces(
        &self,
        stream: &Stream,
        [gate, up]: [DeviceSlice<f32>; 2],
        k: usize,
        (units, all): (Units, usize),
        to: DeviceSlice<u8>,
    ) -> Result<(), DriverError> {
        assert!(unit_piece_bytes(k, gate.len() / k, all) <= to.len() && gate.len() == up.len());
        let p = HiddenPiecesParams {
            gate: gate.address(),
            up: up.address(),
            out: to.address(),
            unit_first: units.first,
            unit_places: units.places,
            before: units.ends[0],
            count: units.ends[1],
            units: (k / 32) as u32,
            padding: 0,
        };
        let blocks = [(k / 32).div_ceil(CHUNK) as u32, units.most as u32, 1];
        // SAFETY: the sizes were compared above, and a routing's places are rows of both.
        unsafe { self.hidden.launch(stream, Grid { blocks, threads: 256 }, &p) }
    }

    /// Multiplies a matrix with columns whose pieces are made, decoding it into `room`; whether there are enough columns and room for that.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn product(
        &self,
        stream: &Stream,
        (format, weights): (Format, DeviceSlice<u8>),
        [rows, k, cols]: [usize; 3],
        pieces: DeviceSlice<u8>,
        scale: Option<DeviceSlice<f32>>,
        out: DeviceSlice<f32>,
        room: DeviceSlice<u8>,
    ) -> Result<bool, DriverError> {
        let (of, units) = (self.formats.of(format), k / 32);
        let (chunks, segments) = (units.div_ceil(CHUNK), units.div_ceil(SEGMENT));
        let most = room.len() / (chunks * of.bytes).max(1) * ROWS;
        if cols < MANY || most == 0 || rows == 0 {
            return Ok(false);
        }
        // Where there are few tiles, segments are tiles of their own.
        let decoded = rows.div_ceil(ROWS) * chunks * of.bytes;
        let tiles = rows.div_ceil(ROWS) * cols.div_ceil(WIDE);
        let apart = segments > 1
            && tiles < self.processors
            && scale.is_none()
            && (rows * cols).is_multiple_of(4)
            && decoded.next_multiple_of(16) + 4 * segments * rows * cols <= room.len();
        let sums = apart.then(|| {
            let at = decoded.next_multiple_of(16);
            room.range(at..at + 4 * segments * rows * cols).cast::<f32>()
        });
        let row_bytes = weights.len() / rows;
        for first in (0..rows).step_by(most) {
            let count = most.min(rows - first);
            let p = DecodeRowsParams {
                weights: weights.range(first * row_bytes..(first + count) * row_bytes).address(),
                out: room.address(),
                rows: count as u32,
                units: units as u32,
            };
            let blocks = [units.div_ceil(BROUGHT) as u32, count.div_ceil(DECODED) as u32, 1];
            // SAFETY: `most` rows fit into `room`.
            unsafe { of.decode.launch(stream, Grid { blocks, threads: 2 * DECODED as u32 }, &p)? };
            let p = DecodedParams {
                rows: room.address(),
                pieces: pieces.address(),
                out: sums.unwrap_or(out).address() + 4 * first as u64,
                scale: scale.map_or(0, |scale| scale.address()),
                count: count as u32,
                stride: rows as u32,
                cols: cols as u32,
                units: units as u32,
                apart: u32::from(apart),
                padding: 0,
            };
            let tiles = count.div_ceil(ROWS) * cols.div_ceil(WIDE) * if apart { segments } else { 1 };
            let grid = Grid { blocks: [self.processors.min(tiles) as u32, 1, 1], threads: 512 };
            // SAFETY: the rows were decoded before, and `out` has a place for each row and column; so have the sums of each segment.
            unsafe { self.decoded[of.kind].launch(stream, grid, &p)? };
        }
        if let Some(sums) = sums {
            let count = rows * cols / 4;
            let p = AddSegmentsParams {
                sums: sums.address(),
                out: out.address(),
                count: count as u32,
                segments: segments as u32,
            };
            // SAFETY: as above.
            unsafe { self.add_segments.launch(stream, Grid::threads(count, 256), &p)? };
        }
        Ok(true)
    }
}
