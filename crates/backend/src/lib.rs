//! The op contract between the engine, which knows models, and the backends, which know machines.
//!
//! The engine describes once what it will need ([`Spec`]), hands over the weights ([`Weight`]), and then submits
//! ops in order ([`Op`]) over windows of rows ([`Window`]). A backend knows how to compute an op and where its own
//! memory is; it never knows which op comes next, what a layer is made of, or where an expert's bytes live (it asks
//! the expert store).
//!
//! An op is as large as the largest fusion that a backend could want (the mixer's read, the whole GDN mixer), and the
//! expert stage is cut in four (route, group, products, combine) so that two backends can share one token's experts.
//!
//! Every op is row-independent by the arithmetic contract: a row's result has the same bits whatever the window's
//! length, the row's place in it, and the other sequences beside it.

mod backend;
mod build;
mod counters;
mod handle;
mod host;
mod logits;
mod op;
pub mod rope;
mod shape;
mod window;

pub use backend::{Backend, BackendError, Fence};
pub use build::{Build, Takers, WeightData};
pub use counters::{Counters, ExpertCount, Family, FamilyCount, HostCount, LinkCount};
pub use handle::{Buffer, Checkpoint, Layer, SeqSlot, Weight};
pub use host::{BuildHostExperts, GroupedRows, HostExperts};
pub use logits::{Adjustment, Largest, LogitRow, MOST_ADJUSTMENTS, MOST_LARGEST, UNIT_MASS, mass};
pub use op::{ExpertWeights, GdnWeights, MixerWeights, NgramWeights, Op, QsaWeights, SharedWeights};
pub use shape::{BufferSpec, GdnShape, KvFormat, LayerState, MoeShape, NgramShape, QsaShape, Shape, Spec};
pub use strata_residency::FileCount;
pub use window::{Cut, Span, Window, check_spans};
