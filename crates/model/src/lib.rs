//! What a model is: hyper-parameters, tensor roles, n-gram hash, tokenizer, chat template.
//!
//! Everything here comes out of a GGUF file and is plain description: sizes ([`hyper`]), which tensor does what
//! ([`roles`]), how text becomes tokens and back ([`tokenizer`]), how a conversation becomes text ([`template`]), and
//! which rows of the n-gram table a token looks up ([`ngram`]). [`Model::open`] reads them all and checks them against
//! each other. Files are not trusted: what is wrong becomes one sentence, what can be worked around a [`Warning`].
//!
//! Does not know how anything is computed, and reads no weights but rows of the n-gram table on demand.

pub mod hyper;
mod model;
pub mod ngram;
pub mod roles;
pub mod template;
pub mod tokenizer;
mod warning;

pub use hyper::{Hyper, LayerKind};
pub use model::{Model, ModelError};
pub use roles::TensorRef;
pub use template::Template;
pub use tokenizer::{DecodeStream, Tokenizer};
pub use warning::Warning;
