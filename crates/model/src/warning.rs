//! What a loader noticed and worked around: said once, never silently.

/// Something in a file that is wrong or unusual, and what was done about it. The binary shows these once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// `tokenizer.ggml.pre` is absent.
    #[error(
        "the file does not name its pre-tokeniser (tokenizer.ggml.pre); the `default` one is used, which may cut text otherwise than in training"
    )]
    NoPreTokenizer,
}
