// What a unit of weights and 32 quantised activations come to: exact integers, each with its scale.
#pragma once

#include "formats.cuh"

namespace strata {

/// Whether a unit has a second term: a minimum's, or that of the upper half.
template <class F>
constexpr bool SECOND = F::MINIMUM != 0 || F::SPLIT;

/// Whether a format's units have sub-scales: integers that a sum of products is multiplied with, one or one per half.
template <class F>
constexpr bool SCALED = F::HALVES || F::GRID > 0 || F::LEN == 256;

/// Quantised columns in device memory, `cols` of `k` values.
struct Columns {
    /// `[cols][k]`
    const int8_t* q;
    /// `[cols][k / 32]`
    const float* d;
    /// `[cols][k / 32]`: the sums of 16 values each, two to a word.
    const uint32_t* sums;

    /// Those from number `col` on.
    __device__ Columns from(size_t col, uint32_t k) const {
        return {q + col * k, d + col * (k / 32), sums + col * (k / 32)};
    }
};

/// The terms of a unit and one column's 32 values `low` and `high`, with their scale and sums.
template <class F>
__device__ inline void terms(const Unit& u, const uint4& low, const uint4& high, float d, uint32_t sums, float2& first,
                             float2& second) {
    int lower = __dp4a(int(u.w[0]), int(low.x), 0);
    lower = __dp4a(int(u.w[1]), int(low.y), lower);
    lower = __dp4a(int(u.w[2]), int(low.z), lower);
    lower = __dp4a(int(u.w[3]), int(low.w), lower);
    int upper = __dp4a(int(u.w[4]), int(high.x), F::HALVES || F::SPLIT ? 0 : lower);
    upper = __dp4a(int(u.w[5]), int(high.y), upper);
    upper = __dp4a(int(u.w[6]), int(high.z), upper);
    upper = __dp4a(int(u.w[7]), int(high.w), upper);
    if constexpr (F::ZERO > 0) {
        static_assert(!F::SPLIT);
        const int below = F::ZERO * int16_t(sums & 0xffff), above = F::ZERO * int16_t(sums >> 16);
        lower -= below, upper -= F::HALVES ? above : below + above;
    }
    if constexpr (F::SPLIT) {
        first = {float(lower), u.d[0] * d};
        second = {float(upper), u.d[1] * d};
    } else {
        const int sum = F::HALVES ? u.s[0] * lower + u.s[1] * upper : u.s[0] * upper;
        first = {float(sum), u.d[0] * d};
    }
    if constexpr (F::MINIMUM != 0) {
        const int minimum = u.m[0] * int16_t(sums & 0xffff) + u.m[1] * int16_t(sums >> 16);
        const float scale = u.d_min * d;
        second = {float(minimum), F::MINIMUM > 0 ? scale : -scale};
    }
}

/// A segment's sum: its terms in ascending order, from zero. They start at multiples of 16 bytes. Eight are on their way
/// while eight are added: the chain is long enough without waiting for memory.
template <class F>
__device__ inline float chain(const float2* first, const float2* second, int count) {
    constexpr int EIGHT = 8, PAIRS = EIGHT / 2, KINDS = SECOND<F> ? 2 : 1;
    float acc = 0.0f;
    auto load = [&](float4 (&to)[KINDS][PAIRS], int from) {
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            to[0][n] = *reinterpret_cast<const float4*>(first + from + 2 * n);
            if constexpr (SECOND<F>) {
                to[1][n] = *reinterpret_cast<const float4*>(second + from + 2 * n);
            }
        }
    };
    auto add = [&](const float4 (&of)[KINDS][PAIRS]) {
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            const float4 two = of[0][n], other = of[KINDS - 1][n];
            acc = fma(two.y, two.x, acc);
            acc = SECOND<F> ? fma(other.y, other.x, acc) : acc;
            acc = fma(two.w, two.z, acc);
            acc = SECOND<F> ? fma(other.w, other.z, acc) : acc;
        }
    };
    float4 even[KINDS][PAIRS], odd[KINDS][PAIRS];
    int i = 0;
    if (count >= EIGHT) {
        load(even, 0);
    }
#pragma unroll 1
    for (; i + 2 * EIGHT <= count; i += 2 * EIGHT) {
        load(odd, i + EIGHT);
        add(even);
        if (i + 3 * EIGHT <= count) {
            load(even, i + 2 * EIGHT);
        }
        add(odd);
    }
    if (i + EIGHT <= count) {
        add(even);
        i += EIGHT;
    }
#pragma unroll 1
    for (; i < count; i++) {
        acc = fma(first[i].y, first[i].x, acc);
        if constexpr (SECOND<F>) {
            acc = fma(second[i].y, second[i].x, acc);
        }
    }
    return acc;
}

}  // namespace strata
