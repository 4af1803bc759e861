//! The backend itself: what it is built from, and the dispatch of ops.

use std::sync::Arc;
use std::time::Instant;

use strata_backend::{
    Backend, BackendError, Buffer, Build, Checkpoint, Counters, Fence, Op, SeqSlot, Shape, Span, Spec,
    WeightData,
};
use strata_plan::{Arena, Block, Plan};
use strata_quant::{Activations, Isa};
use strata_residency::{ExpertStore, LayerSource};
use strata_topology::{Assignment, Latch, Pool};

use crate::bench::{Bench, Crew, GRAIN, MOST_STREAMS, TILE};
use crate::buffers::Buffers;
use crate::draft::Join;
use crate::failed;
use crate::memory::{self, Described};
use crate::ngram::Table;
use crate::route::Routing;
use crate::select::MOST_DIM;
use crate::shared::{Grid, run};
use crate::spans::Piece;
use crate::state::State;
use crate::taps::MOST_TAPS;
use crate::weights::Weights;

/// The CPU, not yet built into a backend: which threads compute, with which instructions.
pub struct Cpu {
    pub(crate) assignment: Assignment,
    pub(crate) isa: Isa,
    pub(crate) grain: usize,
}

impl Cpu {
    /// A backend-to-be on the threads of `assignment`, which start when it is built, with the kernels of `isa`.
    pub fn new(assignment: Assignment, isa: Isa) -> Cpu {
        Cpu { assignment, isa, grain: GRAIN }
    }

    /// Another least amount of work that is worth another task, in multiply-adds. Changes the speed, never the bits; tests use
    /// 1, so that small shapes are shared among threads too.
    pub fn with_grain(self, grain: usize) -> Cpu {
        Cpu { grain: grain.max(1), ..self }
    }
}

impl Build for Cpu {
    type Described = Described;

    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        _: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Described, BackendError> {
        check(&spec.shape)?;
        Ok(memory::describe(spec, weights, self.assignment.threads(), plan))
    }

    fn build(
        self,
        spec: Spec,
        described: Described,
        mut arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(Box::new(CpuBackend::new(self, spec, described, &mut arena, weights, store)?))
    }
}

/// Computes ops on the CPU. Made by [`Cpu`]. An op is done when `submit` returns.
pub(crate) struct CpuBackend {
    pub(crate) spec: Spec,
    pub(crate) crew: Crew,
    pub(crate) weights: Weights,
    pub(crate) buffers: Buffers,
    pub(crate) state: State,
    pub(crate) bench: Bench,
    pub(crate) piece: Piece,
    pub(crate) piece_rows: usize,
    pub(crate) piece_floats: Block<f32>,
    pub(crate) rope: Block<f32>,
    pub(crate) routing: Routing,
    /// Per place of the routing `[D]`.
    pub(crate) products: Block<f32>,
    /// For the experts of one row.
    pub(crate) latches: Vec<Latch>,
    pub(crate) store: Arc<ExpertStore>,
    counters: Counters,
    submitted: u64,
}

impl CpuBackend {
    fn new(
        cpu: Cpu,
        spec: Spec,
        described: Described,
        arena: &mut Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<CpuBackend, BackendError> {
        let sizes = described.sizes;
        let mut floats = |region| arena.take::<f32>(region).map_err(failed);
        let buffers = described.buffers.iter().map(|&region| floats(region)).collect::<Result<_, _>>()?;
        let weights = Weights::new(&spec, weights, floats(described.weights)?)?;
        let (mut rope, products) = (floats(described.rope)?, floats(described.products)?);
        let (bench, piece_floats) = (floats(described.bench)?, floats(described.piece)?);
        let [experts, shares, places, order, ends, units, bounds] = described.routing;
        let shares = floats(shares)?;
        let mut words = |region| arena.take::<u32>(region).map_err(failed);
        let routing = Routing {
            rows: 0,
            grouped: false,
            experts: words(experts)?,
            shares,
            places: words(places)?,
            order: words(order)?,
            ends: words(ends)?,
            units: words(units)?,
            bounds: words(bounds)?,
            unit_count: 0,
        };
        let state = State::new(&spec, &described.layers, arena)?;
        let crew =
            Crew { pool: Pool::with(&cpu.assignment).map_err(failed)?, isa: cpu.isa, grain: cpu.grain };
        let team = crew.team();
        if let Some(q) = spec.shape.qsa.as_ref().filter(|q| q.rotary > 0) {
            let grain = spec.context.div_ceil(64 * team.threads()).max(1);
            run(team.pool, Grid::rows(&mut rope, q.rotary, grain), |task, part| {
                strata_backend::rope::fill(q, task * grain, part.into_slice());
            });
        }
        let acts = (0..sizes.places).map(|_| Activations::new(sizes.k_max, TILE)).collect();
        Ok(CpuBackend {
            crew,
            weights,
            buffers: Buffers::new(buffers),
            state,
            bench: Bench { floats: bench, each: sizes.each, acts },
            piece: Piece::new(spec.sequences),
            piece_rows: sizes.piece_rows,
            piece_floats,
            rope,
            routing,
            products,
            latches: (0..spec.shape.moe.used).map(|_| Latch::new()).collect(),
            store,
            counters: Counters::default(),
            submitted: 0,
            spec,
        })
    }

    fn compute(&mut self, op: &Op<'_>) -> Result<usize, BackendError> {
        match *op {
            Op::Embed { table, tokens, x } => self.embed(table, tokens, x),
            Op::Ngram { layer, ref weights, format, scale, table_rows, spans, x } => {
                self.ngram(layer, weights, Table { format, scale, rows: table_rows }, spans, x)
            }
            Op::MixerRead { ref weights, rows, x, u, inject } => self.mixer_read(weights, rows, x, u, inject),
            Op::MixerWrite { rows, y, inject, x } => self.mixer_write(rows, y, inject, x),
            Op::Gdn { layer, ref weights, spans, u, y } => self.gdn(layer, weights, spans, u, y),
            Op::Qsa { layer, ref weights, spans, u, y } => self.qsa(layer, weights, spans, u, y),
            Op::Route { router, rows, u, .. } => self.route(router, rows, u),
            Op::Group { rows } => self.group(rows).map(|()| 0),
            Op::Experts { layer, ref weights, rows, u } => self.experts(layer, weights, rows, u),
            Op::Combine { ref shared, rows, u, y } => self.combine(shared, rows, u, y),
            Op::Head { ref mixer, output, rows, x, logits } => self.head(mixer, output, rows, x, logits),
            Op::DraftJoin { table, eh_proj, e_norm, h_norm, next, x, out } => {
                self.draft_join(Join { table, eh_proj, e_norm, h_norm }, next, x, out)
            }
        }
    }
}

/// Whether the geometry keeps inside what the ops have arrays for; that it makes sense is known of every model that was opened.
fn check(shape: &Shape) -> Result<(), BackendError> {
    let Shape { streams, gdn, qsa, ngram, .. } = shape;
    let most = |what: &str, n: usize, most: usize| match n <= most {
        true => Ok(()),
        false => Err(failed(format!("there are no ops for this geometry: {what} is {n}, more than {most}"))),
    };
    most("the number of residual streams", *streams, MOST_STREAMS)?;
    most("the number of GDN convolution taps", gdn.map_or(0, |g| g.conv_kernel), MOST_TAPS)?;
    most("the number of n-gram convolution taps", ngram.map_or(0, |n| n.conv_kernel), MOST_TAPS)?;
    most("the width of an indexer head", qsa.as_ref().map_or(0, |q| q.index_dim), MOST_DIM)
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        let team = self.crew.team();
        let threads = team.threads();
        format!("cpu ({}, {threads} thread{})", team.isa, if threads == 1 { "" } else { "s" })
    }

    fn begin_step(&mut self) {
        self.crew.pool.begin_step();
    }

    fn end_step(&mut self) {
        self.crew.pool.end_step();
    }

    fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        let started = Instant::now();
        let bytes = self.compute(op).inspect_err(|_| self.routing.rows = 0)?;
        self.submitted += 1;
        self.counters.add(op.family(), started.elapsed().as_nanos() as u64, bytes as u64);
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence, BackendError> {
        Ok(Fence(self.submitted))
    }

    fn wait(&mut self, _: Fence) -> Result<(), BackendError> {
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError> {
        self.buffers.read(buffer, first, out)
    }

    fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        self.state.commit(spans)
    }

    fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError> {
        self.state.clear(slot)
    }

    fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError> {
        self.state.fork(from, to, tokens)
    }

    fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError> {
        self.state.restore(from, slot)
    }

    fn export(&mut self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError> {
        self.state.export(slot, tokens, out)
    }

    fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.state.import(slot, tokens, bytes)
    }

    fn take_counters(&mut self) -> Counters {
        let mut counters = std::mem::take(&mut self.counters);
        if let Some(count) = self.store.take_file_count() {
            counters.add_reads(count);
        }
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_backend::{BufferSpec, GdnShape, KvFormat, LayerState, MoeShape, NgramShape, QsaShape};
    use strata_plan::Category;
    use strata_topology::Topology;

    fn spec() -> Spec {
        let qsa = QsaShape {
            heads: 4,
            kv_heads: 2,
            head_dim: 20,
            rotary: 8,
            rope_base: 1e4,
            index_heads: 3,
            index_dim: 12,
            budget: 12,
        };
        Spec {
            shape: Shape {
                hidden: 40,
                streams: 3,
                mixer_rank: 10,
                vocab: 77,
                norm_eps: 1e-6,
                gdn: Some(GdnShape {
                    key_heads: 2,
                    value_heads: 6,
                    key_dim: 12,
                    value_dim: 20,
                    conv_kernel: 4,
                }),
                qsa: Some(qsa),
                moe: MoeShape { experts: 7, used: 3, width: 24, shared_width: 18 },
                ngram: Some(NgramShape { heads: 4, row: 10, conv_kernel: 3, dilation: 2 }),
            },
            layers: vec![
                LayerState { gdn: true, qsa: None, ngram: true },
                LayerState { gdn: false, qsa: Some(3), ngram: false },
                LayerState { gdn: false, qsa: Some(4), ngram: false },
            ],
            sequences: 3,
            checkpoints: 2,
            context: 50,
            kv: KvFormat::F16,
            window: 9,
            buffers: vec![BufferSpec { name: "x", rows: 9, width: 120 }],
        }
    }

    fn build(spec: Spec) -> Result<(CpuBackend, usize, usize), BackendError> {
        let cpu = Cpu::new(Topology::read().assign(Some(2)).unwrap(), Isa::Scalar);
        let mut plan = Plan::new();
        let described = cpu.describe(&spec, &[], &[], &mut plan)?;
        let mut arena = Arena::new(&plan).unwrap();
        let store = Arc::new(ExpertStore::new(vec![], Box::new(|| Ok(()))));
        let backend = CpuBackend::new(cpu, spec, described, &mut arena, vec![], store)?;
        Ok((backend, arena.taken_bytes(), plan.arena_bytes()))
    }

    /// Oracle: the plan.
    #[test]
    fn every_planned_region_is_taken() {
        let (_, taken, planned) = build(spec()).unwrap();
        assert_eq!(taken, planned);
    }

    /// Oracle: `Spec`'s own arithmetic, through the byte form.
    #[test]
    fn state_is_as_large_as_the_spec_says() {
        let spec = spec();
        let expected: usize = spec.layers.iter().map(|layer| spec.state_bytes(layer, 50)).sum();
        let (mut backend, ..) = build(spec).unwrap();
        let mut bytes = Vec::new();
        backend.export(SeqSlot(2), 50, &mut bytes).unwrap();
        assert_eq!(bytes.len(), expected);
        assert!(backend.import(SeqSlot(1), 50, &bytes).is_ok());
    }

    /// Oracle: the bounds that docs/ARCHITECTURE.md has, each one below and one above. Refused before anything is allocated.
    #[test]
    fn a_geometry_without_ops_is_refused() {
        let cpu = Cpu::new(Topology::uniform(2).assign(Some(2)).unwrap(), Isa::Scalar);
        for (change, most, words) in [
            ((|s, n| s.streams = n) as fn(&mut Shape, usize), 32, "residual streams is 33, more than 32"),
            (|s, n| s.gdn.as_mut().unwrap().conv_kernel = n, 8, "GDN convolution taps is 9, more than 8"),
            (
                |s, n| s.ngram.as_mut().unwrap().conv_kernel = n,
                8,
                "n-gram convolution taps is 9, more than 8",
            ),
            (|s, n| s.qsa.as_mut().unwrap().index_dim = n, 256, "indexer head is 257, more than 256"),
        ] {
            let describe = |n| {
                let mut spec = spec();
                change(&mut spec.shape, n);
                cpu.describe(&spec, &[], &[], &mut Plan::new()).map(|_| ())
            };
            assert!(describe(most).is_ok(), "{most}");
            let said = describe(most + 1).unwrap_err().to_string();
            assert!(said.contains("no ops for this geometry") && said.contains(words), "{said}");
        }
    }

    /// Oracle: the plan's promise. The largest caches that a model file may ask for are more than a number holds, and say so.
    #[test]
    fn caches_saturate() {
        let cpu = Cpu::new(Topology::uniform(2).assign(Some(2)).unwrap(), Isa::Scalar);
        let mut spec = Spec { context: 1 << 30, ..spec() };
        let q = spec.shape.qsa.as_mut().unwrap();
        (q.heads, q.kv_heads, q.head_dim) = (1 << 20, 1 << 20, 1 << 20);
        let mut plan = Plan::new();
        cpu.describe(&spec, &[], &[], &mut plan).unwrap();
        assert_eq!(plan.by_category(Category::Cache), u64::MAX);
    }
}
