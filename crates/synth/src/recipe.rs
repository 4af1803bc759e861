//! How weights are spread, so that what flows through the model stays sane.
//!
//! Owns the spread of every role. The reasoning, with the parts of the architecture that it answers to:
//!
//! - The embedding has spread 1, and so has the residual at the start. Every layer adds two results to every stream, each of
//!   spread `sqrt(ADDED / (2 layers))`: at the end the residual's variance is about `1 + ADDED`, however many layers there are.
//! - A mixer hands on the mean of gated, normed streams. Gates lie about a half, so its result has spread a half (the streams
//!   differ little), and matrices that read it have `2 / sqrt(width)` where their result should have spread 1.
//! - Inside a mixer, products are divided by the number of streams before their nonlinearity; their matrices make up for it.
//! - Output matrices know the spread of what they read: see [`Spread::of`].
//! - Gammas lie about 1. Decays are spread evenly from -16 to -1, and time steps so that they are between a thousandth and a
//!   tenth at rest, evenly in their logarithm, as recurrent layers are initialised before training: memories from one token to a
//!   thousand. With write strengths between 0 and 1 and unit keys, the delta rule can't diverge.
//!
//! Invariant: only the geometry decides; formats and seeds don't change a spread.

use crate::geometry::Geometry;
use crate::tensors::Role;

/// What the layers add to the residual's variance in all.
const ADDED: f32 = 0.5;
/// The spread of what the mixers hand on.
pub(crate) const MIXED: f32 = 0.5;
/// What the n-gram block adds to the residual's variance.
const ADDED_BY_NGRAMS: f32 = 0.05;

/// How the values of a tensor are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Recipe {
    /// Around zero, in any format, with this root mean square.
    Noise(f32),
    /// Floats around 1, with this standard deviation.
    Gamma(f32),
    /// Floats spread evenly from the first to the second.
    Even(f32, f32),
}

/// The spreads of a geometry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread<'g> {
    geometry: &'g Geometry,
}

impl<'g> Spread<'g> {
    pub(crate) fn of(geometry: &'g Geometry) -> Self {
        Self { geometry }
    }

    /// The variance of the residual where layer `layer` reads its experts' input (`layers`: the draft block, which begins
    /// anew with variance 1).
    pub(crate) fn residual_variance(self, layer: u32) -> f32 {
        let geometry = self.geometry;
        let each = ADDED / (2.0 * geometry.layers as f32);
        if layer == geometry.layers {
            return 1.0 + each;
        }
        let ngrams = geometry.ngram.as_ref().is_some_and(|ngram| ngram.layer <= layer);
        1.0 + each * (2 * layer + 1) as f32 + if ngrams { ADDED_BY_NGRAMS } else { 0.0 }
    }

    /// The variance of the residual after the last layer.
    pub(crate) fn last_variance(self) -> f32 {
        1.0 + ADDED + if self.geometry.ngram.is_some() { ADDED_BY_NGRAMS } else { 0.0 }
    }

    /// How the tensors of a role are drawn.
    pub(crate) fn recipe(self, role: Role) -> Recipe {
        use Recipe::{Even, Gamma, Noise};
        let geometry = self.geometry;
        let root = |n: u32| (n as f32).sqrt();
        let (streams, wide) = (geometry.streams as f32, root(geometry.wide()));
        let attention = root(geometry.attention.heads * geometry.attention.head_dim);
        let values = root(geometry.gdn.value_heads * geometry.gdn.value_dim);
        // Reads a mixer's result; its own result has this spread.
        let from_mixed = |spread: f32| Noise(spread / (MIXED * root(geometry.hidden)));
        let added = (ADDED / (2.0 * geometry.layers as f32)).sqrt();
        // The root mean square of sigmoid(z) for z of spread 1.
        const GATE: f32 = 0.54;
        // Of silu(a) b for a and b of spread 1.
        const SWIGLU: f32 = 0.6;
        match role {
            Role::Embedding => Noise(1.0),
            Role::Head => from_mixed(2.0),
            Role::Table => Noise(0.1),
            Role::Gamma => Gamma(0.1),
            Role::MixDown => Noise(streams / wide),
            // Reads silu of spread 1, which has 0.6; gates of sigmoid(spread 0.5).
            Role::MixUp => Noise(0.5 / (0.6 * root(geometry.low_rank))),
            // Weights of 2 sigmoid(spread 0.3): between a half and three halves.
            Role::Inject => Noise(0.3 * streams / wide),
            Role::GdnQkv | Role::GdnGate | Role::Beta => from_mixed(1.0),
            Role::Alpha | Role::SharedGate => from_mixed(0.5),
            Role::GdnConv => Noise(1.0 / root(geometry.gdn.conv_kernel)),
            Role::TimeBias => Even(-6.9, -2.25),
            Role::Decay => Even(-16.0, -1.0),
            // Heads of spread 1, gated.
            Role::GdnOutput => Noise(added / (GATE * values)),
            Role::Query | Role::Key | Role::Value | Role::Indexer => from_mixed(1.0),
            // Values of spread 1, averaged over some tokens and gated.
            Role::AttentionOutput => Noise(added / (0.5 * GATE * attention)),
            Role::Router | Role::ExpertGate | Role::ExpertUp | Role::SharedIn => from_mixed(1.0),
            // Routed and shared experts add half of the variance each: the routed ones under weights whose squares sum to
            // about 1.3 over their number, the shared one times a gate of about a half.
            Role::ExpertDown => {
                let weights = (1.3 / geometry.moe.used as f32).sqrt().min(1.0);
                Noise(0.7 * added / (weights * SWIGLU * root(geometry.moe.width)))
            }
            Role::SharedDown => Noise(1.4 * added / (SWIGLU * root(geometry.moe.shared_width))),
            // Normed after the product, so the scale is free.
            Role::NgramKey => Noise(10.0 / root(self.ngram_width())),
            // Values of spread 0.4 from rows of spread 0.1, times a gate of about a half.
            Role::NgramValue => Noise(4.0 / root(self.ngram_width())),
            Role::NgramConv => Noise(0.1),
            Role::Join => Noise(1.0 / root(2 * geometry.hidden)),
        }
    }

    fn ngram_width(self) -> u32 {
        self.geometry.ngram.as_ref().map_or(1, |ngram| ngram.all_heads() * ngram.row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: arithmetic. The variance that all layers add, step by step, is the one that is there after the last.
    #[test]
    fn the_residual_grows_to_what_is_said() {
        for name in Geometry::PRESETS {
            let geometry = Geometry::preset(name).unwrap();
            let spread = Spread::of(&geometry);
            let steps: Vec<f32> = (0..geometry.layers).map(|l| spread.residual_variance(l)).collect();
            assert!(steps.is_sorted() && steps[0] > 1.0);
            let last_step = ADDED / (2.0 * geometry.layers as f32);
            assert!((steps[steps.len() - 1] + last_step - spread.last_variance()).abs() < 1e-5, "{name}");
        }
    }
}
