//! Experts for a device's windows: a few of one row's, or some of those that a prompt's rows use, by the whole pool.
//!
//! Owns a bench of its own. The products are the CPU backend's.

use std::sync::{Arc, OnceLock};

use strata_backend::{
    BackendError, BuildHostExperts, ExpertWeights, GroupedRows, HostExperts, Layer, MoeShape, Spec,
};
use strata_plan::{Arena, Category, Place, Plan, Region};
use strata_quant::Activations;
use strata_residency::ExpertStore;
use strata_topology::{Latch, Pool};

use crate::bench::{Bench, Crew, SLACK, TILE};
use crate::experts::{Stage, unit_floats};
use crate::route::most_units;
use crate::{Cpu, failed};

/// The CPU, not yet built: on its threads, the caller's being one of them.
pub struct CpuHostExperts(pub Cpu);

/// Places to work, the floats of each, and the longest column that is quantised.
fn sizes(spec: &Spec, threads: usize) -> [usize; 3] {
    let (shape, used) = (&spec.shape, spec.shape.moe.used);
    let places = threads.max(used + 1);
    // One row's experts have all places together.
    let each = unit_floats(shape, TILE).max(unit_floats(shape, used).div_ceil(places));
    [places, (each + SLACK).next_multiple_of(16), shape.hidden.max(shape.moe.width).next_multiple_of(32)]
}

impl BuildHostExperts for CpuHostExperts {
    fn describe(&self, spec: &Spec, plan: &mut Plan) -> Region {
        let [places, each, k_max] = sizes(spec, self.0.assignment.threads());
        let columns = places * Activations::bytes_for(k_max, TILE);
        plan.item(Category::Scratch, "cpu quantised columns", Place::Heap, columns as u64);
        let units = 4 * (2 * most_units(&spec.shape.moe, spec.window) + 1 + 2 * spec.shape.moe.used);
        plan.item(Category::Scratch, "cpu experts' units", Place::Heap, units as u64);
        plan.heap(Category::Scratch, "cpu experts", places * each * size_of::<f32>())
    }

    fn build(
        self: Box<Self>,
        spec: &Spec,
        region: Region,
        arena: &mut Arena,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn HostExperts>, BackendError> {
        let (Cpu { assignment, isa, grain }, used) = (self.0, spec.shape.moe.used);
        let [places, each, k_max] = sizes(spec, assignment.threads());
        let units = most_units(&spec.shape.moe, spec.window);
        Ok(Box::new(CpuExperts {
            crew: Crew { pool: Pool::with(&assignment).map_err(failed)?, isa, grain },
            bench: Bench {
                floats: arena.take(region).map_err(failed)?,
                each,
                acts: (0..places).map(|_| Activations::new(k_max, TILE)).collect(),
            },
            order: vec![0; used],
            bounds: (0..=used as u32).collect(),
            units: Vec::with_capacity(units),
            unit_bounds: Vec::with_capacity(units + 1),
            latches: (0..used).map(|_| Latch::new()).collect(),
            experts: Experts { store, d: spec.shape.hidden, moe: spec.shape.moe },
        }))
    }
}

/// The model's experts.
struct Experts {
    store: Arc<ExpertStore>,
    d: usize,
    moe: MoeShape,
}

impl Experts {
    /// What computes these units of rows of `u`.
    fn stage<'a>(
        &'a self,
        (layer, formats): (Layer, &ExpertWeights),
        u: &'a [f32],
        [order, units, bounds]: [&'a [u32]; 3],
    ) -> Stage<'a> {
        Stage {
            store: &self.store,
            layer,
            formats: *formats,
            scales: [None; 3],
            d: self.d,
            moe: self.moe,
            u,
            order,
            units,
            bounds,
            error: OnceLock::new(),
        }
    }
}

/// Computes experts.
struct CpuExperts {
    crew: Crew,
    bench: Bench,
    /// The one row, for each expert; and where each expert's places end.
    order: Vec<u32>,
    bounds: Vec<u32>,
    /// Experts of up to [`TILE`] places each, and where those end.
    units: Vec<u32>,
    unit_bounds: Vec<u32>,
    latches: Vec<Latch>,
    experts: Experts,
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
        let (count, d) = (experts.len(), self.experts.d);
        if count > self.experts.moe.used || u.len() != d || out.len() != count * d {
            return Err(failed(format!(
                "{count} experts of one row, from {} values to {}",
                u.len(),
                out.len()
            )));
        }
        if count == 0 {
            return Ok(());
        }
        let grouped = [&self.order[..count], experts, &self.bounds[..=count]];
        let stage = self.experts.stage((layer, weights), u, grouped);
        stage.one_row(self.crew.team(), 0..count, out, self.bench.whole(), &mut self.latches);
        stage.error.into_inner().map_or(Ok(()), Err)
    }

    fn grouped(
        &mut self,
        layer: Layer,
        weights: &ExpertWeights,
        rows: GroupedRows<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let (GroupedRows { experts, bounds, order, u }, d) = (rows, self.experts.d);
        let places = order.len();
        let ends = bounds.first() == Some(&0) && bounds.last().is_some_and(|end| *end as usize == places);
        if bounds.len() != experts.len() + 1 || !ends || !bounds.is_sorted() || out.len() != places * d {
            return Err(failed(format!(
                "{places} places of {} experts, to {} values",
                experts.len(),
                out.len()
            )));
        }
        if let Some(row) = order.iter().find(|&&row| (row as usize + 1) * d > u.len()) {
            return Err(failed(format!("row {row} of {}", u.len() / d)));
        }
        self.units.clear();
        self.unit_bounds.clear();
        self.unit_bounds.push(0);
        for (expert, bound) in experts.iter().zip(bounds.windows(2)) {
            for first in (bound[0]..bound[1]).step_by(TILE) {
                self.units.push(*expert);
                self.unit_bounds.push(bound[1].min(first + TILE as u32));
            }
        }
        let count = self.units.len();
        let stage = self.experts.stage((layer, weights), u, [order, &self.units, &self.unit_bounds]);
        stage.compute(self.crew.team(), 0..count, out, &mut self.bench, &mut self.latches);
        stage.error.into_inner().map_or(Ok(()), Err)
    }
}
