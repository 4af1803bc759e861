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

/// A segment's sum: its terms in ascending order, from zero. They start at multiples of 16 bytes.
template <class F>
__device__ inline float chain(const float2* first, const float2* second, int count) {
    float acc = 0.0f;
    int i = 0;
#pragma unroll 4
    for (; i + 2 <= count; i += 2) {
        const float4 two = *reinterpret_cast<const float4*>(first + i);
        if constexpr (SECOND<F>) {
            const float4 other = *reinterpret_cast<const float4*>(second + i);
            acc = fma(other.y, other.x, fma(two.y, two.x, acc));
            acc = fma(other.w, other.z, fma(two.w, two.z, acc));
        } else {
            acc = fma(two.w, two.z, fma(two.y, two.x, acc));
        }
    }
    if (i < count) {
        acc = fma(first[i].x, first[i].y, acc);
        if constexpr (SECOND<F>) {
            acc = fma(second[i].x, second[i].y, acc);
        }
    }
    return acc;
}

}  // namespace strata
