//! The host beside a device: it computes routed experts where they lie in memory, or once they have been read there, while the device computes others.

use std::sync::Arc;

use strata_plan::{Arena, Plan, Region};
use strata_residency::ExpertStore;

use crate::{BackendError, ExpertWeights, Layer, Spec};

/// Not yet built, as [`crate::Build`] is for a backend.
pub trait BuildHostExperts: Send {
    /// Adds all memory that [`BuildHostExperts::build`] takes to the plan; of the arena it takes one region.
    fn describe(&self, spec: &Spec, plan: &mut Plan) -> Region;

    /// Builds it into the arena that the plan sized.
    fn build(
        self: Box<Self>,
        spec: &Spec,
        region: Region,
        arena: &mut Arena,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn HostExperts>, BackendError>;
}

/// Rows of a window, grouped by expert.
#[derive(Debug, Clone, Copy)]
pub struct GroupedRows<'a> {
    /// The experts of a layer, each once.
    pub experts: &'a [u32],
    /// Where each one's places start, and at last where they end: from 0 on, one more than experts.
    pub bounds: &'a [u32],
    /// Which row each place has.
    pub order: &'a [u32],
    /// `[rows][D]`
    pub u: &'a [f32],
}

/// Computes experts' products, with the bits that a backend gives.
pub trait HostExperts: Send {
    /// Calls will follow one another closely until [`HostExperts::end_step`]: threads may stay awake between them.
    fn begin_step(&mut self);

    /// A call will come in a moment: threads that sleep should wake.
    fn rouse(&mut self);

    /// Nothing more is coming soon: whoever waits must sleep.
    fn end_step(&mut self);

    /// The outputs of some of a layer's experts for one row, before their shares: of `u`, `[D]`, to `out`, `[experts][D]`. The weights have no
    /// scales of their own.
    fn outputs(
        &mut self,
        layer: Layer,
        weights: &ExpertWeights,
        experts: &[u32],
        u: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError>;

    /// The same for several rows: to `out`, `[places][D]`.
    fn grouped(
        &mut self,
        layer: Layer,
        weights: &ExpertWeights,
        rows: GroupedRows<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError>;
}
