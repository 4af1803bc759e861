//! What a model is: hyper-parameters, tensor roles, n-gram hash, tokenizer, chat template.

pub mod tokenizer;
mod warning;

pub use tokenizer::{DecodeStream, Tokenizer};
pub use warning::Warning;
