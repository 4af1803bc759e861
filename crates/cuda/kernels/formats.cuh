// The block formats on the device, one description each: how bytes become 32 weights as exact integers with their
// scales. Layouts: crates/quant/src/formats. Decode and prompt kernels are both made of these.
//
// A format `F` has
//   LEN, BYTES  values and bytes of a block
//   ALIGN       what a block's address is a multiple of, at most 4: a row's bytes start anywhere, and blocks have odd sizes
//   HALVES      whether a unit has two integer sub-scales, one per 16 values
//   SPLIT       whether it has two float scales (NVFP4): two terms, one FMA each
//   MINIMUM     0 none, 1 added, -1 subtracted
//   ZERO        what is to be taken from every weight that `unit` gives
//   LARGE       whether a weight times its sub-scale can have more than the 11 bits of an f16
//   GRID        32-bit words of its code book, staged in shared memory; 0 for none
//   SHARE       units that have bytes in common: each `SHARE` consecutive ones of a block, a power of two
//   unit(block, i, grid)  the `i`-th 32 weights of a block
#pragma once

#include "codebooks.cuh"
#include "contract.cuh"

namespace strata {

/// 32 weights: `w` as bytes in order, `s` and `d` integer and float scales per half, `m` and `d_min` the minimums.
struct Unit {
    uint32_t w[8];
    int s[2];
    float d[2];
    int m[2];
    float d_min;
};

template <int ALIGN>
__device__ inline uint32_t load16(const uint8_t* p) {
    if constexpr (ALIGN >= 2) {
        return *reinterpret_cast<const uint16_t*>(p);
    } else {
        return p[0] | uint32_t(p[1]) << 8;
    }
}

template <int ALIGN>
__device__ inline uint32_t load32(const uint8_t* p) {
    if constexpr (ALIGN >= 4) {
        return *reinterpret_cast<const uint32_t*>(p);
    } else {
        return load16<ALIGN>(p) | load16<ALIGN>(p + 2) << 16;
    }
}

/// Every byte less `n`, for bytes below 128: no borrow crosses a byte.
template <int N>
__device__ inline uint32_t less(uint32_t bytes) {
    return (bytes + (128 - N) * 0x01010101u) ^ 0x80808080u;
}

/// The lowest bits of the bytes, from the lowest four bits.
__device__ inline uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

/// Positive bytes, negated where `signs` has a bit.
__device__ inline uint32_t negate(uint32_t bytes, uint32_t signs) {
    const uint32_t ones = spread(signs);
    return (bytes ^ ones * 255) + ones;
}

/// Eight sign bits from the seven that are stored: the eighth makes their number even.
__device__ inline uint32_t even_signs(uint32_t seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

/// A byte permutation as the instruction has it: a selector's fourth bit asks for eight times the byte's sign.
__device__ inline uint32_t permute(uint32_t low, uint32_t high, uint32_t select) {
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(select));
    return out;
}

/// Eight nibbles through a table of 16 bytes: `low` gets those of the lower nibbles of the four bytes, `high` the
/// others'.
__device__ inline void lookup(uint32_t nibbles, const uint32_t (&table)[4], uint32_t& low, uint32_t& high) {
    uint32_t picked[2];
    for (int half = 0; half < 2; half++) {
        const uint32_t select = nibbles >> (16 * half);
        const uint32_t small = __byte_perm(table[0], table[1], select & 0x7777);
        const uint32_t large = __byte_perm(table[2], table[3], select & 0x7777);
        picked[half] = __byte_perm(small, large, 0x3210 | (select & 0x8888) >> 1);
    }
    low = __byte_perm(picked[0], picked[1], 0x6420);
    high = __byte_perm(picked[0], picked[1], 0x7531);
}

/// What most formats have in common.
template <int LEN_, int BYTES_, int MINIMUM_ = 0, bool HALVES_ = false, int GRID_ = 0, int ZERO_ = 0>
struct Layout {
    static constexpr int LEN = LEN_, BYTES = BYTES_, MINIMUM = MINIMUM_, GRID = GRID_, ZERO = ZERO_;
    static constexpr int ALIGN = BYTES_ % 4 == 0 ? 4 : BYTES_ % 2 == 0 ? 2 : 1;
    static constexpr bool HALVES = HALVES_, SPLIT = false, LARGE = false;
    static constexpr int SHARE = 1;

    __device__ static const uint32_t* codebook() { return nullptr; }
    __device__ static uint32_t word(const uint8_t* p) { return load16<ALIGN>(p); }
    __device__ static uint32_t dword(const uint8_t* p) { return load32<ALIGN>(p); }
    __device__ static float half(const uint8_t* p) { return half_to_float(uint16_t(word(p))); }
    /// Consecutive words, of which neighbours share loads where the address is no multiple of four.
    template <int N>
    __device__ static void dwords(const uint8_t* p, uint32_t (&out)[N]) {
        const uint32_t off = ALIGN >= 4 ? 0 : uint32_t(reinterpret_cast<uintptr_t>(p)) & 3;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(p - off);
        uint32_t low = words[0];
#pragma unroll
        for (int k = 0; k < N; k++) {
            if constexpr (ALIGN >= 4) {
                out[k] = words[k];
            } else {
                // Beyond the last byte that is wanted nothing is read.
                const uint32_t high = words[k + 1 < N || off > 0 ? k + 1 : k];
                out[k] = __funnelshift_r(low, high, off * 8);
                low = high;
            }
        }
    }

    /// A unit with one scale; its weights are filled in by the caller.
    __device__ static Unit plain(float d, int s0 = 1, int s1 = 0) {
        Unit unit;
        unit.s[0] = s0, unit.s[1] = HALVES ? s1 : s0;
        unit.d[0] = unit.d[1] = d;
        unit.m[0] = unit.m[1] = 0;
        unit.d_min = 0.0f;
        return unit;
    }
};

struct Q8_0 : Layout<32, 34> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        dwords(block + 2, u.w);
        return u;
    }
};

struct Q4_0 : Layout<32, 18, 0, false, 0, 8> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        uint32_t q[4];
        dwords(block + 2, q);
        for (int k = 0; k < 4; k++) {
            u.w[k] = q[k] & 0x0f0f0f0fu;
            u.w[k + 4] = q[k] >> 4 & 0x0f0f0f0fu;
        }
        return u;
    }
};

struct Q4_1 : Layout<32, 20, 1> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        u.m[0] = u.m[1] = 1;
        u.d_min = half(block + 2);
        for (int k = 0; k < 4; k++) {
            const uint32_t q = dword(block + 4 + 4 * k);
            u.w[k] = q & 0x0f0f0f0fu;
            u.w[k + 4] = q >> 4 & 0x0f0f0f0fu;
        }
        return u;
    }
};

/// Nibbles with a fifth bit each, as Q5_0 and Q5_1 have them.
__device__ inline void fives(uint32_t q, uint32_t high, int k, uint32_t (&w)[8]) {
    w[k] = (q & 0x0f0f0f0fu) | spread(high >> (4 * k)) << 4;
    w[k + 4] = (q >> 4 & 0x0f0f0f0fu) | spread(high >> (4 * k + 16)) << 4;
}

struct Q5_0 : Layout<32, 22, 0, false, 0, 16> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        uint32_t q[5];
        dwords(block + 2, q);
        for (int k = 0; k < 4; k++) {
            fives(q[k + 1], q[0], k, u.w);
        }
        return u;
    }
};

struct Q5_1 : Layout<32, 24, 1> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        u.m[0] = u.m[1] = 1;
        u.d_min = half(block + 2);
        const uint32_t high = dword(block + 4);
        for (int k = 0; k < 4; k++) {
            fives(dword(block + 8 + 4 * k), high, k, u.w);
        }
        return u;
    }
};

struct Q2_0 : Layout<64, 18, 0, false, 0, 1> {
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        Unit u = plain(half(block));
        for (int k = 0; k < 8; k += 2) {
            // A byte is four consecutive values: spread two bits each over a word.
            const uint32_t two = word(block + 2 + 8 * i + k);
            for (int j = 0; j < 2; j++) {
                const uint32_t b = two >> (8 * j);
                u.w[k + j] = (b & 3) | (b & 12) << 6 | (b & 48) << 12 | (b & 192) << 18;
            }
        }
        return u;
    }
};

struct Q2K : Layout<256, 84, -1, true> {
    static constexpr int SHARE = 4;
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        const uint32_t both = word(block + 2 * i);
        Unit u = plain(half(block + 80), both & 15, both >> 8 & 15);
        u.m[0] = both >> 4 & 15, u.m[1] = both >> 12 & 15;
        u.d_min = half(block + 82);
        for (int k = 0; k < 8; k++) {
            u.w[k] = dword(block + 16 + i / 4 * 32 + 4 * k) >> (i % 4 * 2) & 0x03030303u;
        }
        return u;
    }
};

struct Q3K : Layout<256, 110, 0, true, 0, 4> {
    static constexpr int SHARE = 4;
    __device__ static int scale(const uint8_t* block, int j) {
        const int low = block[96 + j % 8] >> (j / 8 * 4) & 15;
        const int high = block[104 + j % 4] >> (j / 4 * 2) & 3;
        return (low | high << 4) - 32;
    }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        Unit u = plain(half(block + 108), scale(block, 2 * i), scale(block, 2 * i + 1));
        uint32_t high[8], low[8];
        dwords(block, high);
        dwords(block + 32 + i / 4 * 32, low);
        for (int k = 0; k < 8; k++) {
            u.w[k] = (low[k] >> (i % 4 * 2) & 0x03030303u) | (high[k] >> i & 0x01010101u) << 2;
        }
        return u;
    }
};

/// The scale and minimum of unit `i` among the 12 bytes that Q4_K and Q5_K keep them in.
__device__ inline void scale_min_6(const uint8_t* b, int i, int& s, int& m) {
    if (i < 4) {
        s = b[i] & 63;
        m = b[i + 4] & 63;
    } else {
        s = (b[i + 4] & 15) | b[i - 4] >> 6 << 4;
        m = b[i + 4] >> 4 | b[i] >> 6 << 4;
    }
}

struct Q4K : Layout<256, 144, -1> {
    static constexpr int SHARE = 2;
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        int s, m;
        scale_min_6(block + 4, i, s, m);
        Unit u = plain(half(block), s);
        u.m[0] = u.m[1] = m;
        u.d_min = half(block + 2);
        for (int k = 0; k < 8; k++) {
            u.w[k] = dword(block + 16 + i / 2 * 32 + 4 * k) >> (i % 2 * 4) & 0x0f0f0f0fu;
        }
        return u;
    }
};

struct Q5K : Layout<256, 176, -1> {
    static constexpr int SHARE = 2;
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        int s, m;
        scale_min_6(block + 4, i, s, m);
        Unit u = plain(half(block), s);
        u.m[0] = u.m[1] = m;
        u.d_min = half(block + 2);
        for (int k = 0; k < 8; k++) {
            const uint32_t low = dword(block + 48 + i / 2 * 32 + 4 * k) >> (i % 2 * 4) & 0x0f0f0f0fu;
            u.w[k] = low | (dword(block + 16 + 4 * k) >> i & 0x01010101u) << 4;
        }
        return u;
    }
};

struct Q6K : Layout<256, 210, 0, true, 0, 32> {
    static constexpr int SHARE = 4;
    static constexpr bool LARGE = true;
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        const uint32_t both = word(block + 192 + 2 * i);
        Unit u = plain(half(block + 208), int8_t(both & 255), int8_t(both >> 8));
        uint32_t low[8], high[8];
        dwords(block + i / 4 * 64 + i % 2 * 32, low);
        dwords(block + 128 + i / 4 * 32, high);
        for (int k = 0; k < 8; k++) {
            u.w[k] = (low[k] >> (i % 4 / 2 * 4) & 0x0f0f0f0fu) | (high[k] >> (i % 4 * 2) & 0x03030303u) << 4;
        }
        return u;
    }
};

/// Eight values of the grid of IQ1, in eighths, shifted by one up or down.
__device__ inline void shifted(const uint32_t* grid, uint32_t index, bool down, uint32_t* w) {
    for (int k = 0; k < 2; k++) {
        const uint32_t eighths = grid[2 * index + k] << 3 & 0xf8f8f8f8u;
        // The low three bits are free: 8 g + 1, or 8 g - 1 as 8 (g - 1) + 7.
        w[k] = down ? (((eighths | 0x07070707u) ^ 0x80808080u) - 0x08080808u) ^ 0x80808080u : eighths | 0x01010101u;
    }
}

struct Iq1S : Layout<256, 50, 0, false, 4096> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ1; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t high = word(block + 34 + 2 * i), low = dword(block + 2 + 4 * i);
        Unit u = plain(half(block) / 8.0f, 2 * int(high >> 12 & 7) + 1);
        for (int g = 0; g < 4; g++) {
            shifted(grid, (low >> (8 * g) & 255) | (high >> (3 * g) & 7) << 8, high >> 15, u.w + 2 * g);
        }
        return u;
    }
};

struct Iq1M : Layout<256, 56, 0, true, 4096> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ1; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t first = dword(block + 48), second = dword(block + 52);
        const uint32_t d = (first >> 12 & 15) | first >> 28 << 4 | (second >> 12 & 15) << 8 | second >> 28 << 12;
        const uint32_t scales = word(block + 48 + i / 2 * 2) >> (i % 2 * 6);
        Unit u = plain(half_to_float(uint16_t(d)) / 8.0f, 2 * int(scales & 7) + 1, 2 * int(scales >> 3 & 7) + 1);
        const uint32_t low = dword(block + 4 * i), high = word(block + 32 + 2 * i);
        for (int g = 0; g < 4; g++) {
            const uint32_t nibble = high >> (4 * g) & 15;
            shifted(grid, (low >> (8 * g) & 255) | (nibble & 7) << 8, nibble >> 3, u.w + 2 * g);
        }
        return u;
    }
};

/// The magnitudes of IQ2's grids, as four bits of an entry select them, and their negatives.
constexpr uint32_t IQ2 = 0x002b1908u, IQ2_NEGATIVE = 0x00d5e7f8u;

/// 32 values of entries of IQ2's grids with their signs.
__device__ inline void signed32(const uint32_t (&entries)[4], uint32_t signs, uint32_t (&w)[8]) {
    const uint32_t low = signs & 0x0f0f0f0fu, high = signs >> 4 & 0x0f0f0f0fu;
#pragma unroll
    for (int g = 0; g < 4; g++) {
        // A bit each to the third of four: halves of the byte to 16 bits, of these to eight.
        const uint32_t halves = permute(low, high, 0x8480 + g * 0x101);
        const uint32_t quarters = halves * 0x41 & 0x03030303u;
        const uint32_t select = entries[g] | (quarters * 0x24 & 0x44444444u);
        w[2 * g] = permute(IQ2, IQ2_NEGATIVE, select);
        w[2 * g + 1] = permute(IQ2, IQ2_NEGATIVE, select >> 16);
    }
}

struct Iq2Xxs : Layout<256, 66, 0, false, 256> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ2_XXS; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        uint32_t packed[2], entries[4], signs = 0;
        dwords(block + 2 + 8 * i, packed);
        Unit u = plain(half(block) / 8.0f, 2 * int(packed[1] >> 28) + 1);
        for (int g = 0; g < 4; g++) {
            entries[g] = grid[packed[0] >> (8 * g) & 255];
            signs |= even_signs(packed[1] >> (7 * g)) << (8 * g);
        }
        signed32(entries, signs, u.w);
        return u;
    }
};

struct Iq2Xs : Layout<256, 74, 0, true, 512> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ2_XS; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t scales = block[66 + i];
        Unit u = plain(half(block) / 8.0f, 2 * int(scales & 15) + 1, 2 * int(scales >> 4) + 1);
        uint32_t entries[4], signs = 0;
        for (int g = 0; g < 4; g++) {
            const uint32_t packed = word(block + 2 + 8 * i + 2 * g);
            entries[g] = grid[packed & 511];
            signs |= even_signs(packed >> 9) << (8 * g);
        }
        signed32(entries, signs, u.w);
        return u;
    }
};

struct Iq2S : Layout<256, 82, 0, true, 1024> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ2_S; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t scales = block[74 + i];
        Unit u = plain(half(block) / 8.0f, 2 * int(scales & 15) + 1, 2 * int(scales >> 4) + 1);
        // Whole words: units share those that they lie across.
        const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(block + 2)) & 3;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(block + 2 - off) + i;
        const uint32_t low = __funnelshift_r(words[0], words[1], off * 8),
                       signs = __funnelshift_r(words[8], words[9], off * 8);
        // Two bits to each byte.
        uint32_t high = block[66 + i] * 0x1001u & 0x000f000fu;
        high = high * 0x41 & 0x03030303u;
        uint32_t entries[4];
        for (int g = 0; g < 4; g++) {
            entries[g] = grid[permute(low, high, 0xcc40 + g * 0x11)];
        }
        signed32(entries, signs, u.w);
        return u;
    }
};

struct Iq3Xxs : Layout<256, 98, 0, false, 256> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ3_XXS; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t packed = dword(block + 66 + 4 * i);
        Unit u = plain(half(block) / 4.0f, 2 * int(packed >> 28) + 1);
        for (int g = 0; g < 4; g++) {
            const uint32_t indices = word(block + 2 + 8 * i + 2 * g), signs = even_signs(packed >> (7 * g));
            u.w[2 * g] = negate(grid[indices & 255], signs);
            u.w[2 * g + 1] = negate(grid[indices >> 8], signs >> 4);
        }
        return u;
    }
};

struct Iq3S : Layout<256, 110, 0, false, 512> {
    __device__ static const uint32_t* codebook() { return CODEBOOK_IQ3_S; }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t* grid) {
        const uint32_t high = block[66 + i], signs = dword(block + 74 + 4 * i);
        Unit u = plain(half(block), 2 * int(block[106 + i / 2] >> (i % 2 * 4) & 15) + 1);
        for (int g = 0; g < 4; g++) {
            const uint32_t indices = word(block + 2 + 8 * i + 2 * g);
            const uint32_t first = (indices & 255) | (high >> (2 * g) & 1) << 8;
            const uint32_t second = indices >> 8 | (high >> (2 * g + 1) & 1) << 8;
            u.w[2 * g] = negate(grid[first], signs >> (8 * g));
            u.w[2 * g + 1] = negate(grid[second], signs >> (8 * g + 4));
        }
        return u;
    }
};

/// The values of IQ4_NL and IQ4_XS: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
__device__ constexpr uint32_t IQ4[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
/// Eight nibbles through that table, of whose halves one is negative: seven bits of a value, and its sign. A selector's
/// fourth bit makes what the other half gives 0.
__device__ inline void lookup_iq4(uint32_t nibbles, uint32_t& low, uint32_t& high) {
    const uint32_t upper = nibbles ^ 0x88888888u;
    uint32_t picked[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        picked[half] = permute(IQ4[0] & 0x7f7f7f7fu, IQ4[1] & 0x7f7f7f7fu, nibbles >> (16 * half)) +
                       permute(IQ4[2], IQ4[3], upper >> (16 * half));
    }
    low = permute(picked[0], picked[1], 0x6420) | (upper << 4 & 0x80808080u);
    high = permute(picked[0], picked[1], 0x7531) | (upper & 0x80808080u);
}
/// Twice the E2M1 values: 0 1 2 3 4 6 8 12, then their negatives.
__device__ constexpr uint32_t E2M1[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};

struct Iq4Nl : Layout<32, 18> {
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(half(block));
        uint32_t q[4];
        dwords(block + 2, q);
        for (int k = 0; k < 4; k++) {
            lookup_iq4(q[k], u.w[k], u.w[k + 4]);
        }
        return u;
    }
};

struct Iq4Xs : Layout<256, 136> {
    static constexpr bool LARGE = true;
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        const int low = block[4 + i / 2] >> (i % 2 * 4) & 15, high = word(block + 2) >> (2 * i) & 3;
        Unit u = plain(half(block), (low | high << 4) - 32);
        for (int k = 0; k < 4; k++) {
            lookup_iq4(dword(block + 8 + 16 * i + 4 * k), u.w[k], u.w[k + 4]);
        }
        return u;
    }
};

struct Mxfp4 : Layout<32, 17> {
    /// 2^(e - 128): subnormal for e < 2, NaN for 255.
    __device__ static float scale(uint32_t e) {
        return from_bits(e == 255 ? 0x7fc00000u : e < 2 ? 1u << (21 + e) : (e - 1) << 23);
    }
    __device__ static Unit unit(const uint8_t* block, int, const uint32_t*) {
        Unit u = plain(scale(block[0]));
        uint32_t q[4];
        dwords(block + 1, q);
        for (int k = 0; k < 4; k++) {
            lookup(q[k], E2M1, u.w[k], u.w[k + 4]);
        }
        return u;
    }
};

struct Nvfp4 : Layout<64, 36, 0, true> {
    static constexpr bool SPLIT = true;
    /// Half the E4M3 number `b`, its sign ignored; 0x7F is 0.
    __device__ static float scale(uint32_t b) {
        const uint32_t exponent = b >> 3 & 15, fraction = b & 7;
        const float normal = from_bits((exponent + 127 - 8) << 23 | fraction << 20);
        const float subnormal = float(fraction) * (1.0f / 1024.0f);
        return b == 0x7f ? 0.0f : exponent == 0 ? subnormal : normal;
    }
    __device__ static Unit unit(const uint8_t* block, int i, const uint32_t*) {
        Unit u = plain(0.0f, 1, 1);
        const uint32_t scales = word(block + 2 * i);
        u.d[0] = scale(scales & 255), u.d[1] = scale(scales >> 8);
        for (int h = 0; h < 2; h++) {
            for (int k = 0; k < 2; k++) {
                lookup(dword(block + 4 + 16 * i + 8 * h + 4 * k), E2M1, u.w[4 * h + k], u.w[4 * h + k + 2]);
            }
        }
        return u;
    }
};

/// The weights of a unit themselves, as bytes.
template <class F>
__device__ inline void centre(Unit& u) {
    if constexpr (F::ZERO > 0) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u.w[k] = less<F::ZERO>(u.w[k]);
        }
    }
}

/// The values of a unit.
template <class F>
__device__ inline void decode(Unit u, float (&out)[32]) {
    centre<F>(u);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int half = i / 16;
        const float scale = u.d[half] * float(u.s[half]), minimum = u.d_min * float(u.m[half]);
        const float value = scale * float(int8_t(u.w[i / 4] >> (i % 4 * 8)));
        out[i] = F::MINIMUM == 0 ? value : F::MINIMUM > 0 ? value + minimum : value - minimum;
    }
}

}  // namespace strata

/// Calls `X(type, name)` for every block format.
#define STRATA_BLOCK_FORMATS(X)                                                                                    \
    X(Q8_0, q8_0)                                                                                                  \
    X(Q4_0, q4_0) X(Q4_1, q4_1) X(Q5_0, q5_0) X(Q5_1, q5_1) X(Q2_0, q2_0) X(Q2K, q2_k) X(Q3K, q3_k) X(Q4K, q4_k)   \
        X(Q5K, q5_k) X(Q6K, q6_k) X(Iq1S, iq1_s) X(Iq1M, iq1_m) X(Iq2Xxs, iq2_xxs) X(Iq2Xs, iq2_xs) X(Iq2S, iq2_s) \
            X(Iq3Xxs, iq3_xxs) X(Iq3S, iq3_s) X(Iq4Nl, iq4_nl) X(Iq4Xs, iq4_xs) X(Mxfp4, mxfp4) X(Nvfp4, nvfp4)
