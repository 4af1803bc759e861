//! The draft block's join of the next token's embedding and the trunk's residual: `kernels/mixer.cu`.

use strata_backend::{BackendError, Buffer, Shape, Weight};

use super::input::Input;
use super::{OpError, module};
use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, Grid, Kernel};
use crate::inputs::Ids;
use crate::scratch::Scratch;

#[repr(C)]
#[derive(Clone, Copy)]
struct JoinParams {
    embeddings: u64,
    x: u64,
    e_norm: u64,
    h_norm: u64,
    out: u64,
    count: u32,
    streams: u32,
    width: u32,
    eps: f32,
}

/// The kernel.
pub(crate) struct Draft(Kernel<JoinParams>);

impl Draft {
    pub(crate) fn new(context: &Context) -> Result<Draft, OpError> {
        Ok(Draft(module(context, "mixer")?.kernel("strata_join")?))
    }
}

/// What the op needs while it runs.
pub(crate) struct Room {
    embeddings: DeviceSlice<f32>,
    /// A column per row and stream.
    columns: Input,
}

impl Room {
    /// For so many rows.
    pub(crate) fn new(shape: &Shape, rows: usize, room: &mut Scratch) -> Room {
        let (d, columns) = (shape.hidden, rows * shape.streams);
        let embeddings = room.take(rows * d);
        let joined = room.take(columns * 2 * d);
        Room { embeddings, columns: Input::new(joined, 2 * d, columns, room) }
    }
}

impl CudaBackend {
    /// `out[t, s] = eh_proj [ rms(table[next[t]]) * e_norm ; gnorm(x[t]; h_norm)_s ]`.
    pub(crate) fn draft_join(
        &mut self,
        [table, eh_proj, e_norm, h_norm]: [Weight; 4],
        next: &[u32],
        x: Buffer,
        out: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, streams, vocab, norm_eps: eps, .. } = self.spec.shape;
        let (rows, wide) = (next.len(), streams * d);
        let table = self.weights.matrix(table, vocab, d)?;
        let eh_proj = self.weights.matrix(eh_proj, d, 2 * d)?;
        let [e_norm, h_norm] = [self.weights.floats(e_norm, d)?, self.weights.floats(h_norm, wide)?];
        let (x, out) = (self.buffer(x, rows, wide)?, self.buffer(out, rows, wide)?);
        let ids = self.tokens(Ids::Next, next)?;
        let room = Room::new(&self.spec.shape, rows, &mut self.room());
        self.kernels.embed.rows(&self.stream, &table, ids, 1, room.embeddings).map_err(Failed::from)?;
        let p = JoinParams {
            embeddings: room.embeddings.address(),
            x: x.address(),
            e_norm: e_norm.address(),
            h_norm: h_norm.address(),
            out: room.columns.floats().address(),
            count: (rows * streams) as u32,
            streams: streams as u32,
            width: d as u32,
            eps,
        };
        // SAFETY: `Room` made the columns, and the buffers have these sizes.
        unsafe { self.kernels.draft.0.launch(&self.stream, Grid::threads(rows * streams * 32, 128), &p) }
            .map_err(Failed::from)?;
        self.prepare(&room.columns, &[eh_proj])?;
        self.product(&eh_proj, &room.columns, out)?;
        Ok(eh_proj.bytes.len() + rows * (table.bytes.len() / vocab))
    }
}
