//! The engine over the CPU backend, against golden vectors and against itself.

mod exactness;
mod golden;
mod rig;
mod sequences;
