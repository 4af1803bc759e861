//! The policy, and well-known ones to hold it against, replayed over a trace.

use std::collections::{BTreeMap, BTreeSet};

use strata_residency::{Caution, Cost, Costs, ExpertId, Heat, Pace, Slots, Swap, plan_moves};

use super::traces::{BYTES, EXPERTS, Event, LAYERS, roster};

/// What came of a replay, per event (zeros for prompts).
#[derive(Clone, PartialEq)]
pub struct Outcome {
    pub hits: Vec<u32>,
    pub uses: Vec<u32>,
    pub loads: Vec<u32>,
}

impl Outcome {
    fn new() -> Outcome {
        Outcome { hits: Vec::new(), uses: Vec::new(), loads: Vec::new() }
    }

    fn push(&mut self, hits: usize, uses: usize, loads: usize) {
        self.hits.push(hits as u32);
        self.uses.push(uses as u32);
        self.loads.push(loads as u32);
    }

    /// Hits of 100 uses, in these events.
    pub fn rate(&self, events: std::ops::Range<usize>) -> f64 {
        let sum = |counts: &[u32]| f64::from(counts[events.clone()].iter().sum::<u32>());
        100.0 * sum(&self.hits) / sum(&self.uses)
    }

    /// Loads per event and layer, in these events.
    pub fn loads(&self, events: std::ops::Range<usize>) -> f64 {
        let count = events.len();
        f64::from(self.loads[events].iter().sum::<u32>()) / count as f64 / f64::from(LAYERS)
    }
}

/// How the policy is set up.
#[derive(Clone, Copy)]
pub struct Setup {
    pub pace: Pace,
    pub caution: Caution,
    /// Experts per step and layer that the link has time for.
    pub idle: f64,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup { pace: Pace::default(), caution: Caution::default(), idle: 2.0 }
    }
}

/// A CPU that reads experts at 40 GB/s, a link of 25 GB/s.
pub const COSTS: Costs = Costs {
    miss: Cost { fixed_ns: 5_000, ps_per_byte: 25 },
    load: Cost { fixed_ns: 10_000, ps_per_byte: 40 },
    evict: Cost { fixed_ns: 0, ps_per_byte: 0 },
};

/// The policy, with room for `room` experts per layer. A move planned after a step is done before the one after next.
pub fn strata(events: &[Event], room: usize, setup: Setup) -> Outcome {
    let roster = roster();
    let mut slots = Slots::cut(roster.clone(), room as u64 * u64::from(LAYERS) * BYTES, usize::MAX);
    let mut heat = Heat::new(&roster, setup.pace);
    for load in slots.first_loads(&heat) {
        slots.begin(load).unwrap();
        slots.land(load.slot).unwrap();
    }
    let (mut outcome, mut coming) = (Outcome::new(), Vec::new());
    let mut idle = 0.0;
    for event in events {
        let (mut hits, mut uses) = (0, 0);
        let mut held = BTreeSet::new();
        match event {
            Event::Step(chosen) => {
                hits = chosen.iter().filter(|id| slots.resident(**id).is_some()).count();
                uses = chosen.len();
                held.extend(chosen.iter().copied());
                heat.decode(&roster, chosen.iter().copied());
            }
            Event::Prompt(tokens, chosen) => heat.prompt(&roster, *tokens, chosen.iter().copied()),
        }
        for slot in coming.drain(..) {
            slots.land(slot).unwrap();
        }
        let budget: f64 = setup.idle * f64::from(LAYERS);
        idle = (idle + budget).min(budget.max(1.0));
        let plan =
            plan_moves(&slots, &heat, (&COSTS, Swap::Evict), setup.caution, idle as u64 * BYTES, &held);
        idle -= plan.len() as f64;
        outcome.push(hits, uses, plan.len());
        for planned in plan {
            slots.begin(planned).unwrap();
            coming.push(planned.slot);
        }
    }
    outcome
}

/// Decides, when a layer's cache is full, which of its experts goes.
type Victim = fn(&Seen) -> f64;

/// What a cache may know of an expert: when it was used last, how often, and when it is used next.
pub struct Seen {
    last: usize,
    count: u32,
    next: usize,
}

/// The one used least recently goes.
pub fn lru(events: &[Event], room: usize) -> Outcome {
    on_demand(events, room, |seen| seen.last as f64, false)
}

/// The one used least often goes, of equals the one used least recently.
pub fn lfu(events: &[Event], room: usize) -> Outcome {
    on_demand(events, room, |seen| f64::from(seen.count) * 1e9 + seen.last as f64, false)
}

/// The one used next the latest goes, or does not come: the optimum, which knows the future.
pub fn belady(events: &[Event], room: usize) -> Outcome {
    on_demand(events, room, |seen| -(seen.next as f64), true)
}

/// A cache that loads what is missed, without limit. A prompt uses each of its experts once, layer by layer.
fn on_demand(events: &[Event], room: usize, keep: Victim, may_pass: bool) -> Outcome {
    let touched: Vec<Vec<ExpertId>> = events
        .iter()
        .map(|event| match event {
            Event::Step(chosen) => chosen.clone(),
            Event::Prompt(_, chosen) => chosen.iter().map(|&(id, _)| id).collect(),
        })
        .collect();
    let mut future: BTreeMap<ExpertId, Vec<usize>> = BTreeMap::new();
    // Of all uses, one after the other.
    for (time, &id) in touched.iter().flatten().enumerate().collect::<Vec<_>>().into_iter().rev() {
        future.entry(id).or_default().push(time);
    }
    let mut counts: BTreeMap<ExpertId, u32> = BTreeMap::new();
    // As the policy starts: the first experts of each layer.
    let start = |layer| (0..room as u16).map(move |expert| ExpertId { layer, expert });
    let mut caches: Vec<BTreeMap<ExpertId, Seen>> = (0..LAYERS)
        .map(|layer| {
            let next = |id| future.get(&id).map_or(usize::MAX, |times| times[times.len() - 1]);
            start(layer).map(|id| (id, Seen { last: 0, count: 0, next: next(id) })).collect()
        })
        .collect();
    let mut outcome = Outcome::new();
    for ((now, ids), event) in touched.iter().enumerate().zip(events) {
        let (mut hits, mut loads) = (0, 0);
        for &id in ids {
            let times = future.get_mut(&id).unwrap();
            times.pop();
            let count = counts.entry(id).or_default();
            *count += 1;
            let seen = Seen { last: now, count: *count, next: times.last().copied().unwrap_or(usize::MAX) };
            let cache = &mut caches[usize::from(id.layer)];
            if cache.insert(id, seen).is_some() {
                hits += 1;
                continue;
            }
            if cache.len() > room {
                let others = cache.iter().filter(|(other, _)| may_pass || **other != id);
                let out = *others.min_by(|a, b| keep(a.1).total_cmp(&keep(b.1))).unwrap().0;
                cache.remove(&out);
                loads += usize::from(out != id);
            } else {
                loads += 1;
            }
        }
        match event {
            Event::Step(chosen) => outcome.push(hits, chosen.len(), loads),
            Event::Prompt(..) => outcome.push(0, 0, loads),
        }
    }
    outcome
}

/// The most used experts of the whole trace, which never move: the best that a fixed choice can do, in hindsight.
pub fn fixed(events: &[Event], room: usize) -> Outcome {
    let mut counts = vec![vec![0u32; usize::from(EXPERTS)]; usize::from(LAYERS)];
    let steps = || {
        events.iter().map(|event| match event {
            Event::Step(chosen) => &chosen[..],
            Event::Prompt(..) => &[],
        })
    };
    steps().flatten().for_each(|id| counts[usize::from(id.layer)][usize::from(id.expert)] += 1);
    let best: Vec<BTreeSet<u16>> = counts
        .iter()
        .map(|counts| {
            let mut order: Vec<u16> = (0..EXPERTS).collect();
            order.sort_by_key(|&expert| std::cmp::Reverse(counts[usize::from(expert)]));
            order[..room].iter().copied().collect()
        })
        .collect();
    let mut outcome = Outcome::new();
    for chosen in steps() {
        let hits = chosen.iter().filter(|id| best[usize::from(id.layer)].contains(&id.expert)).count();
        outcome.push(hits, chosen.len(), 0);
    }
    outcome
}
