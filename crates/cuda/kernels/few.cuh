// Products of block-format rows with a few quantised columns: several sequences, or a draft that is verified.
//
// A block of threads takes some rows and walks them in rounds of up to `ROUND` units. In a round every thread turns units of 32 weights
// into integers times scales, all at once; then a thread per row, column and segment of the contract adds its terms in ascending order, and
// one per row and column adds the segments. The terms go through shared memory: that is what the fixed order costs.
#pragma once

#include "terms.cuh"

namespace strata {

/// Quantised columns in device memory, `cols` of `k` values.
struct Columns {
    /// `[cols][k]`
    const int8_t* q;
    /// `[cols][k / 32]`
    const float* d;
    /// `[cols][k / 32]`: the sums of 16 values each, two to a word.
    const uint32_t* sums;
};

/// Up to `COLS` columns at a time, `SEGMENTS` segments in a round, `TERMS` (row, unit) pairs of room.
template <class F, int COLS, int SEGMENTS, int TERMS, int THREADS>
struct Few {
    static constexpr int ROUND = SEGMENTS * SEGMENT;

    struct alignas(16) Shared {
        /// The halves of a unit lie swapped in every other group of four units, so that the eight lanes of a 16-byte access meet 32 different
        /// banks.
        uint4 q[COLS][ROUND * 2];
        float d[COLS][ROUND];
        uint32_t sums[COLS][ROUND];
        float2 first[COLS][TERMS];
        float2 second[SECOND<F> ? COLS : 1][SECOND<F> ? TERMS : 1];
        float chains[THREADS];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
    };

    __device__ static int slot(int unit, int half) { return unit * 2 + (half ^ (unit >> 2 & 1)); }

    /// Loads `units` units from `from` on, of the columns that `which` names, or of the first ones.
    __device__ static void load(Shared& shared, const Columns& x, const uint32_t* which, int cols, int all, int from, int units) {
        for (int i = threadIdx.x; i < cols * units * 2; i += THREADS) {
            const int col = i / (units * 2), rest = i % (units * 2);
            const size_t unit = size_t(which == nullptr ? col : which[col]) * all + from + rest / 2;
            shared.q[col][slot(rest / 2, rest % 2)] = reinterpret_cast<const uint4*>(x.q)[unit * 2 + rest % 2];
        }
        for (int i = threadIdx.x; i < cols * units; i += THREADS) {
            const int col = i / units, unit = i % units;
            const size_t at = size_t(which == nullptr ? col : which[col]) * all + from + unit;
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

    /// The products of `rows` rows (as many as `Products::few_rows` allows) at `weights` with `cols` columns of `units` units: those that `which` names, or the first
    /// ones. The thread with number `col * rows + row` returns that row and column's; the others return nothing of use.
    __device__ static float product(Shared& shared, const uint8_t* weights, int rows, const Columns& x, const uint32_t* which, int cols,
                                    int units) {
        constexpr int PER_BLOCK = F::LEN / 32;
        const int thread = threadIdx.x;
        const size_t row_bytes = size_t(units / PER_BLOCK) * F::BYTES;
        float total = 0.0f;
        for (int from = 0; from < units; from += ROUND) {
            const int here = min(ROUND, units - from), stride = here + 2 + (here & 1), chains = (here + SEGMENT - 1) / SEGMENT;
            load(shared, x, which, cols, units, from, here);
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
                        const uint4 low = shared.q[c][slot(unit, 0)], high = shared.q[c][slot(unit, 1)];
                        terms<F>(u, low, high, shared.d[c][unit], shared.sums[c][unit], first, second);
                        shared.first[c][r * stride + unit] = first;
                        if constexpr (SECOND<F>) {
                            shared.second[c][r * stride + unit] = second;
                        }
                    }
                }
            }
            __syncthreads();
            if (thread < cols * rows * chains) {
                const int chain = thread / (cols * rows), col = thread / rows % cols, row = thread % rows;
                const int first = row * stride + chain * SEGMENT, count = min(here - chain * SEGMENT, SEGMENT);
                const float2* second = SECOND<F> ? &shared.second[col][first] : nullptr;
                shared.chains[thread] = strata::chain<F>(&shared.first[col][first], second, count);
            }
            __syncthreads();
            if (thread < cols * rows) {
                for (int chain = 0; chain < chains; chain++) {
                    total = total + shared.chains[chain * cols * rows + thread];
                }
            }
            __syncthreads();
        }
        return total;
    }
};

constexpr int FEW_THREADS = 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// A block of threads has 64 KB here. Twin: `Products::few_rows`.
constexpr int EIGHT_TERMS = 260;
#else
constexpr int EIGHT_TERMS = 520;
#endif
template <class F>
using FewEight = Few<F, 8, 1, EIGHT_TERMS, FEW_THREADS>;

}  // namespace strata
