// Dense products with F32, F16 and BF16 weights.
#include "copies.cuh"
#include "floats.cuh"

namespace strata {

struct FloatMatrix {
    const void* weights;
    /// `[cols][rows]`
    float* out;
    const float* scale;
    uint64_t rows;

    template <class T>
    __device__ const T* row(uint32_t row, uint32_t k) const {
        return static_cast<const T*>(weights) + size_t(row) * k;
    }
    __device__ void put(uint32_t row, uint32_t col, float sum) const {
        out[size_t(col) * rows + row] = scale == nullptr ? sum : sum * *scale;
    }
};

/// One matrix or two of a format, with the same columns. Twin: `src/ops/floats.rs`.
struct FloatParams {
    FloatMatrix matrices[2];
    /// `[cols][k]`
    const float* x;
    uint32_t cols, k;

    /// The matrix of the `tile`-th `tile_rows` rows; and its row, in place of `tile`.
    __device__ const FloatMatrix& matrix(uint32_t& tile, uint32_t tile_rows) const {
        const uint32_t first = (matrices[0].rows + tile_rows - 1) / tile_rows;
        const bool second = tile >= first;
        tile = (second ? tile - first : tile) * tile_rows;
        return matrices[second];
    }
};

/// Values of a row that are brought at once.
constexpr int BROUGHT = 2560;
constexpr int BRINGERS = 256;

/// One row and one column: all threads bring the values, and one warp, which has the only chain, multiplies what they brought while they bring the
/// next. Grid: rows, columns.
template <class T>
__device__ void product_one(const FloatParams& p) {
    __shared__ float w[2][BROUGHT], x[2][BROUGHT];
    uint32_t number = blockIdx.x;
    const FloatMatrix& m = p.matrix(number, 1);
    const T* row = m.row<T>(number, p.k);
    const float* col = p.x + size_t(blockIdx.y) * p.k;
    auto bring = [&](uint32_t from, int to) {
        const uint32_t here = from < p.k ? min(uint32_t(BROUGHT), p.k - from) : 0;
#pragma unroll 5
        for (uint32_t j = threadIdx.x; j < here; j += BRINGERS) {
            w[to][j] = widen(row + from + j), x[to][j] = col[from + j];
        }
    };
    bring(0, 0);
    __syncthreads();
    float acc = 0.0f;
    for (uint32_t from = 0, turn = 0; from < p.k; from += BROUGHT, turn ^= 1) {
        bring(from + BROUGHT, turn ^ 1);
        if (threadIdx.x < WARP) {
            const uint32_t here = min(uint32_t(BROUGHT), p.k - from);
#pragma unroll 16
            for (uint32_t j = threadIdx.x; j < here; j += WARP) {
                acc = fma(w[turn][j], x[turn][j], acc);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < WARP) {
        const float sum = fold(acc);
        if (threadIdx.x == 0) {
            m.put(number, blockIdx.y, sum);
        }
    }
}

/// Many columns: a block of threads walks `DOWN * ROWS` rows and `ACROSS * COLS` columns together, `ROWS` and `COLS` of them a warp, whose lanes are the
/// contract's. What it multiplies next is on its way to shared memory meanwhile, in `STAGES` pieces of `DEEP` values of each row and column, which lie
/// on borders of 16 bytes. Grid: rows, columns.
template <class T, int ROWS, int COLS, int DOWN, int ACROSS, int STAGES>
struct Many {
    static constexpr int THREADS = DOWN * ACROSS * WARP, DEEP = 2 * WARP;
    struct Stage {
        T w[DOWN * ROWS][DEEP];
        float x[ACROSS * COLS][DEEP];
    };

    /// A thread's part in bringing `LINES` lines of `k` values; of the last of `count` where there are fewer.
    template <int LINES, class V>
    struct Bring {
        static constexpr int PIECE = 16 / sizeof(V), PIECES = DEEP / PIECE, STEP = THREADS / PIECES;
        static constexpr int TURNS = (LINES + STEP - 1) / STEP;
        const V* from[TURNS];

        __device__ Bring(const V* lines, uint32_t count, uint32_t k) {
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                from[i] = lines + size_t(min(threadIdx.x / PIECES + i * STEP, count - 1)) * k + threadIdx.x % PIECES * PIECE;
            }
        }

        /// Starts the copies of the next `DEEP` values, of which `left` are there.
        __device__ void start(V (*to)[DEEP], int left) {
            const int line = threadIdx.x / PIECES, at = threadIdx.x % PIECES * PIECE;
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                if (at < left && (LINES % STEP == 0 || line + i * STEP < LINES)) {
                    start_copy<16>(&to[line + i * STEP][at], from[i]);
                }
                from[i] += DEEP;
            }
        }
    };

    static __device__ void product(const FloatParams& p) {
        __shared__ __align__(16) Stage stages[STAGES];
        const int lane = threadIdx.x % WARP, down = threadIdx.x / WARP % DOWN * ROWS, across = threadIdx.x / WARP / DOWN * COLS;
        uint32_t row = blockIdx.x;
        const FloatMatrix& m = p.matrix(row, DOWN * ROWS);
        const uint32_t col = blockIdx.y * ACROSS * COLS;
        Bring<DOWN * ROWS, T> w(m.row<T>(row, p.k), m.rows - row, p.k);
        Bring<ACROSS * COLS, float> x(p.x + size_t(col) * p.k, p.cols - col, p.k);
        auto start = [&](uint32_t piece) {
            Stage& to = stages[piece % STAGES];
            const int left = int(p.k) - int(piece * DEEP);
            w.start(to.w, left);
            x.start(to.x, left);
            end_copies();
        };
        float acc[ROWS][COLS] = {};
        auto multiply = [&](const Stage& from, int j) {
            float values[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                values[r] = widen(&from.w[down + r][j]);
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const float value = from.x[across + c][j];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    acc[r][c] = fma(values[r], value, acc[r][c]);
                }
            }
        };
        const uint32_t pieces = (p.k + DEEP - 1) / DEEP;
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            start(i);
        }
        for (uint32_t piece = 0; piece < pieces; piece++) {
            await_copies<STAGES - 2>();
            __syncthreads();
            start(piece + STAGES - 1);
            const Stage& here = stages[piece % STAGES];
            if ((piece + 1) * DEEP <= p.k) {
#pragma unroll
                for (int j = 0; j < DEEP; j += WARP) {
                    multiply(here, j + lane);
                }
            } else {
                for (uint32_t j = lane; piece * DEEP + j < p.k; j += WARP) {
                    multiply(here, j);
                }
            }
        }
        // Rows of a column lie together in the result.
        constexpr int AT_ONCE = ROWS * COLS < WARP ? ROWS * COLS : WARP;
#pragma unroll
        for (int first = 0; first < ROWS * COLS; first += AT_ONCE) {
            float sums[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                sums[i] = acc[(first + i) % ROWS][(first + i) / ROWS];
            }
            const float sum = fold_many(sums, lane);
            const uint32_t value = first + folded<AT_ONCE>(lane);
            const uint32_t r = row + down + value % ROWS, c = col + across + value / ROWS;
            if (lane % (WARP / AT_ONCE) == 0 && r < m.rows && c < p.cols) {
                m.put(r, c, sum);
            }
        }
    }
};

/// For matrices of up to four rows, and for all others.
template <class T>
using Flat = Many<T, 4, 4, 1, 8, 5>;
template <class T>
using Tall = Many<T, 8, 16, 4, 2, 3>;

struct WidenParams {
    const void* from;
    float* to;
    uint64_t count;
};

struct ScaleParams {
    float* x;
    uint64_t count;
    float by;
};

/// `x *= by`.
extern "C" __global__ void __launch_bounds__(256) strata_scale(const __grid_constant__ ScaleParams p) {
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) {
        p.x[i] = p.x[i] * p.by;
    }
}

template <class T>
__device__ void widen_all(const WidenParams& p) {
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) {
        p.to[i] = widen(static_cast<const T*>(p.from) + i);
    }
}

#define STRATA_KERNELS(T, NAME)                                                                            \
    extern "C" __global__ void __launch_bounds__(BRINGERS) strata_floats_one_##NAME(                     \
        const __grid_constant__ FloatParams p) {                                                          \
        product_one<T>(p);                                                                              \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(Flat<T>::THREADS) strata_floats_flat_##NAME(             \
        const __grid_constant__ FloatParams p) {                                                          \
        Flat<T>::product(p);                                                                              \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(Tall<T>::THREADS, 1) strata_floats_tall_##NAME(          \
        const __grid_constant__ FloatParams p) {                                                          \
        Tall<T>::product(p);                                                                              \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) strata_widen_##NAME(                                \
        const __grid_constant__ WidenParams p) {                                                          \
        widen_all<T>(p);                                                                                  \
    }
STRATA_KERNELS(float, f32)
STRATA_KERNELS(Half, f16)
STRATA_KERNELS(Bfloat, bf16)

}  // namespace strata
