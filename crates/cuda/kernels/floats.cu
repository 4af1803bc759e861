// Dense products with F32, F16 and BF16 weights.
#include "floats.cuh"

namespace strata {

/// Twin: `src/ops/floats.rs`.
struct FloatParams {
    const void* weights;
    /// `[cols][k]`
    const float* x;
    /// `[cols][rows]`
    float* out;
    const float* scale;
    uint32_t rows, cols, k;
};

constexpr int WARPS = 4;

template <class T, int ROWS, int COLS>
__device__ void product(const FloatParams& p) {
    const int lane = threadIdx.x % WARP;
    const uint32_t row = (blockIdx.x * WARPS + threadIdx.x / WARP) * ROWS, col = blockIdx.y * COLS;
    if (row >= p.rows) {
        return;
    }
    const int rows = min(uint32_t(ROWS), p.rows - row), cols = min(uint32_t(COLS), p.cols - col);
    const T* w = static_cast<const T*>(p.weights) + size_t(row) * p.k;
    warp_products<ROWS, COLS>(w, p.x + size_t(col) * p.k, rows, cols, p.k, lane, [&](int r, int c, float sum) {
        p.out[size_t(col + c) * p.rows + row + r] = p.scale == nullptr ? sum : sum * *p.scale;
    });
}

/// Values of a row that are brought at once.
constexpr int BROUGHT = 2560;
constexpr int BRINGERS = 256;

/// One row and one column: all threads bring the values, and one warp, which has the only chain, multiplies what they brought while they bring the
/// next. Grid: rows, columns.
template <class T>
__device__ void product_one(const FloatParams& p) {
    __shared__ float w[2][BROUGHT], x[2][BROUGHT];
    const T* row = static_cast<const T*>(p.weights) + size_t(blockIdx.x) * p.k;
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
            p.out[size_t(blockIdx.y) * p.rows + blockIdx.x] = p.scale == nullptr ? sum : sum * *p.scale;
        }
    }
}

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
    extern "C" __global__ void __launch_bounds__(BRINGERS) strata_floats_1_##NAME(                     \
        const __grid_constant__ FloatParams p) {                                                          \
        product_one<T>(p);                                                                              \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) strata_floats_8_##NAME(                     \
        const __grid_constant__ FloatParams p) {                                                          \
        product<T, 4, 8>(p);                                                                              \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) strata_widen_##NAME(                                \
        const __grid_constant__ WidenParams p) {                                                          \
        widen_all<T>(p);                                                                                  \
    }
STRATA_KERNELS(float, f32)
STRATA_KERNELS(Half, f16)
STRATA_KERNELS(Bfloat, bf16)

}  // namespace strata
