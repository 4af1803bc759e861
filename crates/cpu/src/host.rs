//! Experts for a device's decode steps: a few of one row's, by the whole pool.
//!
//! Owns a bench of its own, and the order in which experts are computed where some have to be read from the file first. The products are the CPU backend's.

use std::sync::{Arc, OnceLock};

use strata_backend::{BackendError, BuildHostExperts, ExpertWeights, HostExperts, Layer, MoeShape, Spec};
use strata_plan::{Arena, Category, Place, Plan, Region};
use strata_quant::Activations;
use strata_residency::{ExpertId, ExpertStore, Tier};
use strata_topology::{Latch, Pool};

use crate::bench::{Bench, Crew, SLACK};
use crate::experts::{Stage, unit_floats};
use crate::route::put_first;
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
            units: vec![0; used],
            places: vec![0; used],
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
    /// The experts in the order in which they are computed, and where in it each of those asked for is.
    units: Vec<u32>,
    places: Vec<u32>,
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
        let (units, places) = (&mut self.units[..count], &mut self.places[..count]);
        // Those in memory first: the others are read meanwhile.
        put_first(experts, units, places, |expert| {
            let id = ExpertId { layer: layer.0, expert: expert as u16 };
            !self.store.reads_files() || self.store.tier(id).is_ok_and(|tier| tier == Tier::Heap)
        });
        let stage = Stage {
            store: &self.store,
            layer,
            formats: *weights,
            scales: [None; 3],
            d: self.d,
            moe: self.moe,
            u,
            order: &self.order[..count],
            units,
            bounds: &self.bounds[..=count],
            error: OnceLock::new(),
        };
        for units in self.store.tour(layer.0, stage.units, true)? {
            let units = units?;
            let part = &mut out[units.start * self.d..units.end * self.d];
            stage.one_row(self.crew.team(), units, part, self.bench.whole(), &mut self.latches);
            if stage.error.get().is_some() {
                break;
            }
        }
        stage.error.into_inner().map_or(Ok(()), Err)?;
        gather(out, self.d, places);
        Ok(())
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
