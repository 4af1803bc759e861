//! Which experts change places: from what steps and prompts chose, and from how much the link can bring beside them.
//!
//! Owns the heat, and what is planned. Pure: times are arguments, and no device is known. Only where experts are beside the GPU.
//!
//! # What the link may bring
//! In a step of so much time it could bring `time * rate` bytes; those of experts without a slot that the step used it had to bring. Half of the rest
//! is for exchanges, and at least a quarter of an expert, so that one moves every few steps whatever else there is. What a step leaves adds up to
//! [`Policy::most`].
//!
//! A plan looks at all experts, which takes 0.6 to 1 ms for a model of 24,576 (`cargo bench -p strata-residency --bench policy`): so it is made
//! once in [`PLANNED`] steps, for as many exchanges as can be made in these, and while the GPU computes.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use strata_backend::ExpertCount;
use strata_residency::{Caution, Cost, Costs, ExpertId, Heat, Move, Slots, Swap, plan_moves};

use super::chosen::{Counted, Step};

/// Steps between two plans.
const PLANNED: u32 = 16;
/// An exchange takes about so many steps.
const TAKES: u64 = 4;

/// Which experts change places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Exchanges {
    /// Those of which steps say that it pays.
    #[default]
    Learned,
    /// As many as can be under way, chosen by a pseudo-random sequence: for tests.
    Forced(u64),
}

/// The policy of one GPU's slots.
pub(super) struct Policy {
    exchanges: Exchanges,
    heat: Heat,
    costs: Costs,
    /// Bytes that exchanges may have brought now, and at most.
    credit: u64,
    most: u64,
    /// Bytes of the longest expert.
    longest: u64,
    /// Whether a step was counted.
    counted: bool,
    /// Steps since the last plan.
    steps: u32,
    planned: VecDeque<Move>,
    /// Scratch: the experts of a step.
    used: Vec<ExpertId>,
}

impl Policy {
    /// A policy with what is known already, for a link that takes so many picoseconds a byte and so many exchanges at once.
    pub(super) fn new(
        exchanges: Exchanges,
        heat: Heat,
        slots: &Slots,
        ps_per_byte: u32,
        at_once: usize,
    ) -> Policy {
        let roster = slots.roster();
        let longest = roster.layers().iter().map(|layer| layer.bytes).max().unwrap_or(0);
        let of_link = Cost { fixed_ns: 0, ps_per_byte };
        Policy {
            exchanges,
            heat,
            costs: Costs { miss: of_link, load: of_link, evict: of_link },
            credit: 0,
            most: longest * at_once as u64 * (u64::from(PLANNED) / TAKES),
            longest,
            counted: false,
            steps: 0,
            planned: VecDeque::new(),
            used: Vec::with_capacity(roster.len()),
        }
    }

    /// The heat, if there is something new in it that is worth keeping: prompts are not.
    pub(super) fn learned(&self) -> Option<&Heat> {
        self.counted.then_some(&self.heat)
    }

    /// Counts a step that took so long, and says how many experts it used and how many of these were resident.
    pub(super) fn step(
        &mut self,
        step: &Step<'_>,
        took: Duration,
        slots: &Slots,
        resident: impl Fn(ExpertId) -> bool,
    ) -> ExpertCount {
        self.used.clear();
        self.used.extend(step.ids().filter(|id| slots.roster().number(*id).is_some()));
        self.count_step(slots);
        self.steps = self.steps.saturating_add(1);
        let missed = self.used.iter().filter(|id| !resident(**id)).map(|id| slots.roster().bytes(*id)).sum();
        self.allow(took, missed);
        self.count(resident)
    }

    /// Counts a wide window: as a step, if its rows are those of as many answers.
    pub(super) fn wide(
        &mut self,
        counted: &Counted<'_>,
        slots: &Slots,
        resident: impl Fn(ExpertId) -> bool,
    ) -> ExpertCount {
        self.used.clear();
        self.used.extend(counted.counts().map(|(id, _)| id));
        if counted.answers {
            self.count_step(slots);
        } else {
            self.heat.prompt(slots.roster(), counted.rows as u64, counted.counts());
        }
        self.count(resident)
    }

    /// The next move, if there is one; it stays the next until it is taken.
    pub(super) fn next(&mut self, slots: &Slots, held: &BTreeSet<ExpertId>) -> Option<Move> {
        if let Exchanges::Forced(state) = &mut self.exchanges {
            return self.planned.front().copied().or_else(|| {
                let next = any_exchange(state, slots, held)?;
                self.planned.push_back(next);
                Some(next)
            });
        }
        self.planned.front().copied()
    }

    /// Plans, if it is time to: meant to be asked while the GPU has a step to do, and nobody else waits for the host.
    pub(super) fn plan(&mut self, slots: &Slots, held: impl FnOnce() -> BTreeSet<ExpertId>) {
        // At most nothing: no exchange can be under way.
        if self.steps < PLANNED || self.most == 0 || self.exchanges != Exchanges::Learned {
            return;
        }
        self.steps = 0;
        let costs = (&self.costs, Swap::Exchange);
        let moves = plan_moves(slots, &self.heat, costs, Caution::default(), self.credit, &held());
        self.planned = moves.into();
    }

    /// The next move has been begun, or can't be any more.
    pub(super) fn taken(&mut self, begun: bool, slots: &Slots) {
        if let Some(Move { load, .. }) = self.planned.pop_front().filter(|_| begun) {
            self.credit = self.credit.saturating_sub(slots.roster().bytes(load));
        }
    }

    fn allow(&mut self, took: Duration, missed: u64) {
        let brings = took.as_nanos() * 1000 / u128::from(self.costs.load.ps_per_byte.max(1));
        let idle = u64::try_from(brings).unwrap_or(u64::MAX).saturating_sub(missed);
        self.credit = self.credit.saturating_add((idle / 2).max(self.longest / 4)).min(self.most);
    }

    fn count_step(&mut self, slots: &Slots) {
        self.counted = true;
        self.used.sort_unstable();
        self.used.dedup();
        self.heat.decode(slots.roster(), self.used.iter().copied());
    }

    fn count(&self, resident: impl Fn(ExpertId) -> bool) -> ExpertCount {
        let resident = self.used.iter().filter(|id| resident(**id)).count();
        ExpertCount { used: self.used.len() as u64, resident: resident as u64, exchanged: 0 }
    }
}

/// One of the exchanges that there can be, if some tries find one.
fn any_exchange(state: &mut u64, slots: &Slots, held: &BTreeSet<ExpertId>) -> Option<Move> {
    let mut below = |count: usize| {
        // A linear congruential generator.
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 33) % count.max(1) as u64) as usize
    };
    let (roster, count) = (slots.roster(), slots.ids().count());
    (0..64).find_map(|_| {
        let slot = slots.ids().nth(below(count))?;
        let load = roster.ids().nth(below(roster.len()))?;
        let strata_residency::Content::Holds(evict) = slots.content(slot) else { return None };
        let fits = slots.slot_of(load).is_none() && roster.bytes(load) == roster.bytes(evict);
        let free = !held.contains(&load) && !held.contains(&evict);
        (fits && free).then_some(Move { slot, evict: Some(evict), load })
    })
}

#[cfg(test)]
mod tests {
    use strata_residency::{LayerExperts, Pace, Roster, STEP};

    use super::*;
    use crate::tiers::chosen;

    /// Two layers of four experts each, of which experts 0 and 1 have slots.
    fn policy(exchanges: Exchanges, ps_per_byte: u32) -> (Policy, Slots) {
        let roster = Roster::new([LayerExperts { experts: 4, bytes: 256 }; 2]);
        let heat = Heat::new(&roster, Pace::default());
        let mut slots = Slots::cut(roster, 1024, usize::MAX);
        for first in slots.first_loads(&heat) {
            slots.begin(first).unwrap();
            slots.land(first.slot).unwrap();
        }
        (Policy::new(exchanges, heat, &slots, ps_per_byte, 2), slots)
    }

    /// Oracle: by hand. An expert counts once a step, prompts by their shares; those that are resident are told.
    #[test]
    fn steps_and_prompts_are_counted() {
        let (mut policy, slots) = policy(Exchanges::Learned, 1000);
        let resident = |id| slots.resident(id).is_some();
        // Two rows, two experts each.
        let step = chosen::Step::new(&[0, 3, 0, 1, 2, 3, 2, 3], 4);
        let counted = policy.step(&step, Duration::ZERO, &slots, resident);
        assert_eq!(counted, ExpertCount { used: 5, resident: 2, exchanged: 0 });
        let uses: Vec<u64> = policy.heat.all_uses().collect();
        assert!(uses[0] > 0 && uses[0] == uses[3] && uses[2] == 0 && uses[0] == uses[1], "{uses:?}");
        // Sixty rows, all of which choose the first expert of the first layer.
        let counts = chosen::Counted::new(&[60, 60, 60, 60, 0, 30, 30, 60], 4, 60, false);
        let counted = policy.wide(&counts, &slots, resident);
        assert_eq!(counted, ExpertCount { used: 3, resident: 2, exchanged: 0 });
        let more: Vec<u64> = policy.heat.all_uses().zip(&uses).map(|(more, uses)| more - uses).collect();
        assert_eq!(more[0], 2 * more[5]);
        assert!(more[0] > STEP && more[1] == 0);
    }

    /// Oracle: the formula, by hand: half of what a gigabyte a second leaves, a quarter of an expert at least, eight experts at most.
    #[test]
    fn the_link_brings_what_it_has_time_for() {
        let (mut policy, slots) = policy(Exchanges::Learned, 1000);
        let mut after = |nanoseconds, missed: usize| {
            let experts = [2, 3, 0, 1].map(|expert| if missed > 0 { expert } else { expert % 2 });
            let step = chosen::Step::new(&experts[..2], 2);
            policy.step(&step, Duration::from_nanos(nanoseconds), &slots, |id| slots.resident(id).is_some());
            policy.credit
        };
        assert_eq!(after(0, 0), 64);
        assert_eq!(after(1000, 2), 64 + (1000 - 512) / 2);
        assert_eq!(after(300, 2), 64 + 244 + 64);
        assert_eq!(after(100_000, 0), 8 * 256);
    }

    /// Oracle: by hand. Experts that all steps use come in place of those that none does, in plans that are some steps apart, as credit allows.
    #[test]
    fn what_steps_use_is_planned() {
        let (mut policy, slots) = policy(Exchanges::Learned, 1000);
        let mut planned = Vec::new();
        for step in 0..200u32 {
            let chosen = chosen::Step::new(&[0, 2, 0, 1], 2);
            policy.step(&chosen, Duration::ZERO, &slots, |id| slots.resident(id).is_some());
            policy.plan(&slots, BTreeSet::new);
            if let Some(next) = policy.next(&slots, &BTreeSet::new()) {
                planned.push((step, next));
                policy.taken(true, &slots);
            }
        }
        let (wanted, evicted) = (ExpertId { layer: 0, expert: 2 }, ExpertId { layer: 0, expert: 1 });
        assert!(!planned.is_empty() && planned.iter().all(|(step, _)| step % PLANNED == PLANNED - 1));
        assert!(planned.iter().all(|(_, next)| (next.load, next.evict) == (wanted, Some(evicted))));
        let held = BTreeSet::from([evicted]);
        policy.steps = PLANNED;
        policy.plan(&slots, || held.clone());
        assert_eq!(policy.next(&slots, &held), None);
        // Where nothing can move nobody looks.
        policy.most = 0;
        policy.steps = PLANNED;
        policy.plan(&slots, || panic!("nothing can move"));
    }

    /// Oracle: the conditions of an exchange; nothing that is held.
    #[test]
    fn forced_exchanges_are_exchanges() {
        let (mut policy, slots) = policy(Exchanges::Forced(7), 1000);
        let held = BTreeSet::from([ExpertId { layer: 0, expert: 0 }, ExpertId { layer: 1, expert: 3 }]);
        let mut seen = BTreeSet::new();
        for _ in 0..200 {
            let Move { slot, evict, load } = policy.next(&slots, &held).unwrap();
            assert_eq!(policy.next(&slots, &held), Some(Move { slot, evict, load }));
            assert!(slots.content(slot) == strata_residency::Content::Holds(evict.unwrap()));
            assert!(
                slots.slot_of(load).is_none() && !held.contains(&load) && !held.contains(&evict.unwrap())
            );
            seen.insert((evict, load));
            policy.taken(true, &slots);
        }
        assert_eq!(seen.len(), 9);
    }
}
