//! The commands, a module each.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod inspect;
pub mod logits;
pub mod plan;
pub mod run;
pub mod synth;
