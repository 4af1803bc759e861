// The largest values of a row, in order: what most samplers need of the logits, so that the whole row stays here.
#include "contract.cuh"

namespace strata {

constexpr uint32_t CHUNK = 2048, SORTERS = CHUNK / 2;

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

/// A block sorts a chunk of a row, by Batcher's bitonic network, and keeps its first.
extern "C" __global__ void __launch_bounds__(SORTERS) strata_largest(const __grid_constant__ LargestParams p) {
    __shared__ uint64_t ranks[CHUNK];
    const uint32_t t = threadIdx.x;
    for (uint32_t i = t; i < CHUNK; i += SORTERS) {
        const uint32_t at = blockIdx.x * CHUNK + i;
        const size_t place = size_t(blockIdx.y) * p.width + at;
        ranks[i] = at >= p.width ? 0 : p.values ? rank(p.values[place], at, p.zeros_alike) : p.from[place];
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
