// Dense products with 2 to 64 columns.
#include "few.cuh"

namespace strata {

/// One of the matrices of a format that a launch multiplies with the same columns. Twins of both: `ops/few.rs`.
struct FewMatrix {
    const uint8_t* weights;
    /// `[cols][rows]`
    float* out;
    const float* scale;
    /// Rows, and the number of its first block of threads.
    uint32_t rows, first;
};

struct FewParams {
    FewMatrix matrices[3];
    Columns x;
    /// Matrices; strips of a group of warps, and groups, which share a row's segments out.
    uint32_t count, cols, k, strips, groups;
};

/// Grid: strips of rows, columns.
template <class F, int COLS>
__device__ void few(const FewParams& p) {
    extern __shared__ __align__(16) uint8_t room[];
    using Rows = Few<F, COLS>;
    pass();
    uint32_t number = 0;
    while (number + 1 < p.count && blockIdx.x >= p.matrices[number + 1].first) {
        number++;
    }
    const FewMatrix& m = p.matrices[number];
    const uint32_t warp = threadIdx.x / WARP, strip = warp % p.strips, own = warp / p.strips;
    const uint32_t first = (blockIdx.x - m.first) * p.strips * Rows::ROWS, col = blockIdx.y * uint32_t(COLS);
    const uint32_t units = p.k / 32, segments = (units + SEGMENT - 1) / SEGMENT, cols = min(uint32_t(COLS), p.cols - col);
    auto* grid = reinterpret_cast<uint32_t*>(room);
    auto* decoded = reinterpret_cast<typename Rows::Decoded*>(grid + F::GRID);
    auto* sums = reinterpret_cast<float*>(decoded + 2 * p.strips * p.groups);
    const bool whole = p.groups == 1;
    typename Rows::Group group;
    group.ring = reinterpret_cast<uint8_t*>(sums + (whole ? 1 : segments) * COLS * p.strips * Rows::ROWS);
    group.grid = Rows::prepare(grid);
    group.row_bytes = units / Rows::PER_BLOCK * F::BYTES;
    group.rows = int(m.rows) - int(first + strip * Rows::ROWS);
    group.weights = m.weights + size_t(first + strip * Rows::ROWS) * group.row_bytes;
    group.strip = strip, group.strips = p.strips, group.barrier = 1 + own;
    group.x = p.x.from(col, p.k), group.resident = nullptr;
    group.cols = cols, group.room = COLS, group.units = units;
    group.ring += own * Rows::STAGES * group.stage_bytes();
    typename Rows::Together multiply{{sums, whole}, decoded + 2 * warp};
    const uint32_t from = own * segments / p.groups * SEGMENT, to = (own + 1) * segments / p.groups * SEGMENT;
    group.walk(from, min(to, units), multiply, [] { ready(); });
    __syncthreads();
    const uint32_t tall = p.strips * Rows::ROWS;
    const float scale = m.scale == nullptr ? 1.0f : *m.scale;
    for (uint32_t i = threadIdx.x; i < tall * cols; i += blockDim.x) {
        const uint32_t r = i % tall, c = i / tall;
        if (first + r < m.rows) {
            const float sum = multiply.sums.sum(segments, c, r, p.strips);
            m.out[size_t(col + c) * m.rows + first + r] = sum * scale;
        }
    }
}

#define STRATA_KERNELS(F, NAME)                                                                                 \
    STRATA_FEW_LAYOUT(F, NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) strata_few_1_##NAME(const __grid_constant__ FewParams p) { \
        few<F, 8>(p);                                                                                           \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 2) strata_few_2_##NAME(const __grid_constant__ FewParams p) { \
        few<F, 16>(p);                                                                                          \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 2) strata_few_4_##NAME(const __grid_constant__ FewParams p) { \
        few<F, 32>(p);                                                                                          \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
