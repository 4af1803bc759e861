//! Random-weight models of a real geometry: to try a machine before a download of 70 GB, to measure, and to test geometries that
//! nobody has published.
//!
//! Owns what such a model consists of. Its shapes and metadata follow from a [`Geometry`], its formats from a [`Mix`] that
//! mirrors a published file, its weights from a seed; [`write()`] makes it at the speed of the disk, in little memory. What comes
//! out loads like any model, runs at the same speed as the real one, and says nothing. Does not read models, and knows no kernels.
//!
//! Invariant: a tensor's bytes are a function of the options' seed, the tensor's name and the place in it (and, with a skew, of
//! the geometry): never of threads, shards or of other tensors.
//!
//! ```
//! use std::sync::atomic::AtomicBool;
//! use strata_synth::{Geometry, Options, layout, write};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut options = Options::new(Geometry::named("tiny")?, "ud-iq3_xxs".parse()?, 1);
//! options.draft = true;
//! println!("{} bytes of experts", layout(&options)?.expert_bytes());
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("tiny.gguf");
//! let mut show = |p: strata_synth::Progress| eprintln!("{} of {} bytes", p.written, p.total);
//! let made = write(&options, &path, &mut show, &AtomicBool::new(false))?;
//! assert_eq!(made.files, [path]);
//! # Ok(())
//! # }
//! ```
//!
//! # Geometries as files
//! Besides the built-in ones ([`Geometry::PRESETS`]) a geometry can be a JSON file; the fields are those of [`Geometry`], none has
//! a default but `ngram`, which may be left out. This is `tiny`:
//!
//! ```
//! # let text = r#"
//! {
//!   "name": "tiny",
//!   "vocabulary": 384, "hidden": 64, "layers": 4, "pattern": ["gdn", "gdn", "gdn", "qsa"],
//!   "context": 512, "streams": 4, "low_rank": 8, "epsilon": 1e-6,
//!   "attention": { "heads": 4, "kv_heads": 2, "head_dim": 32, "rotary": 8, "rope_base": 1e7, "rope_sections": [2, 1, 1] },
//!   "indexer": { "heads": 4, "dim": 16, "budget": 16, "ratio": 4 },
//!   "gdn": { "key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 16, "conv_kernel": 4 },
//!   "moe": { "experts": 8, "used": 2, "width": 32, "shared_width": 32 },
//!   "ngram": { "layer": 1, "order": 3, "heads": 4, "row": 8, "conv_kernel": 4, "base": 97, "divisor": 8, "seed": 1234 },
//!   "special_tokens": { "<|endoftext|>": 2, "<|im_start|>": 376, "<|im_end|>": 377, "<|vision_start|>": 378, "<|vision_end|>": 379,
//!                       "<|image_pad|>": 380, "<|video_pad|>": 381, "<think>": 382, "</think>": 383 }
//! }
//! # "#;
//! # let geometry: strata_synth::Geometry = serde_json::from_str(text).unwrap();
//! # assert_eq!(geometry, strata_synth::Geometry::tiny());
//! ```
//!
//! # Skewed routing
//! Random routers use all experts evenly, which shows nothing of a cache. [`Options::router_skew`] makes their use follow Zipf's
//! law, anew in each layer and for each topic of a text: [`RouterSkew`] says how the law comes about and answers which expert has
//! which rank; [`Topics::text`] makes prompts whose topic drifts.

#![deny(unsafe_code)]

mod blocks;
mod directions;
mod error;
pub mod geometry;
mod layout;
mod metadata;
mod mix;
mod recipe;
mod skew;
mod stream;
mod tensors;
mod vocabulary;
mod write;

pub use blocks::Weights;
pub use error::SynthError;
pub use geometry::Geometry;
pub use layout::{Layout, Options, Planned, layout};
pub use mix::Mix;
pub use skew::{RouterSkew, Topics, expected_use};
pub use tensors::Role;
pub use write::{Progress, Summary, write};
