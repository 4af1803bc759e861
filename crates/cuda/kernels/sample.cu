// What the choice of a token looks at: a row's largest logits, in order, and the mass of all, so that whole rows stay here.
#include "contract.cuh"

namespace strata {

constexpr uint32_t CHUNK = 2048, SORTERS = CHUNK / 2;
static_assert(SORTERS / WARP == WARP, "");
constexpr uint32_t INFINITE = 0x7f800000u;

/// Rows of logits, and what happens to them. Twin: `Logits` in `src/ops/sample.rs`.
struct Logits {
    /// `[rows][width]`
    const float* values;
    /// For each row where its adjustments begin and how many they are, a temperature, and where its mask begins, if not at 0. Behind these
    /// the adjustments, a token and three floats each, and the masks.
    const uint4* items;
    uint32_t width, padding;
};

/// Twin: `src/ops/sample.rs`.
struct LargestParams {
    /// Looked at in the first round, in which `from` is null.
    Logits logits;
    /// `[rows][width]`: what the chunks of the round before kept
    const uint64_t* from;
    /// `[rows][chunks][keep]`
    uint64_t* to;
    uint32_t width, keep;
};

/// Twin: `src/ops/sample.rs`.
struct MassParams {
    Logits logits;
    /// `[rows][keep]`, the largest first
    const uint64_t* largest;
    /// `[rows][chunks]`
    uint64_t* masses;
    uint32_t keep, padding;
};

/// `strata_backend::Adjustment::apply`
__device__ inline float adjusted(uint4 adjustment, float logit) {
    const float repetition = from_bits(adjustment.y);
    const float repeated = logit > 0.0f ? __fdiv_rn(logit, repetition) : logit * repetition;
    const float x = repeated - from_bits(adjustment.z) + from_bits(adjustment.w);
    return isnan(x) ? -from_bits(INFINITE) : x;
}

/// Brings the block's chunk of its row, adjusted and masked; what wasn't finite is no number then. `values` has room for a chunk.
__device__ inline void bring(const Logits& logits, float* values) {
    const uint32_t t = threadIdx.x, first = blockIdx.x * CHUNK;
    const uint4 row = logits.items[blockIdx.y];
    for (uint32_t i = t; i < CHUNK; i += SORTERS) {
        const uint32_t at = first + i;
        const float logit = at < logits.width ? logits.values[size_t(blockIdx.y) * logits.width + at] : 0.0f;
        values[i] = (to_bits(logit) & INFINITE) == INFINITE ? from_bits(~0u) : logit;
    }
    __syncthreads();
    // A row has at most one adjustment of a token.
    for (uint32_t n = t; n < row.y; n += SORTERS) {
        const uint4 adjustment = logits.items[row.x + n];
        const uint32_t i = adjustment.x - first;
        if (i < CHUNK && !isnan(values[i])) {
            values[i] = adjusted(adjustment, values[i]);
        }
    }
    __syncthreads();
    if (row.w != 0) {
        const auto* mask = reinterpret_cast<const uint32_t*>(logits.items + row.w);
        for (uint32_t i = t; i < CHUNK; i += SORTERS) {
            const uint32_t at = first + i;
            const bool allowed = at >= logits.width || mask[at / 32] >> at % 32 & 1;
            values[i] = allowed || isnan(values[i]) ? values[i] : -from_bits(INFINITE);
        }
        __syncthreads();
    }
}

/// Greater for what comes first: what is no number, then the larger value, then the lower index. 0 is no value's.
__device__ inline uint64_t rank(float value, uint32_t index, bool zeros_alike) {
    uint32_t bits = to_bits(value);
    bits = zeros_alike && value == 0.0f ? 0 : bits;
    uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
    order = isnan(value) ? ~0u : order;
    return uint64_t(order) << 32 | uint32_t(~index);
}

/// The value of a rank.
__device__ inline float value_of(uint64_t rank) {
    const uint32_t order = rank >> 32;
    return from_bits(order >> 31 ? order & 0x7fffffffu : ~order);
}

/// The rank of a thread's value `i` of its block's chunk of a row.
__device__ inline uint64_t rank_of(const LargestParams& p, const float* values, uint32_t i, bool zeros_alike) {
    const uint32_t at = blockIdx.x * CHUNK + i;
    return at >= p.width ? 0 : p.from ? p.from[size_t(blockIdx.y) * p.width + at] : rank(values[i], at, zeros_alike);
}

/// What all of the block's threads give, put together; for its first thread.
template <typename Together>
__device__ inline uint64_t of_block(uint64_t x, Together together) {
    __shared__ uint64_t found[SORTERS / WARP];
    auto of_warp = [&](uint64_t x) {
        for (int width = WARP / 2; width > 0; width /= 2) {
            x = together(x, uint64_t(__shfl_xor_sync(ALL, x, width)));
        }
        return x;
    };
    x = of_warp(x);
    if (threadIdx.x % WARP == 0) {
        found[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    return threadIdx.x < WARP ? of_warp(found[threadIdx.x]) : 0;
}

/// A block finds the first of a chunk of a row, or sorts it by Batcher's bitonic network and keeps its first.
extern "C" __global__ void __launch_bounds__(SORTERS) strata_largest(const __grid_constant__ LargestParams p) {
    __shared__ float values[CHUNK];
    __shared__ uint64_t ranks[CHUNK];
    const uint32_t t = threadIdx.x;
    bool zeros_alike = false;
    if (!p.from) {
        zeros_alike = from_bits(p.logits.items[blockIdx.y].z) == 0.0f;
        bring(p.logits, values);
    }
    const uint64_t a = rank_of(p, values, t, zeros_alike), b = rank_of(p, values, t + SORTERS, zeros_alike);
    uint64_t* to = p.to + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.keep;
    if (p.keep == 1) {
        const uint64_t first = of_block(max(a, b), [](uint64_t x, uint64_t y) { return max(x, y); });
        if (t == 0) {
            *to = first;
        }
        return;
    }
    ranks[t] = a, ranks[t + SORTERS] = b;
    for (uint32_t size = 2; size <= CHUNK; size *= 2) {
        for (uint32_t step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            const uint32_t i = 2 * t - (t & (step - 1));
            const uint64_t a = ranks[i], b = ranks[i + step];
            if ((a < b) == ((i & size) == 0)) {
                ranks[i] = b;
                ranks[i + step] = a;
            }
        }
    }
    __syncthreads();
    for (uint32_t i = t; i < p.keep; i += SORTERS) {
        to[i] = ranks[i];
    }
}

/// `strata_backend::mass`
__device__ inline uint64_t mass(float logit, float max, float temperature) {
    return __float2ull_rz(exp(__fdiv_rn(logit - max, temperature)) * 0x1p40f);
}

/// A block sums the masses of a chunk of a row. Whole numbers: no order of blocks or lanes matters.
extern "C" __global__ void __launch_bounds__(SORTERS) strata_mass(const __grid_constant__ MassParams p) {
    __shared__ float values[CHUNK];
    bring(p.logits, values);
    const float max = value_of(p.largest[size_t(blockIdx.y) * p.keep]);
    const float temperature = from_bits(p.logits.items[blockIdx.y].z);
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < CHUNK; i += SORTERS) {
        const bool there = blockIdx.x * CHUNK + i < p.logits.width;
        sum += there ? mass(values[i], max, temperature) : 0;
    }
    sum = of_block(sum, [](uint64_t x, uint64_t y) { return x + y; });
    if (threadIdx.x == 0) {
        p.masses[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    }
}

}  // namespace strata
