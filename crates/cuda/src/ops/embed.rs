//! Token embedding: `kernels/embed.cu`.

use strata_backend::{BackendError, Buffer, Shape, Weight};
use strata_quant::Format;

use super::experts::many;
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::inputs::Ids;
use crate::recording::MOST_ROWS;
use crate::weights::Matrix;
use crate::{Failed, failed};

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedParams {
    table: u64,
    tokens: u64,
    x: u64,
    rows: u32,
    streams: u32,
    width: u32,
    padding: u32,
}

/// Threads of a block, and units of a block format that it decodes. Twin: in `kernels/embed.cu`.
const THREADS: usize = 128;
const UNITS: usize = 16;

/// A kernel for every format.
pub(crate) struct Embed(Vec<(Format, Kernel<EmbedParams>)>);

impl Embed {
    pub(crate) fn new(context: &Context) -> Result<Embed, OpError> {
        let module = module(context, "embed")?;
        let kernel = |format: Format| -> Result<_, DriverError> {
            Ok((format, module.kernel(&format!("strata_embed_{}", format.name().to_lowercase()))?))
        };
        Ok(Embed(Format::ALL.into_iter().map(kernel).collect::<Result<_, _>>()?))
    }

    /// `x[row][stream] = table[tokens[row]]`, for every stream of `x`.
    pub(crate) fn rows(
        &self,
        stream: &Stream,
        table: &Matrix,
        tokens: DeviceSlice<u32>,
        streams: usize,
        x: DeviceSlice<f32>,
    ) -> Result<(), DriverError> {
        assert_eq!(x.len(), tokens.len() * streams * table.k);
        let (_, kernel) =
            self.0.iter().find(|(format, _)| *format == table.format).expect("every format has one");
        let p = EmbedParams {
            table: table.bytes.address(),
            tokens: tokens.address(),
            x: x.address(),
            rows: tokens.len() as u32,
            streams: streams as u32,
            width: table.k as u32,
            padding: 0,
        };
        let blocks = match table.format.is_float() {
            true => (tokens.len() * table.k).div_ceil(THREADS),
            false => (tokens.len() * table.k / 32).div_ceil(UNITS),
        };
        let grid = Grid { blocks: [blocks as u32, 1, 1], threads: THREADS as u32 };
        // SAFETY: the sizes were compared above; the caller checked the ids.
        unsafe { kernel.launch(stream, grid, &p) }
    }
}

impl CudaBackend {
    /// `x[t, s] = table[tokens[t]]`.
    pub(crate) fn embed(&mut self, table: Weight, tokens: &[u32], x: Buffer) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, vocab, .. } = self.spec.shape;
        let table = self.weights.matrix(table, vocab, d)?;
        let x = self.buffer(x, tokens.len(), streams * d)?;
        // A window begins: experts may come already.
        let many = many(&self.spec.shape.moe, tokens.len());
        if tokens.len() > MOST_ROWS {
            self.tiers.begin_window(tokens.len(), many, &self.stream)?;
        }
        let ids = self.tokens(Ids::Tokens, tokens)?;
        self.kernels.embed.rows(&self.stream, &table, ids, streams, x).map_err(Failed::from)?;
        Ok(tokens.len() * (table.bytes.len() / vocab))
    }

    /// Token ids on the device, all in the vocabulary.
    pub(crate) fn tokens(&mut self, what: Ids, tokens: &[u32]) -> Result<DeviceSlice<u32>, BackendError> {
        let vocab = self.spec.shape.vocab;
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => Err(failed(format!("token {token} of a vocabulary of {vocab}"))),
            None => self.inputs.ids(&self.stream, what, tokens),
        }
    }
}
