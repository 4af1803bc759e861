// Grouped products: every unit of a routing with its own expert's rows. An expert's address comes from the residency table.
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
    const uint32_t* units;
    /// Rows of a block of threads.
    uint32_t rows, k, tile;
    /// See `ProductParams`.
    const uint16_t* halves;
};

constexpr int THREADS = FEW_THREADS;

template <class F, class Product, int COLS>
__device__ void grouped(const GroupedParams& p) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<typename Product::Shared*>(raw);
    if (blockIdx.y >= *p.units) {
        return;
    }
    const uint32_t expert = p.unit_expert[blockIdx.y], place = p.unit_first[blockIdx.y], cols = p.unit_places[blockIdx.y];
    const uint32_t first = blockIdx.x * p.tile;
    const int units = p.k / 32, rows = min(p.tile, p.rows - first);
    const uint8_t* weights =
        reinterpret_cast<const uint8_t*>(p.slots[expert] + p.offset) + size_t(first) * (p.k / F::LEN) * F::BYTES;
    Product::prepare(shared);
    for (uint32_t from = 0; from < cols; from += COLS) {
        const uint32_t at = place + from, here = min(uint32_t(COLS), cols - from);
        const uint32_t* which = p.order == nullptr ? nullptr : p.order + at;
        Columns x = p.x;
        if (which == nullptr) {
            x = {x.q + size_t(at) * p.k, x.d + size_t(at) * units, x.sums + size_t(at) * units};
        }
        float sum = Product::product(shared, weights, rows, x, which, here, units);
        const uint32_t c = threadIdx.x / rows, r = threadIdx.x % rows;
        if (c < here) {
            if (p.scales != nullptr) {
                sum = sum * p.scales[expert];
            }
            p.out[size_t(at + c) * p.rows + first + r] = sum;
        }
        __syncthreads();
    }
}

template <class F>
__device__ void grouped_wide(const GroupedParams& p) {
    extern __shared__ __align__(1024) uint8_t aligned[];
    const uint32_t tall = (p.rows + Wide<F>::ROWS - 1) / Wide<F>::ROWS, tiles = tall * *p.units;
    const size_t row_bytes = size_t(p.k / F::LEN) * F::BYTES;
    Wide<F>::run(*reinterpret_cast<typename Wide<F>::Shared*>(aligned), p.x, p.halves, p.k / 32, p.rows, [&](uint32_t number) {
        if (number >= tiles) {
            return Tile{};
        }
        const uint32_t unit = number / tall, first = number % tall * Wide<F>::ROWS;
        const uint32_t expert = p.unit_expert[unit], place = p.unit_first[unit];
        return Tile{reinterpret_cast<const uint8_t*>(p.slots[expert] + p.offset) + first * row_bytes,
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
    if (blockIdx.y >= *p.units) {
        return;
    }
    const uint32_t expert = p.unit_expert[blockIdx.y], place = p.unit_first[blockIdx.y], cols = p.unit_places[blockIdx.y];
    const uint32_t row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.rows) {
        return;
    }
    const T* w = reinterpret_cast<const T*>(p.slots[expert] + p.offset) + size_t(row) * p.k;
    for (uint32_t c = 0; c < cols; c++) {
        const uint32_t col = p.order == nullptr ? place + c : p.order[place + c];
        warp_products<1, 1>(w, p.floats + size_t(col) * p.k, 1, 1, p.k, threadIdx.x % WARP, [&](int, int, float sum) {
            p.out[size_t(place + c) * p.rows + row] = p.scales == nullptr ? sum : sum * p.scales[expert];
        });
    }
}

#define STRATA_KERNELS(F, NAME)                                                                               \
    extern "C" __device__ uint32_t strata_grouped_1_##NAME##_shared = sizeof(FewOne<F>::Shared); \
    extern "C" __device__ uint32_t strata_grouped_8_##NAME##_shared = sizeof(FewEight<F>::Shared);  \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_grouped_1_##NAME(                            \
        const __grid_constant__ GroupedParams p) {                                                            \
        grouped<F, FewOne<F>, 1>(p);                                                                                 \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_grouped_8_##NAME(                            \
        const __grid_constant__ GroupedParams p) {                                                            \
        grouped<F, FewEight<F>, 8>(p);                                                                                  \
    }                                                                                                         \
    extern "C" __device__ uint32_t strata_grouped_64_##NAME##_shared = sizeof(Wide<F>::Shared); \
    extern "C" __global__ void __launch_bounds__(Wide<F>::THREADS, Wide<F>::BLOCKS) strata_grouped_64_##NAME(                            \
        const __grid_constant__ GroupedParams p) {                                                            \
        grouped_wide<F>(p);                                                                                   \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)
#define STRATA_FLOATS(T, NAME)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_grouped_1_##NAME( \
        const __grid_constant__ GroupedParams p) {                                 \
        grouped_floats<T>(p);                                                      \
    }
STRATA_FLOATS(float, f32)
STRATA_FLOATS(Half, f16)
STRATA_FLOATS(Bfloat, bf16)

}  // namespace strata
