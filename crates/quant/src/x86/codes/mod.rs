//! Every format's bytes as codes and packed scales.
//!
//! Owns the vector counterpart of [`formats`](crate::formats), where the layouts are described; the two are
//! compared block by block. Safety: as [`Coded`](super::chunk::Coded) says.

mod iq;
mod k;
mod legacy;

use std::arch::x86_64::{_pdep_u64, _pext_u64};

use super::chunk::{dword, qword, word};

/// The low `8 * bits` bits of `fields` as 8 bytes of `bits` bits each.
#[inline(always)]
unsafe fn spread(fields: u64, bits: u32) -> u64 {
    _pdep_u64(fields, 0x0101_0101_0101_0101 * ((1 << bits) - 1))
}

/// The bits of `v` under `mask`, together.
#[inline(always)]
unsafe fn gather_bits(v: u64, mask: u64) -> u64 {
    _pext_u64(v, mask)
}

/// Two halves.
#[inline(always)]
fn halves(v: u64) -> [u32; 2] {
    [v as u32, (v >> 32) as u32]
}

/// Bytes in 0..64, less 32.
#[inline(always)]
fn less_32(bytes: u32) -> u32 {
    // 96 more, less 128 in the sign bit: no byte carries.
    (bytes + 0x6060_6060) ^ 0x8080_8080
}

/// `2 b + 1` for bytes below 64.
#[inline(always)]
fn odd(bytes: u64) -> u64 {
    bytes << 1 | 0x0101_0101_0101_0101
}
