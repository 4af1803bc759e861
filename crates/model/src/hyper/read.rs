//! Reading and checking the metadata.

use strata_gguf::{Gguf, Metadata, TensorInfo};

use super::layers::Blocks;
use super::{ARCHITECTURE, Attention, Gdn, Hyper, HyperError, Indexer, Moe, Ple};
use crate::ngram::{Head, NgramError, NgramHash};
use crate::warning::Warning;

/// No dimension is larger; keeps every product of three sizes inside a `usize`.
const MAX_SIZE: usize = 1 << 20;
/// No vocabulary is larger.
const MAX_VOCAB: usize = 1 << 24;

/// Metadata under the architecture's prefix, and the tensors' presence.
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    tensor: &'a dyn Fn(&str) -> Option<&'a TensorInfo>,
}

impl Keys<'_> {
    pub(super) fn name(&self, key: &str) -> String {
        format!("{ARCHITECTURE}.{key}")
    }

    pub(super) fn has(&self, tensor: &str) -> bool {
        (self.tensor)(tensor).is_some()
    }

    pub(super) fn wrong(&self, key: &str, value: impl ToString, wanted: &str) -> HyperError {
        HyperError::Value { key: self.name(key), value: value.to_string(), wanted: wanted.to_owned() }
    }

    /// A dimension: from 1 to [`MAX_SIZE`].
    pub(super) fn size(&self, key: &str) -> Result<usize, HyperError> {
        let value = self.metadata.u64(&self.name(key))?;
        let size = usize::try_from(value).ok().filter(|size| (1..=MAX_SIZE).contains(size));
        size.ok_or_else(|| self.wrong(key, value, &format!("from 1 to {MAX_SIZE}")))
    }

    pub(super) fn opt_count(&self, key: &str) -> Result<Option<usize>, HyperError> {
        let Some(value) = self.metadata.opt_u64(&self.name(key))? else { return Ok(None) };
        let count = usize::try_from(value).ok().filter(|&count| count <= MAX_SIZE);
        count.map(Some).ok_or_else(|| self.wrong(key, value, &format!("at most {MAX_SIZE}")))
    }

    fn positive(&self, key: &str) -> Result<f32, HyperError> {
        let value = self.metadata.f32(&self.name(key))?;
        if value.is_finite() && value > 0.0 { Ok(value) } else { Err(self.wrong(key, value, "positive")) }
    }

    fn token(&self, key: &str, vocab: usize) -> Result<Option<u32>, HyperError> {
        let Some(value) = self.metadata.opt_u64(&self.name(key))? else { return Ok(None) };
        let id = u32::try_from(value).ok().filter(|&id| (id as usize) < vocab);
        id.map(Some).ok_or_else(|| self.wrong(key, value, &format!("below the vocabulary's {vocab} tokens")))
    }

    fn contradiction(&self, what: String) -> HyperError {
        HyperError::Contradiction { what }
    }

    /// `key` (of value `value`) must be a multiple of `by_key` (of value `by`).
    fn multiple(&self, (key, value): (&str, usize), (by_key, by): (&str, usize)) -> Result<(), HyperError> {
        if value.is_multiple_of(by) {
            return Ok(());
        }
        let (key, by_key) = (self.name(key), self.name(by_key));
        Err(self.contradiction(format!("`{key}` is {value}, not a multiple of `{by_key}` ({by})")))
    }
}

impl Hyper {
    /// Reads the hyper-parameters of an opened file.
    ///
    /// # Errors
    /// See [`HyperError`].
    pub fn from_gguf(gguf: &Gguf, warnings: &mut Vec<Warning>) -> Result<Self, HyperError> {
        Self::read(gguf.metadata(), &|name| gguf.tensor(name), warnings)
    }

    /// Reads the hyper-parameters in `metadata`; `tensor` looks up tensors by name, for their presence and the size of
    /// the vocabulary.
    ///
    /// # Errors
    /// See [`HyperError`].
    pub fn read<'a>(
        metadata: &'a Metadata,
        tensor: &'a dyn Fn(&str) -> Option<&'a TensorInfo>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, HyperError> {
        let keys = Keys { metadata, tensor };
        let architecture = metadata.str("general.architecture")?;
        if architecture != ARCHITECTURE {
            return Err(HyperError::Architecture { found: architecture.to_owned() });
        }
        let blocks = Blocks::read(&keys, warnings)?;
        let embedding = tensor("token_embd.weight").ok_or(HyperError::NoEmbedding)?;
        let vocab = embedding.shape.get(1).and_then(|&rows| usize::try_from(rows).ok()).unwrap_or(0);
        if !(1..=MAX_VOCAB).contains(&vocab) {
            return Err(HyperError::Contradiction {
                what: format!("`token_embd.weight` has {vocab} rows, which is no size of a vocabulary"),
            });
        }
        check_implied(&keys)?;

        let attention = attention(&keys)?;
        let indexer = Indexer {
            heads: keys.size("attention.indexer.head_count")?,
            dim: keys.size("attention.indexer.key_length")?,
            budget: keys.size("attention.indexer.top_k")?,
        };
        if attention.rotary > indexer.dim {
            return Err(keys.contradiction(format!(
                "`{}` is {}, more than the indexer's width `{}` ({})",
                keys.name("rope.dimension_count"),
                attention.rotary,
                keys.name("attention.indexer.key_length"),
                indexer.dim
            )));
        }
        let (layers, draft) = blocks.kinds(&keys, indexer.budget, warnings)?;
        let (streams, width) = (keys.size("hyper_connection.count")?, keys.size("embedding_length")?);
        let context = keys.metadata.u64(&keys.name("context_length"))?;
        Ok(Self {
            vocab,
            context: usize::try_from(context)
                .ok()
                .filter(|context| (1..=1 << 30).contains(context))
                .ok_or_else(|| keys.wrong("context_length", context, "from 1 to 2^30"))?,
            width,
            streams,
            mixer_rank: keys.size("hyper_connection.low_rank")?,
            norm_eps: keys.positive("attention.layer_norm_rms_epsilon")?,
            layers,
            draft,
            attention,
            indexer,
            gdn: gdn(&keys)?,
            moe: moe(&keys)?,
            ple: ple(&keys, blocks.trunk, vocab)?,
        })
    }
}

/// Settings that the architecture implies: files that state them must agree.
fn check_implied(keys: &Keys<'_>) -> Result<(), HyperError> {
    let unsupported = |what: String| Err(HyperError::Unsupported { what });
    match keys.opt_count("expert_gating_func")? {
        None | Some(0 | 1) => {}
        Some(code) => return unsupported(format!("expert gating function {code} (softmax is 1)")),
    }
    if keys.metadata.opt_bool(&keys.name("expert_weights_norm"))? == Some(false) {
        return unsupported("expert weights that are not renormalised".to_owned());
    }
    match keys.metadata.opt_f32(&keys.name("expert_weights_scale"))? {
        None => {}
        Some(scale) if scale == 0.0 || scale == 1.0 => {}
        Some(scale) => return unsupported(format!("a scale of {scale} on the expert weights")),
    }
    if let Some(groups @ 2..) = keys.opt_count("expert_group_count")? {
        return unsupported(format!("routing in {groups} groups of experts"));
    }
    match keys.metadata.opt_str(&keys.name("rope.scaling.type"))? {
        None | Some("none") => Ok(()),
        Some(kind) => unsupported(format!("rotary scaling of type `{kind}`")),
    }
}

fn attention(keys: &Keys<'_>) -> Result<Attention, HyperError> {
    let heads = keys.size("attention.head_count")?;
    let kv_heads = keys.size("attention.head_count_kv")?;
    keys.multiple(("attention.head_count", heads), ("attention.head_count_kv", kv_heads))?;
    let head_dim = keys.size("attention.key_length")?;
    let value_dim = keys.size("attention.value_length")?;
    if head_dim != value_dim {
        return Err(keys.contradiction(format!(
            "`{}` is {head_dim} and `{}` is {value_dim}, but heads have one width",
            keys.name("attention.key_length"),
            keys.name("attention.value_length")
        )));
    }
    let rotary = keys.size("rope.dimension_count")?;
    if rotary % 2 != 0 || rotary > head_dim {
        return Err(keys.wrong("rope.dimension_count", rotary, &format!("even and at most {head_dim}")));
    }
    let key = "rope.dimension_sections";
    // Without sections all pairs follow the same axis: plain text positions.
    let sections = keys.metadata.opt_u64s(&keys.name(key))?.unwrap_or_else(|| vec![rotary as u64 / 2]);
    let mut rope_sections = [0; 3];
    for (i, &section) in sections.iter().enumerate() {
        match (rope_sections.get_mut(i), usize::try_from(section)) {
            (Some(slot), Ok(section)) if section <= rotary => *slot = section,
            (None, Ok(0)) => {}
            _ => return Err(keys.wrong(key, format!("{sections:?}"), "three sections, then zeros")),
        }
    }
    let pairs: usize = rope_sections.iter().sum();
    if pairs != rotary / 2 {
        return Err(keys.contradiction(format!(
            "`{}` covers {pairs} pairs of dimensions, but {} are rotated",
            keys.name(key),
            rotary / 2
        )));
    }
    Ok(Attention {
        heads,
        kv_heads,
        head_dim,
        rotary,
        rope_base: keys.positive("rope.freq_base")?,
        rope_sections,
    })
}

fn gdn(keys: &Keys<'_>) -> Result<Gdn, HyperError> {
    let (key_heads, value_heads) = (keys.size("ssm.group_count")?, keys.size("ssm.time_step_rank")?);
    keys.multiple(("ssm.time_step_rank", value_heads), ("ssm.group_count", key_heads))?;
    let inner = keys.size("ssm.inner_size")?;
    keys.multiple(("ssm.inner_size", inner), ("ssm.time_step_rank", value_heads))?;
    Ok(Gdn {
        key_heads,
        value_heads,
        key_dim: keys.size("ssm.state_size")?,
        value_dim: inner / value_heads,
        conv_kernel: keys.size("ssm.conv_kernel")?,
    })
}

fn moe(keys: &Keys<'_>) -> Result<Moe, HyperError> {
    let (experts, used) = (keys.size("expert_count")?, keys.size("expert_used_count")?);
    if used > experts {
        return Err(keys.wrong(
            "expert_used_count",
            used,
            &format!("at most the {experts} experts of a layer"),
        ));
    }
    Ok(Moe {
        experts,
        used,
        ffn: keys.size("expert_feed_forward_length")?,
        shared_ffn: keys.size("expert_shared_feed_forward_length")?,
    })
}

fn ple(keys: &Keys<'_>, trunk: usize, vocab: usize) -> Result<Option<Ple>, HyperError> {
    let key = "ple.layers";
    let stored = keys.metadata.opt_u64s(&keys.name(key))?.unwrap_or_default();
    if stored.is_empty() {
        if keys.has("per_layer_token_embd.weight") {
            return Err(keys.contradiction(format!(
                "the file has an n-gram table (`per_layer_token_embd.weight`) but no `{}`",
                keys.name(key)
            )));
        }
        return Ok(None);
    }
    let mut layers = Vec::with_capacity(stored.len());
    for &layer in &stored {
        let ascending = layers.last().is_none_or(|&last| (last as u64) < layer);
        match usize::try_from(layer) {
            Ok(layer) if layer < trunk && ascending => layers.push(layer),
            _ => {
                let wanted = format!("ascending layer numbers below {trunk}");
                return Err(keys.wrong(key, format!("{stored:?}"), &wanted));
            }
        }
    }
    let ngram_size = keys.size("ple.ngram_size")?;
    let heads_per_ngram = keys.size("ple.heads_per_ngram")?;
    if !(2..=64).contains(&ngram_size) {
        return Err(keys.wrong("ple.ngram_size", ngram_size, "from 2 to 64"));
    }
    if heads_per_ngram > 1024 {
        return Err(keys.wrong("ple.heads_per_ngram", heads_per_ngram, "at most 1024"));
    }
    let heads = heads_per_ngram * (ngram_size - 1);
    let end = keys
        .token("ple.eos_token_id", vocab)?
        .ok_or_else(|| keys.contradiction(format!("`{}` is missing", keys.name("ple.eos_token_id"))))?;

    let array = |key: &str, what: &'static str, per_layer: usize| -> Result<Vec<u64>, HyperError> {
        let values = keys.metadata.u64s(&keys.name(key))?;
        let expected = per_layer * layers.len();
        if values.len() != expected {
            let why = format!("{per_layer} for each of {} n-gram layers", layers.len());
            return Err(NgramError::Length { what, found: values.len(), expected, why }.into());
        }
        Ok(values)
    };
    let multipliers = array("ple.layer_multipliers", "`qwen4exp.ple.layer_multipliers`", ngram_size)?;
    let offsets = array("ple.head_offsets", "`qwen4exp.ple.head_offsets`", heads)?;
    let sizes = array("ple.head_vocab_sizes", "`qwen4exp.ple.head_vocab_sizes`", heads)?;
    let ranges: Vec<Head> =
        offsets.iter().zip(&sizes).map(|(&offset, &rows)| Head { offset, rows }).collect();
    let hashes = multipliers
        .chunks(ngram_size)
        .zip(ranges.chunks(heads))
        .map(|(multipliers, ranges)| {
            NgramHash::new(multipliers.to_vec(), ranges.to_vec(), heads_per_ngram, end, vocab)
        })
        .collect::<Result<_, _>>()?;
    Ok(Some(Ple {
        layers,
        hashes,
        ngram_size,
        row_width: keys.size("embedding_length_per_layer_input")?,
        heads,
        conv_kernel: keys.size("ple.conv_kernel")?,
        end,
        image_token: keys.token("ple.image_token_id", vocab)?.unwrap_or(end),
    }))
}
