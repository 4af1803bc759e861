// The rest of a mixer's read for a few rows: docs/qwen4exp.md, section 2.1.
#include "few.cuh"
#include "floats.cuh"

namespace strata {

/// Twin: `src/ops/mixer.rs`.
struct NarrowFewParams {
    /// `[streams * width][rank]`
    const uint8_t* up;
    const float* scale;
    /// `[count][rank]`: the products with `down`.
    const float* low;
    /// `[streams][streams * width]`, and where their finished products go, `[count][streams]`; null without inject
    /// weights.
    const void* inject;
    float* injected;
    /// `[count][streams][width]`
    const float* normed;
    /// `[count][width]`
    float* u;
    Target quantised;
    uint32_t count, rank, width, streams;
    /// Of `inject`: 0 for F32, 1 for F16, 2 for BF16.
    uint32_t inject_format;
};

/// Streams, at most.
constexpr int STREAMS = 4;

/// The product of a float row with a column by a warp, much of which is on its way at once.
template <class T>
__device__ float long_product(const T* w, const float* x, int k, int lane) {
    constexpr int AHEAD = 32;
    float acc = 0.0f;
    int j = lane;
#pragma unroll 1
    for (; j + (AHEAD - 1) * WARP < k; j += AHEAD * WARP) {
        float weights[AHEAD], values[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            weights[i] = widen(w + j + i * WARP), values[i] = x[j + i * WARP];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            acc = fma(weights[i], values[i], acc);
        }
    }
    for (; j < k; j += WARP) {
        acc = fma(widen(w + j), x[j], acc);
    }
    return fold(acc);
}

/// Behind the products with `down`: gates, the products with `up`, the mix. A block of threads, two warps a stream, has
/// the same 32 values of all streams; the warps of the last blocks have an inject weight each.
template <class F, int TILES>
__device__ void narrow_few(const NarrowFewParams& p) {
    extern __shared__ __align__(16) uint8_t room[];
    using Rows = Few<F>;
    constexpr uint32_t COLS = 8 * TILES;
    pass();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = 2 * p.streams;
    const uint32_t j = blockIdx.x * 32;
    if (j >= p.width) {
        const uint32_t number = (blockIdx.x - p.width / 32) * warps + warp, wide = p.streams * p.width;
        ready();
        if (number < p.count * p.streams) {
            const uint32_t row = number / p.streams, stream = number % p.streams;
            const float* x = p.normed + size_t(row) * wide;
            auto product = [&](auto* rows) { return long_product(rows + size_t(stream) * wide, x, wide, lane); };
            const float sum = p.inject_format == 0   ? product(static_cast<const float*>(p.inject))
                              : p.inject_format == 1 ? product(static_cast<const Half*>(p.inject))
                                                     : product(static_cast<const Bfloat*>(p.inject));
            if (lane == 0) {
                p.injected[number] = 2.0f * sigmoid(__fdiv_rn(sum, float(p.streams)));
            }
        }
        return;
    }
    const uint32_t units = p.rank / 32, segments = (units + SEGMENT - 1) / SEGMENT, tall = 32 * p.streams;
    auto* grid = reinterpret_cast<uint32_t*>(room);
    auto* decoded = reinterpret_cast<typename Rows::Decoded*>(grid + F::GRID);
    const typename Rows::Sums sums{reinterpret_cast<float*>(decoded + 2 * warps), int(COLS)};
    typename Rows::Group group;
    group.resident = reinterpret_cast<uint8_t*>(sums.all + segments * COLS * tall);
    group.ring = group.resident + (units + Rows::CHUNK - 1) / Rows::CHUNK * COLS * Rows::COLUMN_BYTES;
    group.grid = Rows::prepare(grid);
    group.row_bytes = units / Rows::PER_BLOCK * F::BYTES;
    group.weights = p.up + size_t(warp / 2 * p.width + j + warp % 2 * Rows::ROWS) * group.row_bytes;
    group.rows = Rows::ROWS, group.strip = warp, group.strips = warps, group.barrier = 1;
    group.which = nullptr, group.cols = p.count, group.room = COLS, group.units = units;
    typename Rows::template Together<TILES> multiply{sums, decoded + 2 * warp};
    group.walk(0, units, multiply, [&] {
        ready();
        for (uint32_t i = warp; i < p.count * units; i += warps) {
            const uint32_t col = i / units, unit = i % units;
            const float low = p.low[size_t(col) * p.rank + unit * 32 + lane];
            group.put(col, unit, silu(__fdiv_rn(low, float(p.streams))), lane);
        }
    });
    __syncthreads();
    const float scale = p.scale == nullptr ? 1.0f : *p.scale;
    for (uint32_t c = warp; c < p.count; c += warps) {
        float u = 0.0f;
        for (uint32_t s = 0; s < p.streams; s++) {
            const float gate = sigmoid(sums.sum(segments, c, s * 32 + lane, warps) * scale);
            u = fma(gate, p.normed[(size_t(c) * p.streams + s) * p.width + j + lane], u);
        }
        u = __fdiv_rn(u, float(p.streams));
        const size_t at = size_t(c) * p.width + j + lane;
        p.u[at] = u;
        p.quantised.put(u, at);
    }
}

#define STRATA_KERNELS(F, NAME)                                                                   \
    STRATA_FEW_LAYOUT(F, NAME)                                                                    \
    extern "C" __global__ void __launch_bounds__(2 * STREAMS * WARP, 1)                           \
        strata_narrow_few_1_##NAME(const __grid_constant__ NarrowFewParams p) {                   \
        narrow_few<F, 1>(p);                                                                      \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(2 * STREAMS * WARP, 1)                           \
        strata_narrow_few_4_##NAME(const __grid_constant__ NarrowFewParams p) {                   \
        narrow_few<F, 4>(p);                                                                      \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
