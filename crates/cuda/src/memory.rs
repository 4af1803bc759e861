//! What the backend will take from the device, described before any of it is: weights, experts, buffers, state, inputs, scratch.

use strata_backend::{Spec, WeightData};
use strata_plan::{Category, Plan, Region};
use strata_residency::LayerSource;

use crate::inputs::InputRegions;
use crate::ops;
use crate::state::LayerRegions;
use crate::tiers::{Budget, TierRegions};
use crate::weights::WeightRegions;

/// Where everything lies.
pub struct Described {
    pub(crate) weights: WeightRegions,
    pub(crate) tiers: TierRegions,
    pub(crate) buffers: Vec<Region>,
    pub(crate) layers: Vec<LayerRegions>,
    pub(crate) inputs: InputRegions,
    /// What ops leave for others behind them.
    pub(crate) kept: Region,
    pub(crate) rope: Region,
    pub(crate) scratch: Region,
    /// Where the host computes experts, if it does.
    pub(crate) host: Option<Region>,
    /// All of it, bytes.
    pub(crate) bytes: usize,
}

/// Lays everything out, for a GPU that takes columns in pieces or not and has so much for experts.
pub(crate) fn describe(
    spec: &Spec,
    weights: &[WeightData],
    experts: &[(u16, LayerSource)],
    plan: &mut Plan,
    (in_pieces, budget): (bool, Budget<'_>),
) -> Described {
    let weights = WeightRegions::describe(spec, weights, plan);
    let layers = (0..spec.layers.len()).map(|index| LayerRegions::describe(spec, index, plan)).collect();
    let buffer = |plan: &mut Plan, buffer: &strata_backend::BufferSpec| {
        plan.device(Category::Window, buffer.name, buffer.rows.saturating_mul(buffer.width).saturating_mul(4))
    };
    let buffers = spec.buffers.iter().map(|spec| buffer(plan, spec)).collect();
    let inputs = InputRegions::describe(spec, plan);
    let rope = spec.shape.qsa.as_ref().map_or(0, |q| spec.context.saturating_mul(4 * q.rotary));
    let kept = plan.device(Category::Scratch, "routing and products", ops::kept_bytes(spec, in_pieces));
    let rope = plan.device(Category::Scratch, "rotary table", rope);
    let scratch = plan.device(Category::Scratch, "ops", ops::scratch_bytes(spec));
    // Experts take what is left.
    let tiers = TierRegions::describe(spec, experts, plan, budget);
    let bytes = plan.device_bytes();
    Described { weights, tiers, buffers, layers, inputs, kept, rope, scratch, host: None, bytes }
}
