// The largest values of a row, in order: what most samplers need of the logits, so that the whole row stays here.
#include "contract.cuh"

namespace strata {

constexpr uint32_t CHUNK = 2048, SORTERS = CHUNK / 2;
static_assert(SORTERS / WARP == WARP, "");

/// Twin: `src/ops/sample.rs`.
struct LargestParams {
    /// `[rows][width]`, in the first round
    const float* values;
    /// `[rows][width]`, in the rounds after it: what the chunks of the one before kept
    const uint64_t* from;
    /// `[rows][chunks][keep]`
    uint64_t* to;
    uint32_t width, keep;
    /// Whether zeros of either sign are the same value.
    uint32_t zeros_alike;
};

/// Greater for what comes first: what isn't finite, then the larger value, then the lower index. 0 is no value's.
__device__ inline uint64_t rank(float value, uint32_t index, bool zeros_alike) {
    uint32_t bits = to_bits(value);
    bits = zeros_alike && value == 0.0f ? 0 : bits;
    uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
    order = (bits & 0x7f800000u) == 0x7f800000u ? ~0u : order;
    return uint64_t(order) << 32 | uint32_t(~index);
}

/// The rank of value `i` of the block's chunk of a row.
__device__ inline uint64_t rank_of(const LargestParams& p, uint32_t i) {
    const uint32_t at = blockIdx.x * CHUNK + i;
    const size_t place = size_t(blockIdx.y) * p.width + at;
    return at >= p.width ? 0 : p.values ? rank(p.values[place], at, p.zeros_alike) : p.from[place];
}

/// A block finds the first of a chunk of a row.
__device__ inline void first_of(const LargestParams& p) {
    __shared__ uint64_t found[SORTERS / WARP];
    const uint32_t t = threadIdx.x;
    uint64_t first = 0;
    for (uint32_t i = t; i < CHUNK; i += SORTERS) {
        first = max(first, rank_of(p, i));
    }
    auto of_warp = [](uint64_t x) {
        for (int width = WARP / 2; width > 0; width /= 2) {
            x = max(x, uint64_t(__shfl_xor_sync(ALL, x, width)));
        }
        return x;
    };
    first = of_warp(first);
    if (t % WARP == 0) {
        found[t / WARP] = first;
    }
    __syncthreads();
    if (t < WARP) {
        first = of_warp(found[t]);
        if (t == 0) {
            p.to[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = first;
        }
    }
}

/// A block sorts a chunk of a row, by Batcher's bitonic network, and keeps its first.
extern "C" __global__ void __launch_bounds__(SORTERS) strata_largest(const __grid_constant__ LargestParams p) {
    __shared__ uint64_t ranks[CHUNK];
    const uint32_t t = threadIdx.x;
    if (p.keep == 1) {
        return first_of(p);
    }
    for (uint32_t i = t; i < CHUNK; i += SORTERS) {
        ranks[i] = rank_of(p, i);
    }
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
        p.to[(size_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.keep + i] = ranks[i];
    }
}

}  // namespace strata
