//! How a backend comes to be: described first, then built into the memory that the plan placed.

use std::sync::Arc;

use strata_plan::{Arena, Limits, Plan};
use strata_quant::Format;
use strata_residency::{Bytes, ExpertId, ExpertStore, LayerSource};

use crate::{Backend, BackendError, Spec};

/// A dense weight as it lies in the model file. Its index in the list given to [`Build`] is its [`crate::Weight`].
#[derive(Clone)]
pub struct WeightData {
    /// The tensor's name, for messages and the plan.
    pub name: String,
    /// How a row is stored.
    pub format: Format,
    /// Rows (1 for a vector).
    pub rows: usize,
    /// Values per row.
    pub k: usize,
    /// `rows` rows of `format`.
    pub bytes: Bytes,
    /// What the finished products are multiplied with, in files that scale whole tensors.
    pub scale: Option<f32>,
}

/// Who takes experts out of the store that a device can't read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Takers {
    /// Threads that copy them, each one at a time ([`strata_residency::Source`]).
    pub stagers: usize,
    /// Whether the host computes with them, on tours ([`ExpertStore::tour`]).
    pub computes: bool,
}

/// A backend not yet built: it can say what it would allocate, and then allocate exactly that.
pub trait Build {
    /// Where everything lies that [`Build::describe`] laid out.
    type Described;

    /// Rows of a prompt window that the backend likes best, where they fit.
    fn window(&self) -> usize {
        512
    }

    /// The same where each window has experts brought that are not on the device: the wider, the fewer times.
    fn window_for_experts_in_memory(&self) -> usize {
        self.window()
    }

    /// What there is of the device's own memory, for a backend that has some.
    fn device_limits(&self) -> Option<Limits> {
        None
    }

    /// Adds every byte that [`Build::build`] will allocate to the plan. Reads no weight's bytes. `experts` are the homes of the
    /// layers' experts, for a backend that keeps copies of its own.
    ///
    /// # Errors
    /// A geometry that the backend has no ops for.
    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Self::Described, BackendError>;

    /// The experts that it will read from memory which it makes known to its device: they have to be in the heap tier. Those used most come first. None for
    /// a backend that takes experts wherever they are, or keeps copies of all.
    fn experts_in_memory(&self, _described: &Self::Described) -> Option<Vec<ExpertId>> {
        None
    }

    /// Who takes others of them out of the store, for a device that can't read those.
    fn takers(&self) -> Takers {
        Takers::default()
    }

    /// Builds the backend into the arena that the plan sized. Afterwards it allocates nothing.
    fn build(
        self,
        spec: Spec,
        described: Self::Described,
        arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError>;
}
