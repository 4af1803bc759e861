//! The formats with blocks of 32 or 64: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_0, IQ4_NL, MXFP4, NVFP4.

use super::dword;
use crate::formats::{E2M1_DOUBLED, IQ4_VALUES, Iq4Nl, Mxfp4, Nvfp4, Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::x86::chunk::{Coded, Plain, PlainMin, Split};
use crate::x86::vector::Vector;

/// `values[i] + offset`.
pub(super) const fn codes_of(values: [i8; 16], offset: i32) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (values[i] as i32 + offset) as u8;
        i += 1;
    }
    codes
}

/// IQ4_NL's values as codes.
pub(super) const IQ4_CODES: [u8; 16] = codes_of(IQ4_VALUES, 128);
/// The doubled E2M1 values as codes.
const E2M1_CODES: [u8; 16] = codes_of(E2M1_DOUBLED, 16);

/// The nibbles of blocks from `step` on, which begin `at` bytes into blocks of `stride` bytes.
#[inline(always)]
unsafe fn nibbles<V: Vector>(chunk: *const u8, step: usize, stride: usize, at: usize) -> V::I {
    V::and(V::load_nibbles(chunk.add(step * V::BLOCKS * stride + at), stride), V::splat_byte(15))
}

/// The fifth bits, which lie `at` bytes into the blocks, as 16.
#[inline(always)]
unsafe fn fifth_bits<V: Vector>(chunk: *const u8, step: usize, stride: usize, at: usize) -> V::I {
    let block = chunk.add(step * V::BLOCKS * stride);
    let mut bits = u64::from(dword(block, at));
    if V::BLOCKS == 2 {
        bits |= u64::from(dword(block, stride + at)) << 32;
    }
    V::bytes_of_bits(bits, 16)
}

impl Coded for Q8_0 {
    type Class = Plain;
    const OFFSET: u32 = 128;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        V::xor(V::load_blocks(chunk.add(step * V::BLOCKS * 34 + 2), 34), V::splat_byte(128))
    }
}

impl Coded for Q4_0 {
    type Class = Plain;
    const OFFSET: u32 = 8;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        nibbles::<V>(chunk, step, 18, 2)
    }
}

impl Coded for Q4_1 {
    type Class = PlainMin;
    const OFFSET: u32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        nibbles::<V>(chunk, step, 20, 4)
    }
}

impl Coded for Q5_0 {
    type Class = Plain;
    const OFFSET: u32 = 16;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        V::or(nibbles::<V>(chunk, step, 22, 6), fifth_bits::<V>(chunk, step, 22, 2))
    }
}

impl Coded for Q5_1 {
    type Class = PlainMin;
    const OFFSET: u32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        V::or(nibbles::<V>(chunk, step, 24, 8), fifth_bits::<V>(chunk, step, 24, 4))
    }
}

impl Coded for Q2_0 {
    type Class = Plain;
    const OFFSET: u32 = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        // A byte's four codes to the low bits of the four bytes of a lane.
        let x = V::load_bytes(chunk.add(t / 2 * 18 + 2 + t % 2 * 8));
        let x = V::or(x, V::shl(x, 12));
        V::and(V::or(x, V::shl(x, 6)), V::splat_byte(3))
    }
}

impl Coded for Iq4Nl {
    type Class = Plain;
    const OFFSET: u32 = 128;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        V::look_up(&IQ4_CODES, nibbles::<V>(chunk, step, 18, 2))
    }
}

/// The upper halves of the f32 scales of MXFP4: bfloat16 has room for all of them.
static MXFP4_SCALES: [u16; 256] = {
    let mut bits = [0; 256];
    let mut e = 0;
    while e < 256 {
        bits[e] = (crate::formats::mxfp4_scale(e as u8).to_bits() >> 16) as u16;
        e += 1;
    }
    bits
};

impl Coded for Mxfp4 {
    type Class = Plain;
    const OFFSET: u32 = 16;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        V::look_up(&E2M1_CODES, nibbles::<V>(chunk, step, 17, 1))
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _: usize) -> u32 {
        u32::from(*MXFP4_SCALES.get_unchecked(usize::from(*block)))
    }
    #[inline(always)]
    unsafe fn scales<V: Vector>(bits: V::I) -> V::F {
        V::as_f(V::shl(bits, 16))
    }
}

/// The scales of NVFP4 as f16, which has room for all of them.
static NVFP4_SCALES: [u16; 256] = {
    let mut bits = [0; 256];
    let mut b = 0;
    while b < 256 {
        bits[b] = crate::math::f32_to_f16(crate::formats::nvfp4_scale(b as u8));
        b += 1;
    }
    bits
};

impl Coded for Nvfp4 {
    type Class = Split;
    const OFFSET: u32 = 16;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let nibbles = V::load_nibbles_of_8(chunk.add(t / 2 * 36 + 4 + t % 2 * 16));
        V::look_up(&E2M1_CODES, V::and(nibbles, V::splat_byte(15)))
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, i: usize) -> u32 {
        u32::from(*NVFP4_SCALES.get_unchecked(usize::from(*block.add(i))))
    }
}
