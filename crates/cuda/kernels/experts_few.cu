// Routed experts' products for a few rows: units of a routing, of a few places each.
#include "few.cuh"

namespace strata {

/// Twin: `src/ops/experts.rs`.
struct ExpertsFewParams {
    /// Per expert the address of its slot.
    const uint64_t* slots;
    /// Where the rows start in a slot; the up rows, where those of the gate start the slot.
    uint64_t offset;
    Columns x;
    /// Per place its column, or null where places are columns.
    const uint32_t* order;
    /// `[places][rows]`
    float* out;
    /// Per expert what its products are multiplied with, or null.
    const float* scales;
    const float* up_scales;
    Target hidden;
    const uint32_t* unit_expert;
    const uint32_t* unit_first;
    const uint32_t* unit_places;
    const uint32_t* units;
    uint32_t rows, k;
};

/// Strips of a block of threads, a warp each; the most places of a unit.
constexpr uint32_t STRIPS = 4, PLACES = 8, STRIP_THREADS = STRIPS * WARP;

/// What a block of threads has: a unit's places, and the sums of its strips with their columns.
template <class F>
struct Work {
    uint32_t expert, place, cols, segments;
    typename Few<F>::Sums sums;

    /// The product of a row of the strips with the column of a place.
    __device__ float product(uint32_t c, uint32_t row, const float* scales) const {
        const float sum = sums.sum(segments, c, row, STRIPS);
        return scales == nullptr ? sum : sum * scales[expert];
    }
};

/// Multiplies the strips of a block of threads for one unit, and calls `done(work)` behind a barrier. `strip(slot)` says
/// where in an expert's slot the warp's strip starts, and `rows` how many rows of it there are. Grid: rows, units.
template <class F, class Strip, class Done>
__device__ void multiply_unit(const ExpertsFewParams& p, Strip strip, int rows, Done done) {
    extern __shared__ __align__(16) uint8_t room[];
    using Rows = Few<F>;
    pass();
    const uint32_t warp = threadIdx.x / WARP, units = p.k / 32, segments = (units + SEGMENT - 1) / SEGMENT;
    auto* which = reinterpret_cast<uint32_t*>(room);
    auto* grid = which + PLACES;
    const typename Rows::Sums sums{reinterpret_cast<float*>(grid + F::GRID), int(PLACES)};
    typename Rows::Group group;
    group.resident = reinterpret_cast<uint8_t*>(sums.all + segments * PLACES * STRIPS * Rows::ROWS);
    group.ring = group.resident + (Rows::Each::MOST * units * Rows::Each::UNIT + 15) / 16 * 16;
    group.grid = Rows::prepare(grid);
    group.row_bytes = units / Rows::PER_BLOCK * F::BYTES;
    group.rows = rows, group.strip = warp, group.strips = STRIPS, group.barrier = 1;
    group.x = p.x, group.cols = group.room = 0, group.units = units;
    ready();
    // Units that aren't there have something, too.
    const uint32_t expert = p.unit_expert[blockIdx.y], place = p.unit_first[blockIdx.y],
                   cols = p.unit_places[blockIdx.y];
    if (blockIdx.y >= *p.units) {
        return;
    }
    group.weights = strip(reinterpret_cast<const uint8_t*>(p.slots[expert]), group.row_bytes);
    if (threadIdx.x < cols) {
        which[threadIdx.x] = p.order == nullptr ? place + threadIdx.x : p.order[place + threadIdx.x];
    }
#pragma unroll 1
    for (int first = 0; first < int(cols); first += Rows::Each::MOST) {
        typename Rows::Each each;
        each.sums = sums, each.first = first, each.cols = min(int(cols) - first, Rows::Each::MOST), each.units = units;
        group.walk(0, units, each, [&] {
            __syncthreads();
            each.start(group.resident, p.x, which + first);
        });
    }
    __syncthreads();
    done(Work<F>{expert, place, cols, segments, sums});
}

/// The products of 64 rows.
template <class F>
__device__ void rows_few(const ExpertsFewParams& p) {
    constexpr uint32_t TALL = STRIPS * Few<F>::ROWS;
    const uint32_t first = blockIdx.x * TALL, own = first + threadIdx.x / WARP * Few<F>::ROWS;
    multiply_unit<F>(
        p, [&](const uint8_t* slot, uint32_t row_bytes) { return slot + p.offset + size_t(own) * row_bytes; },
        int(p.rows) - int(own), [&](const Work<F>& work) {
            for (uint32_t i = threadIdx.x; i < work.cols * TALL; i += STRIP_THREADS) {
                const uint32_t c = i / TALL, r = i % TALL;
                if (first + r < p.rows) {
                    p.out[size_t(work.place + c) * p.rows + first + r] = work.product(c, r, p.scales);
                }
            }
        });
}

/// Gate and up products of 32 rows each, of one format, with their SwiGLU, quantised.
template <class F>
__device__ void hidden_few(const ExpertsFewParams& p) {
    static_assert(STRIPS / 2 * Few<F>::ROWS == WARP, "");
    const uint32_t first = blockIdx.x * WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t own = first + warp % (STRIPS / 2) * Few<F>::ROWS;
    multiply_unit<F>(
        p,
        [&](const uint8_t* slot, uint32_t row_bytes) {
            return slot + (warp < STRIPS / 2 ? 0 : p.offset) + size_t(own) * row_bytes;
        },
        Few<F>::ROWS, [&](const Work<F>& work) {
            for (uint32_t c = warp; c < work.cols; c += STRIPS) {
                const float gate = work.product(c, lane, p.scales), up = work.product(c, WARP + lane, p.up_scales);
                const float hidden = swiglu(gate, up);
                const size_t at = size_t(work.place + c) * p.rows + first + lane;
                p.out[at] = hidden;
                p.hidden.put(hidden, at);
            }
        });
}

#define STRATA_KERNELS(F, NAME)                                         \
    STRATA_FEW_LAYOUT(F, NAME)                                          \
    extern "C" __global__ void __launch_bounds__(STRIP_THREADS, 5)      \
        strata_rows_few_##NAME(const __grid_constant__ ExpertsFewParams p) { \
        rows_few<F>(p);                                                 \
    }                                                                   \
    extern "C" __global__ void __launch_bounds__(STRIP_THREADS, 5)      \
        strata_hidden_few_##NAME(const __grid_constant__ ExpertsFewParams p) { \
        hidden_few<F>(p);                                               \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
