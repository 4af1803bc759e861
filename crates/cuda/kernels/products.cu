// Dense products with block formats, and with one column of all formats; activation quantisation, and row decoding.
#include "few.cuh"
#include "many.cuh"
#include "one.cuh"

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
    /// Rows of a block of threads.
    uint32_t rows, cols, k, tile;
    /// The columns in pieces, as `strata_pieces` leaves them; where kernels for many columns are compiled for 512
    /// threads.
    const uint8_t* pieces;
};

/// One of the matrices that a launch multiplies with the same column. Twins of both: `ops/one.rs`.
struct OneMatrix {
    const uint8_t* weights;
    float* out;
    const float* scale;
    /// Its blocks of threads, and the number of the first; a tile has `2^tall` rows.
    uint32_t format, rows, tall, first, blocks, row_bytes;
};

struct OneParams {
    OneMatrix matrices[6];
    /// Quantised, and as it is, for float weights.
    Columns x;
    const float* floats;
    /// Matrices; bytes of a buffer for rows.
    uint32_t count, buffer, k;
};

constexpr int ONE_THREADS = 128;

/// Tiles of block-format rows one after the other, the next brought while one is multiplied.
template <class F>
__device__ void block_rows(const OneParams& p, const OneMatrix& m, uint8_t* room) {
    const uint32_t row_bytes = m.row_bytes, all = m.rows, tile = 1u << m.tall, step = m.blocks << m.tall;
    uint32_t first = (blockIdx.x - m.first) << m.tall;
    const One<F, ONE_THREADS> one(room + 2 * p.buffer, m.tall, p.k / 32);
    auto bring_rows = [&](uint32_t first, int turn) {
        const uint8_t* from = m.weights + size_t(first) * row_bytes;
        return bring<ONE_THREADS>(room + turn * p.buffer, from, min(tile, all - first) * row_bytes);
    };
    const uint8_t* raw = bring_rows(first, 0);
    one.prepare();
    ready();
    one.bring_column(p.x);
    end_copies();
    for (int turn = 0; first < all; turn ^= 1) {
        const uint8_t* next = nullptr;
        if (first + step < all) {
            next = bring_rows(first + step, turn ^ 1);
            end_copies();
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        __syncthreads();
        const uint32_t rows = min(tile, all - first);
        const float sum = one.product(rows, [&](int r) { return raw + r * row_bytes; });
        if (threadIdx.x < rows) {
            m.out[first + threadIdx.x] = m.scale == nullptr ? sum : sum * *m.scale;
        }
        raw = next, first += step;
    }
}

template <class T>
__device__ void float_rows(const OneParams& p, const OneMatrix& m, uint8_t* room) {
    for (uint32_t row = blockIdx.x - m.first; row < m.rows; row += m.blocks) {
        const float sum =
            float_row<ONE_THREADS>(room, reinterpret_cast<const T*>(m.weights) + size_t(row) * p.k, p.floats, p.k);
        if (threadIdx.x == 0) {
            m.out[row] = m.scale == nullptr ? sum : sum * *m.scale;
        }
    }
}

/// Rows of several matrices with one column. A block of threads has rows of one.
extern "C" __global__ void __launch_bounds__(ONE_THREADS, 8) strata_one(const __grid_constant__ OneParams p) {
    extern __shared__ __align__(16) uint8_t room[];
    pass();
    uint32_t which = 0;
    while (which + 1 < p.count && blockIdx.x >= p.matrices[which + 1].first) {
        which++;
    }
    const OneMatrix& m = p.matrices[which];
    switch (m.format) {
        case CODE_f32:
            return float_rows<float>(p, m, room);
        case CODE_f16:
            return float_rows<Half>(p, m, room);
        case CODE_bf16:
            return float_rows<Bfloat>(p, m, room);
        default:
            with_format(m.format, [&](auto f) { block_rows<decltype(f)>(p, m, room); });
    }
}

template <class F>
__device__ void few(const ProductParams& p) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<typename Few<F>::Shared*>(raw);
    const uint32_t first = blockIdx.x * p.tile, col = blockIdx.y * Few<F>::COLS;
    const int rows = min(p.tile, p.rows - first), cols = min(uint32_t(Few<F>::COLS), p.cols - col);
    const size_t row_bytes = size_t(p.k / F::LEN) * F::BYTES;
    Few<F>::prepare(shared);
    float sum = Few<F>::product(shared, p.weights + first * row_bytes, rows, p.x.from(col, p.k), cols, p.k / 32);
    const int c = threadIdx.x / rows, r = threadIdx.x % rows;
    if (c < cols) {
        if (p.scale != nullptr) {
            sum = sum * *p.scale;
        }
        p.out[size_t(col + c) * p.rows + first + r] = sum;
    }
}

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
    extern "C" __device__ uint32_t strata_format_##NAME[3] = {CODE_##NAME, SECOND<F>, F::GRID};                      \
    extern "C" __device__ uint32_t strata_product_few_##NAME##_shared = sizeof(Few<F>::Shared);                      \
    extern "C" __global__ void __launch_bounds__(Few<F>::THREADS)                                                    \
        strata_product_few_##NAME(const __grid_constant__ ProductParams p) {                                         \
        few<F>(p);                                                                                                   \
    }                                                                                                                \
    extern "C" __device__ uint32_t strata_product_wide_##NAME##_shared = sizeof(Wide<F>::Shared);                    \
    extern "C" __global__ void __launch_bounds__(Wide<F>::THREADS, Wide<F>::BLOCKS)                                  \
        strata_product_wide_##NAME(const __grid_constant__ ProductParams p) {                                        \
        wide<F>(p);                                                                                                  \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) strata_decode_##NAME(const __grid_constant__ DecodeParams p) { \
        decode_units<F>(p);                                                                                          \
    }
/// A format's number, whether its units have two terms, and the words of its code book. Twin: `Traits` in `ops/one.rs`.
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
extern "C" __device__ uint32_t strata_format_f32[3] = {CODE_f32, 0, 0};
extern "C" __device__ uint32_t strata_format_f16[3] = {CODE_f16, 0, 0};
extern "C" __device__ uint32_t strata_format_bf16[3] = {CODE_bf16, 0, 0};

}  // namespace strata
