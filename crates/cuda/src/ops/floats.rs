//! Dense products with float weights: `kernels/floats.cu`.

use strata_quant::Format;

use super::{OpError, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::weights::Matrix;

#[repr(C)]
#[derive(Clone, Copy)]
struct FloatParams {
    weights: u64,
    x: u64,
    out: u64,
    scale: u64,
    rows: u32,
    cols: u32,
    k: u32,
    padding: u32,
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

/// The kernels of one format: products for one column and for eight, and the values as f32.
struct OfFormat([Kernel<FloatParams>; 2], Kernel<WidenParams>);

/// Products with F32, F16 and BF16 weights, bit for bit those of every other backend.
pub(crate) struct Floats {
    f32: OfFormat,
    f16: OfFormat,
    bf16: OfFormat,
    scale: Kernel<ScaleParams>,
}

impl Floats {
    pub(crate) fn new(context: &Context) -> Result<Floats, OpError> {
        let module = module(context, "floats")?;
        let of = |name: &str| -> Result<OfFormat, DriverError> {
            let kernel = |cols: usize| module.kernel(&format!("strata_floats_{cols}_{name}"));
            Ok(OfFormat([kernel(1)?, kernel(8)?], module.kernel(&format!("strata_widen_{name}"))?))
        };
        Ok(Floats {
            f32: of("f32")?,
            f16: of("f16")?,
            bf16: of("bf16")?,
            scale: module.kernel("strata_scale")?,
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
        unsafe { self.of(format).1.launch(stream, Grid::threads(to.len(), 256), &p) }
    }

    /// `x *= by`.
    pub(crate) fn scale(&self, stream: &Stream, x: DeviceSlice<f32>, by: f32) -> Result<(), DriverError> {
        let p = ScaleParams { x: x.address(), count: x.len() as u64, by, padding: 0 };
        // SAFETY: the length is the slice's.
        unsafe { self.scale.launch(stream, Grid::threads(x.len(), 256), &p) }
    }

    /// `out[col][row] = w[row] . x[col]`.
    pub(crate) fn product(
        &self,
        stream: &Stream,
        w: &Matrix,
        x: DeviceSlice<f32>,
        cols: usize,
        out: DeviceSlice<f32>,
    ) -> Result<(), DriverError> {
        assert!(x.len() >= w.k * cols && out.len() >= w.rows * cols);
        let p = FloatParams {
            weights: w.bytes.address(),
            x: x.address(),
            out: out.address(),
            scale: w.scale.map_or(0, DeviceSlice::address),
            rows: w.rows as u32,
            cols: cols as u32,
            k: w.k as u32,
            padding: 0,
        };
        let OfFormat([one, eight], _) = self.of(w.format);
        let (kernel, rows, at_once, threads) = if cols == 1 { (one, 1, 1, 256) } else { (eight, 16, 8, 128) };
        let blocks = [w.rows.div_ceil(rows) as u32, cols.div_ceil(at_once) as u32, 1];
        // SAFETY: the sizes were compared above.
        unsafe { kernel.launch(stream, Grid { blocks, threads }, &p) }
    }
}
