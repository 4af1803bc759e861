//! Routing: which experts each row uses, and each expert's rows.
//!
//! Owns the choice and its memory, which stays until the next `Route`.
//!
//! Rounding: `p = exp(logit - largest) / sum`, the sum lane-32; the `used` largest p are chosen (ties, and anything that
//! isn't a number, to the lower id) and divided by their sum, which is added in ascending order of ids.

use strata_backend::{BackendError, Buffer, MoeShape, Weight};
use strata_plan::Block;
use strata_quant::{dispatch, lanes, math};

use crate::backend::CpuBackend;
use crate::bench::{Spread, TILE};
use crate::failed;
use crate::shared::{Grid, Job};

/// A window's routing. Pairs are (row, place among the row's experts), numbered `row * used + place`.
pub(crate) struct Routing {
    /// Rows of the window that was routed.
    pub(crate) rows: usize,
    /// Whether the pairs are grouped.
    pub(crate) grouped: bool,
    /// Per pair the expert, ascending in a row.
    pub(crate) experts: Block<u32>,
    /// Per pair the expert's share.
    pub(crate) shares: Block<f32>,
    /// Per pair its place in the order of experts, then rows.
    pub(crate) places: Block<u32>,
    /// Per place the pair's row.
    pub(crate) order: Block<u32>,
    /// Per expert the end of its places; used while grouping.
    pub(crate) ends: Block<u32>,
    /// Units of work: `TILE` places of one expert at most. Per unit its expert.
    pub(crate) units: Block<u32>,
    /// Per unit its first place, and the end of the last.
    pub(crate) bounds: Block<u32>,
    /// How many units.
    pub(crate) unit_count: usize,
}

/// The most units that `rows` rows can make.
pub(crate) fn most_units(moe: &MoeShape, rows: usize) -> usize {
    let pairs = rows * moe.used;
    pairs.min(moe.experts + pairs / TILE)
}

/// Floats of a worker's tile.
pub(crate) fn scratch(moe: &MoeShape, tile: usize) -> usize {
    tile * moe.experts
}

impl Routing {
    /// Puts some of one row's experts before its others: they are computed first, and summed in the order of ids all the same.
    pub(crate) fn put_first(&mut self, first: impl Fn(u32) -> bool) {
        put_first(&self.experts[..self.unit_count], &mut self.units, &mut self.places, first);
    }
}

/// Gives experts places, to some before the others: which comes at each place, and each one's place.
pub(crate) fn put_first(experts: &[u32], order: &mut [u32], places: &mut [u32], first: impl Fn(u32) -> bool) {
    let (mut front, mut back) = (0, experts.len());
    for (at, &expert) in experts.iter().enumerate() {
        let place = match first(expert) {
            true => {
                front += 1;
                front - 1
            }
            false => {
                back -= 1;
                back
            }
        };
        (order[place], places[at]) = (expert, place as u32);
    }
}

impl CpuBackend {
    /// Chooses each row's experts; returns the bytes read.
    pub(crate) fn route(&mut self, router: Weight, rows: usize, u: Buffer) -> Result<usize, BackendError> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        let router = self.weights.matrix(router, moe.experts, d)?;
        let [u] = self.buffers.get([(u, rows, d)])?;
        let u = &*u;
        let team = self.crew.team();
        let routing = &mut self.routing;
        if rows > self.spec.window {
            return Err(failed(format!("{rows} rows to route in windows of {}", self.spec.window)));
        }
        (routing.rows, routing.grouped) = (rows, false);
        let (experts, shares) =
            (&mut routing.experts[..rows * moe.used], &mut routing.shares[..rows * moe.used]);
        let bytes = crate::weights::bytes(&router);
        let by = Spread::new(team, rows, bytes);
        let split = (Grid::rows(experts, moe.used, by.grain), Grid::rows(shares, moe.used, by.grain));
        by.run(&mut self.bench, split, |team, rows, (experts, shares), mut scratch| {
            let logits = scratch.take(rows.len() * moe.experts);
            let input = team.input(&u[rows.start * d..rows.end * d], d, scratch.acts, &[router]);
            team.products(input, &mut [Job::new(router, logits, moe.experts)]);
            let (experts, shares) = (experts.into_slice(), shares.into_slice());
            let out = experts.chunks_exact_mut(moe.used).zip(shares.chunks_exact_mut(moe.used));
            for (logits, (experts, shares)) in logits.chunks_exact_mut(moe.experts).zip(out) {
                choose(team.isa, logits, experts, shares);
            }
        });
        Ok(bytes)
    }

    /// Orders the routing's pairs by expert, then row.
    pub(crate) fn group(&mut self, rows: usize) -> Result<(), BackendError> {
        let moe = self.spec.shape.moe;
        let routing = &mut self.routing;
        if rows != routing.rows {
            return Err(failed(format!("{rows} rows to group where {} were routed", routing.rows)));
        }
        let pairs = rows * moe.used;
        let ends = &mut routing.ends[..moe.experts];
        ends.fill(0);
        for &expert in &routing.experts[..pairs] {
            ends[expert as usize] += 1;
        }
        let (mut first, mut units) = (0, 0);
        for (expert, end) in ends.iter_mut().enumerate() {
            let last = first + *end;
            // From here on the next free place; in the end it is the end.
            *end = first;
            while first < last {
                (routing.units[units], routing.bounds[units]) = (expert as u32, first);
                first = last.min(first + TILE as u32);
                units += 1;
            }
        }
        routing.bounds[units] = pairs as u32;
        routing.unit_count = units;
        for pair in 0..pairs {
            let place = &mut ends[routing.experts[pair] as usize];
            routing.places[pair] = *place;
            routing.order[*place as usize] = (pair / moe.used) as u32;
            *place += 1;
        }
        routing.grouped = true;
        Ok(())
    }
}

dispatch! {
    /// Softmax of `logits` in place, then the choice.
    fn choose(isa, logits: &mut [f32], experts: &mut [u32], shares: &mut [f32]) {
        let largest = lanes::max(logits);
        logits.iter_mut().for_each(|x| *x = math::exp(*x - largest));
        let sum = lanes::sum(logits);
        logits.iter_mut().for_each(|x| *x /= sum);
        // The chosen so far are kept sorted by share; a later id enters only above the least of them.
        let used = experts.len();
        let mut count = 0;
        for (id, &p) in logits.iter().enumerate() {
            if count == used {
                // (p, id) comes after every chosen one unless p is larger.
                if !(p > shares[used - 1] || (shares[used - 1].is_nan() && !p.is_nan())) {
                    continue;
                }
                count -= 1;
            }
            let mut at = count;
            while at > 0 && (p > shares[at - 1] || (shares[at - 1].is_nan() && !p.is_nan())) {
                (shares[at], experts[at]) = (shares[at - 1], experts[at - 1]);
                at -= 1;
            }
            (shares[at], experts[at]) = (p, id as u32);
            count += 1;
        }
        // By id: an insertion sort of a handful.
        for i in 1..used {
            let mut at = i;
            while at > 0 && experts[at] < experts[at - 1] {
                experts.swap(at, at - 1);
                shares.swap(at, at - 1);
                at -= 1;
            }
        }
        let mut sum = 0.0;
        shares.iter().for_each(|p| sum += p);
        shares.iter_mut().for_each(|p| *p /= sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_quant::Isa;

    fn chosen(logits: &[f32], used: usize) -> (Vec<u32>, Vec<f32>) {
        let (mut experts, mut shares) = (vec![9; used], vec![9.0; used]);
        choose(Isa::detect(), &mut logits.to_vec(), &mut experts, &mut shares);
        (experts, shares)
    }

    /// Oracle: a stable sort by falling logit, and a float64 softmax of what it chooses.
    #[test]
    fn the_largest_are_chosen_in_order_of_id() {
        for seed in 0..100u32 {
            let level = |i: u32| (i.wrapping_mul(2_654_435_769).wrapping_add(seed * 977) >> 27) as f32 / 4.0;
            let logits: Vec<f32> = (0..3 + seed % 50).map(level).collect();
            for used in [1, 2, 3, logits.len()] {
                let (experts, shares) = chosen(&logits, used);
                let mut expected: Vec<u32> = (0..logits.len() as u32).collect();
                expected.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
                expected.truncate(used);
                expected.sort_unstable();
                assert_eq!(experts, expected, "{used} of {logits:?}");
                let weight = |e: &u32| f64::from(logits[*e as usize]).exp();
                let total: f64 = expected.iter().map(weight).sum();
                for (e, &share) in expected.iter().zip(&shares) {
                    assert!((f64::from(share) - weight(e) / total).abs() < 1e-6);
                }
            }
        }
    }

    /// Oracle: that each pair's place is its expert's unit, and the order asked for.
    #[test]
    fn some_experts_of_a_row_come_first() {
        let mut plan = strata_plan::Plan::new();
        let category = strata_plan::Category::Window;
        let regions: Vec<_> = (0..6).map(|_| plan.heap(category, "words", 6 * 4)).collect();
        let shares = plan.heap(category, "shares", 6 * 4);
        let mut arena = strata_plan::Arena::new(&plan).unwrap();
        let [experts, places, order, ends, units, bounds] =
            std::array::from_fn(|i| arena.take::<u32>(regions[i]).unwrap());
        let shares = arena.take(shares).unwrap();
        let mut routing = Routing {
            rows: 1,
            grouped: true,
            experts,
            shares,
            places,
            order,
            ends,
            units,
            bounds,
            unit_count: 5,
        };
        routing.experts[..5].copy_from_slice(&[2, 3, 5, 8, 9]);
        for firsts in [&[][..], &[2, 3, 5, 8, 9], &[3, 9], &[2]] {
            routing.put_first(|expert| firsts.contains(&expert));
            for pair in 0..5 {
                assert_eq!(routing.units[routing.places[pair] as usize], routing.experts[pair]);
            }
            assert!(routing.units[..firsts.len()].iter().all(|unit| firsts.contains(unit)), "{firsts:?}");
        }
    }

    /// What isn't a number still names different experts.
    #[test]
    fn not_a_number_is_the_least() {
        assert_eq!(chosen(&[f32::NAN; 5], 3).0, [0, 1, 2]);
        assert_eq!(chosen(&[f32::NEG_INFINITY; 5], 3).0, [0, 1, 2]);
        let (experts, shares) = chosen(&[1.0, f32::INFINITY, 2.0], 2);
        assert_eq!(experts.len(), 2);
        assert!(experts[0] < experts[1] && shares.iter().any(|p| p.is_nan()));
    }
}
