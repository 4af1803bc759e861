// Dense products with block formats and many columns; activation quantisation, and row decoding.
#include "many.cuh"

namespace strata {

/// See `ops/products.rs`, which has the same structs.
struct QuantiseParams {
    const float* x;
    int8_t* q;
    float* d;
    uint32_t* sums;
    uint64_t blocks;
};

/// A warp a block of 32 values.
extern "C" __global__ void __launch_bounds__(256) strata_quantise(const __grid_constant__ QuantiseParams p) {
    const uint64_t block = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (block >= p.blocks) {
        return;
    }
    const Quantised result = quantise(p.x[block * 32 + lane]);
    p.q[block * 32 + lane] = int8_t(result.q);
    if (lane == 0) {
        p.d[block] = result.d;
        p.sums[block] = result.sums;
    }
}

struct ProductParams {
    const uint8_t* weights;
    Columns x;
    /// `[cols][rows]`
    float* out;
    /// What finished sums are multiplied with, or null.
    const float* scale;
    uint32_t rows, cols, k;
    /// The columns in pieces, as `strata_pieces` leaves them; where kernels for many columns are compiled for 512
    /// threads.
    const uint8_t* pieces;
};

template <class F>
__device__ void wide(const ProductParams& p) {
    extern __shared__ __align__(1024) uint8_t aligned[];
    const uint32_t tall = (p.rows + Wide<F>::ROWS - 1) / Wide<F>::ROWS;
    const size_t row_bytes = size_t(p.k / F::LEN) * F::BYTES;
    const float scale = p.scale == nullptr ? 1.0f : *p.scale;
    Wide<F>::run(*reinterpret_cast<typename Wide<F>::Shared*>(aligned), p.x, p.k / 32, p.rows,
                 [&](uint32_t number) {
                     const uint32_t first = number % tall * Wide<F>::ROWS, col = number / tall * Wide<F>::COLS;
                     if (col >= p.cols) {
                         return Tile{};
                     }
                     return Tile{p.weights + first * row_bytes,
                                 p.pieces + size_t(col) * COLUMN_BYTES * chunks_of(p.k / 32),
                                 nullptr,
                                 col,
                                 p.out + size_t(col) * p.rows + first,
                                 int(min(uint32_t(Wide<F>::ROWS), p.rows - first)),
                                 int(min(uint32_t(Wide<F>::COLS), p.cols - col)),
                                 scale};
                 });
}

struct DecodeParams {
    const uint8_t* weights;
    float* out;
    uint64_t units;
};

template <class F>
__device__ void decode_units(const DecodeParams& p) {
    const uint64_t unit = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (unit >= p.units) {
        return;
    }
    constexpr int PER_BLOCK = F::LEN / 32;
    float values[32];
    decode<F>(F::unit(p.weights + unit / PER_BLOCK * F::BYTES, unit % PER_BLOCK, F::codebook()), values);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        p.out[unit * 32 + i] = values[i];
    }
}

#define STRATA_KERNELS(F, NAME)                                                                                      \
    extern "C" __device__ uint32_t strata_product_wide_##NAME##_shared = sizeof(Wide<F>::Shared);                    \
    extern "C" __global__ void __launch_bounds__(Wide<F>::THREADS, Wide<F>::BLOCKS)                                  \
        strata_product_wide_##NAME(const __grid_constant__ ProductParams p) {                                        \
        wide<F>(p);                                                                                                  \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) strata_decode_##NAME(const __grid_constant__ DecodeParams p) { \
        decode_units<F>(p);                                                                                          \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
}  // namespace strata
