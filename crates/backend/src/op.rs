//! The ops. Formulas: docs/qwen4exp.md, section 2; rounding: the arithmetic contract.
//!
//! Buffers are `[rows, width]` f32. `x` is the wide residual `[rows, S * D]`, `u` a mixer's output `[rows, D]`.

use crate::{Buffer, Family, Layer, Span, Weight};
use strata_quant::Format;

/// A hyper-connection mixer's weights: section 2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixerWeights {
    /// Gammas of the grouped norm `[S * D]`.
    pub norm: Weight,
    /// `[r, S * D]`.
    pub down: Weight,
    /// `[S * D, r]`.
    pub up: Weight,
    /// `[S, S * D]`; absent in the final mixer, which writes nothing back.
    pub inject: Option<Weight>,
}

/// Gated DeltaNet weights: section 2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GdnWeights {
    /// `[channels, D]`, rows q then k then v.
    pub qkv: Weight,
    /// The output gate z, `[value_width, D]`.
    pub gate: Weight,
    /// Convolution taps `[channels, conv_kernel]`, the current token's last.
    pub conv: Weight,
    /// `[value_heads]`, added before the softplus.
    pub dt_bias: Weight,
    /// `[value_heads]`, `-exp(A_log)`.
    pub a: Weight,
    /// `[value_heads, D]`.
    pub alpha: Weight,
    /// `[value_heads, D]`.
    pub beta: Weight,
    /// `[value_dim]`.
    pub norm: Weight,
    /// `[D, value_width]`.
    pub out: Weight,
}

/// Sparse-attention weights: section 2.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QsaWeights {
    /// `[heads * 2 * head_dim, D]`: per head the query, then its gate.
    pub q: Weight,
    /// `[kv_heads * head_dim, D]`.
    pub k: Weight,
    /// `[kv_heads * head_dim, D]`.
    pub v: Weight,
    /// `[D, heads * head_dim]`.
    pub out: Weight,
    /// `[head_dim]`.
    pub q_norm: Weight,
    /// `[head_dim]`.
    pub k_norm: Weight,
    /// The indexer's queries, `[index_heads * index_dim, D]`.
    pub index_q: Weight,
    /// The indexer's key, `[index_dim, D]`.
    pub index_k: Weight,
    /// `[index_dim]`.
    pub index_q_norm: Weight,
    /// `[index_dim]`.
    pub index_k_norm: Weight,
}

/// Formats and layout of a layer's routed experts. Their bytes come from the expert store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertWeights {
    /// Format of the gate rows `[width, D]`.
    pub gate: Format,
    /// Format of the up rows `[width, D]`.
    pub up: Format,
    /// Format of the down rows `[D, width]`.
    pub down: Format,
    /// What the finished gate, up and down products are multiplied with, in files that scale whole tensors: one value per expert.
    pub scales: [Option<Weight>; 3],
}

/// The shared expert: section 2.4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedWeights {
    /// `[shared_width, D]`.
    pub gate: Weight,
    /// `[shared_width, D]`.
    pub up: Weight,
    /// `[D, shared_width]`.
    pub down: Weight,
    /// `[D]`: the scalar gate.
    pub scalar: Weight,
}

/// The n-gram block: section 2.5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NgramWeights {
    /// `[S * D, heads * row]`.
    pub key: Weight,
    /// `[D, heads * row]`.
    pub value: Weight,
    /// Gammas `[S * D]`.
    pub norm_key: Weight,
    /// Gammas `[S * D]`.
    pub norm_query: Weight,
    /// Gammas `[S * D]`.
    pub norm_conv: Weight,
    /// Convolution taps `[S * D, conv_kernel]`, the current token's last.
    pub conv: Weight,
}

/// One step of a forward pass over a window's rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Op<'a> {
    /// `x[t, s] = table[tokens[t]]` for every stream s.
    Embed {
        /// `[vocab, D]`.
        table: Weight,
        /// One per row.
        tokens: &'a [u32],
        /// Written.
        x: Buffer,
    },
    /// `x += ngram(x, rows)`, with the convolution's history per sequence.
    Ngram {
        /// Whose history.
        layer: Layer,
        /// The block's weights.
        weights: NgramWeights,
        /// How the table's rows are stored.
        format: Format,
        /// What the table's values are multiplied with, in files that scale whole tensors.
        scale: Option<f32>,
        /// The table rows of each token, `[rows, heads]` rows of `format`, as read from the table.
        table_rows: &'a [u8],
        /// The sequences' parts.
        spans: &'a [Span],
        /// Read and written.
        x: Buffer,
    },
    /// A mixer's read: `u` and, where the mixer has them, the inject weights.
    MixerRead {
        /// The mixer.
        weights: MixerWeights,
        /// Rows.
        rows: usize,
        /// Read.
        x: Buffer,
        /// Written, `[rows, D]`.
        u: Buffer,
        /// Written, `[rows, S]`; ignored for a mixer without inject weights.
        inject: Buffer,
    },
    /// A mixer's write: `x[t, s] = fma(inject[t, s], y[t], x[t, s])`.
    MixerWrite {
        /// Rows.
        rows: usize,
        /// Read, `[rows, D]`.
        y: Buffer,
        /// Read, `[rows, S]`.
        inject: Buffer,
        /// Read and written.
        x: Buffer,
    },
    /// Gated DeltaNet: `y = gdn(u)`.
    Gdn {
        /// Whose state.
        layer: Layer,
        /// Weights.
        weights: GdnWeights,
        /// The sequences' parts.
        spans: &'a [Span],
        /// Read, `[rows, D]`.
        u: Buffer,
        /// Written, `[rows, D]`.
        y: Buffer,
    },
    /// Block-sparse attention: `y = qsa(u)`; appends to the caches.
    Qsa {
        /// Whose caches.
        layer: Layer,
        /// Weights.
        weights: QsaWeights,
        /// The sequences' parts.
        spans: &'a [Span],
        /// Read, `[rows, D]`.
        u: Buffer,
        /// Written, `[rows, D]`.
        y: Buffer,
    },
    /// Chooses each row's experts: softmax over `router u`, the `used` largest (ties to the lower id), renormalised, sorted by id.
    /// The routing stays in the backend until the next `Route`.
    Route {
        /// Whose experts: where they may move, which were chosen is counted by layer.
        layer: Layer,
        /// `[experts, D]`.
        router: Weight,
        /// Rows.
        rows: usize,
        /// Read, `[rows, D]`.
        u: Buffer,
    },
    /// Groups the routing's (row, expert) pairs by expert.
    Group {
        /// Rows.
        rows: usize,
    },
    /// The grouped experts' products `down(silu(gate u) * (up u))`, one `[D]` per (row, expert) pair, kept in the backend.
    Experts {
        /// Whose experts.
        layer: Layer,
        /// Formats.
        weights: ExpertWeights,
        /// Rows.
        rows: usize,
        /// Read, `[rows, D]`.
        u: Buffer,
    },
    /// `y[t] = sum over experts, ascending id, of p_e * product_e + sigmoid(scalar . u) * shared(u)`.
    Combine {
        /// The shared expert.
        shared: SharedWeights,
        /// Rows.
        rows: usize,
        /// Read, `[rows, D]`.
        u: Buffer,
        /// Written, `[rows, D]`.
        y: Buffer,
    },
    /// The final mixer and the vocabulary head, for some rows only.
    Head {
        /// The final mixer, without inject weights.
        mixer: MixerWeights,
        /// `[vocab, D]`.
        output: Weight,
        /// Which rows of `x`, ascending.
        rows: &'a [u32],
        /// Read.
        x: Buffer,
        /// Written, `[rows.len(), vocab]`.
        logits: Buffer,
    },
    /// The draft block's input: `out[t, s] = eh_proj [ rms(table[next[t]]) * e_norm ; gnorm(x[t]; h_norm)_s ]`: section 2.6.
    DraftJoin {
        /// `[vocab, D]`.
        table: Weight,
        /// `[D, 2 D]`, the embedding's half first.
        eh_proj: Weight,
        /// `[D]`.
        e_norm: Weight,
        /// `[S * D]`.
        h_norm: Weight,
        /// The token after each row's.
        next: &'a [u32],
        /// The trunk's wide residual after its last layer, read.
        x: Buffer,
        /// Written, `[rows, S * D]`.
        out: Buffer,
    },
}

impl Op<'_> {
    /// The family that the op's cost is counted under.
    pub fn family(&self) -> Family {
        match self {
            Op::Embed { .. } => Family::Embed,
            Op::Ngram { .. } => Family::Ngram,
            Op::MixerRead { .. } | Op::MixerWrite { .. } => Family::Mixer,
            Op::Gdn { .. } => Family::Gdn,
            Op::Qsa { .. } => Family::Qsa,
            Op::Route { .. } | Op::Group { .. } => Family::Route,
            Op::Experts { .. } => Family::Experts,
            Op::Combine { .. } => Family::Combine,
            Op::Head { .. } => Family::Head,
            Op::DraftJoin { .. } => Family::Draft,
        }
    }
}
