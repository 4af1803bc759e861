//! Layer graphs: which ops a model's forward pass is made of, a file per architecture.
//!
//! A graph knows weights by their handles and says ops to whoever listens; it knows no backend and no sequence.

mod qwen4exp;

pub use qwen4exp::{Draft, Graph, LayerGraph, Mixing, Ngram, Run, Work};
