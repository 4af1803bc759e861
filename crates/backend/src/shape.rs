//! What a backend must know before the first op: geometry, state, buffers.
//!
//! Sizes of state are computed here and nowhere else: the memory plan and the backends' allocations both come from
//! these functions. A backend may only round a part up to what its layout needs.

use crate::Buffer;

/// The model's geometry, as far as ops need it.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Hidden width D.
    pub hidden: usize,
    /// Residual streams S; the wide residual is `[rows, S, D]`.
    pub streams: usize,
    /// The mixers' low rank r.
    pub mixer_rank: usize,
    /// Rows of embedding and head.
    pub vocab: usize,
    /// Epsilon of every RMS norm and l2 norm.
    pub norm_eps: f32,
    /// Gated DeltaNet layers, if any.
    pub gdn: Option<GdnShape>,
    /// Sparse-attention layers, if any.
    pub qsa: Option<QsaShape>,
    /// The expert stage.
    pub moe: MoeShape,
    /// The n-gram block, if any.
    pub ngram: Option<NgramShape>,
}

/// Gated DeltaNet: docs/qwen4exp.md, section 2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GdnShape {
    /// Key heads; value head h pairs with key head `h mod key_heads`.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Width of a key (and query) head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl GdnShape {
    /// Channels of the convolution: q, k and v side by side.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// All value heads' width.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Floats of the recurrent state: `[value_heads, value_dim, key_dim]`, a state column contiguous.
    pub fn state_floats(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Floats of the convolution's history: `[conv_kernel - 1, channels]`, oldest first.
    pub fn conv_floats(&self) -> usize {
        (self.conv_kernel - 1) * self.channels()
    }
}

/// Block-sparse attention with its indexer: docs/qwen4exp.md, section 2.3.
#[derive(Debug, Clone, PartialEq)]
pub struct QsaShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotary dimensions, half-split, of heads and indexer keys alike.
    pub rotary: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Indexer query heads (one key head).
    pub index_heads: usize,
    /// Width of an indexer head.
    pub index_dim: usize,
    /// Tokens a query may select by blocks; a multiple of every layer's block.
    pub budget: usize,
}

impl QsaShape {
    /// The most keys that one query attends to in a context of `tokens`, where `block` tokens make a block.
    pub fn selected(&self, block: usize, tokens: usize) -> usize {
        tokens.min(self.budget + block - 1)
    }

    /// Values that one layer caches of `tokens` tokens: keys, values, raw indexer keys, and those pooled over `block` tokens.
    /// `usize::MAX` where a product is larger.
    pub fn cached(&self, block: usize, tokens: usize) -> [usize; 4] {
        let kv = self.kv_heads.saturating_mul(self.head_dim).saturating_mul(tokens);
        let index = |keys| self.index_dim.saturating_mul(keys);
        [kv, kv, index(tokens), index(tokens / block)]
    }
}

/// The expert stage: docs/qwen4exp.md, section 2.4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub used: usize,
    /// A routed expert's inner width.
    pub width: usize,
    /// The shared expert's inner width.
    pub shared_width: usize,
}

/// The n-gram block: docs/qwen4exp.md, section 2.5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NgramShape {
    /// Table rows per token.
    pub heads: usize,
    /// Width of a table row.
    pub row: usize,
    /// Taps of the dilated convolution.
    pub conv_kernel: usize,
    /// Dilation of the convolution.
    pub dilation: usize,
}

impl NgramShape {
    /// Rows of `[streams * hidden]` that the convolution's history keeps.
    pub fn history(&self) -> usize {
        (self.conv_kernel - 1) * self.dilation
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// 4 bytes.
    F32,
    /// 2 bytes, rounded to nearest even when appended.
    F16,
}

impl KvFormat {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::F16 => 2,
        }
    }

    /// The name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
        }
    }
}

/// What a layer keeps for each sequence. A layer that also holds an n-gram block keeps that block's history too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerState {
    /// Recurrent state and convolution history.
    pub gdn: bool,
    /// Keys, values and indexer keys, of attention whose blocks have so many tokens.
    pub qsa: Option<usize>,
    /// The n-gram block's convolution history.
    pub ngram: bool,
}

/// An activation buffer, `[rows, width]` f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferSpec {
    /// The name in the memory plan.
    pub name: &'static str,
    /// Rows.
    pub rows: usize,
    /// Floats per row.
    pub width: usize,
}

/// Everything that a backend allocates for, before the first op.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Geometry.
    pub shape: Shape,
    /// State per layer, the draft block's last.
    pub layers: Vec<LayerState>,
    /// Sequences that may hold state at once.
    pub sequences: usize,
    /// Copies of a recurrent state that may be kept for later.
    pub checkpoints: usize,
    /// Tokens a sequence may have.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: KvFormat,
    /// Rows of the widest window.
    pub window: usize,
    /// Activation buffers; [`Buffer`] is an index into them.
    pub buffers: Vec<BufferSpec>,
}

impl Spec {
    /// The description of `buffer`.
    pub fn buffer(&self, buffer: Buffer) -> &BufferSpec {
        &self.buffers[buffer.0 as usize]
    }

    /// Floats of one sequence's recurrent state in one layer: GDN state, GDN history, n-gram history, in this order.
    pub fn recurrent_floats(&self, layer: &LayerState) -> [usize; 3] {
        let gdn = self.shape.gdn.as_ref().filter(|_| layer.gdn);
        let ngram = self.shape.ngram.as_ref().filter(|_| layer.ngram);
        let [state, conv] = gdn.map_or([0; 2], |g| [g.state_floats(), g.conv_floats()]);
        let wide = self.shape.streams.saturating_mul(self.shape.hidden);
        [state, conv, ngram.map_or(0, |n| n.history().saturating_mul(wide))]
    }

    /// Values of one layer's positional cache for `tokens` tokens, as [`QsaShape::cached`] has them.
    pub fn cached(&self, layer: &LayerState, tokens: usize) -> [usize; 4] {
        match (&self.shape.qsa, layer.qsa) {
            (Some(q), Some(block)) => q.cached(block, tokens),
            _ => [0; 4],
        }
    }

    /// Bytes of one sequence's state of `tokens` tokens in one layer, as [`crate::Backend::export`] writes it.
    pub fn state_bytes(&self, layer: &LayerState, tokens: usize) -> usize {
        let floats: usize = self.recurrent_floats(layer).iter().sum();
        let values: usize = self.cached(layer, tokens).iter().sum();
        floats * size_of::<f32>() + values * self.kv.bytes()
    }
}
