//! Choosing the next tokens of a window's sequences: from the few values of a row that decide, where the backend finds these, else from all of
//! its logits.

use strata_backend::{Largest, LogitRow, MOST_LARGEST};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::event::{Event, Reason};
use crate::sampling::{Choice, SampleError};
use crate::sequence::Sequence;

/// What the backend found of the rows at the head.
pub(crate) struct Found {
    /// `[rows][count]`
    largest: Vec<(u32, f32)>,
    /// `[rows]`, or empty
    masses: Vec<u64>,
    /// Of a row; 0 where nothing was found, and all logits are read.
    count: usize,
}

impl Found {
    /// For rows of so many sequences.
    pub(crate) fn new(sequences: usize) -> Found {
        let largest = Vec::with_capacity(sequences * MOST_LARGEST);
        Found { largest, masses: Vec::with_capacity(sequences), count: 0 }
    }

    /// What one sequence's row takes, bytes.
    pub(crate) fn bytes() -> usize {
        MOST_LARGEST * size_of::<(u32, f32)>() + size_of::<u64>()
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// Whether each row has a logit that isn't finite; nothing where that isn't known.
    pub(crate) fn broken(&self) -> Option<impl Iterator<Item = bool>> {
        (self.count > 0).then(|| self.largest.chunks_exact(self.count).map(|row| row[0].1.is_nan()))
    }
}

impl Engine {
    /// Asks the backend for what decides of the rows in `ends` that are at the head, if that is less than all of any.
    pub(crate) fn find(&mut self, ends: &[(u32, usize)]) -> Result<(), EngineError> {
        let (vocab, logits) = (self.spec.shape.vocab, self.buffers.work.logits);
        let (mut rows, mut count, mut mass) = (vec![LogitRow::default(); ends.len()], 0, false);
        for (slot, sequence) in self.sequences.iter_mut().enumerate() {
            let Some(at) = ends.iter().position(|&(_, of)| of == slot) else { continue };
            let Some(task) = sequence.as_mut().and_then(|sequence| sequence.task.as_mut()) else { continue };
            let Some(looks_at) = task.sampler.looks_at() else { continue };
            rows[at] = task.sampler.row(task.constraint.as_mut().map(|constraint| constraint.mask()));
            count = count.max(looks_at.largest.min(vocab));
            mass |= looks_at.mass;
        }
        let Found { largest, masses, count: found } = &mut self.found;
        largest.resize(rows.len() * count, (0, 0.0));
        masses.resize(if mass { rows.len() } else { 0 }, 0);
        let wanted = Largest { rows: &rows, width: vocab, count };
        if count > 0 && self.machine.backend.largest(logits, wanted, largest, masses)? {
            *found = count;
        }
        Ok(())
    }

    /// Chooses the next token of each sequence in `ends`, whose rows are at the head, and tells it, or ends the answer.
    pub(crate) fn choose_all(
        &mut self,
        ends: &[(u32, usize)],
        events: &mut Vec<Event>,
    ) -> Result<(), EngineError> {
        for (at, &(_, slot)) in ends.iter().enumerate() {
            let Some(task) = &self.sequence(slot).task else { continue };
            let ending = if task.left == 0 {
                Some(Reason::Length)
            } else {
                match self.choose(slot, at)? {
                    Ok(choice) => self.tell(slot, choice, events),
                    Err(error) => Some(Reason::Failed(error.to_string())),
                }
            };
            if let Some(reason) = ending {
                self.end(slot, reason, events);
            }
        }
        Ok(())
    }

    /// Chooses the next token of a sequence whose row is the head's row `at`.
    fn choose(&mut self, slot: usize, at: usize) -> Result<Result<Choice, SampleError>, EngineError> {
        let vocab = self.spec.shape.vocab;
        let Found { largest, masses, count } = &self.found;
        let Some(Sequence { tokens, task: Some(task), .. }) = &mut self.sequences[slot] else {
            return Err(EngineError::Closed);
        };
        let (looks_at, position) = (task.sampler.looks_at(), tokens.len());
        if *count > 0 && looks_at.is_some() {
            let (largest, mass) = (&largest[at * count..][..*count], masses.get(at).copied());
            if let Some(choice) = task.sampler.choose_of(largest, mass.unwrap_or(0), position) {
                return Ok(Ok(choice));
            }
        }
        let first = if *count > 0 { 0 } else { at * vocab };
        let logits = &mut self.logits[first..first + vocab];
        if *count > 0 {
            self.machine.backend.read(self.buffers.work.logits, at * vocab, logits)?;
        }
        let mask = task.constraint.as_mut().map(|constraint| constraint.mask());
        Ok(task.sampler.choose(logits, position, mask, &mut self.scratch))
    }

    /// Tells a sequence's next token, and why the answer ends, if it does.
    fn tell(&mut self, slot: usize, choice: Choice, events: &mut Vec<Event>) -> Option<Reason> {
        let (seq, context) = (self.id(slot), self.spec.context);
        let sequence = self.sequence_mut(slot);
        let (position, task) = (sequence.tokens.len(), sequence.task.as_mut()?);
        let Choice { token, logprob, top } = choice;
        if task.stop.contains(&token) {
            return Some(Reason::Stop(token));
        }
        if let Some(constraint) = &mut task.constraint {
            constraint.accept(token);
        }
        task.left -= 1;
        task.next = Some(token);
        events.push(Event::Token { seq, token, logprob, top });
        let full = (position + 1 > context).then_some(Reason::Context);
        if task.left == 0 { Some(Reason::Length) } else { full }
    }
}
