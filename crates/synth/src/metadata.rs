//! The metadata of a model: what the loader needs to know of the geometry, the vocabulary, and how the file was made.
//!
//! Owns the keys. They and their types are section 3.1 of the architecture's
//! description; keys under `synth.` are ours: with them and this crate, a file can be made again.
//!
//! Invariant: a model written with these keys is one that the loader takes as it is, with nothing to repair.

use strata_gguf::{Metadata, Value};
use strata_model::hyper::ARCHITECTURE;
use strata_model::ngram::derive::{self, Table};

use crate::geometry::{END_OF_TEXT, Geometry, IMAGE, LayerKind, Ngram, TURN_END};
use crate::layout::Options;
use crate::vocabulary::{CHAT_TEMPLATE, Vocabulary};

/// The n-gram table and the constants of its hash: the geometry's own, or, with `wanted` rows, those of a smaller table whose
/// heads begin at an even share of them.
pub(crate) fn table(ngram: &Ngram, vocabulary: u32, wanted: Option<u64>) -> Table {
    let geometry = derive::Geometry {
        vocab: vocabulary as usize,
        ngram_size: ngram.order as usize,
        heads_per_ngram: ngram.heads as usize,
        vocab_base: wanted.map_or(ngram.base, |rows| rows / u64::from(ngram.all_heads())),
        divisor: ngram.divisor,
        seed: ngram.seed,
    };
    derive::derive(&geometry, 1)
}

/// The metadata of the model that `options` ask for.
pub(crate) fn metadata(options: &Options, table: Option<&Table>) -> Metadata {
    let geometry = &options.geometry;
    let mut metadata = Metadata::new();
    let mut put = |key: &str, value: Value| {
        metadata.insert(key, value);
    };
    put("general.architecture", ARCHITECTURE.into());
    put("general.type", "model".into());
    put("general.name", format!("Synthetic {}", geometry.name).into());
    put(
        "general.description",
        "Random weights: for trying a machine and for measurements; it says nothing.".into(),
    );
    put("general.quantization_version", 2u32.into());
    geometry_keys(geometry, options.draft, |key, value| put(&format!("{ARCHITECTURE}.{key}"), value));
    if let (Some(ngram), Some(table)) = (&geometry.ngram, table) {
        ngram_keys(geometry, ngram, table, |key, value| put(&format!("{ARCHITECTURE}.{key}"), value));
    }
    let vocabulary = Vocabulary::new(geometry);
    put("tokenizer.ggml.model", "gpt2".into());
    put("tokenizer.ggml.pre", "qwen35".into());
    put("tokenizer.ggml.tokens", vocabulary.tokens.into());
    put("tokenizer.ggml.token_type", vocabulary.kinds.into());
    put("tokenizer.ggml.merges", vocabulary.merges.into());
    for (key, token) in [("eos", TURN_END), ("padding", END_OF_TEXT)] {
        if let Some(id) = geometry.special(token) {
            put(&format!("tokenizer.ggml.{key}_token_id"), id.into());
        }
    }
    put("tokenizer.ggml.add_bos_token", false.into());
    put("tokenizer.chat_template", CHAT_TEMPLATE.into());
    put("synth.geometry", geometry.name.as_str().into());
    put("synth.formats", options.formats.to_string().into());
    put("synth.seed", options.seed.into());
    if let Some(alpha) = options.router_skew {
        put("synth.router_skew", alpha.into());
    }
    metadata
}

fn geometry_keys(geometry: &Geometry, draft: bool, mut put: impl FnMut(&str, Value)) {
    let Geometry { attention, indexer, gdn, moe, .. } = geometry;
    let blocks = geometry.layers + u32::from(draft);
    // The draft block is a full layer.
    let kinds = || (0..geometry.layers).map(|l| geometry.kind(l)).chain(draft.then_some(LayerKind::Qsa));
    put("block_count", blocks.into());
    put("context_length", geometry.context.into());
    put("embedding_length", geometry.hidden.into());
    put("attention.head_count", attention.heads.into());
    put("attention.head_count_kv", attention.kv_heads.into());
    put("attention.key_length", attention.head_dim.into());
    put("attention.value_length", attention.head_dim.into());
    put("attention.layer_norm_rms_epsilon", geometry.epsilon.into());
    put("rope.dimension_count", attention.rotary.into());
    let sections = attention.rope_sections.iter().map(|&n| n as i32).chain([0]).collect::<Vec<_>>();
    put("rope.dimension_sections", sections.into());
    put("rope.freq_base", attention.rope_base.into());
    put("expert_count", moe.experts.into());
    put("expert_used_count", moe.used.into());
    put("expert_feed_forward_length", moe.width.into());
    put("expert_shared_feed_forward_length", moe.shared_width.into());
    put("ssm.conv_kernel", gdn.conv_kernel.into());
    put("ssm.state_size", gdn.key_dim.into());
    put("ssm.group_count", gdn.key_heads.into());
    put("ssm.time_step_rank", gdn.value_heads.into());
    put("ssm.inner_size", (gdn.value_heads * gdn.value_dim).into());
    let recurrent: Vec<bool> = kinds().map(|kind| kind == LayerKind::Gdn).collect();
    put("attention.recurrent_layers", recurrent.into());
    if let Some(interval) = interval(&geometry.pattern) {
        put("full_attention_interval", interval.into());
    }
    put("hyper_connection.count", geometry.streams.into());
    put("hyper_connection.low_rank", geometry.low_rank.into());
    put("attention.indexer.head_count", indexer.heads.into());
    put("attention.indexer.key_length", indexer.dim.into());
    put("attention.indexer.top_k", indexer.budget.into());
    let ratio = |kind| if kind == LayerKind::Qsa { indexer.ratio as i32 } else { 0 };
    put("attention.compress_ratios", kinds().map(ratio).collect::<Vec<i32>>().into());
    if draft {
        put("nextn_predict_layers", 1u32.into());
    }
}

/// `n` where the pattern is every `n`-th layer full, the last of each `n`.
fn interval(pattern: &[LayerKind]) -> Option<u32> {
    let (last, others) = pattern.split_last()?;
    let regular = *last == LayerKind::Qsa && others.iter().all(|&kind| kind == LayerKind::Gdn);
    regular.then(|| u32::try_from(pattern.len()).ok()).flatten()
}

fn ngram_keys(geometry: &Geometry, ngram: &Ngram, table: &Table, mut put: impl FnMut(&str, Value)) {
    put("ple.layers", vec![ngram.layer as i32].into());
    put("ple.ngram_size", ngram.order.into());
    put("ple.heads_per_ngram", ngram.heads.into());
    put("ple.conv_kernel", ngram.conv_kernel.into());
    if let Some(id) = geometry.special(END_OF_TEXT) {
        put("ple.eos_token_id", id.into());
    }
    if let Some(id) = geometry.special(IMAGE) {
        put("ple.image_token_id", id.into());
    }
    put("embedding_length_per_layer_input", ngram.row.into());
    for constants in &table.layers {
        put("ple.layer_multipliers", constants.multipliers.clone().into());
        let (offsets, rows): (Vec<u64>, Vec<u64>) =
            constants.heads.iter().map(|h| (h.offset, h.rows)).unzip();
        put("ple.head_offsets", offsets.into());
        put("ple.head_vocab_sizes", rows.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table_of(geometry: &Geometry, wanted: Option<u64>) -> (Vec<u64>, Vec<u64>, u64) {
        let table = table(geometry.ngram.as_ref().unwrap(), geometry.vocabulary, wanted);
        let constants = &table.layers[0];
        (constants.multipliers.clone(), constants.heads.iter().map(|h| h.rows).collect(), table.rows)
    }

    /// Oracle: the constants in the headers of the real model's files, of the golden model and of the demo model.
    #[test]
    fn hash_constants_are_the_published_ones() {
        let (multipliers, heads, rows) = table_of(&Geometry::flash_next(), None);
        assert_eq!(multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        let above = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171];
        assert_eq!((heads, rows), (above.map(|n| 20_000_000 + n).to_vec(), 320_001_536));
        let (multipliers, heads, rows) = table_of(&Geometry::tiny(), None);
        assert_eq!(multipliers, [16_304_757_896_083_889, 11_435_418_644_576_253, 7_275_717_464_594_479]);
        assert_eq!((heads, rows), (vec![97, 101, 103, 107, 109, 113, 127, 131], 888));
        let (multipliers, heads, rows) = table_of(&Geometry::pebble(), None);
        assert_eq!(multipliers, [542_159_200_305_367, 176_419_576_156_223, 520_318_023_548_141]);
        let heads: Vec<u64> = heads.iter().map(|n| n - 20_000).collect();
        assert_eq!((heads, rows), (vec![11, 21, 23, 29, 47, 51, 63, 71], 160_384));
    }

    /// Oracle: arithmetic. A smaller table keeps its multipliers and has hardly more rows than asked for.
    #[test]
    fn tables_can_be_smaller() {
        let (whole, small) =
            (table_of(&Geometry::flash_next(), None), table_of(&Geometry::flash_next(), Some(32_000_000)));
        assert_eq!(small.0, whole.0);
        assert_eq!(small.2, 32_002_176);
        assert_eq!(table_of(&Geometry::tiny(), Some(16)).1, [2, 3, 5, 7, 11, 13, 17, 19]);
    }
}
