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
    /// A `Code`.
    uint32_t inject_format;
};

/// Streams, and threads of a block, at most.
constexpr uint32_t STREAMS = 4, NARROWERS = 4 * STREAMS * WARP;
/// Inject weights of a block of threads: more would wait for one multiprocessor's share of the second cache. Twin:
/// `src/ops/mixer.rs`.
constexpr uint32_t INJECTED = 4;

/// The product of a float row with a column by a warp, much of which is on its way at once.
template <class T>
__device__ float long_product(const T* w, const float* x, int k, int lane) {
    constexpr int AHEAD = 20, STEP = AHEAD * WARP;
    float weights[2][AHEAD], values[2][AHEAD], acc = 0.0f;
    const int whole = k / STEP;
    w += lane, x += lane;
    auto load = [&](int turn, int from) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            weights[turn][i] = widen(w + from + i * WARP), values[turn][i] = x[from + i * WARP];
        }
    };
    auto add = [&](int turn) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            acc = fma(weights[turn][i], values[turn][i], acc);
        }
    };
    if (whole > 0) {
        load(0, 0);
    }
#pragma unroll 1
    for (int i = 0; i < whole; i += 2) {
        if (i + 1 < whole) {
            load(1, (i + 1) * STEP);
        }
        add(0);
        if (i + 1 < whole) {
            if (i + 2 < whole) {
                load(0, (i + 2) * STEP);
            }
            add(1);
        }
    }
    for (int j = whole * STEP; j + lane < k; j += WARP) {
        acc = fma(widen(w + j), x[j], acc);
    }
    return fold(acc);
}

/// Behind the products with `down`: gates, the products with `up`, the mix. A block of threads, four warps a stream, has
/// the same 32 values of all streams; some warps of the last blocks have an inject weight each.
template <class F, int COLS>
__device__ void narrow_few(const NarrowFewParams& p) {
    extern __shared__ __align__(16) uint8_t room[];
    using Rows = Few<F, COLS>;
    constexpr uint32_t STRIPS = WARP / Rows::ROWS;
    pass();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = STRIPS * p.streams;
    const uint32_t j = blockIdx.x * 32;
    if (j >= p.width) {
        const uint32_t number = (blockIdx.x - p.width / 32) * INJECTED + warp, wide = p.streams * p.width;
        ready();
        if (warp < INJECTED && number < p.count * p.streams) {
            const uint32_t row = number / p.streams, stream = number % p.streams;
            const float* x = p.normed + size_t(row) * wide;
            auto product = [&](auto* rows) { return long_product(rows + size_t(stream) * wide, x, wide, lane); };
            const float sum = p.inject_format == CODE_f32   ? product(static_cast<const float*>(p.inject))
                              : p.inject_format == CODE_f16 ? product(static_cast<const Half*>(p.inject))
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
    const typename Rows::Sums sums{reinterpret_cast<float*>(decoded + 2 * warps), true};
    typename Rows::Group group;
    group.resident = reinterpret_cast<uint8_t*>(sums.all + COLS * tall);
    group.ring = group.resident + (units + Rows::CHUNK - 1) / Rows::CHUNK * COLS * Rows::COLUMN_BYTES;
    group.grid = Rows::prepare(grid);
    group.row_bytes = units / Rows::PER_BLOCK * F::BYTES;
    group.weights = p.up + size_t(warp / STRIPS * p.width + j + warp % STRIPS * Rows::ROWS) * group.row_bytes;
    group.rows = Rows::ROWS, group.strip = warp, group.strips = warps, group.barrier = 1;
    group.cols = p.count, group.room = COLS, group.units = units;
    typename Rows::Together multiply{sums, decoded + 2 * warp};
    group.walk(0, units, multiply, [&] {
        ready();
        // Eight threads a unit.
        for (uint32_t from = warp * 4; from < p.count * units; from += warps * 4) {
            const uint32_t i = from + lane / 8, col = i / units, unit = i % units;
            const bool there = i < p.count * units;
            float4 low = {};
            if (there) {
                low = *reinterpret_cast<const float4*>(p.low + size_t(col) * p.rank + unit * 32 + lane % 8 * 4);
            }
            const float streams = float(p.streams);
            const float four[4] = {silu(__fdiv_rn(low.x, streams)), silu(__fdiv_rn(low.y, streams)),
                                   silu(__fdiv_rn(low.z, streams)), silu(__fdiv_rn(low.w, streams))};
            group.put(col, unit, four, there);
        }
    });
    __syncthreads();
    const float scale = p.scale == nullptr ? 1.0f : *p.scale;
    // A warp has every so many columns; what it wants of several is on its way at once.
    constexpr uint32_t AT_ONCE = COLS <= 16 ? 1 : COLS / 16;
    for (uint32_t first = warp; first < p.count; first += AT_ONCE * warps) {
        float normed[AT_ONCE][STREAMS];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t c = first + i * warps;
#pragma unroll
            for (uint32_t s = 0; s < STREAMS; s++) {
                if (c < p.count && s < p.streams) {
                    normed[i][s] = p.normed[(size_t(c) * p.streams + s) * p.width + j + lane];
                }
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t c = first + i * warps;
            if (c < p.count) {
                float u = 0.0f;
#pragma unroll
                for (uint32_t s = 0; s < STREAMS; s++) {
                    if (s < p.streams) {
                        u = fma(sigmoid(sums.sum(segments, c, s * 32 + lane, warps) * scale), normed[i][s], u);
                    }
                }
                u = __fdiv_rn(u, float(p.streams));
                const size_t at = size_t(c) * p.width + j + lane;
                p.u[at] = u;
                p.quantised.put(u, at);
            }
        }
    }
}

#define STRATA_KERNELS(F, NAME)                                                                   \
    STRATA_FEW_LAYOUT(F, NAME)                                                                    \
    extern "C" __global__ void __launch_bounds__(NARROWERS, 1)                                    \
        strata_narrow_few_1_##NAME(const __grid_constant__ NarrowFewParams p) {                   \
        narrow_few<F, 8>(p);                                                                      \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(NARROWERS, 1)                                    \
        strata_narrow_few_4_##NAME(const __grid_constant__ NarrowFewParams p) {                   \
        narrow_few<F, 32>(p);                                                                      \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
