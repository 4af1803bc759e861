//! The GGUF container: header, metadata, tensor index, shards; reader and writer.
//!
//! Owns the file format and nothing of its meaning: which keys a model needs is `strata-model`'s business, how a
//! block decodes `strata-quant`'s. Files are not trusted: everything is checked before it is used, and what is
//! wrong becomes one sentence ([`Error`]).
//!
//! [`Gguf::open`] reads headers only; data is read by position or mapped. [`Header::parse`] reads a header from
//! memory or any other [`ReadAt`].

#![deny(unsafe_code)]

mod encode;
mod error;
pub mod header;
mod mapping;
mod metadata;
mod model;
mod shards;
pub mod sigbus;
mod source;
mod types;
mod value;
mod whole;
pub mod write;

pub use error::{Error, KeyProblem, ShardProblem, TensorProblem, WriteProblem};
pub use header::{Header, TensorInfo};
pub use mapping::Mapping;
pub use metadata::Metadata;
pub use model::{Gguf, Shard};
pub use shards::join;
pub use source::ReadAt;
pub use types::TensorType;
pub use value::{Array, Value};
pub use whole::WholeFile;
