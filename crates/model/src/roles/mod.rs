//! Tensor roles: what each tensor of the file is for, checked against the hyper-parameters.
//!
//! Owns the names and shapes of the architecture. A [`TensorRef`] says where a tensor is and how it is stored; nothing
//! here reads its bytes.
//!
//! Invariant: every tensor in these structures exists, has a supported format and exactly the shape that the
//! [`Hyper`] asks for. Rows of a matrix are its outputs, `k` its inputs.

mod find;
mod layer;

use strata_gguf::Gguf;
use strata_quant::Format;

use crate::hyper::Hyper;
use crate::warning::Warning;
use find::Finder;

pub use layer::{Attention, GateUp, Gdn, Layer, Mixer, Moe, Ple, Qsa, SharedExpert};

/// Why the tensors don't make a model.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// A tensor that the architecture needs is not there.
    #[error(
        "the file has no tensor `{tensor}` ({role}); it is cut short, or from a conversion this program does not know: download or convert it again"
    )]
    Missing {
        /// Its name.
        tensor: String,
        /// What it is for.
        role: &'static str,
    },
    /// A tensor of another shape.
    #[error(
        "tensor `{tensor}` ({role}) has the shape {found:?}, but {expected} follows from the metadata; the file is damaged or mixed from two models"
    )]
    Shape {
        /// Its name.
        tensor: String,
        /// What it is for.
        role: &'static str,
        /// Its extents, row length first.
        found: Vec<u64>,
        /// The shapes it may have.
        expected: String,
    },
    /// A tensor stored in a format without kernels.
    #[error("tensor `{tensor}`: {source}")]
    Format {
        /// Its name.
        tensor: String,
        /// Names the format.
        source: strata_quant::UnsupportedType,
    },
    /// A vector or convolution stored in a block format.
    #[error(
        "tensor `{tensor}` ({role}) is stored as {format}, but must be F32, F16 or BF16; quantise the model again without it"
    )]
    NotFloat {
        /// Its name.
        tensor: String,
        /// What it is for.
        role: &'static str,
        /// Its format.
        format: &'static str,
    },
    /// A row that is no whole number of blocks.
    #[error(
        "tensor `{tensor}` has rows of {k} values, which is not a multiple of {format}'s block; quantise the model again"
    )]
    Blocks {
        /// Its name.
        tensor: String,
        /// Row length.
        k: usize,
        /// Its format.
        format: &'static str,
    },
    /// The n-gram table is shorter than the hash reaches.
    #[error(
        "the n-gram table `per_layer_token_embd.weight` has {found} rows, but the hash reaches {needed}; the file is damaged or mixed from two models"
    )]
    TableRows {
        /// Rows found.
        found: u64,
        /// Rows needed.
        needed: u64,
    },
}

/// A tensor in its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRef {
    /// Index into [`Gguf::tensors`].
    pub index: usize,
    /// How it is stored.
    pub format: Format,
    /// Rows of one matrix; 1 for a vector.
    pub rows: usize,
    /// Values in a row; the length of a vector.
    pub k: usize,
    /// Matrices stacked in the tensor; 1 but for experts.
    pub experts: usize,
    /// Index of the tensor with its scale factors (one, or one per expert), which some NVFP4 files have.
    pub scale: Option<usize>,
}

impl TensorRef {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        // A whole number of blocks since it was found.
        self.format.row_bytes(self.k).unwrap_or(0)
    }

    /// Bytes of one matrix.
    pub fn matrix_bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> usize {
        self.experts * self.matrix_bytes()
    }
}

/// The tensors of the trunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trunk {
    /// Token embedding, `[vocab, D]`.
    pub token_embd: TensorRef,
    /// The layers.
    pub layers: Vec<Layer>,
    /// The mixer before the head; it injects nothing.
    pub head_mixer: Mixer,
    /// The head, `[vocab, D]`; the token embedding again in files that tie them.
    pub output: TensorRef,
    /// The n-gram table, `[rows, row width]`, of models with n-gram layers.
    pub ngram_table: Option<TensorRef>,
}

/// The tensors of the draft (MTP) block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mtp {
    /// Joins embedding (first half of the columns) and hidden state, `[D, 2D]`.
    pub eh_proj: TensorRef,
    /// Norm of the embedding, `[D]`.
    pub enorm: TensorRef,
    /// Grouped norm of the trunk's streams, `[R]`.
    pub hnorm: TensorRef,
    /// The mixer before the head; it injects nothing.
    pub head_mixer: Mixer,
    /// The block itself: full attention, no n-gram embedding.
    pub layer: Layer,
    /// Its own token embedding, if it doesn't share the trunk's.
    pub embed_tokens: Option<TensorRef>,
    /// Its own head, if it doesn't share the trunk's.
    pub shared_head_head: Option<TensorRef>,
}

/// All roles of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    /// The trunk.
    pub trunk: Trunk,
    /// The draft block, if the file has one.
    pub mtp: Option<Mtp>,
    /// Names of tensors that have no role.
    pub unused: Vec<String>,
}

impl Roles {
    /// Finds every tensor that `hyper` calls for in `gguf`.
    ///
    /// # Errors
    /// The first tensor that is missing or not as it should be.
    pub fn find(gguf: &Gguf, hyper: &Hyper, warnings: &mut Vec<Warning>) -> Result<Self, RoleError> {
        let mut finder = Finder::new(gguf, hyper);
        let trunk = finder.trunk()?;
        let mtp = hyper.draft.map(|draft| finder.mtp(draft)).transpose()?;
        let unused = finder.unused();
        let inside = |name: &&String| {
            let block =
                name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            block.is_some_and(|block| block < hyper.layers.len())
        };
        let unknown: Vec<&String> = unused.iter().filter(inside).collect();
        if let Some(&example) = unknown.first() {
            warnings.push(Warning::UnknownTensors { count: unknown.len(), example: example.clone() });
        }
        Ok(Self { trunk, mtp, unused })
    }
}
