//! The engine over the CPU backend, against golden vectors and against itself.

mod chat;
mod eval;
mod exactness;
mod forms;
mod golden;
mod rig;
mod sequences;
