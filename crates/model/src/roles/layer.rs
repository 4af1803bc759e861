//! The tensors of one layer.

use super::TensorRef;

/// A hyper-connection mixer: reads the streams into one input, and says how the result goes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixer {
    /// Grouped norm of the streams, `[R]`.
    pub norm: TensorRef,
    /// First factor of the gates, `[r, R]`.
    pub down: TensorRef,
    /// Second factor of the gates, `[R, r]`.
    pub up: TensorRef,
    /// Weights of the scatter, `[S, R]`; absent in the mixers before a head.
    pub inject: Option<TensorRef>,
}

/// One layer of the trunk, or the draft block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The n-gram embedding added before the layer.
    pub ple: Option<Ple>,
    /// The mixer around `attention`.
    pub attn_mixer: Mixer,
    /// What mixes tokens.
    pub attention: Attention,
    /// The mixer around `moe`.
    pub ffn_mixer: Mixer,
    /// The experts.
    pub moe: Moe,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Gated DeltaNet.
    Gdn(Gdn),
    /// Full attention with its indexer.
    Qsa(Qsa),
}

/// Gated DeltaNet. `C` channels are queries, keys, values; value heads are stored tiled (head `h` uses key head
/// `h % key_heads`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gdn {
    /// Queries, keys, values, `[C, D]`.
    pub qkv: TensorRef,
    /// The output gate, `[inner, D]`.
    pub gate: TensorRef,
    /// The causal convolution, `[C, kernel]`, newest tap last.
    pub conv1d: TensorRef,
    /// Bias of the decay, `[value heads]`.
    pub dt_bias: TensorRef,
    /// `-exp(A_log)`, `[value heads]`.
    pub a: TensorRef,
    /// The decay, `[value heads, D]`.
    pub alpha: TensorRef,
    /// The write strength, `[value heads, D]`.
    pub beta: TensorRef,
    /// Norm of each head's output, `[value dim]`, a plain factor.
    pub norm: TensorRef,
    /// The output, `[D, inner]`.
    pub out: TensorRef,
}

/// Full attention with its indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Qsa {
    /// Per head its query, then its gate: `[heads * 2 * head dim, D]`.
    pub q: TensorRef,
    /// Keys, `[kv heads * head dim, D]`.
    pub k: TensorRef,
    /// Values, `[kv heads * head dim, D]`.
    pub v: TensorRef,
    /// The output, `[D, heads * head dim]`.
    pub output: TensorRef,
    /// Norm of each query, `[head dim]`.
    pub q_norm: TensorRef,
    /// Norm of each key, `[head dim]`.
    pub k_norm: TensorRef,
    /// The indexer's queries, `[indexer heads * dim, D]`.
    pub index_q: TensorRef,
    /// The indexer's key, `[dim, D]`.
    pub index_k: TensorRef,
    /// Norm of each indexer query, `[dim]`.
    pub index_q_norm: TensorRef,
    /// Norm of each pooled indexer key, `[dim]`.
    pub index_k_norm: TensorRef,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moe {
    /// Scores of the experts, `[experts, D]`.
    pub router: TensorRef,
    /// First projections, `[ffn, D]` each.
    pub gate_up: GateUp,
    /// Second projection, `[D, ffn]`.
    pub down: TensorRef,
    /// The expert that every token uses.
    pub shared: SharedExpert,
}

/// The expert that every token uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// First projection, `[shared ffn, D]`.
    pub gate: TensorRef,
    /// First projection, `[shared ffn, D]`.
    pub up: TensorRef,
    /// Second projection, `[D, shared ffn]`.
    pub down: TensorRef,
    /// Its weight, `[1, D]`.
    pub weight: TensorRef,
}

/// The experts' first projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUp {
    /// Two tensors.
    Split {
        /// `[ffn, D]` per expert.
        gate: TensorRef,
        /// `[ffn, D]` per expert.
        up: TensorRef,
    },
    /// One tensor, `[2 * ffn, D]` per expert: gate rows, then up rows.
    Fused(TensorRef),
}

/// The n-gram embedding of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ple {
    /// Keys, one per stream: `[R, embedding]`.
    pub key: TensorRef,
    /// The value, `[D, embedding]`.
    pub value: TensorRef,
    /// Grouped norm of the keys, `[R]`.
    pub norm_key: TensorRef,
    /// Grouped norm of the streams, `[R]`.
    pub norm_query: TensorRef,
    /// Grouped norm before the convolution, `[R]`.
    pub norm_conv: TensorRef,
    /// The dilated convolution, `[R, kernel]`, newest tap last.
    pub conv1d: TensorRef,
}
