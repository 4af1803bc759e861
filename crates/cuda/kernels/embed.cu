// Token embedding: a row of the table, decoded, once per residual stream.
#include "floats.cuh"
#include "formats.cuh"

namespace strata {

/// Twin: `src/ops/embed.rs`.
struct EmbedParams {
    const uint8_t* table;
    const uint32_t* tokens;
    /// `[rows][streams][width]`
    float* x;
    uint32_t rows, streams, width;
};

/// Units that a block of threads decodes. Twin: `UNITS` in `ops/embed.rs`.
constexpr uint32_t UNITS = 16;

/// A thread decodes a unit; all of them write what came out, once per stream.
template <class F>
__device__ void embed(const EmbedParams& p) {
    constexpr uint32_t PER_BLOCK = F::LEN / 32;
    __shared__ float decoded[UNITS][33];
    const uint32_t units = p.width / 32, first = blockIdx.x * UNITS, here = min(UNITS, p.rows * units - first);
    if (threadIdx.x < here) {
        const uint32_t row = (first + threadIdx.x) / units, unit = (first + threadIdx.x) % units;
        const uint8_t* from = p.table + size_t(p.tokens[row]) * (units / PER_BLOCK) * F::BYTES;
        float values[32];
        decode<F>(F::unit(from + size_t(unit / PER_BLOCK) * F::BYTES, unit % PER_BLOCK, F::codebook()), values);
#pragma unroll
        for (int j = 0; j < 32; j++) {
            decoded[threadIdx.x][j] = values[j];
        }
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % WARP;
    for (uint32_t i = threadIdx.x / WARP; i < here * p.streams; i += blockDim.x / WARP) {
        const uint32_t which = i / p.streams, stream = i % p.streams;
        const uint32_t row = (first + which) / units, unit = (first + which) % units;
        p.x[(size_t(row) * p.streams + stream) * p.width + unit * 32 + lane] = decoded[which][lane];
    }
}

template <class T>
__device__ void embed_floats(const EmbedParams& p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.rows * p.width) {
        return;
    }
    const uint32_t row = i / p.width, j = i % p.width;
    const float value = widen(reinterpret_cast<const T*>(p.table) + size_t(p.tokens[row]) * p.width + j);
    for (uint32_t s = 0; s < p.streams; s++) {
        p.x[(size_t(row) * p.streams + s) * p.width + j] = value;
    }
}

#define STRATA_KERNELS(F, NAME)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) strata_embed_##NAME(const __grid_constant__ EmbedParams p) { \
        embed<F>(p);                                                                                               \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
#define STRATA_FLOATS(T, NAME)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128) strata_embed_##NAME(const __grid_constant__ EmbedParams p) { \
        embed_floats<T>(p);                                                                                        \
    }
STRATA_FLOATS(float, f32)
STRATA_FLOATS(Half, f16)
STRATA_FLOATS(Bfloat, bf16)

}  // namespace strata
