// The delta rule over state columns of one head, token after token: docs/arithmetic.md. What a token costs is the chain
// from one to the next: a dot, its fold, an update.
//
// `SHARERS` threads have a column together: thread `r` of them the contract's lanes `r`, `r + 8`, `r + 16` and `r +
// 24`. These fold without leaving the thread, a sum is three exchanges away, and then all of them have it.
#pragma once

#include "floats.cuh"

namespace strata {

constexpr int SHARERS = 8;
/// Lanes of the contract that a thread has of a column; groups of sharers in a warp, too.
constexpr int OWN = WARP / SHARERS;

/// Which of its sharers a thread is, and in which group of its warp. Neighbours have the same values of a key, so that
/// they read it together.
__device__ inline int sharer(int lane) { return lane / OWN; }
__device__ inline int group(int lane) { return lane % OWN; }

/// Where value `j` of a key or query lies among those of its row, `PARTS` units of 32: a sharer's four of a unit side
/// by side.
__device__ inline uint32_t shared_place(uint32_t j) { return j / WARP * WARP + j % SHARERS * OWN + j % WARP / SHARERS; }

/// A sharer's values of a key or query.
template <int PARTS>
__device__ inline void own_values(const float* x, int r, float (&to)[PARTS][OWN]) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float4 four = reinterpret_cast<const float4*>(x + i * WARP)[r];
        to[i][0] = four.x, to[i][1] = four.y, to[i][2] = four.z, to[i][3] = four.w;
    }
}

/// `COLUMNS` columns of a head's state in the hands of a thread and its sharers; `PARTS` units of 32 values each.
template <int PARTS, int COLUMNS>
struct StateColumns {
    using Values = float[PARTS][OWN];
    Values state[COLUMNS];

    /// Calls `use(value, column, j)` for each of the thread's values: the `j`-th of its `column`-th column.
    template <class Use>
    __device__ void each(int r, Use use) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    use(state[c][i][m], uint32_t(c), uint32_t(i * WARP + m * SHARERS + r));
                }
            }
        }
    }

    /// A thread's part of the columns' dots with `x`.
    __device__ void own_dots(const Values& x, float (&sums)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float acc[OWN] = {};
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    acc[m] = fma(state[c][i][m], x[i][m], acc[m]);
                }
            }
            sums[c] = (acc[0] + acc[2]) + (acc[1] + acc[3]);
        }
    }

    /// Makes them the dots, for all sharers.
    static __device__ void exchange(float (&sums)[COLUMNS]) {
#pragma unroll
        for (int width = WARP / 2; width >= OWN; width /= 2) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                sums[c] += __shfl_xor_sync(ALL, sums[c], width);
            }
        }
    }

    /// The same for four tokens at once: a sharer gets those of token `r / 2`.
    static __device__ void exchange_four(const float (&sums)[4][COLUMNS], int r, float (&mine)[COLUMNS]) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float two[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float keep = r & 4 ? sums[i + 2][c] : sums[i][c], give = r & 4 ? sums[i][c] : sums[i + 2][c];
                two[i] = keep + __shfl_xor_sync(ALL, give, WARP / 2);
            }
            const float keep = r & 2 ? two[1] : two[0], give = r & 2 ? two[0] : two[1];
            const float one = keep + __shfl_xor_sync(ALL, give, WARP / 4);
            mine[c] = one + __shfl_xor_sync(ALL, one, WARP / 8);
        }
    }

    __device__ void decay(float by) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    state[c][i][m] = state[c][i][m] * by;
                }
            }
        }
    }

    /// `state += by * key`, a factor for each column.
    __device__ void add(const float (&by)[COLUMNS], const Values& key) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    state[c][i][m] = fma(by[c], key[i][m], state[c][i][m]);
                }
            }
        }
    }

    /// Takes in one token. `meanwhile`, for which the chain waits no longer than for its sums' exchanges, gets the
    /// state before the token, and a value that is not there before they start.
    template <class Meanwhile>
    __device__ void step(const Values& key, const float (&value)[COLUMNS], float decay_by, float strength,
                         Meanwhile meanwhile) {
        const StateColumns before = *this;
        decay(decay_by);
        float by[COLUMNS];
        own_dots(key, by);
        const float started = by[0];
        exchange(by);
        meanwhile(before, started);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            by[c] = strength * (value[c] - by[c]);
        }
        add(by, key);
    }
};

}  // namespace strata
