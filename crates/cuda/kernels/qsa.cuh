// What the kernels of block-sparse attention share: docs/qwen4exp.md, section 2.3; rounding: docs/arithmetic.md,
// "Attention".
#pragma once

#include "floats.cuh"
#include "window.cuh"

namespace strata {

constexpr int CHUNK = 256;

__device__ inline float stored(const float* at) { return *at; }
__device__ inline float stored(const uint16_t* at) { return half_to_float(*at); }
__device__ inline void store(float* at, float x) { *at = x; }
__device__ inline void store(uint16_t* at, float x) { *at = float_to_half(x); }

/// What the kernels know of a layer. Twins of all parameters: `src/ops/qsa.rs`.
struct Attention {
    const Row* rows;
    /// `[context][cos, sin][rotary / 2]`
    const float* rope;
    /// `[sequences]` caches of `stride` bytes: keys, then the rest from these bytes on.
    uint8_t* cache;
    uint64_t stride, values, raw, pooled;
    uint32_t count, heads, kv_heads, dim, index_heads, index_dim, rotary, block, budget;
    float eps;

    template <class T>
    __device__ T* keys(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride) + position * kv_heads * dim;
    }
    template <class T>
    __device__ T* value_rows(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride + values) + position * kv_heads * dim;
    }
    template <class T>
    __device__ T* raw_keys(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride + raw) + position * index_dim;
    }
    template <class T>
    __device__ T* pooled_keys(uint32_t slot, uint64_t which) const {
        return reinterpret_cast<T*>(cache + slot * stride + pooled) + which * index_dim;
    }
    /// Whether a query that sees `visible` tokens chooses among their blocks.
    __device__ bool chooses(uint32_t visible) const { return block > 0 && visible / block > budget / block; }
};

struct AttendParams {
    Attention a;
    /// `[rows][heads][2][dim]`: per head the query, then its gate.
    const float* queries;
    const uint32_t* chosen;
    /// `[rows][heads][span]`, of few rows.
    float* scores;
    /// `[rows][heads][chunks][slices][2 + 32]`, of few rows: the largest score, the sum of exponentials, values.
    float* partials;
    /// `[rows][kv_heads][slices]`: chunks that are done, of few rows; zeros before.
    uint32_t* done;
    /// `[rows][heads * dim]`
    float* out;
    Target quantised;
    uint32_t span, chunks;
};

/// Whether all other blocks of threads that count here are done, and what they wrote is there: of one thread, whose
/// block's writes it has waited for.
__device__ inline bool is_last(uint32_t* done, uint32_t all) {
    __threadfence();
    const bool last = atomicAdd(done, 1u) == all - 1;
    __threadfence();
    return last;
}

/// The position of the `i`-th key that a row attends to.
__device__ inline uint32_t position_of(const Attention& a, const uint32_t* chosen, bool chooses, uint32_t visible,
                                       uint32_t i) {
    if (!chooses) {
        return i;
    }
    const uint32_t kept = a.budget / a.block * a.block;
    return i < kept ? chosen[i / a.block] * a.block + i % a.block : visible / a.block * a.block + (i - kept);
}

/// How many keys a row attends to.
__device__ inline uint32_t attended(const Attention& a, uint32_t visible) {
    return a.chooses(visible) ? a.budget / a.block * a.block + visible % a.block : visible;
}

}  // namespace strata
