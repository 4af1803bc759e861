//! The formats with code-book grids: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.
//!
//! The grids here hold codes, so that a sign is a reflection: `64 + g` becomes `64 - g`.

use std::arch::x86_64::_pdep_u64;

use super::{dword, gather_bits, halves, odd, qword, spread, word};
use crate::formats::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, grids};
use crate::x86::chunk::{Coded, Halved, Scaled, WIDTH};
use crate::x86::vector::Vector;

const fn biased_8<const N: usize>(grid: &[u64; N]) -> [u64; N] {
    let mut codes = [0; N];
    let mut i = 0;
    while i < N {
        codes[i] = grid[i] + 0x4040_4040_4040_4040;
        i += 1;
    }
    codes
}

const fn biased_4<const N: usize>(grid: &[u32; N]) -> [u32; N] {
    let mut codes = [0; N];
    let mut i = 0;
    while i < N {
        codes[i] = grid[i] + 0x4040_4040;
        i += 1;
    }
    codes
}

static IQ2_XXS: [u64; 256] = biased_8(&grids::IQ2_XXS);
static IQ2_XS: [u64; 512] = biased_8(&grids::IQ2_XS);
static IQ2_S: [u64; 1024] = biased_8(&grids::IQ2_S);
static IQ3_XXS: [u32; 256] = biased_4(&grids::IQ3_XXS);
static IQ3_S: [u32; 512] = biased_4(&grids::IQ3_S);
/// `8 g + 16`.
static IQ1: [u64; 2048] = {
    let mut codes = [0; 2048];
    let mut i = 0;
    while i < 2048 {
        let row = grids::IQ1[i].to_le_bytes();
        let mut j = 0;
        while j < 8 {
            codes[i] |= ((8 * row[j] as i8 + 16) as u64) << (8 * j);
            j += 1;
        }
        i += 1;
    }
    codes
};

/// `LANES / 2` of eight values that `$word` gives for `$i`, the others zero.
macro_rules! qwords {
    ($i:ident => $word:expr) => {
        qwords!(@ $i $word; 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident $word:expr; $($n:literal)*) => {
        V::from_qwords([$({
            const $i: usize = $n;
            if $i < V::LANES / 2 { $word } else { 0 }
        }),*])
    };
}

/// What reflects codes of 64 more.
const TWICE: u8 = 128;
/// One in every byte.
const ONES: u64 = 0x0101_0101_0101_0101;

/// The same index, behind a wall that keeps the compiler from computing several in a vector, only to take it
/// apart again for the loads.
#[inline(always)]
fn alone(mut i: usize) -> usize {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) i, options(pure, nomem, nostack, preserves_flags)) };
    i
}

/// Two grid rows of four.
#[inline(always)]
fn pair(low: &u32, high: &u32) -> u64 {
    u64::from(*low) | u64::from(*high) << 32
}

#[inline(always)]
unsafe fn byte(p: *const u8, at: usize) -> usize {
    usize::from(*p.add(at))
}

/// Eight times seven sign bits as eight bytes with an even number of bits each.
#[inline(always)]
unsafe fn even_signs(fields: u64) -> u64 {
    let seven = spread(fields, 7);
    // The lowest bit of a byte becomes its parity; what crosses over from the next byte stays above that bit.
    let parity = seven ^ seven >> 4;
    let parity = parity ^ parity >> 2;
    let parity = parity ^ parity >> 1;
    seven | (parity & ONES) << 7
}

/// The sign fields of the blocks of a step, 28 bits each, in the low bits of dwords at `p + b * stride`.
#[inline(always)]
unsafe fn sign_fields<V: Vector>(p: *const u8, stride: usize) -> u64 {
    let fields = u64::from(dword(p, 0) & 0x0fff_ffff);
    if V::BLOCKS == 2 { fields | u64::from(dword(p, stride) & 0x0fff_ffff) << 28 } else { fields }
}

/// The sign bits of the blocks of a step, stored whole at `p`.
#[inline(always)]
unsafe fn whole_signs<V: Vector>(p: *const u8) -> u64 {
    if V::BLOCKS == 2 { qword(p, 0) } else { u64::from(dword(p, 0)) }
}

/// Sub-scale `2 n + 1` of nibble `i` of every lane: nibbles are spread once there is a lane for each row.
#[inline(always)]
unsafe fn odd_nibble<V: Vector>(v: V::I, i: usize) -> V::F {
    let nibble = V::to_f(V::and(V::shr(v, 4 * i as u32), V::splat(15)));
    V::fma(nibble, V::splat_f(2.0), V::splat_f(1.0))
}

/// The indices of four grid rows, in the words of a register: their 8 low bits each at `low`, those above in `high`, from
/// where they go to `places`.
#[inline(always)]
unsafe fn four_indices(low: *const u8, high: u64, places: u64) -> u64 {
    _pdep_u64(u64::from(dword(low, 0)), 0x00ff_00ff_00ff_00ff) | _pdep_u64(high, places)
}

/// Word `i` of a register.
#[inline(always)]
fn word_of(words: u64, i: usize) -> usize {
    usize::from((words >> (16 * i)) as u16)
}

/// Eight nibbles as odd scales.
#[inline(always)]
unsafe fn odd_nibbles(nibbles: u32) -> [u32; 2] {
    halves(odd(spread(u64::from(nibbles), 4)))
}

impl Coded for Iq2Xxs {
    type Class = Scaled;
    const OFFSET: u32 = 64;
    const FACTOR: f32 = 0.125;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let p = chunk.add(2 + step * V::BLOCKS * 8);
        let grid = if V::GATHERS {
            V::gather_qwords(IQ2_XXS.as_ptr(), V::indices_of_low_bytes(p))
        } else {
            qwords!(I => *IQ2_XXS.get_unchecked(byte(p, I / 4 * 8 + I % 4)))
        };
        V::reflect(grid, even_signs(sign_fields::<V>(p.add(4), 8)), TWICE)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        let nibble = |t: usize| dword(block, 6 + 8 * t) >> 28 << (4 * t);
        let [a, b] = odd_nibbles((0..8).fold(0, |all, t| all | nibble(t)));
        [a, b, 0, 0]
    }
}

impl Coded for Iq2Xs {
    type Class = Halved;
    const OFFSET: u32 = 64;
    const FACTOR: f32 = 0.125;
    const SCALE_WORDS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let p = chunk.add(2 + step * V::BLOCKS * 8);
        let grid = if V::GATHERS {
            V::gather_qwords(IQ2_XS.as_ptr(), V::indices_of_words(p, 9))
        } else {
            qwords!(I => *IQ2_XS.get_unchecked(alone(usize::from(word(p, 2 * I)) & 511)))
        };
        let signs = |at| gather_bits(qword(p, at), 0xfe00_fe00_fe00_fe00);
        let fields = if V::BLOCKS == 2 { signs(0) | signs(8) << 28 } else { signs(0) };
        V::reflect(grid, even_signs(fields), TWICE)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        [dword(block, 66), dword(block, 70), 0, 0]
    }
    #[inline(always)]
    unsafe fn sub_scale<V: Vector>(words: *const [u32; WIDTH], i: usize) -> V::F {
        odd_nibble::<V>(V::load(words.add(i / 8).cast()), i % 8)
    }
}

impl Coded for Iq2S {
    type Class = Halved;
    const OFFSET: u32 = 64;
    const FACTOR: f32 = 0.125;
    const SCALE_WORDS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let (low, high) = (chunk.add(2 + 4 * t), chunk.add(66 + t));
        let grid = if V::GATHERS {
            let high = u32::from(word(high, 0));
            V::gather_qwords(IQ2_S.as_ptr(), V::add_high(V::indices_of_bytes(low), high, 2, 2))
        } else {
            let four = |i: usize| match i < V::BLOCKS {
                true => four_indices(low.add(4 * i), u64::from(*high.add(i)), 0x0300_0300_0300_0300),
                false => 0,
            };
            let found = [four(0), four(1)];
            qwords!(I => *IQ2_S.get_unchecked(alone(word_of(found[I / 4], I % 4))))
        };
        V::reflect(grid, whole_signs::<V>(chunk.add(34 + 4 * t)), TWICE)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        [dword(block, 74), dword(block, 78), 0, 0]
    }
    #[inline(always)]
    unsafe fn sub_scale<V: Vector>(words: *const [u32; WIDTH], i: usize) -> V::F {
        odd_nibble::<V>(V::load(words.add(i / 8).cast()), i % 8)
    }
}

impl Coded for Iq3Xxs {
    type Class = Scaled;
    const OFFSET: u32 = 64;
    const FACTOR: f32 = 0.25;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let p = chunk.add(2 + 8 * t);
        let grid = if V::GATHERS {
            V::gather(IQ3_XXS.as_ptr(), V::load_bytes(p))
        } else {
            qwords!(I => pair(IQ3_XXS.get_unchecked(byte(p, 2 * I)), IQ3_XXS.get_unchecked(byte(p, 2 * I + 1))))
        };
        V::reflect(grid, even_signs(sign_fields::<V>(chunk.add(66 + 4 * t), 4)), TWICE)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        let pair = |i: usize| gather_bits(qword(block, 66 + 8 * i), 0xf000_0000_f000_0000) << (8 * i);
        let [a, b] = odd_nibbles((pair(0) | pair(1) | pair(2) | pair(3)) as u32);
        [a, b, 0, 0]
    }
}

impl Coded for Iq3S {
    type Class = Scaled;
    const OFFSET: u32 = 64;
    const SCALE_WORDS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let low = chunk.add(2 + 8 * t);
        let high = usize::from(word(chunk, 66 + t));
        let grid = if V::GATHERS {
            V::gather(IQ3_S.as_ptr(), V::or(V::load_bytes(low), V::lanes_of_bits(high as u32, 256)))
        } else {
            let four = |i: usize| match i < V::BLOCKS * 2 {
                true => four_indices(low.add(4 * i), (high >> (4 * i)) as u64, 0x0100_0100_0100_0100),
                false => 0,
            };
            let found = [four(0), four(1), four(2), four(3)];
            qwords!(I => pair(
                IQ3_S.get_unchecked(alone(word_of(found[I / 2], I % 2 * 2))),
                IQ3_S.get_unchecked(alone(word_of(found[I / 2], I % 2 * 2 + 1))),
            ))
        };
        V::reflect(grid, whole_signs::<V>(chunk.add(74 + 4 * t)), TWICE)
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        [dword(block, 106), 0, 0, 0]
    }
    #[inline(always)]
    unsafe fn sub_scale<V: Vector>(words: *const [u32; WIDTH], i: usize) -> V::F {
        odd_nibble::<V>(V::load(words.cast()), i)
    }
}

/// `code + 1`, or `code - 1` where `negative` is 1, in every byte.
#[inline(always)]
fn shifted(codes: u64, negative: usize) -> u64 {
    codes + ONES - negative as u64 * (2 * ONES)
}

impl Coded for Iq1S {
    type Class = Scaled;
    const OFFSET: u32 = 16;
    const FACTOR: f32 = 0.125;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let (low, high) = (chunk.add(2 + 4 * t), chunk.add(34 + 2 * t));
        if V::GATHERS {
            let high = if V::BLOCKS == 2 { dword(high, 0) } else { u32::from(word(high, 0)) };
            let grid = V::gather_qwords(IQ1.as_ptr(), V::add_high(V::indices_of_bytes(low), high, 3, 3));
            let negative =
                (u64::from(high >> 15 & 1) * 0xffff_ffff) | (u64::from(high >> 31) * (0xffff_ffff << 32));
            return V::sub_bytes(V::add_bytes(grid, V::splat_byte(1)), V::bytes_of_bits(negative, 2));
        }
        qwords!(I => {
            let high = usize::from(word(high, I / 4 * 2));
            let codes = *IQ1.get_unchecked(alone(byte(low, I) | (high >> (I % 4 * 3) & 7) << 8));
            shifted(codes, high >> 15)
        })
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        let four = |at| gather_bits(qword(block, at), 0x7000_7000_7000_7000);
        let [a, b] = halves(odd(spread(four(34) | four(42) << 12, 3)));
        [a, b, 0, 0]
    }
}

impl Coded for Iq1M {
    type Class = Halved;
    const OFFSET: u32 = 16;
    const FACTOR: f32 = 0.125;

    #[inline(always)]
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I {
        let t = step * V::BLOCKS;
        let low = chunk.add(4 * t);
        let high = if V::BLOCKS == 2 { dword(chunk, 32 + 2 * t) } else { u32::from(word(chunk, 32 + 2 * t)) }
            as usize;
        if V::GATHERS {
            let high = high as u32;
            let grid = V::gather_qwords(IQ1.as_ptr(), V::add_high(V::indices_of_bytes(low), high, 4, 3));
            let negative = spread(gather_bits(u64::from(high), 0x8888_8888), 1) * 0xff;
            return V::sub_bytes(V::add_bytes(grid, V::splat_byte(1)), V::bytes_of_bits(negative, 2));
        }
        qwords!(I => {
            let high = high >> (4 * I) & 15;
            shifted(*IQ1.get_unchecked(alone(byte(low, I) | (high & 7) << 8)), high >> 3)
        })
    }
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _: usize) -> u32 {
        gather_bits(qword(block, 48), 0xf000_f000_f000_f000) as u32
    }
    #[inline(always)]
    unsafe fn sub_scales(block: *const u8) -> [u32; 4] {
        let fields = gather_bits(qword(block, 48), 0x0fff_0fff_0fff_0fff);
        let ([a, b], [c, d]) = (halves(odd(spread(fields, 3))), halves(odd(spread(fields >> 24, 3))));
        [a, b, c, d]
    }
}
