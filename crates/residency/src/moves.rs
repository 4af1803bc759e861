//! Which experts change places: a pure function of what was counted and measured. No clock, no threads, no device.
//!
//! # When a swap pays
//! An expert that is not resident costs [`Costs::miss`] more in each step that uses it. With frequencies from [`Heat`], a
//! swap saves
//!
//! ```text
//! frequency of the one loaded * its miss - frequency of the one evicted * its miss
//! ```
//!
//! per step. It is made only if that, over [`Caution::horizon`] steps, is more than the move costs by
//! [`Caution::margin`], *and* if the difference is no accident of counting: it must exceed [`Caution::doubt`] standard
//! errors. Counts that decay exponentially have a variance of half of their value, so of two experts used alike the
//! luckier one does not push the other out, and in a steady state nothing moves.
//!
//! Swaps are made best first, over all layers at once. A candidate takes the least valuable of the slots that are long
//! enough, and the plan ends where the idle time of the link does. Where the one evicted takes the place that the one loaded
//! comes from ([`Swap::Exchange`]), both must be equally long.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::heat::STEP;
use crate::slots::Content;
use crate::{ExpertId, Heat, SlotId, Slots};

/// A change of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The slot.
    pub slot: SlotId,
    /// The expert in it, none if it is empty.
    pub evict: Option<ExpertId>,
    /// The expert that it is to hold.
    pub load: ExpertId,
}

/// A measured time that grows with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Whatever the length, in nanoseconds.
    pub fixed_ns: u32,
    /// Per byte, in picoseconds: 1000 / (GB/s).
    pub ps_per_byte: u32,
}

impl Cost {
    /// In nanoseconds, rounded down, at most 2^32 - 1: four seconds.
    fn ns(self, bytes: u64) -> u64 {
        let ns = u128::from(self.fixed_ns) + u128::from(bytes) * u128::from(self.ps_per_byte) / 1000;
        ns.min(u128::from(u32::MAX)) as u64
    }
}

/// What was measured on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// How much longer a step takes because it uses an expert that is not resident: on the CPU or over the link, less what
    /// a resident one takes.
    pub miss: Cost,
    /// How long the link is busy with loading an expert.
    pub load: Cost,
    /// How long it is busy with evicting one: nothing where the expert has a home elsewhere, a copy where tiers exchange.
    pub evict: Cost,
}

/// What becomes of an expert that is evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swap {
    /// It is read from elsewhere: a slot takes any expert that is not longer than it.
    Evict,
    /// It takes the place of the one that is loaded. Empty slots stay empty.
    Exchange,
}

/// How sure a plan must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caution {
    /// For so many steps the frequencies are believed to last.
    pub horizon: u32,
    /// By so many percent of the move's cost the saving must exceed it.
    pub margin: u32,
    /// By so many tenths of a standard error the difference of two experts must exceed nothing.
    pub doubt: u32,
}

impl Default for Caution {
    /// By `cargo bench -p strata-residency --bench policy`.
    fn default() -> Caution {
        Caution { horizon: 128, margin: 50, doubt: 20 }
    }
}

/// One side of a swap: how much time per step is at stake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stake {
    /// In [`STEP`]s.
    uses: u64,
    miss_ns: u64,
}

impl Stake {
    const NOTHING: Stake = Stake { uses: 0, miss_ns: 0 };

    /// Nanoseconds times [`STEP`]s.
    fn value(self) -> u128 {
        u128::from(self.uses) * u128::from(self.miss_ns)
    }

    /// The variance of [`Stake::value`], in nanoseconds squared times [`STEP`]s squared.
    fn variance(self) -> u128 {
        self.value() * u128::from(self.miss_ns) * u128::from(STEP) / 2
    }
}

impl Caution {
    /// What a swap that costs `move_ns` must gain at least, in nanoseconds times [`STEP`]s.
    fn price(self, move_ns: u64, steps: u64) -> u128 {
        let with_margin = u128::from(move_ns) * u128::from(100 + u64::from(self.margin));
        with_margin.saturating_mul(u128::from(steps)) / (u128::from(self.horizon.max(1)) * 100)
    }

    /// Whether to replace `out` by `next`, which costs `move_ns`.
    fn allows(self, next: Stake, out: Stake, move_ns: u64, steps: u64) -> bool {
        let Some(gain) = next.value().checked_sub(out.value()) else { return false };
        // An empty slot has nothing to lose but the move.
        let error = if out.miss_ns == 0 { 0 } else { next.variance().saturating_add(out.variance()) };
        let doubt = error.saturating_mul(u128::from(self.doubt).pow(2));
        gain > self.price(move_ns, steps) && gain.saturating_mul(gain).saturating_mul(100) > doubt
    }
}

/// A slot that may change. The least valuable comes first; of equals the highest id goes, so that the lower one stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Leaving {
    value: u128,
    evict: Option<Reverse<ExpertId>>,
    slot: SlotId,
    stake: Stake,
}

/// The moves that pay, the best first. Their loads have at most `idle_bytes` bytes together. Experts in `held` are not
/// evicted: they are being read, or otherwise busy. Slots and experts that are part of a move already are left alone.
/// Equal experts are taken in the order of their ids.
pub fn plan_moves(
    slots: &Slots,
    heat: &Heat,
    (costs, swap): (&Costs, Swap),
    caution: Caution,
    idle_bytes: u64,
    held: &BTreeSet<ExpertId>,
) -> Vec<Move> {
    let (roster, steps) = (slots.roster(), heat.steps());
    let miss_ns: Vec<u64> = roster.layers().iter().map(|layer| costs.miss.ns(layer.bytes)).collect();
    let stake = |id: ExpertId, uses| Stake { uses, miss_ns: miss_ns[usize::from(id.layer)] };

    // Per length, of slots or of the experts in them, what could go.
    let mut leaving: BTreeMap<u64, Vec<Reverse<Leaving>>> = BTreeMap::new();
    for slot in slots.ids() {
        let (evict, stake) = match slots.content(slot) {
            Content::Empty if swap == Swap::Exchange => continue,
            Content::Empty => (None, Stake::NOTHING),
            Content::Holds(id) => match roster.number(id) {
                Some(number) => (Some(Reverse(id)), stake(id, heat.uses(number))),
                None => continue,
            },
            Content::Coming(_) => continue,
        };
        let value = stake.value();
        let length = match (swap, evict) {
            (Swap::Exchange, Some(Reverse(id))) => roster.bytes(id),
            _ => slots.bytes(slot),
        };
        leaving.entry(length).or_default().push(Reverse(Leaving { value, evict, slot, stake }));
    }
    let mut leaving: BTreeMap<u64, BinaryHeap<_>> =
        leaving.into_iter().map(|(bytes, slots)| (bytes, slots.into())).collect();
    leaving.values_mut().for_each(|slots| drop_held(slots, held));

    // Whoever gains too little over the least valuable of all gains too little over any.
    let least = leaving.values().filter_map(|slots| slots.peek()).map(|first| first.0.value).min();
    let Some(least) = least else { return Vec::new() };
    let load_ns = |id| costs.load.ns(roster.bytes(id));
    let enough: Vec<u128> = (0u16..)
        .zip(roster.layers())
        .map(|(layer, _)| least + caution.price(load_ns(ExpertId { layer, expert: 0 }), steps))
        .collect();
    let mut wanted: Vec<(u128, ExpertId, Stake)> = roster
        .ids()
        .zip(heat.all_uses())
        .map(|(id, uses)| (id, stake(id, uses)))
        .filter(|&(id, stake)| stake.value() > enough[usize::from(id.layer)] && slots.slot_of(id).is_none())
        .map(|(id, stake)| (stake.value(), id, stake))
        .collect();
    wanted.sort_unstable_by_key(|&(value, id, _)| (Reverse(value), id));

    let (mut moves, mut left) = (Vec::new(), idle_bytes);
    for (_, load, next) in wanted {
        let bytes = roster.bytes(load);
        if bytes > left {
            continue;
        }
        let lengths = bytes..=if swap == Swap::Exchange { bytes } else { u64::MAX };
        let fitting = leaving.range_mut(lengths).filter_map(|(_, slots)| Some((*slots.peek()?, slots)));
        // The first of equals: the shortest slots.
        let least = fitting.min_by_key(|(Reverse(first), _)| (first.value, first.evict));
        let Some((Reverse(Leaving { evict, slot, stake, .. }), fitting)) = least else { continue };
        let evict = evict.map(|Reverse(id)| id);
        let evict_ns = evict.map_or(0, |id| costs.evict.ns(roster.bytes(id)));
        if caution.allows(next, stake, load_ns(load) + evict_ns, steps) {
            fitting.pop();
            drop_held(fitting, held);
            left -= bytes;
            moves.push(Move { slot, evict, load });
        }
    }
    moves
}

/// Takes slots off the top until it is one that may change.
fn drop_held(slots: &mut BinaryHeap<Reverse<Leaving>>, held: &BTreeSet<ExpertId>) {
    while let Some(Reverse(Leaving { evict: Some(Reverse(id)), .. })) = slots.peek() {
        if !held.contains(id) {
            return;
        }
        slots.pop();
    }
}
