//! The engine over the CPU backend, against golden vectors and against itself.

mod budget;
mod chat;
mod choices;
#[allow(dead_code)]
#[path = "../../../model/tests/model/copy.rs"]
mod copy;
mod device;
mod eval;
mod exactness;
mod fault;
mod forms;
mod geometries;
mod golden;
mod rig;
mod scales;
mod sequences;
mod whole;
