//! Experts for a device's decode steps: a few of one row's, by the whole pool.
//!
//! Owns a bench of its own. The products are the CPU backend's.

use std::sync::{Arc, OnceLock};

use strata_backend::{BackendError, BuildHostExperts, ExpertWeights, HostExperts, Layer, MoeShape, Spec};
use strata_plan::{Arena, Category, Place, Plan, Region};
use strata_quant::Activations;
use strata_residency::ExpertStore;
use strata_topology::{Latch, Pool};

use crate::bench::{Bench, Crew, SLACK};
use crate::experts::{Stage, unit_floats};
use crate::{Cpu, failed};

/// The CPU, not yet built: on its threads, the caller's being one of them.
pub struct CpuHostExperts(pub Cpu);

/// The longest column that is quantised.
fn longest(spec: &Spec) -> usize {
    spec.shape.hidden.max(spec.shape.moe.width).next_multiple_of(32)
}

impl BuildHostExperts for CpuHostExperts {
    fn describe(&self, spec: &Spec, plan: &mut Plan) -> Region {
        let used = spec.shape.moe.used;
        let floats = unit_floats(&spec.shape, used) + SLACK;
        let columns = (used + 1) * Activations::bytes_for(longest(spec), 1);
        plan.item(Category::Scratch, "cpu quantised columns", Place::Heap, columns as u64);
        plan.heap(Category::Scratch, "cpu experts", floats * size_of::<f32>())
    }

    fn build(
        self: Box<Self>,
        spec: &Spec,
        region: Region,
        arena: &mut Arena,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn HostExperts>, BackendError> {
        let (Cpu { assignment, isa, grain }, used) = (self.0, spec.shape.moe.used);
        let floats = arena.take(region).map_err(failed)?;
        let acts = (0..=used).map(|_| Activations::new(longest(spec), 1)).collect();
        Ok(Box::new(CpuExperts {
            crew: Crew { pool: Pool::with(&assignment).map_err(failed)?, isa, grain },
            bench: Bench { each: floats.len(), floats, acts },
            order: vec![0; used],
            bounds: (0..=used as u32).collect(),
            latches: (0..used).map(|_| Latch::new()).collect(),
            store,
            d: spec.shape.hidden,
            moe: spec.shape.moe,
        }))
    }
}

/// Computes experts of one row.
struct CpuExperts {
    crew: Crew,
    bench: Bench,
    /// The one row, for each expert; and where each expert's places end.
    order: Vec<u32>,
    bounds: Vec<u32>,
    latches: Vec<Latch>,
    store: Arc<ExpertStore>,
    d: usize,
    moe: MoeShape,
}

impl HostExperts for CpuExperts {
    fn begin_step(&mut self) {
        self.crew.pool.begin_step();
    }

    fn rouse(&mut self) {
        self.crew.pool.rouse();
    }

    fn end_step(&mut self) {
        self.crew.pool.end_step();
    }

    fn outputs(
        &mut self,
        layer: Layer,
        weights: &ExpertWeights,
        experts: &[u32],
        u: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let count = experts.len();
        if count > self.moe.used || u.len() != self.d || out.len() != count * self.d {
            return Err(failed(format!(
                "{count} experts of one row, from {} values to {}",
                u.len(),
                out.len()
            )));
        }
        if count == 0 {
            return Ok(());
        }
        let stage = Stage {
            store: &self.store,
            layer,
            formats: *weights,
            scales: [None; 3],
            d: self.d,
            moe: self.moe,
            u,
            order: &self.order[..count],
            units: experts,
            bounds: &self.bounds[..=count],
            error: OnceLock::new(),
        };
        stage.one_row(self.crew.team(), 0..count, out, self.bench.whole(), &mut self.latches);
        stage.error.into_inner().map_or(Ok(()), Err)
    }
}
