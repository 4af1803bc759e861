//! The experts that the GPU keeps, where it can't keep all: which are chosen, which should be there, and how they come.
//!
//! Owns the order of these three in a step: before it, exchanges go on as far as copies and steps before allow; behind it, what it chose is
//! counted, exchanges go on again, and new ones begin. Beside a wide window, which brings experts by the ring, nothing is under way.

use std::time::{Duration, Instant};

use strata_backend::{BackendError, ExpertCount, Layer, Op};
use strata_residency::{ExpertId, Ranking, RankingFile};

use super::exchange::{Ask, Begun, Exchanger};
use super::link::DeviceLink;
use super::policy::{Exchanges, Policy};
use super::{At, Choices, Chosen};
use crate::driver::Stream;
use crate::failed;

/// Steps without a wide window among them after which exchanges begin: in a prompt between whose layers answers go on, there are none.
const ALONE: usize = 2;

/// What is learned and moved.
pub(crate) struct Cache {
    pub(super) chosen: Chosen,
    pub(super) policy: Policy,
    pub(super) exchanger: Exchanger<DeviceLink>,
    pub(super) link: DeviceLink,
    pub(super) exchanges: Exchanges,
    /// When the step began.
    pub(super) began: Option<Instant>,
    /// Where what is learned is kept.
    pub(super) ranking: Option<RankingFile>,
}

impl Cache {
    pub(super) fn choices(&self, layer: Layer, rows: usize) -> Choices {
        Choices { experts: self.chosen.experts(layer, rows), ends: self.chosen.ends(layer, rows) }
    }

    /// A short window begins.
    pub(super) fn begin_step(&mut self) -> Result<(), BackendError> {
        self.began = Some(Instant::now());
        self.exchanger.advance(&mut self.link, Ask::Now)
    }

    pub(super) fn see(&mut self, op: &Op<'_>) {
        self.chosen.see(op);
    }

    pub(super) fn forget(&mut self) {
        self.chosen.forget();
        self.began = None;
    }

    pub(super) fn bring_choices(&mut self, stream: &Stream) -> Result<(), BackendError> {
        self.chosen.bring(stream).map_err(failed)?;
        // The GPU computes meanwhile, and whoever wants its results would wait.
        self.policy.plan(self.exchanger.slots(), || self.exchanger.held());
        Ok(())
    }

    /// After everything was waited for: counts a step that is over, and begins exchanges.
    pub(super) fn end_step(&mut self) -> Result<Option<ExpertCount>, BackendError> {
        let (slots, link) = (self.exchanger.slots(), &self.link);
        let Some(step) = self.chosen.step() else { return Ok(None) };
        let took = self.began.take().map_or(Duration::ZERO, |began| began.elapsed());
        let counted = self.policy.step(&step, took, slots, |id| link.is_resident(id));
        // Copies have the time until the next step.
        self.exchanger.advance(&mut self.link, Ask::Now)?;
        if self.exchanges != Exchanges::Learned || self.chosen.alone() >= ALONE {
            self.begin_exchanges()?;
        }
        Ok(Some(ExpertCount { exchanged: self.exchanger.take_landed(), ..counted }))
    }

    fn begin_exchanges(&mut self) -> Result<(), BackendError> {
        while self.exchanger.room() > 0 {
            let Some(next) = self.policy.next(self.exchanger.slots(), &self.exchanger.held()) else { break };
            let begun = self.exchanger.begin(next, &mut self.link)?;
            if begun == Begun::NoRoom {
                break;
            }
            self.policy.taken(begun == Begun::Yes, self.exchanger.slots());
        }
        Ok(())
    }

    /// Counts a window of so many rows that is committed, if it is a wide one.
    pub(super) fn committed(
        &mut self,
        rows: usize,
        stream: &Stream,
    ) -> Result<Option<ExpertCount>, BackendError> {
        let Some(counted) = self.chosen.committed(rows, stream).map_err(failed)? else { return Ok(None) };
        let link = &self.link;
        Ok(Some(self.policy.wide(&counted, self.exchanger.slots(), |id| link.is_resident(id))))
    }

    /// Whether nothing is under way.
    pub(super) fn is_settled(&self) -> bool {
        self.exchanger.is_settled()
    }

    /// Waits until nothing is: a wide window comes.
    pub(super) fn settle(&mut self) -> Result<(), BackendError> {
        self.exchanger.settle(&mut self.link)
    }

    /// Where every expert is, and how often that has changed.
    pub(super) fn experts(&self) -> (&[(ExpertId, At)], u64) {
        (self.link.experts(), self.link.changes())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let Some(file) = &self.ranking else { return };
        let learned = |now| self.policy.learned().map(|heat| Ranking::of(heat, now));
        if let Err(why) = file.save(self.exchanger.slots().roster(), learned) {
            tracing::warn!("{why}");
        }
    }
}
