//! A chunk: 256 weights of up to 16 rows, decoded to what every product kernel reads.
//!
//! Owns the step from a format's bytes to format-independent form: unsigned codes, and scales with a lane for
//! each row. What distinguishes formats after this is their [`Class`] and three numbers ([`Decoder`]).
//!
//! Invariant: weight `i` of row `r` is `codes[r][i] - offset`; a product sums `code * a` and takes off
//! `offset * sum(a)`, which is exact.

use super::fetch;
use super::vector::Vector;
use crate::block::{BlockFormat, Minimum, SEGMENT};

/// Weights of a row in a chunk.
pub(super) const CHUNK: usize = 256;
/// Blocks of 32 in a chunk.
pub(super) const TERMS: usize = CHUNK / 32;

/// What scales the integers of a block of 32.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sub {
    /// Nothing but the float scale.
    None,
    /// One integer per 32.
    Block,
    /// One integer per 16.
    Half,
    /// One float scale per 16, no integer.
    Float,
}

/// How a block's products are finished; formats of one class share their kernels.
pub(super) trait Class {
    /// Sub-scales.
    const SUB: Sub;
    /// Minimums: as [`BlockFormat::MINIMUM`].
    const MINIMUM: Minimum = Minimum::None;
    /// Whether products are needed per half block.
    const HALVES: bool = matches!(Self::SUB, Sub::Half | Sub::Float);
}

/// A scale per block.
pub(super) struct Plain;
/// A scale and an added minimum per block.
pub(super) struct PlainMin;
/// Integer sub-scales per 32.
pub(super) struct Scaled;
/// Integer sub-scales and minimums per 32.
pub(super) struct ScaledMin;
/// Integer sub-scales per 16.
pub(super) struct Halved;
/// Integer sub-scales and minimums per 16.
pub(super) struct HalvedMin;
/// Float scales per 16.
pub(super) struct Split;

impl Class for Plain {
    const SUB: Sub = Sub::None;
}
impl Class for PlainMin {
    const SUB: Sub = Sub::None;
    const MINIMUM: Minimum = Minimum::Added;
}
impl Class for Scaled {
    const SUB: Sub = Sub::Block;
}
impl Class for ScaledMin {
    const SUB: Sub = Sub::Block;
    const MINIMUM: Minimum = Minimum::Subtracted;
}
impl Class for Halved {
    const SUB: Sub = Sub::Half;
}
impl Class for HalvedMin {
    const SUB: Sub = Sub::Half;
    const MINIMUM: Minimum = Minimum::Subtracted;
}
impl Class for Split {
    const SUB: Sub = Sub::Float;
}

/// How a format's bytes become codes and scales.
///
/// Safety of all functions: `block` and `chunk` point to whole blocks of the format (`chunk`: as many as
/// `term` or `step` reach).
pub(super) trait Coded: BlockFormat {
    /// How its products are finished.
    type Class: Class;
    /// What is taken off the codes to get the weights: zero or a power of two.
    const OFFSET: u32;
    /// Whether codes exceed 128; then `OFFSET` is 128.
    const WIDE: bool = false;
    /// A power of two that multiplies the f16 scale.
    const FACTOR: f32 = 1.0;

    /// The codes of blocks `step * V::BLOCKS ..` of a chunk.
    unsafe fn codes<V: Vector>(chunk: *const u8, step: usize) -> V::I;

    /// The bits of the float scale of `block` (of its `i`-th 16 weights, where it has one per 16) in the low
    /// half; in the high half those of the minimums' scale, if the format has minimums.
    #[inline(always)]
    unsafe fn scale_bits(block: *const u8, _i: usize) -> u32 {
        if Self::MINIMUM == Minimum::None { u32::from(word(block, 0)) } else { dword(block, 0) }
    }

    /// Scales from their bits, which lie in the low halves of the lanes. The high halves are noise.
    #[inline(always)]
    unsafe fn scales<V: Vector>(bits: V::I) -> V::F {
        let d = V::halves(bits);
        if Self::FACTOR == 1.0 { d } else { V::mul(d, V::splat_f(Self::FACTOR)) }
    }

    /// How many words [`Coded::sub_scales`] gives.
    const SCALE_WORDS: usize = if Self::Class::HALVES { 4 } else { 2 };

    /// The sub-scales of a block of 256, in order: 8 or 16, as [`Coded::sub_scale`] finds them.
    #[inline(always)]
    unsafe fn sub_scales(_block: *const u8) -> [u32; 4] {
        [0; 4]
    }

    /// Sub-scale `i` of every lane, of whose words word `w` is at `words + w`: as signed bytes, unless a format says otherwise.
    #[inline(always)]
    unsafe fn sub_scale<V: Vector>(words: *const [u32; WIDTH], i: usize) -> V::F {
        V::to_f(V::signed_byte(V::load(words.add(i / 4).cast()), i % 4))
    }

    /// The minimums of a block of 256 as signed bytes, in order: 8 or 16.
    #[inline(always)]
    unsafe fn minimums(_block: *const u8) -> [u32; 4] {
        [0; 4]
    }
}

/// The little-endian u16 at `p + at`.
#[inline(always)]
pub(super) unsafe fn word(p: *const u8, at: usize) -> u16 {
    p.add(at).cast::<u16>().read_unaligned()
}

/// The little-endian u32 at `p + at`.
#[inline(always)]
pub(super) unsafe fn dword(p: *const u8, at: usize) -> u32 {
    p.add(at).cast::<u32>().read_unaligned()
}

/// The little-endian u64 at `p + at`.
#[inline(always)]
pub(super) unsafe fn qword(p: *const u8, at: usize) -> u64 {
    p.add(at).cast::<u64>().read_unaligned()
}

/// Where a decoded chunk goes. A lane is a row.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// Of lane 0: `[weight]`, and as many bytes after them as fill a vector.
    pub codes: *mut u8,
    /// From a lane's codes to the next lane's.
    pub stride: usize,
    /// Float scales: `[block >> Decoder::scale_shift][lane]`, or per 16. Like the others, in rows of
    /// [`WIDTH`] lanes.
    pub d: *mut f32,
    /// Integer sub-scales: per 32 or per 16.
    pub s: *mut f32,
    /// Float scales of the minimums, as `d`.
    pub d_min: *mut f32,
    /// Integer minimums: per 32 or per 16.
    pub m: *mut f32,
    /// Scratch; its lanes that no row has are zero.
    raw: *mut Raw,
}

/// Lanes in a row of scales, whatever the vector.
pub(super) const WIDTH: usize = 16;

impl Target {
    /// Where the chunk goes whose first block is block `blocks` of its rows, if this is where the first chunk
    /// goes.
    #[inline(always)]
    pub unsafe fn after(&self, blocks: usize, format: &Decoder) -> Target {
        let floats = if format.split { 2 * blocks } else { blocks >> format.scale_shift };
        let integers = if format.halves { 2 * blocks } else { blocks };
        Target {
            codes: self.codes.add(32 * blocks),
            stride: self.stride,
            d: self.d.add(floats * WIDTH),
            s: self.s.add(integers * WIDTH),
            d_min: self.d_min.add(floats * WIDTH),
            m: self.m.add(integers * WIDTH),
            raw: self.raw,
        }
    }
}

/// Decoded chunks: room for `LANES` rows of `BLOCKS` blocks.
#[repr(C, align(64))]
pub(super) struct Panel<const LANES: usize, const BLOCKS: usize> {
    codes: [[[u8; 32]; BLOCKS]; LANES],
    /// What an odd last block writes beyond its row.
    spare: [u8; 64],
    d: [[[f32; WIDTH]; 2]; BLOCKS],
    s: [[[f32; WIDTH]; 2]; BLOCKS],
    d_min: [[f32; WIDTH]; BLOCKS],
    m: [[[f32; WIDTH]; 2]; BLOCKS],
    raw: Raw,
}

impl<const LANES: usize, const BLOCKS: usize> Panel<LANES, BLOCKS> {
    /// To be called once, before anything is decoded to `panel`. Unless all lanes of all chunks are going to
    /// be rows (`whole`), what is not must be something: zero.
    #[inline(always)]
    pub unsafe fn prepare(panel: *mut Self, whole: bool) {
        if whole {
            (&raw mut (*panel).raw).write_bytes(0, 1);
        } else {
            panel.write_bytes(0, 1);
        }
    }

    /// The panel at `panel` as a target, with codes `stride` bytes apart.
    #[inline(always)]
    pub unsafe fn target(panel: *mut Self, stride: usize) -> Target {
        Target {
            codes: (&raw mut (*panel).codes).cast(),
            stride,
            d: (&raw mut (*panel).d).cast(),
            s: (&raw mut (*panel).s).cast(),
            d_min: (&raw mut (*panel).d_min).cast(),
            m: (&raw mut (*panel).m).cast(),
            raw: &raw mut (*panel).raw,
        }
    }
}

/// Scales as they lie in the blocks, with as few stores as possible: a lane for each row.
#[repr(C, align(64))]
struct Raw {
    /// Four float scales; two and their minimums' scales; or, where a chunk has one, as `[u32; 16]`, that and
    /// the minimums' scale.
    d: [[u64; 16]; 4],
    /// Four sub-scales.
    s: [[u32; 16]; 4],
    /// Four minimums.
    m: [[u32; 16]; 4],
}

/// [`decode`] for a format and a path.
pub(super) type Decode =
    unsafe fn(from: *const u8, row_bytes: usize, rows: usize, terms: usize, to: &Target, ahead: usize);

/// A format, as the product kernels see it.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
    pub decode: Decode,
    /// Bytes of a chunk of a row.
    pub chunk_bytes: usize,
    /// log2 of blocks of 32 with one float scale.
    pub scale_shift: usize,
    /// There is a float scale per 16.
    pub split: bool,
    /// There are integers per 16.
    pub halves: bool,
    /// Taken off every code: 0 or a power of two.
    pub offset: u32,
    /// Codes exceed 128.
    pub wide: bool,
}

impl Decoder {
    pub fn of<F: Coded>(decode: Decode, takes_wide: bool) -> Decoder {
        Decoder {
            decode,
            chunk_bytes: CHUNK / F::LEN * F::BYTES,
            scale_shift: (F::LEN / 32).trailing_zeros() as usize,
            split: F::SPLIT,
            halves: F::Class::HALVES,
            // Where wide codes take another product, that one sees the weights themselves.
            offset: if F::WIDE && !takes_wide { 0 } else { F::OFFSET },
            wide: F::WIDE,
        }
    }

    /// How many rows of `blocks` blocks to take for one, so that their chunks are full: rows follow each
    /// other without a gap. 1 if that would be more than a segment.
    pub fn merge(&self, blocks: usize) -> usize {
        let rows = TERMS >> blocks.trailing_zeros().min(TERMS.trailing_zeros());
        if rows * blocks <= SEGMENT { rows } else { 1 }
    }
}

/// Decodes `terms` (at most 8) blocks of 32 of each of `rows` (at most `V::LANES`) rows. Lanes beyond `rows`
/// of the codes keep what they had. Meanwhile the chunks `ahead` bytes on are fetched.
///
/// # Safety
/// `from` is the first row's first block, and `row_bytes` lead to the next row's. The processor has `V`'s
/// features.
#[inline(always)]
pub(super) unsafe fn decode<V: Vector, F: Coded>(
    from: *const u8,
    row_bytes: usize,
    rows: usize,
    terms: usize,
    to: &Target,
    ahead: usize,
) {
    let raw = to.raw;
    for row in 0..rows {
        let p = from.add(row * row_bytes);
        fetch(p.wrapping_add(ahead), CHUNK / F::LEN * F::BYTES);
        let codes = to.codes.add(row * to.stride).cast::<i32>();
        if terms == TERMS {
            raw_scales::<F>(p, TERMS, raw, row);
            for step in 0..TERMS / V::BLOCKS {
                V::store(codes.add(step * V::LANES), F::codes::<V>(p, step));
            }
        } else {
            raw_scales::<F>(p, terms, raw, row);
            for step in 0..terms / V::BLOCKS {
                V::store(codes.add(step * V::LANES), F::codes::<V>(p, step));
            }
            if !terms.is_multiple_of(V::BLOCKS) {
                let last = V::one_block(F::codes::<V::Block>(p, terms - 1));
                V::store(codes.add(terms / V::BLOCKS * V::LANES), last);
            }
        }
    }
    if F::LEN == CHUNK {
        put::<V, F>(to, 0, V::load((*raw).d.as_ptr().cast()));
    } else {
        for i in 0..scales::<F>(terms).div_ceil(per_word::<F>()) {
            let [first, second] = V::load_pairs((*raw).d[i].as_ptr());
            if F::MINIMUM != Minimum::None {
                put::<V, F>(to, 2 * i, first);
                put::<V, F>(to, 2 * i + 1, second);
            } else {
                put::<V, F>(to, 4 * i, first);
                put::<V, F>(to, 4 * i + 1, V::shr(first, 16));
                put::<V, F>(to, 4 * i + 2, second);
                put::<V, F>(to, 4 * i + 3, V::shr(second, 16));
            }
        }
    }
    if F::LEN == CHUNK {
        let bytes = if F::Class::HALVES { 16 } else { 8 };
        for i in 0..bytes {
            V::store_f(to.s.add(WIDTH * i), F::sub_scale::<V>((&raw const (*raw).s).cast(), i));
            if F::MINIMUM != Minimum::None {
                let m = V::signed_byte(V::load((*raw).m[i / 4].as_ptr().cast()), i % 4);
                V::store_f(to.m.add(WIDTH * i), V::to_f(m));
            }
        }
    }
}

/// Widens the float scales in one vector of bits.
#[inline(always)]
unsafe fn put<V: Vector, F: Coded>(to: &Target, i: usize, bits: V::I) {
    V::store_f(to.d.add(WIDTH * i), F::scales::<V>(bits));
    if F::MINIMUM != Minimum::None {
        V::store_f(to.d_min.add(WIDTH * i), V::halves(V::shr(bits, 16)));
    }
}

/// Float scales in `terms` blocks of 32 of a row.
const fn scales<F: Coded>(terms: usize) -> usize {
    if F::SPLIT { 2 * terms } else { terms.div_ceil(F::LEN / 32) }
}

/// Scales (with their minimums') in a u64.
const fn per_word<F: Coded>() -> usize {
    if matches!(F::MINIMUM, Minimum::None) { 4 } else { 2 }
}

/// Collects the scales of a row's chunk.
#[inline(always)]
unsafe fn raw_scales<F: Coded>(p: *const u8, terms: usize, raw: *mut Raw, row: usize) {
    if F::LEN == CHUNK {
        (*raw).d.as_mut_ptr().cast::<u32>().add(row).write(F::scale_bits(p, 0));
        let (s, m) = (F::sub_scales(p), F::minimums(p));
        for (to, s) in (*raw).s.iter_mut().zip(s).take(F::SCALE_WORDS) {
            to[row] = s;
        }
        if F::MINIMUM != Minimum::None {
            let words = if F::Class::HALVES { 4 } else { 2 };
            for (to, m) in (*raw).m.iter_mut().zip(m).take(words) {
                to[row] = m;
            }
        }
        return;
    }
    let (count, per_word) = (scales::<F>(terms), per_word::<F>());
    let per_block = if F::SPLIT { F::LEN / 16 } else { 1 };
    for i in 0..count.div_ceil(per_word) {
        let mut bits = 0;
        for j in 0..per_word.min(count - i * per_word) {
            let scale = i * per_word + j;
            let found = F::scale_bits(p.add(scale / per_block * F::BYTES), scale % per_block);
            bits |= u64::from(found) << (64 / per_word * j);
        }
        (*raw).d[i][row] = bits;
    }
}

/// The scales of one block of 32, in lanes.
pub(super) struct Scales<V: Vector> {
    /// Float scale; per half where there is one per 16.
    pub d: [V::F; 2],
    /// Integer sub-scale; per half where there is one per 16.
    pub s: [V::F; 2],
    /// Float scale of the minimums.
    pub d_min: V::F,
    /// Minimum; per half where there is one per 16.
    pub m: [V::F; 2],
}

/// One quantised block of 32 activations, in lanes.
#[derive(Clone, Copy)]
pub(super) struct Block<V: Vector> {
    /// Its scale.
    pub d: V::F,
    /// The sums of its halves.
    pub sums: [V::I; 2],
}

/// Adds one block's products to `acc`. Contract: "Block formats".
///
/// `i` are the products of the codes less the offset: of each half where the class has `HALVES`, else of the
/// block, in `i[0]`.
#[inline(always)]
pub(super) unsafe fn accumulate<V: Vector, K: Class>(
    acc: V::F,
    i: [V::I; 2],
    w: &Scales<V>,
    a: &Block<V>,
) -> V::F {
    let acc = match K::SUB {
        Sub::None => V::fma(V::to_f(i[0]), V::mul(w.d[0], a.d), acc),
        Sub::Block => V::fma(V::mul(V::to_f(i[0]), w.s[0]), V::mul(w.d[0], a.d), acc),
        // Exact: the parts and their sum are integers below 2^24.
        Sub::Half => {
            let sum = V::fma(V::to_f(i[1]), w.s[1], V::mul(V::to_f(i[0]), w.s[0]));
            V::fma(sum, V::mul(w.d[0], a.d), acc)
        }
        Sub::Float => {
            let acc = V::fma(V::to_f(i[0]), V::mul(w.d[0], a.d), acc);
            V::fma(V::to_f(i[1]), V::mul(w.d[1], a.d), acc)
        }
    };
    let scale = || V::mul(w.d_min, a.d);
    match (K::MINIMUM, K::SUB) {
        (Minimum::None, _) => acc,
        (Minimum::Added, _) => V::fma(V::to_f(V::add(a.sums[0], a.sums[1])), scale(), acc),
        (Minimum::Subtracted, Sub::Half) => {
            let sum = V::fma(V::to_f(a.sums[1]), w.m[1], V::mul(V::to_f(a.sums[0]), w.m[0]));
            V::fnma(sum, scale(), acc)
        }
        (Minimum::Subtracted, _) => {
            let sum = V::mul(V::to_f(V::add(a.sums[0], a.sums[1])), w.m[0]);
            V::fnma(sum, scale(), acc)
        }
    }
}
