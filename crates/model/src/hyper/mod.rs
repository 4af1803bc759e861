//! The hyper-parameters of a qwen4exp model, read from metadata and checked against each other.
//!
//! Owns every number that describes the geometry; nothing of it is compiled in. Shapes of tensors are checked
//! against these numbers by the [roles](crate::roles); here a tensor is at most asked for its presence, where files
//! are known to leave the metadata wrong.
//!
//! Invariant: a [`Hyper`] is consistent. Products of its sizes fit a `usize`, divisions that the architecture needs
//! come out even, and every layer has its kind.

mod layers;
mod read;

use crate::ngram::{NgramError, NgramHash};

/// The architecture this reads.
pub const ARCHITECTURE: &str = "qwen4exp";

/// Why the metadata doesn't describe a usable model.
#[derive(Debug, thiserror::Error)]
pub enum HyperError {
    /// A key is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] strata_gguf::Error),
    /// Another architecture.
    #[error(
        "the model's architecture is `{found}`, but only `{ARCHITECTURE}` (Qwen3.8-Flash-Next) can be run"
    )]
    Architecture {
        /// Its name in the file.
        found: String,
    },
    /// A value outside its range.
    #[error(
        "`{key}` is {value}, but must be {wanted}; the file is damaged or not a model of this architecture"
    )]
    Value {
        /// The metadata key.
        key: String,
        /// Its value.
        value: String,
        /// What it may be.
        wanted: String,
    },
    /// Two values that contradict each other.
    #[error("{what}; the file is damaged or not a model of this architecture")]
    Contradiction {
        /// Both values and the rule, as a clause.
        what: String,
    },
    /// Something this program doesn't do.
    #[error("the model needs {what}, which is not supported; use another conversion of it")]
    Unsupported {
        /// What it needs.
        what: String,
    },
    /// Bad constants of the n-gram hash.
    #[error(transparent)]
    Ngram(#[from] NgramError),
    /// A file with only the draft block.
    #[error(
        "the file holds only the model's draft (MTP) block and cannot answer by itself; give the file of the whole model instead"
    )]
    DraftAlone,
    /// The embedding is missing, so not even the vocabulary's size is known.
    #[error(
        "the file has no tensor `token_embd.weight`; it is a part of a model or cut short, download it again"
    )]
    NoEmbedding,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet: a recurrent state.
    Gdn,
    /// Full attention over selected blocks of tokens.
    Qsa {
        /// Tokens in one block of the indexer.
        ratio: usize,
    },
}

/// All sizes and settings of a model. Names in brackets are the symbols of the spec.
#[derive(Debug, Clone, PartialEq)]
pub struct Hyper {
    /// Tokens in the vocabulary, padding included.
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Width of the hidden state \[D\].
    pub width: usize,
    /// Residual streams \[S\].
    pub streams: usize,
    /// Rank of the mixers' gates \[r\].
    pub mixer_rank: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// The trunk's layers.
    pub layers: Vec<LayerKind>,
    /// The draft block, if the file has one.
    pub draft: Option<Draft>,
    /// Full attention.
    pub attention: Attention,
    /// The indexer that selects what full attention sees.
    pub indexer: Indexer,
    /// Gated DeltaNet.
    pub gdn: Gdn,
    /// Mixture of experts.
    pub moe: Moe,
    /// The n-gram embedding, if the model has one.
    pub ple: Option<Ple>,
}

impl Hyper {
    /// Width of the whole residual, all streams \[R\].
    pub fn residual(&self) -> usize {
        self.streams * self.width
    }

    /// Index of `layer` among the n-gram layers.
    pub fn ple_slot(&self, layer: usize) -> Option<usize> {
        self.ple.as_ref()?.layers.iter().position(|&l| l == layer)
    }
}

/// The draft (MTP) block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draft {
    /// The block's number in tensor names.
    pub block: usize,
    /// Tokens in one block of its indexer.
    pub ratio: usize,
}

/// Full attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading dimensions of a head that are rotated; even.
    pub rotary: usize,
    /// Base of the rotation's frequencies.
    pub rope_base: f32,
    /// Rotated pairs that follow time, height and width, interleaved; they add up to `rotary / 2`.
    pub rope_sections: [usize; 3],
}

/// The indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    /// Query heads; there is one key head.
    pub heads: usize,
    /// Width of a head; at least `rotary`.
    pub dim: usize,
    /// Tokens selected in whole blocks; a multiple of every layer's ratio.
    pub budget: usize,
}

/// Gated DeltaNet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gdn {
    /// Heads of queries and keys; value head `h` uses key head `h % key_heads`.
    pub key_heads: usize,
    /// Heads of values, gates and states; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl Gdn {
    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.inner()
    }

    /// Width of all value heads together.
    pub fn inner(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// Mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moe {
    /// Experts in a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub used: usize,
    /// Hidden width of an expert.
    pub ffn: usize,
    /// Hidden width of the shared expert.
    pub shared_ffn: usize,
}

/// The n-gram embedding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ple {
    /// The trunk layers before which it is added, ascending.
    pub layers: Vec<usize>,
    /// The hash of each of them.
    pub hashes: Vec<NgramHash>,
    /// Longest n-gram in tokens; also the dilation of the convolution.
    pub ngram_size: usize,
    /// Width of a row of the table.
    pub row_width: usize,
    /// Rows looked up per token and layer.
    pub heads: usize,
    /// Taps of the dilated convolution.
    pub conv_kernel: usize,
    /// The token that cuts n-grams.
    pub end: u32,
    /// What an image's tokens are hashed as.
    pub image_token: u32,
}

impl Ple {
    /// Width of one token's looked-up embedding.
    pub fn embedding(&self) -> usize {
        self.heads * self.row_width
    }

    /// Rows that the table must have at least.
    pub fn table_rows(&self) -> u64 {
        self.hashes.iter().map(NgramHash::table_rows).max().unwrap_or(0)
    }
}
