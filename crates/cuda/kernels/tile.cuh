// Dots of many queries with many keys in the order of the contract: a register tile a warp, of f16 keys in shared
// memory.
#pragma once

#include "contract.cuh"
#include "shared.cuh"

namespace strata {

/// Keys that a warp scores at once.
constexpr int STEP = 16;

/// Starts a copy of the 16 bytes that are `at * 16` behind `from`.
__device__ inline void start_copy_at(SharedAddress to, const uint8_t* from, uint32_t at) {
    // One instruction, where a sum of addresses takes three.
    const uint8_t* there;
    asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(there) : "r"(at), "l"(from));
    start_copy<16>(to, there);
}
/// Waits until all of the warp's copies but those of the latest group are there.
__device__ inline void all_but_the_latest() {
    await_copies<1>();
    __syncwarp();
}

/// Four 8x8 matrices of 16-bit values, transposed: a lane names a row of 16 bytes, and gets of each matrix values `lane
/// / 4` of rows `lane % 4 * 2` (low half) and the next (high half).
__device__ inline void load_columns(SharedAddress row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

/// Which copy of a key lies where: so that the eight rows of a matrix are in different banks.
__device__ inline uint32_t swap(uint32_t piece, uint32_t key) { return piece ^ ((key & 1) | (key & 2) << 1); }
/// Where a value of a query lies: `[link / 4][lane][link % 4]`.
__device__ inline uint32_t permuted(uint32_t j) { return (j / (4 * WARP) * WARP + j % WARP) * 4 + j / WARP % 4; }

/// Dots of `HEADS` queries of `DIM` values, permuted, with 16 keys in shared memory, by a warp. A thread has lanes r, r
/// + 8, r + 16, r + 24 of four keys, r = lane / 4, so that the folds of 16 and 8 are its own. In the end it has the
/// sums of a quarter of the heads, the `lane / 8`-th, with keys `key_of(lane, n)`.
template <int HEADS, int DIM>
__device__ inline void dots(const float (&permuted)[HEADS][DIM], SharedAddress keys, int lane,
                            float (&sums)[HEADS / 4][2]) {
    constexpr int LINKS = DIM / WARP, BYTES = 2 * DIM, QUARTER = HEADS / 4;
    float s[4][QUARTER][4];
    // Each thread takes the quarters of the heads in an order of its own, so that what it keeps of a fold comes first.
    const float* queries[4];
#pragma unroll
    for (int part = 0; part < 4; part++) {
        queries[part] = permuted[(part ^ lane / 8) * QUARTER] + lane / 4 * 4;
#pragma unroll
        for (int h = 0; h < QUARTER; h++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                // The one zero that changes nothing it is added to.
                s[part][h][c] = -0.0f;
            }
        }
    }
    // A matrix is two rows of each of four keys: links apart by 16 lanes. Four matrices are four links.
    const uint32_t key = lane % 8 / 2, row = keys + key * BYTES;
    const uint32_t piece = swap(lane / 8 * 4 + lane % 2 * 2, key) * 16;
#pragma unroll 1
    for (int o = 0; o < 2; o++) {
        float x[4][2][LINKS];
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int i = 0; i < LINKS; i += 4) {
                uint32_t pairs[4];
                load_columns(row + c * 4 * BYTES + (piece ^ o * 16) + i * 64, pairs);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    x[c][0][i + n] = half_to_float(uint16_t(pairs[n]));
                    x[c][1][i + n] = half_to_float(uint16_t(pairs[n] >> 16));
                }
            }
        }
#pragma unroll
        for (int part = 0; part < 4; part++) {
#pragma unroll
            for (int h = 0; h < QUARTER; h++) {
                float acc[2][4] = {};
#pragma unroll
                for (int i = 0; i < LINKS; i += 4) {
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        const int at = h * DIM + (i / 4 * WARP + 8 * (o + 2 * b)) * 4;
                        const float4 q = *reinterpret_cast<const float4*>(queries[part] + at);
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            acc[b][c] = fma(x[c][b][i + 0], q.x, acc[b][c]);
                            acc[b][c] = fma(x[c][b][i + 1], q.y, acc[b][c]);
                            acc[b][c] = fma(x[c][b][i + 2], q.z, acc[b][c]);
                            acc[b][c] = fma(x[c][b][i + 3], q.w, acc[b][c]);
                        }
                    }
                }
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    s[part][h][c] = s[part][h][c] + (acc[0][c] + acc[1][c]);
                }
            }
        }
    }
    // Folds of 4, 2, 1: each exchange halves what a thread has.
#pragma unroll
    for (int h = 0; h < QUARTER; h++) {
        float own[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float first = s[0][h][c] + __shfl_xor_sync(ALL, s[2][h][c], 16);
            const float second = s[1][h][c] + __shfl_xor_sync(ALL, s[3][h][c], 16);
            own[c] = first + __shfl_xor_sync(ALL, second, 8);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const bool upper = lane & 4;
            const float keep = upper ? own[n + 2] : own[n], give = upper ? own[n] : own[n + 2];
            sums[h][n] = keep + __shfl_xor_sync(ALL, give, 4);
        }
    }
}
__device__ inline uint32_t key_of(int lane, int n) { return lane % 8 / 4 * 8 + n * 4 + lane % 4; }

}  // namespace strata
