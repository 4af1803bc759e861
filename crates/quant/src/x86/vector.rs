//! The few vector operations that the kernels are written in, for 256 and 512 bits.
//!
//! Owns the choice of operations; what they compile to is in [`avx2`](super::avx2) and
//! [`avx512`](super::avx512).
//!
//! Safety of everything here: call only where the processor has the features of the implementing type.
//! Pointers must be valid for the bytes that a function says it reads or writes; none needs an alignment.

use std::arch::x86_64::__m256i;

/// Something for each of a number of lanes: a closure that is certain to be inlined, and so to be compiled
/// with the features of the function it is used in.
pub(super) trait Lanes<T> {
    /// That of lane `i`.
    unsafe fn lane(&self, i: usize) -> T;
}

/// A width of vector registers: `LANES` 32-bit lanes, or bytes for `BLOCKS` blocks of 32 weights.
pub(super) trait Vector: Copy {
    /// 32-bit lanes.
    const LANES: usize;
    /// Blocks of 32 bytes.
    const BLOCKS: usize = Self::LANES / 8;
    /// Whether table look-ups are better gathered than assembled from loads.
    const GATHERS: bool;
    /// Whether [`Vector::dot`] takes codes above 128. Otherwise wide codes go through [`Vector::dot_wide`].
    const TAKES_WIDE: bool;
    /// Integers or bytes.
    type I: Copy;
    /// Floats.
    type F: Copy;
    /// `LANES / 2` indices.
    type Indices: Copy;
    /// The vector of one block.
    type Block: Vector<I = __m256i>;

    /// Reads `LANES` integers.
    unsafe fn load(p: *const i32) -> Self::I;
    /// Writes `LANES` integers.
    unsafe fn store(p: *mut i32, v: Self::I);
    /// Reads `LANES` floats.
    unsafe fn load_f(p: *const f32) -> Self::F;
    /// Writes `LANES` floats.
    unsafe fn store_f(p: *mut f32, v: Self::F);
    /// Every lane `v`.
    unsafe fn splat(v: i32) -> Self::I;
    /// Every lane `v`.
    unsafe fn splat_f(v: f32) -> Self::F;
    /// Reads `LANES` pairs of integers: the first ones, and the second ones.
    unsafe fn load_pairs(p: *const u64) -> [Self::I; 2];
    /// The f16 in the low half of every lane, widened.
    unsafe fn halves(v: Self::I) -> Self::F;
    /// Reads `LANES` f16 and widens them.
    unsafe fn load_halves(p: *const u16) -> Self::F;
    /// Reads `LANES` u16 and widens them.
    unsafe fn load_words(p: *const u16) -> Self::I;
    /// Reads `LANES` bytes and widens them.
    unsafe fn load_bytes(p: *const u8) -> Self::I;

    /// Sum by lanes.
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
    /// Difference by lanes.
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I;
    /// Shifts every lane left.
    unsafe fn shl(v: Self::I, bits: u32) -> Self::I;
    /// Shifts every lane right, zeros coming in.
    unsafe fn shr(v: Self::I, bits: u32) -> Self::I;
    /// Byte `byte` (0..4) of every lane, sign-extended.
    unsafe fn signed_byte(v: Self::I, byte: usize) -> Self::I;
    /// Integers to floats.
    unsafe fn to_f(v: Self::I) -> Self::F;
    /// The same bits as floats.
    unsafe fn as_f(v: Self::I) -> Self::F;
    /// Sum by lanes.
    unsafe fn add_f(a: Self::F, b: Self::F) -> Self::F;
    /// Product by lanes.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// `acc` plus, in every lane, the dot product of its four unsigned bytes of `codes` (at most 128 unless
    /// `TAKES_WIDE`) and its four signed bytes of `a` (-127..=127).
    unsafe fn dot(acc: Self::I, codes: Self::I, a: Self::I) -> Self::I;
    /// The same for codes that stand for `code - 128`.
    unsafe fn dot_wide(acc: Self::I, codes: Self::I, a: Self::I) -> Self::I;
    /// From one vector for each lane of the result: the sums of its lanes over each half block, as
    /// `[block][half]`. With one block, the second is the first.
    unsafe fn reduce_halves(v: &impl Lanes<Self::I>) -> [[Self::I; 2]; 2];
    /// The same over each block.
    unsafe fn reduce(v: &impl Lanes<Self::I>) -> [Self::I; 2];
    /// From one vector for each lane of the result: the sums of its lanes, folded by halves of the vector,
    /// then of the halves.
    unsafe fn fold(v: &impl Lanes<Self::F>) -> Self::F;
    /// Transposes the `LANES` x `LANES` floats at `p` in place.
    unsafe fn transpose(p: *mut f32);

    /// Bitwise and.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I;
    /// Every byte `v`.
    unsafe fn splat_byte(v: u8) -> Self::I;
    /// `table[code]` for every byte, a code below 16.
    unsafe fn look_up(table: &[u8; 16], codes: Self::I) -> Self::I;
    /// The bytes of one block, and zeros for a second.
    unsafe fn one_block(v: __m256i) -> Self::I;
    /// For block `b`, the 32 bytes at `p + b * stride`.
    unsafe fn load_blocks(p: *const u8, stride: usize) -> Self::I;
    /// The 32 bytes at `first`, and those at `second` if there is a second block.
    unsafe fn load_two_blocks(first: *const u8, second: *const u8) -> Self::I;
    /// For block `b`, the 16 bytes at `p + b * stride` twice: as they are, and shifted right by four bits.
    /// Bits above the low four are noise.
    unsafe fn load_nibbles(p: *const u8, stride: usize) -> Self::I;
    /// For block `b`, each of the two groups of 8 bytes at `p + 16 * b` twice: as they are, and shifted right
    /// by four bits. Bits above the low four are noise.
    unsafe fn load_nibbles_of_8(p: *const u8) -> Self::I;
    /// The same 32 bytes for each block.
    unsafe fn load_same(p: *const u8) -> Self::I;
    /// Moves bit `first + b * step` of the bytes of block `b` to bit `to`. The bits are moved as those of
    /// 64-bit numbers: what comes with them is noise.
    unsafe fn field(v: Self::I, first: usize, step: usize, to: usize) -> Self::I;
    /// The first `LANES / 2` of `words`.
    unsafe fn from_qwords(words: [u64; 8]) -> Self::I;
    /// `table[i]` for every lane; reads four bytes each.
    unsafe fn gather(table: *const u32, i: Self::I) -> Self::I;
    /// `table[i]` for every index; reads eight bytes each.
    unsafe fn gather_qwords(table: *const u64, i: Self::Indices) -> Self::I;
    /// `LANES / 2` bytes.
    unsafe fn indices_of_bytes(p: *const u8) -> Self::Indices;
    /// The lower four of each eight bytes, `LANES` in all.
    unsafe fn indices_of_low_bytes(p: *const u8) -> Self::Indices;
    /// The low `bits` bits of `LANES / 2` little-endian u16.
    unsafe fn indices_of_words(p: *const u8, bits: u32) -> Self::Indices;
    /// Adds to each index, times 256, `bits` bits of `fields`: those from `width` times its number on.
    unsafe fn add_high(i: Self::Indices, fields: u32, width: u32, bits: u32) -> Self::Indices;
    /// `value` in the lanes whose bit of `bits` is set, zero in the others.
    unsafe fn lanes_of_bits(bits: u32, value: i32) -> Self::I;
    /// Sum by bytes.
    unsafe fn add_bytes(a: Self::I, b: Self::I) -> Self::I;
    /// Difference by bytes.
    unsafe fn sub_bytes(a: Self::I, b: Self::I) -> Self::I;
    /// `value` in the bytes whose bit of `bits` is set (bit 0 is byte 0), zero in the others.
    unsafe fn bytes_of_bits(bits: u64, value: u8) -> Self::I;
    /// `twice - byte` in the bytes whose bit of `bits` is set, `v` in the others.
    unsafe fn reflect(v: Self::I, bits: u64, twice: u8) -> Self::I;
}
