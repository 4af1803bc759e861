//! What a loader noticed and worked around: said once, never silently.

/// Something in a file that is wrong or unusual, and what was done about it. The binary shows these once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// `tokenizer.ggml.pre` is absent.
    #[error(
        "the file does not name its pre-tokeniser (tokenizer.ggml.pre); the `default` one is used, which may cut text otherwise than in training"
    )]
    NoPreTokenizer,
    /// Every trunk layer's compress ratio is zero, a known mistake of converters.
    #[error(
        "attention.compress_ratios is zero on every layer although the file has indexer weights, a known mistake of its converter; sparse attention uses the ratio {ratio} instead"
    )]
    RatiosRepaired {
        /// The ratio used.
        ratio: usize,
    },
    /// The metadata promises a draft block that isn't there.
    #[error(
        "the file says it has a draft (MTP) block but holds none of its tensors; drafting with it is not possible"
    )]
    NoDraft,
    /// More draft blocks than are used.
    #[error("the file has {found} draft (MTP) blocks; only the first is used")]
    ExtraDrafts {
        /// Blocks declared.
        found: usize,
    },
    /// Tensors inside the layers that the architecture doesn't know.
    #[error(
        "{count} tensors of the layers are not part of this architecture and are ignored, such as `{example}`; answers may be wrong if they matter"
    )]
    UnknownTensors {
        /// How many.
        count: usize,
        /// The first.
        example: String,
    },
}
