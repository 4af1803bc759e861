//! Dense products, activation quantisation and row decoding: `kernels/products.cu`.

use strata_quant::Format;

use super::few::{FEW, Few};
use super::one::{One, Wanted};
use super::wide::{WIDE, Wide, piece_bytes};
use super::{ByFormat, OpError, module};
use crate::driver::{Context, DeviceMemory, DeviceSlice, DriverError, Grid, Kernel, Stream};

/// Quantised columns in device memory: `cols` of `k` values.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// `[cols][k]`
    pub q: DeviceSlice<i8>,
    /// `[cols][k / 32]`
    pub d: DeviceSlice<f32>,
    /// `[cols][k / 32]`: sums of 16 values, two to a word.
    pub sums: DeviceSlice<u32>,
    /// Room for the same in pieces, as the products of many columns take them.
    pub pieces: DeviceSlice<u8>,
}

impl Columns {
    /// Bytes that [`Columns::new`] wants.
    pub fn bytes_for(k: usize, cols: usize) -> usize {
        piece_bytes(k, cols) + cols * (k + k / 32 * 8)
    }

    /// Places columns in `memory`.
    ///
    /// # Panics
    /// If `k` is no multiple of 32 or there isn't the room.
    pub fn new(memory: &DeviceMemory, k: usize, cols: usize) -> Columns {
        assert!(k.is_multiple_of(32), "columns are quantised per 32 values, not {k}");
        let (pieces, values, blocks) = (piece_bytes(k, cols), k * cols, k / 32 * cols);
        Columns {
            pieces: memory.part(0, pieces),
            q: memory.part(pieces, values),
            d: memory.part(pieces + values, blocks),
            sums: memory.part(pieces + values + 4 * blocks, blocks),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct QuantiseParams {
    x: u64,
    q: u64,
    d: u64,
    sums: u64,
    blocks: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ProductParams {
    weights: u64,
    q: u64,
    d: u64,
    sums: u64,
    out: u64,
    scale: u64,
    rows: u32,
    cols: u32,
    k: u32,
    padding: u32,
    pieces: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeParams {
    weights: u64,
    out: u64,
    units: u64,
}

/// The kernels of one block format.
struct OfFormat {
    /// For many columns.
    wide: Kernel<ProductParams>,
    decode: Kernel<DecodeParams>,
}

/// Products with block-format weights, bit for bit those of every other backend.
pub struct Products {
    /// For one column, and several matrices at once.
    pub(crate) one: One,
    /// For a few.
    pub(crate) few: Few,
    processors: usize,
    quantise: Kernel<QuantiseParams>,
    pub(crate) many: Wide,
    formats: ByFormat<OfFormat>,
}

impl Products {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Products, OpError> {
        let module = module(context, "products")?;
        let of = |name: &str| -> Result<_, DriverError> {
            Ok(OfFormat {
                wide: module.kernel(&format!("strata_product_wide_{name}"))?,
                decode: module.kernel(&format!("strata_decode_{name}"))?,
            })
        };
        Ok(Products {
            one: One::new(context)?,
            few: Few::new(context)?,
            processors: context.device().processors as usize,
            quantise: module.kernel("strata_quantise")?,
            many: Wide::new(context)?,
            formats: ByFormat::new(of)?,
        })
    }

    /// Whether the kernels for few columns take so many.
    pub(crate) fn few_fits(&self, format: Format, k: usize, cols: usize) -> bool {
        cols <= FEW && self.few.fits(format, k)
    }

    /// Blocks of threads for a kernel that takes tiles of 128 rows and up to [`WIDE`] columns one after the other: as many as there is room for
    /// at once, by the threads that it was compiled for.
    pub(crate) fn wide_grid<P: Copy>(&self, kernel: &Kernel<P>, rows: usize, groups: usize) -> Grid {
        let threads = kernel.max_threads();
        // Kernels of fewer threads take half as many columns at a time.
        let share = (512 / threads as usize).max(1);
        let blocks = self.processors.min(rows.div_ceil(128) * groups) * share;
        Grid { blocks: [blocks as u32, 1, 1], threads }
    }

    /// Whether the kernels for many columns take them in pieces.
    pub(crate) fn in_pieces(&self) -> bool {
        self.formats.of(Format::Q8_0).wide.max_threads() == 512
    }

    /// Leaves `cols` quantised columns of `k` values in pieces, if the kernels for many columns want that.
    pub(crate) fn pieces(
        &self,
        stream: &Stream,
        x: &Columns,
        k: usize,
        cols: usize,
    ) -> Result<(), DriverError> {
        match self.in_pieces() {
            true => self.many.pieces(stream, x, [k, cols], None, x.pieces),
            false => Ok(()),
        }
    }

    /// Quantises `x`, `[cols][k]`.
    ///
    /// # Panics
    /// If the columns have no room for it.
    pub fn quantise(&self, stream: &Stream, x: DeviceSlice<f32>, to: &Columns) -> Result<(), DriverError> {
        let blocks = x.len() / 32;
        assert!(
            x.len().is_multiple_of(32)
                && x.len() <= to.q.len()
                && blocks <= to.d.len()
                && blocks <= to.sums.len()
        );
        let p = QuantiseParams {
            x: x.address(),
            q: to.q.address(),
            d: to.d.address(),
            sums: to.sums.address(),
            blocks: blocks as u64,
        };
        let grid = Grid { blocks: [blocks.div_ceil(8) as u32, 1, 1], threads: 256 };
        // SAFETY: the sizes were compared above.
        unsafe { self.quantise.launch(stream, grid, &p) }
    }

    /// `out[col][row] = w[row] . x[col]` for `rows` rows of `k` weights and `cols` columns; times `scale`'s one value, where there is one.
    /// `room` is for decoded rows, which products of many columns make where they can.
    ///
    /// # Panics
    /// If the sizes don't fit together.
    #[allow(clippy::too_many_arguments)]
    pub fn product(
        &self,
        stream: &Stream,
        weights: (Format, DeviceSlice<u8>),
        sizes: [usize; 3],
        x: &Columns,
        scale: Option<DeviceSlice<f32>>,
        out: DeviceSlice<f32>,
        room: DeviceSlice<u8>,
    ) -> Result<(), DriverError> {
        let ((format, weights), [rows, k, cols]) = (weights, sizes);
        let wanted = [Wanted { format, weights, rows, scale, out }];
        if cols == 1 && self.one.fits(format, k) {
            return self.one.launch(stream, &wanted, k, Some(x), None);
        }
        if self.few_fits(format, k, cols) {
            return self.few.launch(stream, &wanted, [k, cols], x);
        }
        self.pieces(stream, x, k, cols)?;
        self.product_of_pieces(stream, (format, weights), sizes, x, scale, out, room)
    }

    /// The same by the kernels for many columns, whose pieces are made.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn product_of_pieces(
        &self,
        stream: &Stream,
        (format, weights): (Format, DeviceSlice<u8>),
        [rows, k, cols]: [usize; 3],
        x: &Columns,
        scale: Option<DeviceSlice<f32>>,
        out: DeviceSlice<f32>,
        room: DeviceSlice<u8>,
    ) -> Result<(), DriverError> {
        assert_eq!(
            format.row_bytes(k).and_then(|bytes| bytes.checked_mul(rows)),
            Some(weights.len()),
            "{format}"
        );
        assert!(out.len() >= rows * cols && x.q.len() >= k * cols && x.d.len() >= k / 32 * cols);
        if self.in_pieces() {
            let (weights, sizes) = ((format, weights), [rows, k, cols]);
            if self.many.product(stream, weights, sizes, x.pieces, scale, out, room)? {
                return Ok(());
            }
        }
        let p = ProductParams {
            weights: weights.address(),
            q: x.q.address(),
            d: x.d.address(),
            sums: x.sums.address(),
            out: out.address(),
            scale: scale.map_or(0, |scale| scale.address()),
            rows: rows as u32,
            cols: cols as u32,
            k: k as u32,
            padding: 0,
            pieces: x.pieces.address(),
        };
        let kernel = &self.formats.of(format).wide;
        let grid = self.wide_grid(kernel, rows, cols.div_ceil(WIDE));
        // SAFETY: the sizes were compared above.
        unsafe { kernel.launch(stream, grid, &p) }
    }

    /// Decodes whole blocks into `out`.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn decode(
        &self,
        stream: &Stream,
        (format, weights): (Format, DeviceSlice<u8>),
        out: DeviceSlice<f32>,
    ) -> Result<(), DriverError> {
        assert_eq!(format.row_bytes(out.len()), Some(weights.len()), "{format}");
        let units = out.len() / 32;
        let p = DecodeParams { weights: weights.address(), out: out.address(), units: units as u64 };
        let grid = Grid { blocks: [units.div_ceil(256) as u32, 1, 1], threads: 256 };
        // SAFETY: the sizes were compared above.
        unsafe { self.formats.of(format).decode.launch(stream, grid, &p) }
    }
}
