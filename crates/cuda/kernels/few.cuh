// Products of block-format rows with a few quantised columns: what decoding is made of.
//
// A block of threads takes `ROWS` rows and walks the segments of the contract. In a segment every thread turns units of 32
// weights into integers times scales, all at once; then one thread per (row, column) adds a row's terms in ascending order.
// The terms go through shared memory: that is what the fixed order costs, about a tenth of the decoding beside it.
#pragma once

#include "formats.cuh"

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

/// The columns of one segment in shared memory. The halves of a unit lie swapped in every other group of four units, so that
/// the eight lanes of a 16-byte access meet 32 different banks.
template <int COLS>
struct StagedColumns {
    uint4 q[COLS][SEGMENT * 2];
    float d[COLS][SEGMENT];
    uint32_t sums[COLS][SEGMENT];

    __device__ static int slot(int unit, int half) { return unit * 2 + (half ^ (unit >> 2 & 1)); }

    /// Loads `units` units from `first` on, of the columns that `which` names, or of the first ones; whoever calls synchronises.
    template <int THREADS>
    __device__ void load(const Columns& x, const uint32_t* which, int cols, int all_units, int first, int units, int thread) {
        for (int i = thread; i < cols * units * 2; i += THREADS) {
            const int col = i / (units * 2), rest = i % (units * 2);
            const size_t unit = size_t(which == nullptr ? col : which[col]) * all_units + first + rest / 2;
            q[col][slot(rest / 2, rest % 2)] = reinterpret_cast<const uint4*>(x.q)[unit * 2 + rest % 2];
        }
        for (int i = thread; i < cols * units; i += THREADS) {
            const int col = i / units, unit = i % units;
            const size_t at = size_t(which == nullptr ? col : which[col]) * all_units + first + unit;
            d[col][unit] = x.d[at];
            sums[col][unit] = x.sums[at];
        }
    }
};

template <class F, int ROWS, int COLS, int THREADS>
struct Few {
    static_assert(ROWS * COLS <= THREADS);
    static constexpr bool SECOND = F::MINIMUM != 0 || F::SPLIT;

    struct Shared {
        StagedColumns<COLS> x;
        float2 first[COLS][ROWS][SEGMENT + 1];
        float2 second[SECOND ? COLS : 1][SECOND ? ROWS : 1][SECOND ? SEGMENT + 1 : 1];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
    };

    /// The terms of one unit and one column.
    __device__ static void terms(const Unit& u, const StagedColumns<COLS>& x, int col, int unit, float2& first, float2& second) {
        const uint4 low = x.q[col][StagedColumns<COLS>::slot(unit, 0)], high = x.q[col][StagedColumns<COLS>::slot(unit, 1)];
        const float d = x.d[col][unit];
        int lower = __dp4a(int(u.w[0]), int(low.x), 0), upper = F::HALVES ? 0 : lower;
        lower = __dp4a(int(u.w[1]), int(low.y), F::HALVES ? lower : upper);
        lower = __dp4a(int(u.w[2]), int(low.z), lower);
        lower = __dp4a(int(u.w[3]), int(low.w), lower);
        upper = __dp4a(int(u.w[4]), int(high.x), F::HALVES ? 0 : lower);
        upper = __dp4a(int(u.w[5]), int(high.y), upper);
        upper = __dp4a(int(u.w[6]), int(high.z), upper);
        upper = __dp4a(int(u.w[7]), int(high.w), upper);
        if constexpr (F::SPLIT) {
            first = {float(lower), u.d[0] * d};
            second = {float(upper), u.d[1] * d};
        } else {
            const int sum = F::HALVES ? u.s[0] * lower + u.s[1] * upper : u.s[0] * upper;
            first = {float(sum), u.d[0] * d};
        }
        if constexpr (F::MINIMUM != 0) {
            const uint32_t sums = x.sums[col][unit];
            const int minimum = u.m[0] * int16_t(sums & 0xffff) + u.m[1] * int16_t(sums >> 16);
            const float scale = u.d_min * d;
            second = {float(minimum), F::MINIMUM > 0 ? scale : -scale};
        }
    }

    /// The products of `rows` rows (at most `ROWS`) at `weights` with `cols` columns of `units` units: those that `which` names, or the first
    /// ones. The thread with number
    /// `col * ROWS + row` returns the product of that row and column; the others return nothing of use.
    __device__ static float product(Shared& shared, const uint8_t* weights, int rows, const Columns& x,
                                    const uint32_t* which, int cols, int units) {
        constexpr int PER_BLOCK = F::LEN / 32;
        const int thread = threadIdx.x;
        const size_t row_bytes = size_t(units / PER_BLOCK) * F::BYTES;
        for (int i = thread; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
        const int col = thread / ROWS, row = thread % ROWS;
        float total = 0.0f;
        for (int from = 0; from < units; from += SEGMENT) {
            const int here = min(SEGMENT, units - from);
            shared.x.template load<THREADS>(x, which, cols, units, from, here, thread);
            __syncthreads();
            for (int i = thread; i < rows * here; i += THREADS) {
                const int r = i / here, unit = i % here, at = from + unit;
                const uint8_t* block = weights + r * row_bytes + size_t(at / PER_BLOCK) * F::BYTES;
                const Unit u = F::unit(block, at % PER_BLOCK, shared.grid);
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    if (c < cols) {
                        float2 second;
                        terms(u, shared.x, c, unit, shared.first[c][r][unit], second);
                        if constexpr (SECOND) {
                            shared.second[c][r][unit] = second;
                        }
                    }
                }
            }
            __syncthreads();
            if (col < cols && row < rows) {
                float acc = 0.0f;
#pragma unroll 8
                for (int unit = 0; unit < here; unit++) {
                    const float2 term = shared.first[col][row][unit];
                    acc = fma(term.x, term.y, acc);
                    if constexpr (SECOND) {
                        const float2 other = shared.second[col][row][unit];
                        acc = fma(other.x, other.y, acc);
                    }
                }
                total = total + acc;
            }
        }
        return total;
    }
};

}  // namespace strata
