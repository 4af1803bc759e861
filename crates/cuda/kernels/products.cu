// Dense products, activation quantisation and row decoding.
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
};

/// One of the matrices that a launch multiplies with the same column.
struct OneMatrix {
    const uint8_t* weights;
    float* out;
    const float* scale;
    /// Tiles of `tile` rows each, the first of which is number `first`; of float weights a row each.
    uint32_t format, rows, tile, first;
    uint32_t row_bytes, padding;
};

struct OneParams {
    OneMatrix matrices[6];
    /// Quantised, and as it is, for float weights.
    Column x;
    const float* floats;
    /// Matrices; their tiles; bytes of a buffer for rows.
    uint32_t count, tiles, buffer, k;
};

constexpr int ONE_THREADS = 128;
/// Values of a float row that are brought at once.
constexpr uint32_t PIECE = 2048;

/// What a block of threads works on: a tile of block-format rows, or a piece of a float row.
struct Work {
    const OneMatrix* matrix;
    uint32_t tile, piece;
    const uint8_t* raw;
    const uint8_t* x;
};

/// Rows of several matrices with one column, by blocks of threads that each go through several tiles and bring the next while they
/// multiply.
extern "C" __global__ void __launch_bounds__(ONE_THREADS) strata_one(const __grid_constant__ OneParams p) {
    extern __shared__ __align__(16) uint8_t room[];
    pass();
    const int units = p.k / 32, lane = threadIdx.x % WARP;
    uint8_t* const rest = room + 2 * p.buffer;
    auto find = [&](uint32_t tile) {
        uint32_t which = 0;
        while (which + 1 < p.count && tile >= p.matrices[which + 1].first) {
            which++;
        }
        return Work{&p.matrices[which], tile, 0, nullptr, nullptr};
    };
    auto is_float = [](const Work& work) { return work.matrix->format >= CODE_f32; };
    auto width = [](uint32_t format) { return format == CODE_f32 ? 4u : 2u; };
    auto bring_rows = [&](Work& work, int turn) {
        const OneMatrix& m = *work.matrix;
        const uint32_t first = (work.tile - m.first) * m.tile;
        const uint8_t* from = m.weights + size_t(first) * m.row_bytes;
        uint32_t bytes = min(m.tile, m.rows - first) * m.row_bytes;
        if (is_float(work)) {
            from += work.piece * PIECE * width(m.format);
            bytes = min(PIECE, p.k - work.piece * PIECE) * width(m.format);
        }
        work.raw = bring<ONE_THREADS>(room + turn * p.buffer, from, bytes);
    };
    auto bring_column = [&](Work& work, int turn) {
        if (is_float(work)) {
            const uint32_t from = work.piece * PIECE;
            work.x = bring<ONE_THREADS>(room + turn * p.buffer + brought(4 * PIECE), p.floats + from, min(PIECE, p.k - from) * 4);
        }
    };
    auto next = [&](const Work& work) {
        if (is_float(work) && (work.piece + 1) * PIECE < p.k) {
            return Work{work.matrix, work.tile, work.piece + 1, nullptr, nullptr};
        }
        return work.tile + gridDim.x < p.tiles ? find(work.tile + gridDim.x) : Work{nullptr, 0, 0, nullptr, nullptr};
    };
    Work work = find(blockIdx.x);
    bring_rows(work, 0);
    ready();
    bring_column(work, 0);
    if (p.x.q != nullptr) {
        One<Q8_0, ONE_THREADS>(rest, 0, units).bring_column(p.x);
    }
    float acc = 0.0f;
    uint32_t prepared = ~0u;
    for (int turn = 0; work.matrix != nullptr; turn ^= 1) {
        const OneMatrix& m = *work.matrix;
        if (m.format != prepared && !is_float(work)) {
            // Formats lay out the rest of the room differently.
            __syncthreads();
            prepared = m.format;
            with_format(m.format, [&](auto f) { One<decltype(f), ONE_THREADS>(rest, 0, units).prepare(); });
        }
        end_copies();
        Work other = next(work);
        if (other.matrix != nullptr) {
            bring_rows(other, turn ^ 1);
            bring_column(other, turn ^ 1);
            end_copies();
            await_copies<1>();
        } else {
            await_all_copies();
        }
        __syncthreads();
        const uint32_t first = (work.tile - m.first) * m.tile;
        const float* scale = m.scale;
        if (is_float(work)) {
            const uint32_t from = work.piece * PIECE, here = min(PIECE, p.k - from);
            if (threadIdx.x < WARP) {
                auto add = [&](auto* w) {
                    const float* x = reinterpret_cast<const float*>(work.x);
#pragma unroll 16
                    for (uint32_t j = lane; j < here; j += WARP) {
                        acc = fma(widen(w + j), x[j], acc);
                    }
                };
                switch (m.format) {
                    case CODE_f32:
                        add(reinterpret_cast<const float*>(work.raw));
                        break;
                    case CODE_f16:
                        add(reinterpret_cast<const Half*>(work.raw));
                        break;
                    default:
                        add(reinterpret_cast<const Bfloat*>(work.raw));
                }
                if (from + here == p.k) {
                    const float sum = fold(acc);
                    acc = 0.0f;
                    if (lane == 0) {
                        m.out[first] = scale == nullptr ? sum : sum * *scale;
                    }
                }
            }
            __syncthreads();
        } else {
            const int rows = min(m.tile, m.rows - first);
            with_format(m.format, [&](auto f) {
                const One<decltype(f), ONE_THREADS> one(rest, m.tile, units);
                const float sum = one.product(rows, [&](int r) { return work.raw + r * m.row_bytes; });
                if (threadIdx.x < rows) {
                    m.out[first + threadIdx.x] = scale == nullptr ? sum : sum * *scale;
                }
            });
        }
        work = other;
    }
}

template <class F, class Product, int COLS>
__device__ void product(const ProductParams& p) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<typename Product::Shared*>(raw);
    const uint32_t first = blockIdx.x * p.tile, col = blockIdx.y * COLS;
    const int units = p.k / 32, rows = min(p.tile, p.rows - first), cols = min(uint32_t(COLS), p.cols - col);
    Product::prepare(shared);
    const size_t row_bytes = size_t(p.k / F::LEN) * F::BYTES;
    const Columns x = {p.x.q + size_t(col) * p.k, p.x.d + size_t(col) * units, p.x.sums + size_t(col) * units};
    float sum = Product::product(shared, p.weights + first * row_bytes, rows, x, nullptr, cols, units);
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
    Wide<F>::run(*reinterpret_cast<typename Wide<F>::Shared*>(aligned), p.x, p.k / 32, p.rows, [&](uint32_t number) {
        const uint32_t first = number % tall * Wide<F>::ROWS, col = number / tall * Wide<F>::COLS;
        if (col >= p.cols) {
            return Tile{};
        }
        return Tile{p.weights + first * row_bytes,
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

#define STRATA_KERNELS(F, NAME)                                                                                     \
    extern "C" __device__ uint32_t strata_format_##NAME[3] = {CODE_##NAME, SECOND<F>, F::GRID};                     \
    extern "C" __device__ uint32_t strata_product_8_##NAME##_shared = sizeof(FewEight<F>::Shared);        \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) strata_product_8_##NAME(                                  \
        const __grid_constant__ ProductParams p) {                                                                 \
        product<F, FewEight<F>, 8>(p);                                                                                       \
    }                                                                                                              \
    extern "C" __device__ uint32_t strata_product_64_##NAME##_shared = sizeof(Wide<F>::Shared); \
    extern "C" __global__ void __launch_bounds__(Wide<F>::THREADS, Wide<F>::BLOCKS) strata_product_64_##NAME(                                  \
        const __grid_constant__ ProductParams p) {                                                                 \
        wide<F>(p);                                                                                                \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) strata_decode_##NAME(const __grid_constant__ DecodeParams p) { \
        decode_units<F>(p);                                                                                              \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
extern "C" __device__ uint32_t strata_format_f32[3] = {CODE_f32, 0, 0};
extern "C" __device__ uint32_t strata_format_f16[3] = {CODE_f16, 0, 0};
extern "C" __device__ uint32_t strata_format_bf16[3] = {CODE_bf16, 0, 0};

}  // namespace strata
