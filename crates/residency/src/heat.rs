//! How often each expert is used: what the past says about the next steps, in integers only, so that a recorded trace
//! replays to the same moves on every machine.
//!
//! The unit is a decode step. A step reads an expert once, however many of its tokens and sequences chose it, so an
//! expert counts once per step; where one sequence decodes without drafts, a step is a token.
//!
//! # Decay
//! Counters are not touched in every step. Instead later uses weigh more: in the i-th step of a half-life of `H` steps
//! (i = 0 .. H-1) a use adds `H + i`, and when the half-life is over all counters are halved, rounding down. A use has
//! then half the weight of one a half-life later, and in between the weight is linear instead of exponential, at most
//! 6 % off.
//!
//! # Three sources
//! - *recent*: decode steps, by a short half-life. It follows the conversation.
//! - *prior*: the same steps by a long half-life, scaled to count like at most [`Pace::prior`] steps. It decides among experts
//!   of which recent steps say little, and it is what is kept across restarts ([`crate::ranking`]).
//! - *asked*: prompts. A prompt of thousands of tokens touches nearly every expert, and what it prefers is evidence of the
//!   answer's topic, but thousands of tokens of it are not thousands of steps: they are read once, layer by layer, from
//!   wherever experts are. So whatever its length a prompt counts like at most [`Pace::prompt`] steps, by the *shares* of its
//!   tokens that chose an expert. A later prompt halves what earlier ones left, so many prompts count no more than one, and
//!   decoding fades them like its own steps.
//!
//! Owns no residency and knows no cost.

use crate::{ExpertId, Ranking, Roster};

/// The unit of [`Heat::uses`] and [`Heat::steps`]: so many make one step.
pub const STEP: u64 = 1 << 16;

/// How fast the past is forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Decode steps after which a use counts half: 1 to 32,768.
    pub half_life: u16,
    /// The same for the prior: 1 to 32,768.
    pub prior_half_life: u16,
    /// The prior counts like at most so many steps.
    pub prior: u16,
    /// A prompt counts like at most so many steps.
    pub prompt: u16,
}

impl Default for Pace {
    /// By `cargo bench -p strata-residency --bench policy`, whose skew is that published of the real model.
    fn default() -> Pace {
        Pace { half_life: 32, prior_half_life: 4096, prior: 8, prompt: 8 }
    }
}

/// Decayed counts of steps.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Counts {
    half_life: u32,
    /// Which step of the half-life is next.
    phase: u32,
    /// The weights of all steps, decayed as uses are.
    mass: u64,
    /// The weights of each expert's uses: at most `mass`, which is at most 3 H^2 < 2^32.
    uses: Vec<u32>,
}

impl Counts {
    fn new(half_life: u16, experts: usize) -> Counts {
        let half_life = u32::from(half_life).clamp(1, 1 << 15);
        Counts { half_life, phase: 0, mass: 0, uses: vec![0; experts] }
    }

    /// What a use in the step to come, or in the step now counted, weighs.
    fn weight(&self) -> u32 {
        self.half_life + self.phase
    }

    fn add(&mut self, expert: usize) {
        self.uses[expert] += self.weight();
    }

    /// Ends a step. True if a half-life ended with it.
    fn end_step(&mut self) -> bool {
        self.mass += u64::from(self.weight());
        self.phase += 1;
        if self.phase < self.half_life {
            return false;
        }
        self.phase = 0;
        self.mass >>= 1;
        self.uses.iter_mut().for_each(|uses| *uses >>= 1);
        true
    }

    /// Steps that the counts stand for, in [`STEP`]s.
    fn steps(&self) -> u64 {
        self.mass * STEP / u64::from(self.weight())
    }
}

/// How often each expert is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heat {
    pace: Pace,
    recent: Counts,
    prior: Counts,
    /// Of prompts: uses in [`STEP`]s, at most [`Pace::prompt`] steps each.
    asked: Vec<u32>,
    /// The steps that they stand for.
    asked_steps: u64,
    /// The step in which each expert was last counted, so that it is once a step.
    counted: Vec<u64>,
    step: u64,
}

impl Heat {
    /// No history.
    pub fn new(roster: &Roster, pace: Pace) -> Heat {
        Heat {
            recent: Counts::new(pace.half_life, roster.len()),
            prior: Counts::new(pace.prior_half_life, roster.len()),
            asked: vec![0; roster.len()],
            asked_steps: 0,
            counted: vec![0; roster.len()],
            step: 0,
            pace,
        }
    }

    /// Counts one decode step, which chose these experts. An expert may come several times and counts once; one that
    /// the model hasn't is left out.
    pub fn decode(&mut self, roster: &Roster, chosen: impl IntoIterator<Item = ExpertId>) {
        self.choose(roster, chosen);
        self.end_step();
    }

    /// Counts some of the experts of a decode step that goes on until [`Heat::end_step`], otherwise as [`Heat::decode`] does.
    pub fn choose(&mut self, roster: &Roster, chosen: impl IntoIterator<Item = ExpertId>) {
        for id in chosen {
            let Some(expert) = roster.number(id) else { continue };
            if self.counted[expert] != self.step + 1 {
                self.counted[expert] = self.step + 1;
                self.recent.add(expert);
                self.prior.add(expert);
            }
        }
    }

    /// Ends the step whose experts were counted.
    pub fn end_step(&mut self) {
        self.step += 1;
        self.prior.end_step();
        if self.recent.end_step() {
            self.asked_steps >>= 1;
            self.asked.iter_mut().for_each(|uses| *uses >>= 1);
        }
    }

    /// Counts one prompt of so many tokens, with how many of its tokens chose each expert. Experts that aren't named were
    /// not chosen; one that is named twice adds up to no more than the whole prompt's use.
    pub fn prompt(
        &mut self,
        roster: &Roster,
        tokens: u64,
        chosen: impl IntoIterator<Item = (ExpertId, u64)>,
    ) {
        if tokens == 0 {
            return;
        }
        let steps = u64::from(self.pace.prompt).min(tokens) * STEP;
        self.asked_steps = (self.asked_steps + steps) / 2;
        self.asked.iter_mut().for_each(|uses| *uses >>= 1);
        for (id, count) in chosen {
            let Some(expert) = roster.number(id) else { continue };
            let share = u128::from(count.min(tokens)) * u128::from(steps) / u128::from(tokens) / 2;
            let uses = u64::from(self.asked[expert]) + share as u64;
            // Fits: steps are at most 65,535 of 2^16.
            self.asked[expert] = uses.min(self.asked_steps) as u32;
        }
    }

    /// Uses of an expert in the steps remembered, in [`STEP`]s; the expert by its number in the roster.
    pub fn uses(&self, expert: usize) -> u64 {
        self.scaled(self.prior_scale(), expert)
    }

    /// The uses of all experts, in the order of their numbers.
    pub fn all_uses(&self) -> impl Iterator<Item = u64> + '_ {
        let scale = self.prior_scale();
        (0..self.asked.len()).map(move |expert| self.scaled(scale, expert))
    }

    /// What a weight of the prior counts for, in [`STEP`]s times 2^32.
    fn prior_scale(&self) -> u64 {
        // Below 2^64: the steps are at most 65,535 of 2^16.
        (self.prior_steps() << 32) / self.prior.mass.max(1)
    }

    fn scaled(&self, prior_scale: u64, expert: usize) -> u64 {
        let recent = u64::from(self.recent.uses[expert]) * STEP / u64::from(self.recent.weight());
        // No more than the steps, as uses never exceed the mass but within a step.
        let prior = u64::from(self.prior.uses[expert]).saturating_mul(prior_scale) >> 32;
        recent + prior + u64::from(self.asked[expert])
    }

    /// Steps remembered, in [`STEP`]s: an expert's uses by these are the share of the next steps that will use it.
    pub fn steps(&self) -> u64 {
        self.recent.steps() + self.prior_steps() + self.asked_steps
    }

    fn prior_steps(&self) -> u64 {
        self.prior.steps().min(u64::from(self.pace.prior) * STEP)
    }

    /// The long-term counts, for [`Ranking`]: steps and each expert's uses, in [`STEP`]s.
    pub(crate) fn learned(&self) -> (u64, Vec<u32>) {
        // At most 1.5 H of 32,768 steps: below 2^32.
        let weight = u64::from(self.prior.weight());
        let uses = self.prior.uses.iter().map(|&uses| (u64::from(uses) * STEP / weight) as u32).collect();
        (self.prior.steps(), uses)
    }

    /// Takes these long-term counts in place of its own; the other sources stay. A ranking of another number of experts
    /// changes nothing.
    pub fn recall(&mut self, ranking: &Ranking) {
        if ranking.uses.len() != self.prior.uses.len() {
            return;
        }
        let half_life = self.prior.half_life;
        // No more than could have been counted by this half-life; the shares stay.
        let most = u64::from(half_life) * STEP * 3 / 2;
        let steps = ranking.steps.min(most);
        let scaled = |uses: u64| {
            let uses = uses.min(ranking.steps);
            let wide = u128::from(uses) * u128::from(steps) * u128::from(half_life);
            (wide / u128::from(ranking.steps.max(1)) / u128::from(STEP)) as u64
        };
        self.prior.phase = 0;
        self.prior.mass = scaled(ranking.steps);
        self.prior.uses = ranking.uses.iter().map(|&uses| scaled(uses.into()) as u32).collect();
    }
}
