//! Block-sparse attention with its indexer: `kernels/qsa.cu`.

use strata_backend::{BackendError, Buffer, KvFormat, Layer, QsaShape, QsaWeights, Shape, Span, Spec};

use super::input::{Input, Target, any_blocks};
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module};
use crate::inputs::Row;
use crate::scratch::Scratch;
use crate::{Failed, failed};

/// Keys whose scores share a maximum.
const CHUNK: usize = 256;
/// Bytes that scores and partial results of the rows that attend at once may take.
const ROOM: usize = 96 << 20;

/// What the kernels know of a layer.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionParams {
    rows: u64,
    rope: u64,
    cache: u64,
    stride: u64,
    values: u64,
    raw: u64,
    pooled: u64,
    count: u32,
    heads: u32,
    kv_heads: u32,
    dim: u32,
    index_heads: u32,
    index_dim: u32,
    rotary: u32,
    block: u32,
    budget: u32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RotateParams {
    a: AttentionParams,
    x: u64,
    gamma: u64,
    heads: u32,
    stride: u32,
    dim: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AppendParams {
    a: AttentionParams,
    keys: u64,
    values: u64,
    raw: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PoolParams {
    a: AttentionParams,
    gamma: u64,
    room: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SelectParams {
    a: AttentionParams,
    queries: u64,
    scores: u64,
    most: u64,
    chosen: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AttendParams {
    a: AttentionParams,
    queries: u64,
    chosen: u64,
    partials: u64,
    out: u64,
    quantised: Target,
    chunks: u32,
    padding: u32,
}

/// Kernels for caches of one precision.
struct Stored {
    append: Kernel<AppendParams>,
    pool: Kernel<PoolParams>,
    score: Kernel<SelectParams>,
    /// By the most query heads of a key/value head, and the widest head.
    attend: [(usize, usize, Kernel<AttendParams>); 4],
}

impl Stored {
    fn new(module: &Module, name: &str) -> Result<Stored, DriverError> {
        let attend = |group: usize, parts: usize| -> Result<_, DriverError> {
            Ok((group, 32 * parts, module.kernel(&format!("strata_attend_{name}_{group}_{parts}"))?))
        };
        Ok(Stored {
            append: module.kernel(&format!("strata_append_{name}"))?,
            pool: module.kernel(&format!("strata_pool_{name}"))?,
            score: module.kernel(&format!("strata_score_{name}"))?,
            attend: [attend(4, 4)?, attend(4, 8)?, attend(16, 4)?, attend(16, 8)?],
        })
    }
}

/// The kernels.
pub(crate) struct Qsa {
    norm_rotate: Kernel<RotateParams>,
    select: Kernel<SelectParams>,
    merge: Kernel<AttendParams>,
    f32: Stored,
    f16: Stored,
}

impl Qsa {
    pub(crate) fn new(context: &Context) -> Result<Qsa, OpError> {
        let module = module(context, "qsa")?;
        Ok(Qsa {
            norm_rotate: module.kernel("strata_norm_rotate")?,
            select: module.kernel("strata_select")?,
            merge: module.kernel("strata_merge")?,
            f32: Stored::new(&module, "f32")?,
            f16: Stored::new(&module, "f16")?,
        })
    }
}

/// What the op needs while it runs.
pub(crate) struct Room {
    queries: DeviceSlice<f32>,
    keys: DeviceSlice<f32>,
    values: DeviceSlice<f32>,
    index_q: DeviceSlice<f32>,
    index_k: DeviceSlice<f32>,
    pooled: DeviceSlice<f32>,
    output: Input,
    /// Rows that attend at once, and what they need: scores, chosen blocks, partial results.
    at_once: usize,
    scores: DeviceSlice<f32>,
    chosen: DeviceSlice<u32>,
    partials: DeviceSlice<f32>,
}

/// Chunks of the keys of a row, at most.
fn chunks(spec: &Spec, q: &QsaShape, block: usize) -> usize {
    q.selected(block, spec.context).div_ceil(CHUNK)
}

impl Room {
    /// For the rows of `u`, in a layer with blocks of `block` tokens.
    pub(crate) fn new(
        spec: &Spec,
        q: &QsaShape,
        block: usize,
        u: DeviceSlice<f32>,
        room: &mut Scratch,
    ) -> Room {
        let (kv, heads) = (q.kv_heads * q.head_dim, q.heads * q.head_dim);
        let rows = u.len() / spec.shape.hidden;
        let attended = room.take(rows * heads);
        let (most, kept) = (spec.context / block, q.budget / block);
        let partials = q.heads * chunks(spec, q, block) * (2 + q.head_dim);
        let at_once = (ROOM / (4 * (most + kept + partials))).clamp(1, rows.max(1));
        Room {
            queries: room.take(rows * 2 * heads),
            keys: room.take(rows * kv),
            values: room.take(rows * kv),
            index_q: room.take(rows * q.index_heads * q.index_dim),
            index_k: room.take(rows * q.index_dim),
            pooled: room.take(rows * q.index_dim),
            output: Input::new(attended, heads, rows, room),
            at_once,
            scores: room.take(at_once * most),
            chosen: room.take(at_once * kept),
            partials: room.take(at_once * partials),
        }
    }
}

impl CudaBackend {
    /// `y = qsa(u)`, and the rows' keys and values go to the caches.
    pub(crate) fn qsa(
        &mut self,
        layer: Layer,
        w: &QsaWeights,
        spans: &[Span],
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, norm_eps: eps, ref qsa, .. } = self.spec.shape;
        let q = qsa.clone().ok_or_else(|| failed("an attention op for a model without attention"))?;
        let state = self.state.layer(layer)?;
        let block = self.spec.layers[usize::from(layer.0)].qsa;
        let block = block.ok_or_else(|| failed(format!("layer {} has no attention caches", layer.0)))?;
        let (kv, heads) = (q.kv_heads * q.head_dim, q.heads * q.head_dim);
        let (ni, di, group) = (q.index_heads, q.index_dim, q.heads / q.kv_heads);
        let [wq, wk] = [self.weights.matrix(w.q, 2 * heads, d)?, self.weights.matrix(w.k, kv, d)?];
        let [wv, out] = [self.weights.matrix(w.v, kv, d)?, self.weights.matrix(w.out, d, heads)?];
        let [iq, ik] = [self.weights.matrix(w.index_q, ni * di, d)?, self.weights.matrix(w.index_k, di, d)?];
        let [q_norm, k_norm] = [w.q_norm, w.k_norm].map(|w| self.weights.floats(w, q.head_dim));
        let [iq_norm, ik_norm] = [w.index_q_norm, w.index_k_norm].map(|w| self.weights.floats(w, di));

        let window = self.inputs.window(&self.stream, spans, &self.state)?;
        let rows = window.count;
        let (u, y) = (self.buffer(u, rows, d)?, self.buffer(y, rows, d)?);
        let room = Room::new(&self.spec, &q, block, u, &mut self.room());
        let input = &self.mixed(u);
        self.prepare(input, &[wq, wk, wv, iq, ik])?;
        for (w, to) in [
            (&wq, room.queries),
            (&wk, room.keys),
            (&wv, room.values),
            (&iq, room.index_q),
            (&ik, room.index_k),
        ] {
            self.product(w, input, to)?;
        }

        let [values, raw, pooled] = state.cache_places;
        let a = |rows: DeviceSlice<Row>| AttentionParams {
            rows: rows.address(),
            rope: self.rope.address(),
            cache: state.cache.address(),
            stride: state.cache_bytes as u64,
            values: values as u64,
            raw: raw as u64,
            pooled: pooled as u64,
            count: rows.len() as u32,
            heads: q.heads as u32,
            kv_heads: q.kv_heads as u32,
            dim: q.head_dim as u32,
            index_heads: ni as u32,
            index_dim: di as u32,
            rotary: q.rotary as u32,
            block: block as u32,
            budget: q.budget as u32,
            eps,
        };
        let kernels = &self.kernels.qsa;
        let stored = if self.spec.kv == KvFormat::F16 { &kernels.f16 } else { &kernels.f32 };
        let stream = &self.stream;
        let rotate = |x: DeviceSlice<f32>, gamma: DeviceSlice<f32>, heads: usize, stride: usize| {
            let p = RotateParams {
                a: a(window.rows),
                x: x.address(),
                gamma: gamma.address(),
                heads: heads as u32,
                stride: stride as u32,
                dim: gamma.len() as u32,
                padding: 0,
            };
            // SAFETY: `x` has that many heads for every row; the table has a row for every position of the context.
            unsafe { kernels.norm_rotate.launch(stream, Grid::threads(rows * heads * 32, 128), &p) }
        };
        let (q_norm, k_norm, iq_norm, ik_norm) = (q_norm?, k_norm?, iq_norm?, ik_norm?);
        let queue = || -> Result<(), DriverError> {
            rotate(room.queries, q_norm, q.heads, 2 * q.head_dim)?;
            rotate(room.keys, k_norm, q.kv_heads, q.head_dim)?;
            rotate(room.index_q, iq_norm, ni, di)?;
            let tall = |rows: usize| rows.min(usize::from(u16::MAX)) as u32;
            let p = AppendParams {
                a: a(window.rows),
                keys: room.keys.address(),
                values: room.values.address(),
                raw: room.index_k.address(),
            };
            let blocks = [kv.max(di).div_ceil(128) as u32, tall(rows), 1];
            // SAFETY: the caches have a place for every position of the context.
            unsafe { stored.append.launch(stream, Grid { blocks, threads: 128 }, &p)? };
            let p = PoolParams { a: a(window.rows), gamma: ik_norm.address(), room: room.pooled.address() };
            // SAFETY: as above; raw keys of a block that ends here are stored already.
            unsafe { stored.pool.launch(stream, Grid::threads(rows * 32, 128), &p)? };
            let (_, _, attend) = stored
                .attend
                .iter()
                .find(|(most, dim, _)| group <= *most && q.head_dim <= *dim)
                .expect("checked when the backend was described");
            let chunks = chunks(&self.spec, &q, block);
            // Recorded work has to do for every position.
            let longest = spans.iter().map(|span| span.start + span.rows).max().unwrap_or(0);
            let longest = if self.recording { self.spec.context } else { longest };
            for first in (0..rows).step_by(room.at_once) {
                let part = first..rows.min(first + room.at_once);
                let count = part.len() as u32;
                let some = a(window.rows.range(part.clone()));
                let p = SelectParams {
                    a: some,
                    queries: room.index_q.range(part.start * ni * di..part.end * ni * di).address(),
                    scores: room.scores.address(),
                    most: (self.spec.context / block) as u64,
                    chosen: room.chosen.address(),
                };
                if longest / block > q.budget / block {
                    let warps = (longest / block).div_ceil(4).min(1024) as u32;
                    // SAFETY: scores and choices have room for `at_once` rows.
                    unsafe {
                        stored.score.launch(stream, Grid { blocks: [warps, count, 1], threads: 128 }, &p)?;
                        kernels.select.launch(stream, Grid { blocks: [count, 1, 1], threads: 256 }, &p)?;
                    }
                }
                let p = AttendParams {
                    a: some,
                    queries: room.queries.range(part.start * 2 * heads..part.end * 2 * heads).address(),
                    chosen: room.chosen.address(),
                    partials: room.partials.address(),
                    out: room.output.floats().range(part.start * heads..part.end * heads).address(),
                    quantised: room.output.target_from(any_blocks(&[out]), q.head_dim, part.start),
                    chunks: chunks as u32,
                    padding: 0,
                };
                let used = q.selected(block, longest).div_ceil(CHUNK) as u32;
                // SAFETY: partial results have room for `at_once` rows of `chunks` chunks.
                unsafe {
                    let blocks = [used, q.kv_heads as u32, count];
                    attend.launch(stream, Grid { blocks, threads: 256 }, &p)?;
                    kernels.merge.launch(
                        stream,
                        Grid { blocks: [q.heads as u32, count, 1], threads: 128 },
                        &p,
                    )?;
                }
            }
            Ok(())
        };
        queue().map_err(Failed::from)?;
        let target = room.output.target(any_blocks(&[out]), q.head_dim);
        self.settle(&room.output, target, any_blocks(&[out]))?;
        self.product(&out, &room.output, y)?;
        self.state.note_pending(spans, layer);
        let matrices: usize = [wq, wk, wv, iq, ik, out].iter().map(|w| w.bytes.len()).sum();
        let seen = |span: &Span| q.selected(block, span.start + span.rows) * 2 * kv;
        Ok(matrices + spans.iter().map(seen).sum::<usize>() * self.spec.kv.bytes())
    }
}

/// Whether there is a kernel for these heads.
pub(crate) fn check(q: &QsaShape) -> Result<(), BackendError> {
    let group = q.heads / q.kv_heads.max(1);
    if group <= 16 && q.head_dim <= 256 {
        return Ok(());
    }
    Err(failed(format!(
        "attention with {group} query heads of {} values per key head; at most 16 of 256 can be run",
        q.head_dim
    )))
}
