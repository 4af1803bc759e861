//! The tensors of a geometry: names, shapes and roles, in the order of the file.
//!
//! Owns the list. Does not know formats ([`mix`](crate::mix)) or values ([`recipe`](crate::recipe)).
//!
//! Invariant: every name is unique; shapes are in `ne` order, the row length first.

use crate::geometry::{Geometry, LayerKind};

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embedding.
    Embedding,
    /// Language-model head.
    Head,
    /// The n-gram table.
    Table,
    /// The gamma of any norm.
    Gamma,
    /// A mixer's product down to the low rank.
    MixDown,
    /// A mixer's product back up.
    MixUp,
    /// What a mixer weighs its streams with.
    Inject,
    /// Query, key and value of a recurrent layer.
    GdnQkv,
    /// Output gate of a recurrent layer.
    GdnGate,
    /// Output of a recurrent layer.
    GdnOutput,
    /// Convolution of a recurrent layer.
    GdnConv,
    /// Time-step bias of a recurrent layer.
    TimeBias,
    /// Decay of a recurrent layer: minus the exponential of its logarithm.
    Decay,
    /// Time steps of a recurrent layer.
    Alpha,
    /// Write strengths of a recurrent layer.
    Beta,
    /// Query and output gate of a full layer.
    Query,
    /// Key of a full layer.
    Key,
    /// Value of a full layer.
    Value,
    /// Output of a full layer.
    AttentionOutput,
    /// Query or key of an indexer.
    Indexer,
    /// Router.
    Router,
    /// Gate of the routed experts.
    ExpertGate,
    /// Up-projection of the routed experts.
    ExpertUp,
    /// Down-projection of the routed experts.
    ExpertDown,
    /// Gate or up-projection of the shared expert.
    SharedIn,
    /// Down-projection of the shared expert.
    SharedDown,
    /// The shared expert's own gate.
    SharedGate,
    /// Key of the n-gram block.
    NgramKey,
    /// Value of the n-gram block.
    NgramValue,
    /// Convolution of the n-gram block.
    NgramConv,
    /// Where the draft block joins embedding and trunk.
    Join,
}

impl Role {
    /// Whether the tensor holds the routed experts of a layer.
    pub fn is_expert(self) -> bool {
        matches!(self, Role::ExpertGate | Role::ExpertUp | Role::ExpertDown)
    }
}

/// A tensor of the model, without its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) role: Role,
    /// The layer, the draft block's being one past the trunk's; `None` outside the layers.
    pub(crate) layer: Option<u32>,
}

/// All tensors. The n-gram table, if there is one, is the last and has `table_rows` rows.
pub(crate) fn tensors(geometry: &Geometry, draft: bool, table_rows: u64) -> Vec<Tensor> {
    let mut list = List { tensors: Vec::new(), layer: None };
    let (d, wide) = (geometry.hidden, geometry.wide());
    list.add("token_embd.weight", &[d, geometry.vocabulary], Role::Embedding);
    list.add("output.weight", &[d, geometry.vocabulary], Role::Head);
    list.mixer(geometry, "output_hc", false);
    for layer in 0..geometry.layers {
        list.layer = Some(layer);
        match geometry.kind(layer) {
            LayerKind::Gdn => list.gdn(geometry),
            LayerKind::Qsa => list.qsa(geometry),
        }
        list.experts(geometry);
        if let Some(ngram) = geometry.ngram.as_ref().filter(|ngram| ngram.layer == layer) {
            list.add("ple_key.weight", &[ngram.all_heads() * ngram.row, wide], Role::NgramKey);
            list.add("ple_value.weight", &[ngram.all_heads() * ngram.row, d], Role::NgramValue);
            for of in ["key", "query", "conv"] {
                list.add(&format!("ple_norm_{of}.weight"), &[wide], Role::Gamma);
            }
            list.add("ple_conv1d.weight", &[ngram.conv_kernel, wide], Role::NgramConv);
        }
    }
    if draft {
        list.layer = Some(geometry.layers);
        list.add("nextn.eh_proj.weight", &[2 * d, d], Role::Join);
        list.add("nextn.enorm.weight", &[d], Role::Gamma);
        list.add("nextn.hnorm.weight", &[wide], Role::Gamma);
        list.mixer(geometry, "nextn.hc_head", false);
        list.qsa(geometry);
        list.experts(geometry);
    }
    if let Some(ngram) = &geometry.ngram {
        let name = "per_layer_token_embd.weight".to_owned();
        let shape = vec![ngram.row.into(), table_rows];
        list.tensors.push(Tensor { name, shape, role: Role::Table, layer: None });
    }
    list.tensors
}

struct List {
    tensors: Vec<Tensor>,
    layer: Option<u32>,
}

impl List {
    fn add(&mut self, name: &str, shape: &[u32], role: Role) {
        let name = match self.layer {
            Some(layer) => format!("blk.{layer}.{name}"),
            None => name.to_owned(),
        };
        let shape = shape.iter().map(|&n| u64::from(n)).collect();
        self.tensors.push(Tensor { name, shape, role, layer: self.layer });
    }

    /// A mixer between streams; the last of a trunk or of a draft block has no inject.
    fn mixer(&mut self, geometry: &Geometry, name: &str, inject: bool) {
        let (wide, rank) = (geometry.wide(), geometry.low_rank);
        self.add(&format!("{name}_norm.weight"), &[wide], Role::Gamma);
        self.add(&format!("{name}_down.weight"), &[wide, rank], Role::MixDown);
        self.add(&format!("{name}_up.weight"), &[rank, wide], Role::MixUp);
        if inject {
            self.add(&format!("{name}_inject.weight"), &[wide, geometry.streams], Role::Inject);
        }
    }

    fn gdn(&mut self, geometry: &Geometry) {
        let (d, gdn) = (geometry.hidden, &geometry.gdn);
        let values = gdn.value_heads * gdn.value_dim;
        let channels = 2 * gdn.key_heads * gdn.key_dim + values;
        self.mixer(geometry, "hc_attn", true);
        self.add("attn_qkv.weight", &[d, channels], Role::GdnQkv);
        self.add("attn_gate.weight", &[d, values], Role::GdnGate);
        self.add("ssm_conv1d.weight", &[gdn.conv_kernel, channels], Role::GdnConv);
        self.add("ssm_dt.bias", &[gdn.value_heads], Role::TimeBias);
        self.add("ssm_a", &[gdn.value_heads], Role::Decay);
        self.add("ssm_alpha.weight", &[d, gdn.value_heads], Role::Alpha);
        self.add("ssm_beta.weight", &[d, gdn.value_heads], Role::Beta);
        self.add("ssm_norm.weight", &[gdn.value_dim], Role::Gamma);
        self.add("ssm_out.weight", &[values, d], Role::GdnOutput);
    }

    fn qsa(&mut self, geometry: &Geometry) {
        let (d, attention, indexer) = (geometry.hidden, &geometry.attention, &geometry.indexer);
        let (queries, keys) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
        self.mixer(geometry, "hc_attn", true);
        self.add("attn_q.weight", &[d, 2 * queries], Role::Query);
        self.add("attn_k.weight", &[d, keys], Role::Key);
        self.add("attn_v.weight", &[d, keys], Role::Value);
        self.add("attn_output.weight", &[queries, d], Role::AttentionOutput);
        self.add("attn_q_norm.weight", &[attention.head_dim], Role::Gamma);
        self.add("attn_k_norm.weight", &[attention.head_dim], Role::Gamma);
        self.add("indexer.q_proj.weight", &[d, indexer.heads * indexer.dim], Role::Indexer);
        self.add("indexer.k_proj.weight", &[d, indexer.dim], Role::Indexer);
        self.add("indexer.q_norm.weight", &[indexer.dim], Role::Gamma);
        self.add("indexer.k_norm.weight", &[indexer.dim], Role::Gamma);
    }

    fn experts(&mut self, geometry: &Geometry) {
        let (d, moe) = (geometry.hidden, &geometry.moe);
        self.mixer(geometry, "hc_ffn", true);
        self.add("ffn_gate_inp.weight", &[d, moe.experts], Role::Router);
        self.add("ffn_gate_exps.weight", &[d, moe.width, moe.experts], Role::ExpertGate);
        self.add("ffn_up_exps.weight", &[d, moe.width, moe.experts], Role::ExpertUp);
        self.add("ffn_down_exps.weight", &[moe.width, d, moe.experts], Role::ExpertDown);
        self.add("ffn_gate_inp_shexp.weight", &[d, 1], Role::SharedGate);
        self.add("ffn_gate_shexp.weight", &[d, moe.shared_width], Role::SharedIn);
        self.add("ffn_up_shexp.weight", &[d, moe.shared_width], Role::SharedIn);
        self.add("ffn_down_shexp.weight", &[moe.shared_width, d], Role::SharedDown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Oracle: the published tensor counts of the real model, and the committed tiny model's of the same geometry.
    #[test]
    fn counts_are_the_published_ones() {
        for (geometry, trunk, both) in [(Geometry::flash_next(), 1224, 1256), (Geometry::tiny(), 113, 145)] {
            for (draft, count) in [(false, trunk), (true, both)] {
                let tensors = tensors(&geometry, draft, 1);
                assert_eq!(tensors.len(), count);
                let names: HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
                assert_eq!(names.len(), count);
            }
        }
    }
}
