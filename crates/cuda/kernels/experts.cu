// Grouped products: every unit of a routing with its own expert's rows. An expert's address comes from the residency
// table.
#include "floats.cuh"
#include "many.cuh"

namespace strata {

/// Twin: `src/ops/experts.rs`.
struct GroupedParams {
    /// Per expert the address of its slot.
    const uint64_t* slots;
    /// Where the rows start in a slot.
    uint64_t offset;
    /// Quantised columns, and the same as f32, for float weights.
    Columns x;
    const float* floats;
    /// Per place its column, or null where places are columns.
    const uint32_t* order;
    /// `[places][rows]`
    float* out;
    /// Per expert what its products are multiplied with, or null.
    const float* scales;
    const uint32_t* unit_expert;
    const uint32_t* unit_first;
    const uint32_t* unit_places;
    /// Where the units start, null for the first, and end.
    const uint32_t* before;
    const uint32_t* units;
    uint32_t rows, k;
    /// See `ProductParams`; a unit's start at `first_piece`.
    const uint8_t* pieces;
};

constexpr int THREADS = 128;

/// The column of a place.
__device__ inline uint32_t column_of(const uint32_t* order, uint32_t place) {
    return order == nullptr ? place : order[place];
}

__device__ inline uint32_t first_unit(const GroupedParams& p) { return p.before == nullptr ? 0 : *p.before; }

template <class F>
__device__ void grouped_wide(const GroupedParams& p) {
    extern __shared__ __align__(1024) uint8_t aligned[];
    const uint32_t from = first_unit(p), tall = (p.rows + Wide<F>::ROWS - 1) / Wide<F>::ROWS,
                   tiles = tall * (*p.units - from);
    const size_t row_bytes = size_t(p.k / F::LEN) * F::BYTES;
    Wide<F>::run(*reinterpret_cast<typename Wide<F>::Shared*>(aligned), p.x, p.k / 32, p.rows,
                 [&](uint32_t number) {
                     if (number >= tiles) {
                         return Tile{};
                     }
                     const uint32_t unit = from + number / tall, first = number % tall * Wide<F>::ROWS;
                     const uint32_t expert = p.unit_expert[unit], place = p.unit_first[unit];
                     return Tile{reinterpret_cast<const uint8_t*>(p.slots[expert] + p.offset) + first * row_bytes,
                                 p.pieces + first_piece(place, unit) * COLUMN_BYTES * chunks_of(p.k / 32),
                                 p.order == nullptr ? nullptr : p.order + place,
                                 place,
                                 p.out + size_t(place) * p.rows + first,
                                 int(min(uint32_t(Wide<F>::ROWS), p.rows - first)),
                                 int(p.unit_places[unit]),
                                 p.scales == nullptr ? 1.0f : p.scales[expert]};
                 });
}

template <class T>
__device__ void grouped_floats(const GroupedParams& p) {
    const uint32_t unit = first_unit(p) + blockIdx.y;
    if (unit >= *p.units) {
        return;
    }
    const uint32_t expert = p.unit_expert[unit], place = p.unit_first[unit], cols = p.unit_places[unit];
    const uint32_t row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.rows) {
        return;
    }
    const T* w = reinterpret_cast<const T*>(p.slots[expert] + p.offset) + size_t(row) * p.k;
    for (uint32_t c = 0; c < cols; c++) {
        const uint32_t col = column_of(p.order, place + c);
        const float sum = warp_product(w, p.floats + size_t(col) * p.k, p.k, threadIdx.x % WARP);
        if (threadIdx.x % WARP == 0) {
            p.out[size_t(place + c) * p.rows + row] = p.scales == nullptr ? sum : sum * p.scales[expert];
        }
    }
}

#define STRATA_KERNELS(F, NAME)                                                                   \
    extern "C" __device__ uint32_t strata_grouped_wide_##NAME##_shared = sizeof(Wide<F>::Shared); \
    extern "C" __global__ void __launch_bounds__(Wide<F>::THREADS, Wide<F>::BLOCKS)               \
        strata_grouped_wide_##NAME(const __grid_constant__ GroupedParams p) {                     \
        grouped_wide<F>(p);                                                                       \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
#define STRATA_FLOATS(T, NAME)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                       \
        strata_grouped_floats_##NAME(const __grid_constant__ GroupedParams p) { \
        grouped_floats<T>(p);                                                   \
    }
STRATA_FLOATS(float, f32)
STRATA_FLOATS(Half, f16)
STRATA_FLOATS(Bfloat, bf16)

}  // namespace strata
