//! The K-quants and IQ4_XS.

use super::legacy::IQ4_CODES;
use super::{dword, halves, less_32, qword, spread, word};
use crate::formats::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::x86::chunk::{Coded, Halved, HalvedMin, Scaled, ScaledMin};
use crate::x86::vector::Vector;

/// Codes of two bits: of each 32 bytes at `p`, four runs of 32.
#[inline(always)]
unsafe fn two_bits<V: Vector>(p: *const u8, t: usize, to: usize) -> V::I {
    let v = V::field(V::load_same(p.add(t / 4 * 32)), t % 4 * 2, 2, to);
    V::and(v, V::splat_byte(3 << to))
}

/// One bit of a code: bit `t` of 32 bytes at `p`, moved to bit `to`.
#[inline(always)]
unsafe fn one_bit<V: Vector>(p: *const u8, t: usize, to: usize) -> V::I {
    V::and(V::field(V::load_same(p), t, 1, to), V::splat_byte(1 << to))
}

/// Of each 32 bytes at `p`, a run of 32 low nibbles and one of high nibbles.
#[inline(always)]
unsafe fn nibbles<V: Vector>(p: *const u8, t: usize) -> V::I {
    let v = V::field(V::load_same(p.add(t / 2 * 32)), t % 2 * 4, 4, 0);
    V::and(v, V::splat_byte(15))
}

impl Coded for Q2K {
    type Class = HalvedMin;
    const OFFSET: u32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        two_bits::<V>(chunk.add(16), step * V::BLOCKS, 0)
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _: usize) -> u32 {
        dword(block, 80)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        std::array::from_fn(|i| dword(block, 4 * i) & 0x0f0f_0f0f)
    }
    #[inline(always)]
    unsafe fn minimums(block: *const u8) -> [u32; 4] {
        std::array::from_fn(|i| dword(block, 4 * i) >> 4 & 0x0f0f_0f0f)
    }
}

impl Coded for Q3K {
    type Class = Halved;
    const OFFSET: u32 = 4;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        V::or(two_bits::<V>(chunk.add(32), t, 0), one_bit::<V>(chunk, t, 2))
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _: usize) -> u32 {
        u32::from(word(block, 108))
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        let high = dword(block, 104);
        std::array::from_fn(|i| {
            let low = dword(block, 96 + i % 2 * 4) >> (i / 2 * 4) & 0x0f0f_0f0f;
            less_32(low | (high >> (2 * i) & 0x0303_0303) << 4)
        })
    }
}

/// Scales and minimums of Q4_K and Q5_K: the 12 bytes at `p`.
#[inline(always)]
unsafe fn scales_of_6(p: *const u8) -> [u32; 4] {
    [dword(p, 0) & 0x3f3f_3f3f, dword(p, 8) & 0x0f0f_0f0f | dword(p, 0) >> 2 & 0x3030_3030, 0, 0]
}

#[inline(always)]
unsafe fn minimums_of_6(p: *const u8) -> [u32; 4] {
    [dword(p, 4) & 0x3f3f_3f3f, dword(p, 8) >> 4 & 0x0f0f_0f0f | dword(p, 4) >> 2 & 0x3030_3030, 0, 0]
}

impl Coded for Q4K {
    type Class = ScaledMin;
    const OFFSET: u32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        nibbles::<V>(chunk.add(16), step * V::BLOCKS)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        scales_of_6(block.add(4))
    }
    #[inline(always)]
    unsafe fn minimums(block: *const u8) -> [u32; 4] {
        minimums_of_6(block.add(4))
    }
}

impl Coded for Q5K {
    type Class = ScaledMin;
    const OFFSET: u32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        V::or(nibbles::<V>(chunk.add(48), t), one_bit::<V>(chunk.add(16), t, 4))
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        scales_of_6(block.add(4))
    }
    #[inline(always)]
    unsafe fn minimums(block: *const u8) -> [u32; 4] {
        minimums_of_6(block.add(4))
    }
}

impl Coded for Q6K {
    type Class = Halved;
    const OFFSET: u32 = 32;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let low = V::load_blocks(chunk.add(t / 4 * 64 + t % 2 * 32), 32);
        let low = V::and(V::field(low, t % 4 / 2 * 4, 0, 0), V::splat_byte(15));
        V::or(low, two_bits::<V>(chunk.add(128), t, 4))
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _: usize) -> u32 {
        u32::from(word(block, 208))
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        std::array::from_fn(|i| dword(block, 192 + 4 * i))
    }
}

impl Coded for Iq4Xs {
    type Class = Scaled;
    const OFFSET: u32 = 128;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let nibbles = V::load_nibbles(chunk.add(8 + step * V::BLOCKS * 16), 16);
        V::look_up(&IQ4_CODES, V::and(nibbles, V::splat_byte(15)))
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        // Two bytes of high bit pairs, four of low nibbles.
        let packed = qword(block, 0) >> 16;
        let [a, b] = halves(spread(packed >> 16, 4) | spread(packed & 0xffff, 2) << 4);
        [less_32(a), less_32(b), 0, 0]
    }
}
