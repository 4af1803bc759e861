// Products of block-format rows with a few quantised columns: several sequences, or a draft that is verified.
//
// A block of threads takes some rows and walks them a segment of the contract at a time. First every thread turns units
// of 32 weights into integers times scales, all at once; then a thread per row and column adds the segment's terms in
// ascending order. The terms go through shared memory: that is what the fixed order costs.
#pragma once

#include "terms.cuh"

namespace strata {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// A block of threads has 64 KB here.
constexpr int FEW_TERMS = 260;
#else
constexpr int FEW_TERMS = 520;
#endif

/// Up to `COLS` columns, with room for the terms of `TERMS` pairs of a row and a unit. Twin of the numbers:
/// `Products::few_rows`.
template <class F>
struct Few {
    static constexpr int COLS = 8, THREADS = 128, TERMS = FEW_TERMS, PER_BLOCK = F::LEN / 32;

    struct alignas(16) Shared {
        /// As `half_at` says.
        uint4 q[COLS][SEGMENT * 2];
        float d[COLS][SEGMENT];
        uint32_t sums[COLS][SEGMENT];
        float2 first[COLS][TERMS];
        float2 second[SECOND<F> ? COLS : 1][SECOND<F> ? TERMS : 1];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
    };

    /// Loads `units` units of `all` from `from` on, of the first `cols` columns.
    __device__ static void load(Shared& shared, const Columns& x, int cols, int all, int from, int units) {
        for (int i = threadIdx.x; i < cols * units * 2; i += THREADS) {
            const int col = i / (units * 2), rest = i % (units * 2);
            const size_t unit = size_t(col) * all + from + rest / 2;
            shared.q[col][half_at(rest / 2, rest % 2)] = reinterpret_cast<const uint4*>(x.q)[unit * 2 + rest % 2];
        }
        for (int i = threadIdx.x; i < cols * units; i += THREADS) {
            const int col = i / units, unit = i % units;
            const size_t at = size_t(col) * all + from + unit;
            shared.d[col][unit] = x.d[at];
            shared.sums[col][unit] = x.sums[at];
        }
    }

    /// The code book, before the first `product`.
    __device__ static void prepare(Shared& shared) {
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
    }

    /// The products of `rows` rows (as many as `Products::few_rows` allows) at `weights` with the first `cols` columns
    /// of `units` units. The thread with number `col * rows + row` returns that row and column's; the others return
    /// nothing of use.
    __device__ static float product(Shared& shared, const uint8_t* weights, int rows, const Columns& x, int cols,
                                    int units) {
        const int thread = threadIdx.x;
        const size_t row_bytes = size_t(units / PER_BLOCK) * F::BYTES;
        float total = 0.0f;
        for (int from = 0; from < units; from += SEGMENT) {
            const int here = min(SEGMENT, units - from), stride = here + 2 + (here & 1);
            load(shared, x, cols, units, from, here);
            __syncthreads();
#pragma unroll 2
            for (int i = thread; i < rows * here; i += THREADS) {
                const int r = i / here, unit = i % here, at = from + unit;
                const uint8_t* block = weights + r * row_bytes + size_t(at / PER_BLOCK) * F::BYTES;
                const Unit u = F::unit(block, at % PER_BLOCK, shared.grid);
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    if (c < cols) {
                        float2 first, second;
                        const uint4 low = shared.q[c][half_at(unit, 0)], high = shared.q[c][half_at(unit, 1)];
                        terms<F>(u, low, high, shared.d[c][unit], shared.sums[c][unit], first, second);
                        shared.first[c][r * stride + unit] = first;
                        if constexpr (SECOND<F>) {
                            shared.second[c][r * stride + unit] = second;
                        }
                    }
                }
            }
            __syncthreads();
            if (thread < cols * rows) {
                const int col = thread / rows, first = thread % rows * stride;
                const float2* second = SECOND<F> ? &shared.second[col][first] : nullptr;
                total = total + chain<F>(&shared.first[col][first], second, here);
            }
            __syncthreads();
        }
        return total;
    }
};

}  // namespace strata
