// Products of float rows with f32 columns, and norms: reductions over 32 lanes, one warp each.
#pragma once

#include "contract.cuh"

namespace strata {

/// A number for every format of float weights, for kernels that learn it when they run; and for block formats. Twin:
/// `code` in `ops/one.rs`.
enum Code : uint32_t { CODE_block, CODE_f32, CODE_f16, CODE_bf16 };

__device__ inline float widen(const float* w) { return *w; }

/// F16 and BF16 values as they lie in a file.
struct Half {
    uint16_t bits;
};
struct Bfloat {
    uint16_t bits;
};
__device__ inline float widen(const Half* w) { return half_to_float(w->bits); }
__device__ inline float widen(const Bfloat* w) { return from_bits(uint32_t(w->bits) << 16); }

/// Folds several values at once, `N` a power of two from 2 to 32, in the order of `fold`; returns the sum of value
/// `folded<N>(lane)`. Each exchange halves the values that a lane still has, so that all of them cost little more than
/// one.
template <int N>
__device__ inline float fold_many(float (&values)[N], int lane) {
    int width = WARP / 2;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, width /= 2) {
        const bool upper = lane & width;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i < n) {
                const float keep = upper ? values[i + n] : values[i], give = upper ? values[i] : values[i + n];
                values[i] = keep + __shfl_xor_sync(ALL, give, width);
            }
        }
    }
    float sum = values[0];
#pragma unroll
    for (; width > 0; width /= 2) {
        sum += __shfl_xor_sync(ALL, sum, width);
    }
    return sum;
}

/// Which value `fold_many<N>` returned to a lane.
template <int N>
__device__ constexpr int folded(int lane) {
    return lane / (WARP / N);
}

/// Calls `use(j, x[j])` for a lane's values in order. Several are on their way at once: the chain that the order makes
/// is short, waiting for memory at each of its links would not be.
template <class Use>
__device__ inline void each_value(const float* x, int n, int lane, Use use) {
    constexpr int AHEAD = 16;
    int j = lane;
    for (; j + (AHEAD - 1) * WARP < n; j += AHEAD * WARP) {
        float values[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            values[i] = x[j + i * WARP];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            use(j + i * WARP, values[i]);
        }
    }
    for (; j < n; j += WARP) {
        use(j, x[j]);
    }
}

/// A lane's part of `sum(x * x)` over `n` values.
__device__ inline float lane_squares(const float* x, int n, int lane) {
    float acc = 0.0f;
    each_value(x, n, lane, [&](int, float value) { acc = fma(value, value, acc); });
    return acc;
}

/// What a root mean square norm multiplies with; of a warp.
__device__ inline float rms_scale(const float* x, int n, float eps, int lane) {
    return rsqrt(__fdiv_rn(fold(lane_squares(x, n, lane)), float(n)) + eps);
}

/// A row's product with a column of `k` values, by a warp.
template <class T>
__device__ float warp_product(const T* w, const float* x, int k, int lane) {
    float acc = 0.0f;
#pragma unroll 8
    for (int j = lane; j < k; j += WARP) {
        acc = fma(widen(w + j), x[j], acc);
    }
    return fold(acc);
}

}  // namespace strata
