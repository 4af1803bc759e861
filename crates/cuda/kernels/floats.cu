// Dense products of F32, F16 and BF16 weights with two columns or more; one alone is `one.cu`'s.
#include "floats.cuh"
#include "shared.cuh"

#include <cstddef>

namespace strata {

/// The bits of a weight.
__device__ inline float& raw(float& w) { return w; }
__device__ inline uint16_t& raw(Half& w) { return w.bits; }
__device__ inline uint16_t& raw(Bfloat& w) { return w.bits; }

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

/// Values of a row that are brought together.
constexpr int BROUGHT = 2560;
constexpr int BRINGERS = 256, MEANWHILE = 160;

/// Brings what is left of `BROUGHT` values of a row and a column, by threads `thread` of `THREADS`.
template <int THREADS, class T>
__device__ inline void bring(const T* row, const float* col, int left, int thread, float (&w)[BROUGHT],
                             float (&x)[BROUGHT]) {
    constexpr int EACH = BROUGHT / THREADS;
    static_assert(BROUGHT % THREADS == 0, "");
    if (left < BROUGHT) {
#pragma unroll 4
        for (int j = thread; j < left; j += THREADS) {
            w[j] = widen(row + j), x[j] = col[j];
        }
        return;
    }
    float own_w[EACH], own_x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        own_w[i] = widen(row + thread + i * THREADS), own_x[i] = col[thread + i * THREADS];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        w[thread + i * THREADS] = own_w[i], x[thread + i * THREADS] = own_x[i];
    }
}

/// A block of threads for each row and column, where both are few, or lie on no borders of 16 bytes. (One column alone
/// comes to `strata_one`.) All threads bring the first values; then one warp, which has the only chain, multiplies them
/// while `MEANWHILE` others bring the next. Grid: rows, columns.
template <class T>
__device__ void product_each(const FloatParams& p) {
    __shared__ float w[2][BROUGHT], x[2][BROUGHT];
    uint32_t number = blockIdx.x;
    const FloatMatrix& m = p.matrix(number, 1);
    const T* row = m.row<T>(number, p.k);
    const float* col = p.x + size_t(blockIdx.y) * p.k;
    const int thread = threadIdx.x;
    bring<BRINGERS>(row, col, p.k, thread, w[0], x[0]);
    __syncthreads();
    float acc = 0.0f;
    for (int from = 0, left = p.k, turn = 0; left > 0; from += BROUGHT, left -= BROUGHT, turn ^= 1) {
        if (thread >= BRINGERS - MEANWHILE) {
            bring<MEANWHILE>(row + from + BROUGHT, col + from + BROUGHT, left - BROUGHT,
                             thread - (BRINGERS - MEANWHILE), w[turn ^ 1], x[turn ^ 1]);
        } else if (thread >= WARP) {
            // These would only be in the way.
        } else if (left >= BROUGHT) {
#pragma unroll
            for (int j = 0; j < BROUGHT; j += WARP) {
                acc = fma(w[turn][j + thread], x[turn][j + thread], acc);
            }
        } else {
            for (int j = thread; j < left; j += WARP) {
                acc = fma(w[turn][j], x[turn][j], acc);
            }
        }
        __syncthreads();
    }
    if (thread < WARP) {
        const float sum = fold(acc);
        if (thread == 0) {
            m.put(number, blockIdx.y, sum);
        }
    }
}

/// Many columns: a block of threads walks `DOWN * ROWS` rows and `ACROSS * COLS` columns together, `ROWS` and `COLS` of
/// them a warp, whose lanes are the contract's. What it multiplies next is on its way to shared memory meanwhile, in
/// `STAGES` pieces of `DEEP` values of each row and column, which lie on borders of 16 bytes. Grid: rows, columns.
template <class T, int ROWS, int COLS, int DOWN, int ACROSS, int STAGES>
struct Many {
    static constexpr int THREADS = DOWN * ACROSS * WARP, DEEP = 2 * WARP;
    struct Stage {
        T w[DOWN * ROWS][DEEP];
        float x[ACROSS * COLS][DEEP];
    };

    /// A thread's part in bringing up to `LINES` of `count` lines of `k` values.
    template <int LINES, class V>
    struct Bring {
        static constexpr int PIECE = 16 / sizeof(V), PIECES = DEEP / PIECE, STEP = THREADS / PIECES;
        static constexpr int TURNS = (LINES + STEP - 1) / STEP;
        const V* from[TURNS];
        /// Lines from its first on.
        int lines;

        __device__ Bring(const V* all, uint32_t count, uint32_t k) {
            const int line = threadIdx.x / PIECES;
            lines = int(min(count, uint32_t(LINES))) - line;
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                from[i] = all + size_t(line + i * STEP) * k + threadIdx.x % PIECES * PIECE;
            }
        }

        /// Starts the copies of the next `DEEP` values, of which `left` are there, to lines of as many from `to` on.
        __device__ void start(SharedAddress to, int left) {
            const int line = threadIdx.x / PIECES, at = threadIdx.x % PIECES * PIECE;
            to += (line * DEEP + at) * sizeof(V);
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                if (at < left && i * STEP < lines) {
                    start_copy<16>(to + i * STEP * DEEP * int(sizeof(V)), from[i]);
                }
                from[i] += DEEP;
            }
        }
    };

    static __device__ void product(const FloatParams& p) {
        __shared__ __align__(16) Stage stages[STAGES];
        const int lane = threadIdx.x % WARP, down = threadIdx.x / WARP % DOWN * ROWS,
                  across = threadIdx.x / WARP / DOWN * COLS;
        uint32_t row = blockIdx.x;
        const FloatMatrix& m = p.matrix(row, DOWN * ROWS);
        const uint32_t col = blockIdx.y * ACROSS * COLS;
        Bring<DOWN * ROWS, T> w(m.row<T>(row, p.k), m.rows - row, p.k);
        Bring<ACROSS * COLS, float> x(p.x + size_t(col) * p.k, p.cols - col, p.k);
        // Where the next piece goes, and where the next to multiply is.
        const SharedAddress all = shared_at(stages);
        const uint32_t own_w = (down * DEEP + lane) * sizeof(T),
                       own_x = offsetof(Stage, x) + (across * DEEP + lane) * sizeof(float);
        uint32_t next = 0, here = 0;
        int left = p.k;
        auto pass = [](uint32_t& stage) { stage = stage == (STAGES - 1) * sizeof(Stage) ? 0 : stage + sizeof(Stage); };
        auto start = [&] {
            w.start(all + next, left);
            x.start(all + next + offsetof(Stage, x), left);
            end_copies();
            pass(next);
            left -= DEEP;
        };
        float acc[ROWS][COLS] = {};
        auto multiply = [&](int j) {
            float values[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                T value;
                load_shared(raw(value), all + here + own_w + (r * DEEP + j) * int(sizeof(T)));
                values[r] = widen(&value);
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                float value;
                load_shared(value, all + here + own_x + (c * DEEP + j) * int(sizeof(float)));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    acc[r][c] = fma(values[r], value, acc[r][c]);
                }
            }
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            start();
        }
        for (int ahead = p.k; ahead > 0; ahead -= DEEP) {
            await_copies<STAGES - 2>();
            __syncthreads();
            start();
            if (ahead >= DEEP) {
#pragma unroll
                for (int j = 0; j < DEEP; j += WARP) {
                    multiply(j);
                }
            } else {
                for (int j = 0; j + lane < ahead; j += WARP) {
                    multiply(j);
                }
            }
            pass(here);
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

#define STRATA_KERNELS(T, NAME)                                                                                    \
    extern "C" __global__ void __launch_bounds__(BRINGERS)                                                         \
        strata_floats_each_##NAME(const __grid_constant__ FloatParams p) {                                         \
        product_each<T>(p);                                                                                        \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(Flat<T>::THREADS)                                                 \
        strata_floats_flat_##NAME(const __grid_constant__ FloatParams p) {                                         \
        Flat<T>::product(p);                                                                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(Tall<T>::THREADS, 1)                                              \
        strata_floats_tall_##NAME(const __grid_constant__ FloatParams p) {                                         \
        Tall<T>::product(p);                                                                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) strata_widen_##NAME(const __grid_constant__ WidenParams p) { \
        widen_all<T>(p);                                                                                           \
    }
STRATA_KERNELS(float, f32)
STRATA_KERNELS(Half, f16)
STRATA_KERNELS(Bfloat, bf16)

}  // namespace strata
