//! Which experts change places: a pure function of what was counted and measured. No clock, no threads, no device.
//!
//! # When a swap pays
//! An expert that is not resident costs [`Costs::miss`] more in each step that uses it. With frequencies from [`Heat`], a
//! swap saves
//!
//!     frequency of the one loaded * its miss - frequency of the one evicted * its miss
//!
//! per step. It is made only if that, over [`Caution::horizon`] steps, is more than the move costs by
//! [`Caution::margin`], *and* if the difference is no accident of counting: it must exceed [`Caution::doubt`] standard
//! errors. Counts that decay exponentially have a variance of half of their value, so of two experts used alike the
//! luckier one does not push the other out, and in a steady state nothing moves.
//!
//! Swaps are made best first, over all layers at once. A candidate takes the least valuable of the slots that are long
//! enough, and the plan ends where the idle time of the link does.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

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
#[derive(Debug, Clone, Copy)]
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
    /// Whether to replace `out` by `next`, which costs `move_ns`.
    fn allows(self, next: Stake, out: Stake, move_ns: u64, steps: u64) -> bool {
        let Some(gain) = next.value().checked_sub(out.value()) else { return false };
        let saved = gain.saturating_mul(u128::from(self.horizon) * 100);
        let price = u128::from(move_ns) * u128::from(100 + u64::from(self.margin)) * u128::from(steps);
        // An empty slot has nothing to lose but the move.
        let error = if out.miss_ns == 0 { 0 } else { next.variance().saturating_add(out.variance()) };
        let doubt = error.saturating_mul(u128::from(self.doubt).pow(2));
        saved > price && gain.saturating_mul(gain).saturating_mul(100) > doubt
    }
}

/// The moves that pay, the best first. Their loads have at most `idle_bytes` bytes together. Experts in `held` are not
/// evicted: they are being read, or otherwise busy. Slots and experts that are part of a move already are left alone.
/// Equal experts are taken in the order of their ids.
pub fn plan_moves(
    slots: &Slots,
    heat: &Heat,
    costs: &Costs,
    caution: Caution,
    idle_bytes: u64,
    held: &BTreeSet<ExpertId>,
) -> Vec<Move> {
    let roster = slots.roster();
    let miss_ns: Vec<u64> = roster.layers().iter().map(|layer| costs.miss.ns(layer.bytes)).collect();
    let stake =
        |number, id: ExpertId| Stake { uses: heat.uses(number), miss_ns: miss_ns[usize::from(id.layer)] };

    // Per length of slots what could go, the least valuable first.
    let mut out: BTreeMap<u64, Vec<(u128, SlotId, Option<ExpertId>, Stake)>> = BTreeMap::new();
    for slot in slots.ids() {
        let (evict, stake) = match slots.content(slot) {
            Content::Empty => (None, Stake::NOTHING),
            Content::Holds(id) if !held.contains(&id) => match roster.number(id) {
                Some(number) => (Some(id), stake(number, id)),
                None => continue,
            },
            _ => continue,
        };
        out.entry(slots.bytes(slot)).or_default().push((stake.value(), slot, evict, stake));
    }
    // Of equals the one with the higher id goes: the lower one stays.
    let mut out: BTreeMap<u64, VecDeque<_>> = out
        .into_iter()
        .map(|(bytes, mut slots)| {
            slots.sort_unstable_by_key(|&(value, slot, evict, _)| (value, evict.map(Reverse), slot));
            (bytes, slots.into())
        })
        .collect();

    let least = out.values().filter_map(|slots| slots.front()).map(|&(value, ..)| value).min();
    let Some(least) = least else { return Vec::new() };
    let mut wanted: Vec<(u128, ExpertId, Stake)> = roster
        .ids()
        .enumerate()
        .filter(|&(_, id)| roster.bytes(id) <= idle_bytes && slots.slot_of(id).is_none())
        .map(|(number, id)| (number, id, stake(number, id)))
        .filter(|(_, _, stake)| stake.value() > least)
        .map(|(_, id, stake)| (stake.value(), id, stake))
        .collect();
    wanted.sort_unstable_by_key(|&(value, id, _)| (Reverse(value), id));

    let (mut moves, mut left, steps) = (Vec::new(), idle_bytes, heat.steps());
    for (_, load, next) in wanted {
        let bytes = roster.bytes(load);
        if bytes > left {
            continue;
        }
        let fitting = out.range_mut(bytes..).filter_map(|(_, slots)| {
            let &(value, _, evict, _) = slots.front()?;
            Some(((value, evict.map(Reverse)), slots))
        });
        // The first of equals: the shortest slots.
        let Some((_, fitting)) = fitting.min_by_key(|&(key, _)| key) else { continue };
        let Some(&(_, slot, evict, stake)) = fitting.front() else { continue };
        let evict_ns = evict.map_or(0, |id| costs.evict.ns(roster.bytes(id)));
        if caution.allows(next, stake, costs.load.ns(bytes) + evict_ns, steps) {
            fitting.pop_front();
            left -= bytes;
            moves.push(Move { slot, evict, load });
        }
    }
    moves
}
