//! Which experts a model has and how long they are: the numbers that heat, slots and moves are kept by.
//!
//! Invariant: experts are numbered by layer, then by expert, without gaps, so that a lower number is a lower
//! [`ExpertId`].

use std::cmp::Reverse;

use crate::{ExpertId, Heat};

/// The experts of one layer, all equally long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerExperts {
    /// How many. Zero for a layer without.
    pub experts: u16,
    /// Bytes of one.
    pub bytes: u64,
}

/// All experts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    layers: Vec<LayerExperts>,
    /// The number of each layer's first expert, and behind the last layer the number of all experts.
    first: Vec<usize>,
}

impl Roster {
    /// The experts of layers 0, 1, ...; at most 65,536 layers.
    pub fn new(layers: impl IntoIterator<Item = LayerExperts>) -> Roster {
        let layers: Vec<LayerExperts> = layers.into_iter().take(1 << 16).collect();
        let mut first = vec![0];
        for layer in &layers {
            first.push(first[first.len() - 1] + usize::from(layer.experts));
        }
        Roster { layers, first }
    }

    /// The layers.
    pub fn layers(&self) -> &[LayerExperts] {
        &self.layers
    }

    /// How many experts there are in all layers.
    pub fn len(&self) -> usize {
        self.first[self.layers.len()]
    }

    /// Whether there is no expert.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All experts by number.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        (0u16..)
            .zip(&self.layers)
            .flat_map(|(layer, experts)| (0..experts.experts).map(move |expert| ExpertId { layer, expert }))
    }

    /// All experts, the most used first. Where nothing is known all are equal, and of equals every layer's first ones come first.
    pub fn by_use(&self, heat: &Heat) -> Vec<ExpertId> {
        let mut all: Vec<(u64, ExpertId)> = heat.all_uses().zip(self.ids()).collect();
        all.sort_by_key(|&(uses, id)| (Reverse(uses), id.expert, id.layer));
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// An expert's number; `None` if the model has no such expert.
    #[inline]
    pub fn number(&self, id: ExpertId) -> Option<usize> {
        let layer = self.layers.get(usize::from(id.layer))?;
        (id.expert < layer.experts).then(|| self.first[usize::from(id.layer)] + usize::from(id.expert))
    }

    /// Bytes of an expert; zero if the model has no such expert.
    #[inline]
    pub fn bytes(&self, id: ExpertId) -> u64 {
        self.layers.get(usize::from(id.layer)).map_or(0, |layer| layer.bytes)
    }

    /// Bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| u64::from(layer.experts) * layer.bytes).sum()
    }
}
