//! The CUDA backend: kernels for the op contract, and the device memory, streams and recorded graphs that they run in.
//!
//! Knows ops and bytes; not which op comes next, nor where an expert's bytes come from. The driver is loaded when it is first asked for, so the
//! same program starts on a machine without a GPU and says why it uses none.

pub mod driver;

pub mod ops;
