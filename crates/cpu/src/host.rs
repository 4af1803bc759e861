//! Experts for a device's windows: a few of one row's, or some of those that a prompt's rows use, by the whole pool.
//!
//! Owns a bench of its own, and the order in which experts are computed where some have to be read from the file first. The products are the CPU backend's.

use std::sync::{Arc, OnceLock};

use strata_backend::{
    BackendError, BuildHostExperts, ExpertWeights, GroupedRows, HostExperts, Layer, MoeShape, Spec,
};
use strata_plan::{Arena, Category, Place, Plan, Region};
use strata_quant::Activations;
use strata_residency::{ExpertId, ExpertStore, Tier};
use strata_topology::{Latch, Pool};

use crate::bench::{Bench, Crew, SLACK, TILE};
use crate::experts::{Stage, unit_floats};
use crate::route::{most_units, put_first};
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
            units: Vec::with_capacity(units.max(used)),
            unit_bounds: Vec::with_capacity(units + 1),
            places: vec![0; used],
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
    /// Experts in the order in which they are computed, of up to [`TILE`] places each, and where those end.
    units: Vec<u32>,
    unit_bounds: Vec<u32>,
    /// Where in that order each of one row's experts is.
    places: Vec<u32>,
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
        let (units, places) = (&mut self.units, &mut self.places[..count]);
        units.resize(count, 0);
        // Those in memory first: the others are read meanwhile.
        let store = &self.experts.store;
        put_first(experts, units, places, |expert| {
            let id = ExpertId { layer: layer.0, expert: expert as u16 };
            !store.reads_files() || store.tier(id).is_ok_and(|tier| tier == Tier::Heap)
        });
        let grouped = [&self.order[..count], units, &self.bounds[..=count]];
        let stage = self.experts.stage((layer, weights), u, grouped);
        for units in store.tour(layer.0, stage.units, true)? {
            let units = units?;
            let part = &mut out[units.start * d..units.end * d];
            stage.one_row(self.crew.team(), units, part, self.bench.whole(), &mut self.latches);
            if stage.error.get().is_some() {
                break;
            }
        }
        stage.error.into_inner().map_or(Ok(()), Err)?;
        gather(out, d, places);
        Ok(())
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
        let grouped = [order, &self.units, &self.unit_bounds];
        let stage = self.experts.stage((layer, weights), u, grouped);
        for units in self.experts.store.tour(layer.0, stage.units, false)? {
            stage.compute(self.crew.team(), units?, out, &mut self.bench, &mut self.latches);
            if stage.error.get().is_some() {
                break;
            }
        }
        stage.error.into_inner().map_or(Ok(()), Err)
    }
}

/// Puts rows of `width` values in another order: row `i` is then what row `places[i]` was.
fn gather(rows: &mut [f32], width: usize, places: &[u32]) {
    for at in 0..places.len() {
        // Rows before `at` are in place; what was there has gone to where that one came from.
        let mut from = places[at] as usize;
        while from < at {
            from = places[from] as usize;
        }
        if from > at {
            let (before, behind) = rows.split_at_mut(from * width);
            before[at * width..(at + 1) * width].swap_with_slice(&mut behind[..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand, and every order of four rows.
    #[test]
    fn rows_are_put_in_any_order() {
        for code in 0..256u32 {
            let places = [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6];
            if (0..4).any(|row| !places.contains(&row)) {
                continue;
            }
            let mut rows: Vec<f32> = (0..8u8).map(f32::from).collect();
            gather(&mut rows, 2, &places);
            let wanted = places.iter().flat_map(|&place| [2.0 * place as f32, 2.0 * place as f32 + 1.0]);
            assert_eq!(rows, wanted.collect::<Vec<_>>());
        }
    }
}
