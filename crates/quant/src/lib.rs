//! Block formats: layout, decoding, dot products by the arithmetic contract, and the choice of instruction
//! set.
//!
//! Owns what the bytes of a weight matrix mean ([`Format`], [`dequantise`]), how activations are quantised
//! ([`Activations`]), products of the two ([`matmul`]), and the functions whose every rounding is part of the
//! contract ([`math`], [`lanes`], [`float`]). Does not know files, tensors' roles, threads or memory plans.
//!
//! Invariant: a result depends on the numbers only. Every path ([`Isa`]), any number of columns and any split
//! of the rows over threads gives the same bits as the scalar definition; results that aren't finite agree by
//! class (NaN, +inf, -inf).
//!
//! ```
//! use strata_quant::{Activations, Columns, Format, Isa, Matrix, Out, matmul};
//!
//! // Two rows of one Q8_0 block: a scale of 0.5 (an f16), then 32 weights.
//! let block = |w: i8| [&[0x00, 0x38][..], &[w as u8; 32]].concat();
//! let bytes = [block(2), block(-3)].concat();
//! let w = Matrix::new(Format::Q8_0, &bytes, 32, 2)?;
//!
//! // Three columns (tokens), quantised once for all the matrices that they meet.
//! let isa = Isa::detect();
//! let mut x = Activations::new(32, 3);
//! x.quantise(isa, &[[1.0; 32], [0.0; 32], [-1.0; 32]].concat(), 32, 3);
//!
//! // A thread's part: here all rows.
//! let mut y = [0.0; 6];
//! matmul(isa, w, 0..2, Columns::Quantised(&x), Out::new(&mut y, 2));
//! assert_eq!(y, [32.0, -48.0, 0.0, 0.0, -32.0, 48.0]);
//! # Ok::<(), strata_quant::MatrixError>(())
//! ```
//!
//! # The contract, as far as it lives here
//! Activations are quantised per 32 values: `d = amax / 127`, `q = clamp(rne(x * (127 / amax)), -127, 127)`;
//! a block whose `amax` is below 2^-100 is zeros with `d = 0`; a block with a non-finite input has `d` = NaN.
//!
//! Against block formats, the products of 32 weights are an exact integer `I`, sub-scales included, and
//! `acc = fma(f32(I), d_w * d_a, acc)`; formats with minimums follow with
//! `acc = fma(f32(M), -(d_min * d_a), acc)` (plus in Q4_1 and Q5_1). NVFP4 does so per 16. Accumulators start
//! from zero every 64 blocks; the sums of these segments are added in ascending order, and a per-tensor scale
//! multiplies the sum once.
//!
//! Against float weights and in all reductions, element `j` goes to lane `j mod 32`, ascending, and the lanes
//! fold 16, 8, 4, 2, 1.

#![deny(unsafe_code)]

mod activations;
mod aligned;
mod block;
pub mod float;
mod format;
mod formats;
mod isa;
pub mod lanes;
pub mod math;
mod matmul;
mod out;
#[cfg(x86_paths)]
mod x86;

pub use activations::Activations;
pub use format::{Format, UnsupportedType};
pub use isa::{Isa, IsaError, Proof};
pub use matmul::{Columns, Matrix, MatrixError, dequantise, matmul};
pub use out::Out;
