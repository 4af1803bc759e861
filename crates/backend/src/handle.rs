//! Opaque names of things that live in a backend.

/// A weight matrix or vector, handed over once at load time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Weight(pub u32);

/// An activation buffer of [`crate::Spec::buffers`], `[rows, width]` f32, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buffer(pub u32);

/// A layer, as an index into [`crate::Spec::layers`]: which state and which experts an op touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Layer(pub u16);

/// The place of one sequence's state, below [`crate::Spec::sequences`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqSlot(pub u32);

/// The place of one copy of a sequence's recurrent state, below [`crate::Spec::checkpoints`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Checkpoint(pub u32);
