//! What is learned of the experts' use: counted step by step, and prompt by prompt.
//!
//! Owns the heat and the accounting of slots; knows no device. Only where experts are beside the GPU.

use strata_backend::ExpertCount;
use strata_residency::{ExpertId, Heat, Slots};

use super::chosen::{Counted, Step};

/// The policy of one GPU's slots.
pub(crate) struct Policy {
    slots: Slots,
    heat: Heat,
    /// Scratch: the experts of a step.
    used: Vec<ExpertId>,
}

impl Policy {
    /// A policy for slots as they are, with what is known already.
    pub(super) fn new(slots: Slots, heat: Heat) -> Policy {
        Policy { used: Vec::with_capacity(slots.roster().len()), slots, heat }
    }

    /// Counts a step, and says how many experts it used and how many of these had slots.
    pub(super) fn step(&mut self, step: &Step<'_>) -> ExpertCount {
        self.used.clear();
        self.used.extend(step.ids());
        self.count_step()
    }

    /// Counts a wide window: as a step, if its rows are those of as many answers.
    pub(super) fn wide(&mut self, counted: &Counted<'_>) -> ExpertCount {
        self.used.clear();
        self.used.extend(counted.counts().map(|(id, _)| id));
        if counted.answers {
            return self.count_step();
        }
        self.heat.prompt(self.slots.roster(), counted.rows as u64, counted.counts());
        self.count()
    }

    fn count_step(&mut self) -> ExpertCount {
        self.used.sort_unstable();
        self.used.dedup();
        self.heat.decode(self.slots.roster(), self.used.iter().copied());
        self.count()
    }

    fn count(&self) -> ExpertCount {
        let resident = self.used.iter().filter(|id| self.slots.resident(**id).is_some()).count();
        ExpertCount { used: self.used.len() as u64, resident: resident as u64, exchanged: 0 }
    }
}

#[cfg(test)]
mod tests {
    use strata_residency::{LayerExperts, Pace, Roster, STEP};

    use super::*;
    use crate::tiers::chosen;

    /// Oracle: by hand. An expert counts once a step, prompts by their shares; those with slots are told.
    #[test]
    fn steps_and_prompts_are_counted() {
        let roster = Roster::new([LayerExperts { experts: 4, bytes: 256 }; 2]);
        let heat = Heat::new(&roster, Pace::default());
        let mut slots = Slots::cut(roster, 1024, usize::MAX);
        for first in slots.first_loads(&heat) {
            slots.begin(first).unwrap();
            slots.land(first.slot).unwrap();
        }
        let mut policy = Policy::new(slots, heat);
        // Two rows, two experts each; experts 0 and 1 of each layer have slots.
        let step = chosen::Step::new(&[0, 3, 0, 1, 2, 3, 2, 3], 4);
        let counted = policy.step(&step);
        assert_eq!(counted, ExpertCount { used: 5, resident: 2, exchanged: 0 });
        let uses: Vec<u64> = policy.heat.all_uses().collect();
        assert!(uses[0] > 0 && uses[0] == uses[3] && uses[2] == 0 && uses[0] == uses[1], "{uses:?}");
        // Sixty rows, all of which choose the first expert of the first layer.
        let counted = policy.wide(&chosen::Counted::new(&[60, 60, 60, 60, 0, 30, 30, 60], 4, 60, false));
        assert_eq!(counted, ExpertCount { used: 3, resident: 2, exchanged: 0 });
        let more: Vec<u64> = policy.heat.all_uses().zip(&uses).map(|(more, uses)| more - uses).collect();
        assert_eq!(more[0], 2 * more[5]);
        assert!(more[0] > STEP && more[1] == 0);
    }
}
