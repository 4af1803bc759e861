// Products with one column: what decoding is made of.
//
// A block of threads takes some rows, whose bytes lie in one piece. They are brought to shared memory whole, in wide
// copies, which a kernel can start before the one in front of it is done: weights wait for nobody. Then every thread
// turns units of 32 weights into terms, and a thread per row and segment of the contract adds them up in their order.
// How many rows, and so how much shared memory, is the host's choice: `ops/one.rs`.
#pragma once

#include "shared.cuh"
#include "floats.cuh"
#include "terms.cuh"

namespace strata {

/// A number for every format, for kernels that learn it when they run.
enum Code : uint32_t {
#define STRATA_CODE(F, NAME) CODE_##NAME,
    STRATA_BLOCK_FORMATS(STRATA_CODE)
#undef STRATA_CODE
    CODE_f32,
    CODE_f16,
    CODE_bf16,
};

/// Calls `use(F{})` with the block format of that number.
template <class Use>
__device__ inline void with_format(uint32_t code, Use use) {
    switch (code) {
#define STRATA_CASE(F, NAME) \
    case CODE_##NAME:        \
        use(F{});            \
        break;
        STRATA_BLOCK_FORMATS(STRATA_CASE)
#undef STRATA_CASE
        default:
            break;
    }
}

/// A block's shared memory, for up to `2^tall` rows of `units` units: behind one another. Twin: `ops/one.rs`, which
/// counts it.
template <class F, int THREADS>
struct OldOne {
    static constexpr int PER_BLOCK = F::LEN / 32;

    /// The column: 32 values a unit, as `half_at` says.
    uint4* q;
    float* d;
    uint32_t* sums;
    uint32_t* grid;
    float2* first;
    float2* second;
    float* chains;
    int tall, units, stride;

    /// `2^tall` is at most `THREADS / PER_BLOCK`.
    __device__ OldOne(uint8_t* room, int tall, int units) : tall(tall), units(units) {
        q = reinterpret_cast<uint4*>(room);
        d = reinterpret_cast<float*>(q + 2 * units);
        sums = reinterpret_cast<uint32_t*>(d + units);
        // What follows starts at multiples of 16. Rows of terms start at such too, and eight of them in different
        // banks.
        grid = sums + units + (units & 1) * 2;
        first = reinterpret_cast<float2*>(grid + F::GRID);
        stride = units + 2 + (units & 1);
        second = first + (stride << tall);
        chains = reinterpret_cast<float*>(SECOND<F> ? second + (stride << tall) : second);
    }

    __device__ static uint32_t row_bytes(int units) { return uint32_t(units / PER_BLOCK) * F::BYTES; }

    /// The code book, for which nobody has to wait.
    __device__ void prepare() const {
        for (int i = threadIdx.x; i < F::GRID / 4; i += THREADS) {
            start_copy<16>(grid + 4 * i, F::codebook() + 4 * i);
        }
    }

    /// Starts bringing the first of these columns.
    __device__ void bring_column(const Columns& x) const {
        for (int i = threadIdx.x; i < units * 2; i += THREADS) {
            start_copy<16>(q + half_at(i / 2, i % 2), x.q + 16 * size_t(i));
        }
        for (int i = threadIdx.x; i < units; i += THREADS) {
            start_copy<4>(d + i, x.d + i);
            start_copy<4>(sums + i, x.sums + i);
        }
    }

    /// Puts a warp's 32 values, quantised, to a unit of the column.
    __device__ void put(int unit, float x, int lane) const {
        const Quantised block = quantise(x);
        reinterpret_cast<int8_t*>(q + half_at(unit, lane / 16))[lane % 16] = int8_t(block.q);
        if (lane == 0) {
            d[unit] = block.d;
            sums[unit] = block.sums;
        }
    }

    /// The products of the first `count` rows, of which `row(r)` says where row `r` lies, with the column, when both
    /// are there. Row `r`'s is returned to thread `r`. All threads come here, and have passed a barrier before.
    template <class Row>
    __device__ float product(int count, Row row) const {
        // A thread has the same unit of several blocks of a row: what depends on the unit is worked out once.
        // Neighbours have the units of a block, then rows: they share activations.
        const int thread = threadIdx.x, i = thread % PER_BLOCK, rest = thread / PER_BLOCK, r = rest & ((1 << tall) - 1);
        const int phases = THREADS / PER_BLOCK >> tall;
        if (r < count) {
            int unit = (rest >> tall) * PER_BLOCK + i;
            const uint8_t* block = row(r) + (rest >> tall) * F::BYTES;
            float2* to = first + r * stride;
            for (; unit < units; unit += phases * PER_BLOCK, block += phases * F::BYTES) {
                const Unit u = F::unit(block, i, grid);
                float2 one, two;
                terms<F>(u, q[half_at(unit, 0)], q[half_at(unit, 1)], d[unit], sums[unit], one, two);
                to[unit] = one;
                if constexpr (SECOND<F>) {
                    to[(stride << tall) + unit] = two;
                }
            }
        }
        __syncthreads();
        const int segments = (units + SEGMENT - 1) / SEGMENT;
        for (int c = thread; c < segments << tall; c += THREADS) {
            const int at = (c & ((1 << tall) - 1)) * stride + (c >> tall) * SEGMENT;
            chains[c] = chain<F>(first + at, second + at, min(SEGMENT, units - (c >> tall) * SEGMENT));
        }
        __syncthreads();
        float total = 0.0f;
        if (thread < count) {
            for (int s = 0; s < segments; s++) {
                total = total + chains[(s << tall) + thread];
            }
        }
        return total;
    }
};

}  // namespace strata
