// Products with one column: what decoding is made of.
//
// A block of threads takes some rows, whose bytes lie in one piece. They are brought to shared memory whole, in wide copies, which a
// kernel can start before the one in front of it is done: weights wait for nobody. Then every thread turns units of 32 weights into terms, and a thread per row and
// segment of the contract adds them up in their order. How many rows, and so how much shared memory, is the host's choice: `ops/one.rs`.
#pragma once

#include "copy.cuh"
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

/// A quantised column in device memory.
struct Column {
    const int8_t* q;
    const float* d;
    const uint32_t* sums;
};

/// A block's shared memory, for some rows of `units` units: behind one another. Twin: `ops/one.rs`, which counts it.
template <class F, int THREADS>
struct One {
    static constexpr int PER_BLOCK = F::LEN / 32;

    /// The column: 32 values a unit. The halves of a unit lie swapped in every other group of four units, so that the eight lanes of a
    /// 16-byte access meet 32 different banks.
    uint4* q;
    float* d;
    uint32_t* sums;
    float* chains;
    float2* first;
    float2* second;
    uint32_t* grid;

    __device__ One(uint8_t* room, int rows, int units) {
        q = reinterpret_cast<uint4*>(room);
        first = reinterpret_cast<float2*>(q + 2 * units);
        second = first + rows * (units + 1);
        d = reinterpret_cast<float*>(second + (SECOND<F> ? rows * (units + 1) : 0));
        sums = reinterpret_cast<uint32_t*>(d + units);
        chains = reinterpret_cast<float*>(sums + units);
        grid = reinterpret_cast<uint32_t*>(chains + rows * ((units + SEGMENT - 1) / SEGMENT));
    }

    __device__ static uint32_t row_bytes(int units) { return uint32_t(units / PER_BLOCK) * F::BYTES; }
    __device__ static int slot(int unit, int half) { return unit * 2 + (half ^ (unit >> 2 & 1)); }

    /// The code book, for which nobody has to wait.
    __device__ void prepare() const {
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            grid[i] = F::codebook()[i];
        }
    }

    /// Starts bringing a column.
    __device__ void bring_column(const Column& x, int units) const {
        for (int i = threadIdx.x; i < units * 2; i += THREADS) {
            copy16(q + slot(i / 2, i % 2), x.q + 16 * size_t(i));
        }
        for (int i = threadIdx.x; i < units; i += THREADS) {
            copy4(d + i, x.d + i);
            copy4(sums + i, x.sums + i);
        }
    }

    /// Puts a warp's 32 values, quantised, to a unit of the column.
    __device__ void put(int unit, float x, int lane) const {
        const Quantised block = quantise(x);
        reinterpret_cast<int8_t*>(q + slot(unit, lane / 16))[lane % 16] = int8_t(block.q);
        if (lane == 0) {
            d[unit] = block.d;
            sums[unit] = block.sums;
        }
    }

    /// The products of `rows` rows, of which `row(r)` says where row `r` lies, with the column, when both are there. Row `r`'s is returned to thread `r`. All threads come
    /// here, and have passed a barrier before.
    template <class Row>
    __device__ float product(int rows, int units, Row row) const {
        const int thread = threadIdx.x, stride = units + 1, count = (units + SEGMENT - 1) / SEGMENT;
        int r = thread / units, unit = thread % units;
        while (r < rows) {
            const uint8_t* block = row(r) + unit / PER_BLOCK * F::BYTES;
            const Unit u = F::unit(block, unit % PER_BLOCK, grid);
            float2 one, two;
            terms<F>(u, q[slot(unit, 0)], q[slot(unit, 1)], d[unit], sums[unit], one, two);
            first[r * stride + unit] = one;
            if constexpr (SECOND<F>) {
                second[r * stride + unit] = two;
            }
            unit += THREADS;
            while (unit >= units) {
                unit -= units, r++;
            }
        }
        __syncthreads();
        for (int i = thread; i < rows * count; i += THREADS) {
            const int at = i % rows * stride + i / rows * SEGMENT;
            chains[i] = chain<F>(first + at, second + at, min(SEGMENT, units - i / rows * SEGMENT));
        }
        __syncthreads();
        float total = 0.0f;
        if (thread < rows) {
            for (int i = 0; i < count; i++) {
                total = total + chains[i * rows + thread];
            }
        }
        return total;
    }
};

}  // namespace strata
