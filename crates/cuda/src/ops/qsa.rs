//! Block-sparse attention with its indexer: `kernels/{qsa,indexer,attend,attend_many}.cu`.

use strata_backend::{BackendError, Buffer, KvFormat, Layer, QsaShape, QsaWeights, Shape, Span, Spec};

use super::input::{Input, Target, any_blocks};
use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Module};
use crate::inputs::Row;
use crate::recording::MOST_ROWS;
use crate::scratch::Scratch;
use crate::{Failed, failed};

/// Keys whose scores share a maximum. Twin: `CHUNK` in `kernels/qsa.cuh`.
const CHUNK: usize = 256;
/// Values that a block of threads has of each.
const SLICE: usize = 32;
/// Bytes that scores of blocks may take, and those that scores of keys and partial results may.
const ROOM: usize = 96 << 20;
/// Values of a score's first digit. Twin: `DIGITS` in `kernels/indexer.cu`.
const DIGITS: usize = 2048;
/// Heads and values of the index queries that many rows score together.
const INDEX_MANY: [usize; 2] = [4, 128];
/// The kernels for many rows: the most query heads of a key/value head, and the width of a head.
const MANY: [(usize, usize); 4] = [(4, 128), (12, 128), (4, 256), (12, 256)];

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
struct PrepareParams {
    a: AttentionParams,
    queries: u64,
    index_queries: u64,
    keys: u64,
    values: u64,
    raw: u64,
    query_gamma: u64,
    key_gamma: u64,
    index_query_gamma: u64,
    index_key_gamma: u64,
    counts: u64,
    counters: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct IndexerParams {
    a: AttentionParams,
    queries: u64,
    scores: u64,
    most: u64,
    chosen: u64,
    done: u64,
    counts: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AttendParams {
    a: AttentionParams,
    queries: u64,
    chosen: u64,
    scores: u64,
    partials: u64,
    done: u64,
    out: u64,
    quantised: Target,
    span: u32,
    chunks: u32,
}

/// Kernels for caches of one precision.
struct Stored {
    prepare: Kernel<PrepareParams>,
    /// By the widest head.
    choose: [(usize, Kernel<IndexerParams>); 2],
    weigh: [(usize, Kernel<AttendParams>); 2],
    gather: Kernel<AttendParams>,
}

impl Stored {
    fn new(modules: &[Module; 3], name: &str) -> Result<Stored, DriverError> {
        let [prepare, indexer, attend] = modules;
        type Found<P> = Result<Kernel<P>, DriverError>;
        let choose = |dim| -> Found<IndexerParams> {
            Ok(indexer.kernel(&format!("strata_choose_blocks_{name}_{dim}"))?.early())
        };
        let weigh = |dim| -> Found<AttendParams> {
            Ok(attend.kernel(&format!("strata_weigh_{name}_{dim}"))?.early())
        };
        Ok(Stored {
            prepare: prepare.kernel(&format!("strata_prepare_{name}"))?.early(),
            choose: [(128, choose(128)?), (256, choose(256)?)],
            weigh: [(128, weigh(128)?), (256, weigh(256)?)],
            gather: attend.kernel(&format!("strata_gather_{name}"))?.early(),
        })
    }
}

/// The kernel for heads of `dim` values, which were checked when the backend was described.
fn for_width<P>(kernels: &[(usize, Kernel<P>)], dim: usize) -> &Kernel<P> {
    &kernels.iter().find(|(most, _)| dim <= *most).expect("no wider heads are taken").1
}

/// The kernels.
pub(crate) struct Qsa {
    processors: usize,
    f32: Stored,
    f16: Stored,
    /// Of many rows: scores of blocks, and the choice.
    score: Kernel<IndexerParams>,
    select: Kernel<IndexerParams>,
    /// In the order of [`MANY`].
    attend_many: Vec<Kernel<AttendParams>>,
}

impl Qsa {
    pub(crate) fn new(context: &Context) -> Result<Qsa, OpError> {
        let modules = [module(context, "qsa")?, module(context, "indexer")?, module(context, "attend")?];
        let many = module(context, "attend_many")?;
        let attend_many =
            MANY.iter().map(|(group, dim)| many.kernel(&format!("strata_attend_many_{group}_{dim}")));
        Ok(Qsa {
            processors: context.device().processors as usize,
            f32: Stored::new(&modules, "f32")?,
            f16: Stored::new(&modules, "f16")?,
            score: modules[1].kernel("strata_score_blocks")?,
            select: modules[1].kernel("strata_select_blocks")?,
            attend_many: attend_many.collect::<Result<_, _>>()?,
        })
    }
}

/// Which kernel attends many rows at once, if there is one for these heads.
fn attends_many(spec: &Spec, q: &QsaShape) -> Option<usize> {
    let group = q.heads / q.kv_heads;
    let fits = |&(most, dim): &(usize, usize)| group <= most && q.head_dim == dim;
    // Keys are copied by 16 bytes, also those of a sequence behind another.
    let aligned = spec.kv == KvFormat::F16 && q.index_dim.is_multiple_of(8);
    MANY.iter().position(fits).filter(|_| aligned)
}

/// What the op needs while it runs.
pub(crate) struct Room {
    queries: DeviceSlice<f32>,
    keys: DeviceSlice<f32>,
    values: DeviceSlice<f32>,
    index_q: DeviceSlice<f32>,
    index_k: DeviceSlice<f32>,
    output: Input,
    /// Per row: blocks of threads that are done with a slice of a key/value head, and with its choice; of few rows also how many scores
    /// there are by their first digit.
    counts: DeviceSlice<u32>,
    chosen: DeviceSlice<u32>,
    /// Rows that choose at once, and scores of all their blocks.
    choosing: usize,
    block_scores: DeviceSlice<f32>,
    /// Rows that attend at once, where no kernel attends all: scores, and partial results.
    attending: usize,
    scores: DeviceSlice<f32>,
    partials: DeviceSlice<f32>,
}

/// Chunks of the keys of a row, at most.
fn chunks(spec: &Spec, q: &QsaShape, block: usize) -> usize {
    q.selected(block, spec.context).div_ceil(CHUNK)
}

/// Blocks of threads that share a row's chunk.
fn slices(q: &QsaShape) -> usize {
    q.kv_heads * q.head_dim.div_ceil(SLICE)
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
        let scores = q.heads * chunks(spec, q, block) * CHUNK;
        let partials = q.heads * chunks(spec, q, block) * q.head_dim.div_ceil(SLICE) * (2 + SLICE);
        let tall = rows.clamp(1, usize::from(u16::MAX));
        let at_once = |floats: usize| (ROOM / (4 * floats.max(1))).clamp(1, tall);
        let attending = match attends_many(spec, q) {
            Some(_) => tall.min(MOST_ROWS),
            None => at_once(scores + partials),
        };
        let choosing = at_once(most);
        Room {
            queries: room.take(rows * 2 * heads),
            keys: room.take(rows * kv),
            values: room.take(rows * kv),
            index_q: room.take(rows * q.index_heads * q.index_dim),
            index_k: room.take(rows * q.index_dim),
            output: Input::new(attended, heads, rows, room),
            counts: room.take(rows * (slices(q) + 1) + rows.min(MOST_ROWS) * DIGITS),
            chosen: room.take(rows * kept),
            choosing,
            block_scores: room.take(choosing * most),
            attending,
            scores: room.take(attending * scores),
            partials: room.take(attending * partials),
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
        let (ni, di) = (q.index_heads, q.index_dim);
        let [wq, wk] = [self.weights.matrix(w.q, 2 * heads, d)?, self.weights.matrix(w.k, kv, d)?];
        let [wv, out] = [self.weights.matrix(w.v, kv, d)?, self.weights.matrix(w.out, d, heads)?];
        let [iq, ik] = [self.weights.matrix(w.index_q, ni * di, d)?, self.weights.matrix(w.index_k, di, d)?];
        let [q_norm, k_norm] = [w.q_norm, w.k_norm].map(|w| self.weights.floats(w, q.head_dim));
        let [iq_norm, ik_norm] = [w.index_q_norm, w.index_k_norm].map(|w| self.weights.floats(w, di));

        let window = self.inputs.window(&self.stream, (&self.spec, &self.state), spans)?;
        let rows = window.count;
        let (u, y) = (self.buffer(u, rows, d)?, self.buffer(y, rows, d)?);
        let room = Room::new(&self.spec, &q, block, u, &mut self.room());
        let input = &self.mixed(u);
        self.prepare(input, &[wq, wk, wv, iq, ik])?;
        let products =
            [(wq, room.queries), (wk, room.keys), (wv, room.values), (iq, room.index_q), (ik, room.index_k)];
        self.products(&products, input)?;

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
        let (q_norm, k_norm, iq_norm, ik_norm) = (q_norm?, k_norm?, iq_norm?, ik_norm?);
        let many = rows > MOST_ROWS;
        let kept = q.budget / block;
        let (slices, digits) = (slices(&q), if many { 0 } else { DIGITS });
        // Recorded work has to do for every position.
        let longest = spans.iter().map(|span| span.start + span.rows).max().unwrap_or(0);
        let longest = if self.recording { self.spec.context } else { longest };
        let parts =
            |at_once: usize| (0..rows).step_by(at_once).map(move |first| first..rows.min(first + at_once));
        let queue = || -> Result<(), DriverError> {
            let p = PrepareParams {
                a: a(window.rows),
                queries: room.queries.address(),
                index_queries: room.index_q.address(),
                keys: room.keys.address(),
                values: room.values.address(),
                raw: room.index_k.address(),
                query_gamma: q_norm.address(),
                key_gamma: k_norm.address(),
                index_query_gamma: iq_norm.address(),
                index_key_gamma: ik_norm.address(),
                counts: room.counts.address(),
                counters: (slices + 1 + digits) as u32,
                padding: 0,
            };
            let warps = rows * (q.heads + 2 * q.kv_heads + ni + 1);
            // SAFETY: the caches and the table have a place for every position of the context, gammas are as wide as their heads.
            unsafe { stored.prepare.launch(stream, Grid::threads(warps * 32, 128), &p)? };

            for part in parts(room.choosing).filter(|_| longest / block > kept) {
                let count = part.len();
                let p = IndexerParams {
                    a: a(window.rows.range(part.clone())),
                    queries: room.index_q.range(part.start * ni * di..part.end * ni * di).address(),
                    scores: room.block_scores.address(),
                    most: (self.spec.context / block) as u64,
                    chosen: room.chosen.range(part.start * kept..part.end * kept).address(),
                    done: room.counts.range(rows * slices..rows * (slices + 1)).range(part.clone()).address(),
                    counts: if many {
                        0
                    } else {
                        let counts = room.counts.range(rows * (slices + 1)..rows * (slices + 1 + digits));
                        counts.range(part.start * digits..part.end * digits).address()
                    },
                };
                let blocks = longest / block;
                if many && [ni, di] == INDEX_MANY && self.spec.kv == KvFormat::F16 {
                    let spans = [blocks.div_ceil(1024) as u32, count.div_ceil(16) as u32, 1];
                    // SAFETY: there is room for the scores of that many rows, and for all rows' choices.
                    unsafe {
                        kernels.score.launch(stream, Grid { blocks: spans, threads: 128 }, &p)?;
                        let rows = [count as u32, 1, 1];
                        kernels.select.launch(stream, Grid { blocks: rows, threads: 256 }, &p)?;
                    }
                } else {
                    let wide = (kernels.processors / count).clamp(1, blocks.div_ceil(128)) as u32;
                    let grid = Grid { blocks: [wide, count as u32, 1], threads: 1024 };
                    // SAFETY: as above; the counts are zero.
                    unsafe { for_width(&stored.choose, di).launch(stream, grid, &p)? };
                }
            }

            let attend_params = |part: std::ops::Range<usize>| AttendParams {
                a: a(window.rows.range(part.clone())),
                queries: room.queries.range(part.start * 2 * heads..part.end * 2 * heads).address(),
                chosen: room.chosen.range(part.start * kept..part.end * kept).address(),
                scores: room.scores.address(),
                partials: room.partials.address(),
                done: room.counts.range(part.start * slices..part.end * slices).address(),
                out: room.output.floats().range(part.start * heads..part.end * heads).address(),
                quantised: room.output.target_from(any_blocks(&[out]), q.head_dim, part.start),
                span: (chunks(&self.spec, &q, block) * CHUNK) as u32,
                chunks: chunks(&self.spec, &q, block) as u32,
            };
            if let Some(which) = attends_many(&self.spec, &q).filter(|_| many) {
                let grid = Grid { blocks: [(rows * q.kv_heads) as u32, 1, 1], threads: 64 };
                // SAFETY: each block of threads leaves its row's heads, and nothing else.
                return unsafe { kernels.attend_many[which].launch(stream, grid, &attend_params(0..rows)) };
            }
            let used = q.selected(block, longest);
            for part in parts(room.attending) {
                let count = part.len() as u32;
                let p = attend_params(part);
                // SAFETY: there is room for scores and partial results of that many rows; the counts are zero.
                unsafe {
                    let blocks = [used.div_ceil(16) as u32, q.kv_heads as u32, count];
                    for_width(&stored.weigh, q.head_dim).launch(stream, Grid { blocks, threads: 128 }, &p)?;
                    let blocks = [used.div_ceil(CHUNK) as u32, slices as u32, count];
                    stored.gather.launch(stream, Grid { blocks, threads: 512 }, &p)?;
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
    if group <= 16 && q.head_dim <= 256 && q.index_dim <= 256 {
        return Ok(());
    }
    Err(failed(format!(
        "attention with {group} query heads of {} values per key head, and an indexer of {}; at most 16 of 256 and 256 can be run",
        q.head_dim, q.index_dim
    )))
}
