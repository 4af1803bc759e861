// Products of block-format rows with many quantised columns: what prompts are made of. Hopper has its own
// (`hopper.cuh`); here the integer tensor cores of other GPUs multiply, and the contract's scales and order are kept
// between them.
//
// A block of threads takes `ROWS` rows and `COLS` columns at a time and walks the row in chunks of units, decoded once
// into shared memory: the next chunk while the warps that are done with theirs multiply. Per unit of 32 weights a
// matrix instruction gives exact integers; sub-scales, scales and the running sum are then f32 operations on each of
// them, three or five to a value: these, not the matrix instructions, are what the time goes to.
#pragma once

#include "hopper.cuh"

namespace strata {

/// `c += a * b` over 16 values: `a` 16 rows, `b` 8 columns.
__device__ inline void multiply16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a0), "r"(b));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(a1), "r"(b));
#endif
}

/// `c += a * b` over 32 values.
__device__ inline void multiply32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply16(c, a[0], a[1], b0);
    multiply16(c, a[2], a[3], b1);
#endif
}

template <class F>
struct Many {
    static constexpr int ROWS = 128, COLS = 64, THREADS = 256, BLOCKS = 2;
    /// Units of a chunk: whole chunks make a segment.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // A block of threads has 64 KB here.
    static constexpr int CHUNK = 2;
#else
    static constexpr int CHUNK = 4;
#endif
    /// Bytes of a row or column in shared memory: eight of them start in different banks.
    static constexpr int STRIDE = CHUNK * 32 + 16;
    static_assert(SEGMENT % CHUNK == 0);

    struct alignas(16) Stage {
        uint8_t w[ROWS][STRIDE];
        uint8_t q[COLS][STRIDE];
        float d[CHUNK][ROWS];
        float d_a[CHUNK][COLS];
        /// The second scale of NVFP4, or the minimum's.
        float second[SECOND<F> ? CHUNK : 1][SECOND<F> ? ROWS : 1];
        /// Sub-scales, of halves where there are two.
        float s[F::HALVES ? 2 : 1][SCALED<F> ? CHUNK : 1][SCALED<F> ? ROWS : 1];
        float m[F::HALVES ? 2 : 1][F::MINIMUM != 0 ? CHUNK : 1][F::MINIMUM != 0 ? ROWS : 1];
        uint32_t sums[F::MINIMUM != 0 ? CHUNK : 1][F::MINIMUM != 0 ? COLS : 1];
    };

    struct Shared {
        Stage stages[2];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
    };

    /// Multiplies the tiles `tiles(i)`, `i` from the block's number on in steps of the grid, up to the first without
    /// rows.
    template <class Tiles>
    __device__ static void run(Shared& shared, const Columns& x, int units, size_t stride, Tiles tiles) {
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
        __syncthreads();
        uint32_t number = blockIdx.x;
        for (Tile tile = tiles(number); tile.rows > 0; tile = tiles(number += gridDim.x)) {
            for (int from = 0; from < tile.cols; from += COLS) {
                const uint32_t* which = tile.which == nullptr ? nullptr : tile.which + from;
                Columns columns = x;
                if (which == nullptr) {
                    const size_t at = size_t(tile.first + from) * units;
                    columns = {x.q + at * 32, x.d + at, x.sums + at};
                }
                product(shared, tile.weights, tile.rows, columns, which, min(COLS, tile.cols - from), units,
                        [&](int r, int c, float sum) { tile.out[(from + c) * stride + r] = sum * tile.scale; });
            }
        }
    }

   private:
    /// Starts the copies of a chunk's columns, and decodes its rows. What is beyond the rows, columns or units becomes
    /// zeros.
    __device__ static void fill(Stage& stage, const uint32_t* grid, const uint8_t* weights, int rows, const Columns& x,
                                const uint32_t* which, int cols, int units, int from) {
        constexpr int PER_BLOCK = F::LEN / 32;
        const int thread = threadIdx.x;
        const size_t row_bytes = size_t(units / PER_BLOCK) * F::BYTES;
        for (int i = thread; i < COLS * CHUNK * 2; i += THREADS) {
            const int col = i / (CHUNK * 2), part = i % (CHUNK * 2), unit = from + part / 2;
            void* to = stage.q[col] + part * 16;
            if (col < cols && unit < units) {
                const size_t at = size_t(which == nullptr ? col : which[col]) * units + unit;
                start_copy<16>(to, x.q + at * 32 + part % 2 * 16);
            } else {
                *static_cast<uint4*>(to) = uint4{0, 0, 0, 0};
            }
        }
        for (int i = thread; i < COLS * CHUNK; i += THREADS) {
            const int col = i % COLS, part = i / COLS, unit = from + part;
            const bool there = col < cols && unit < units;
            const size_t at = there ? size_t(which == nullptr ? col : which[col]) * units + unit : 0;
            stage.d_a[part][col] = there ? x.d[at] : 0.0f;
            if constexpr (F::MINIMUM != 0) {
                stage.sums[part][col] = there ? x.sums[at] : 0;
            }
        }
        for (int i = thread; i < ROWS * CHUNK; i += THREADS) {
            // Neighbouring threads decode neighbouring units of a row.
            const int row = i / CHUNK, part = i % CHUNK, unit = from + part;
            Unit u = {};
            if (row < rows && unit < units) {
                u = F::unit(weights + row * row_bytes + size_t(unit / PER_BLOCK) * F::BYTES, unit % PER_BLOCK, grid);
                centre<F>(u);
            }
            uint4* to = reinterpret_cast<uint4*>(stage.w[row] + part * 32);
            to[0] = uint4{u.w[0], u.w[1], u.w[2], u.w[3]};
            to[1] = uint4{u.w[4], u.w[5], u.w[6], u.w[7]};
            stage.d[part][row] = u.d[0];
            if constexpr (F::SPLIT) {
                stage.second[part][row] = u.d[1];
            }
            if constexpr (SCALED<F>) {
#pragma unroll
                for (int h = 0; h < (F::HALVES ? 2 : 1); h++) {
                    stage.s[h][part][row] = float(u.s[h]);
                }
            }
            if constexpr (F::MINIMUM != 0) {
                stage.second[part][row] = u.d_min;
#pragma unroll
                for (int h = 0; h < (F::HALVES ? 2 : 1); h++) {
                    stage.m[h][part][row] = float(u.m[h]);
                }
            }
        }
    }

    /// Calls `emit(row, col, product)` for every row and column of the tile that is there.
    template <class Emit>
    __device__ static void product(Shared& shared, const uint8_t* weights, int rows, const Columns& x,
                                   const uint32_t* which, int cols, int units, Emit emit) {
        const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
        // A warp has 32 rows and 32 columns: two by four matrices of 16 by 8.
        const int row = warp / 2 * 32, col = warp % 2 * 32;
        float total[2][4][4] = {}, acc[2][4][4] = {};
        fill(shared.stages[0], shared.grid, weights, rows, x, which, cols, units, 0);
        await_all_copies();
        __syncthreads();
        for (int from = 0, turn = 0; from < units; from += CHUNK, turn ^= 1) {
            if (from + CHUNK < units) {
                fill(shared.stages[turn ^ 1], shared.grid, weights, rows, x, which, cols, units, from + CHUNK);
            }
            const Stage& stage = shared.stages[turn];
#pragma unroll
            for (int part = 0; part < CHUNK; part++) {
                if (from + part < units) {
                    unit(stage, part, row, col, lane, acc);
                }
            }
            if ((from + CHUNK) % SEGMENT == 0 || from + CHUNK >= units) {
#pragma unroll
                for (int i = 0; i < 2 * 4 * 4; i++) {
                    total[i / 16][i / 4 % 4][i % 4] = total[i / 16][i / 4 % 4][i % 4] + acc[i / 16][i / 4 % 4][i % 4];
                    acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
                }
            }
            await_all_copies();
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 2 * 4 * 4; i++) {
            const int r = row + i / 16 * 16 + i % 4 / 2 * 8 + lane / 4, c = col + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
            if (r < rows && c < cols) {
                emit(r, c, total[i / 16][i / 4 % 4][i % 4]);
            }
        }
    }

    /// Adds one unit's terms to a warp's values.
    __device__ static void unit(const Stage& stage, int part, int row, int col, int lane, float (&acc)[2][4][4]) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Rows 0..8 and 8..16 of the first 16 bytes, then of the others.
            load_matrices(a[i], stage.w[row + i * 16 + lane % 16] + part * 32 + lane / 16 * 16);
            // Both halves of 8 columns, then of the next 8.
            load_matrices(b[i], stage.q[col + i * 16 + lane % 8 + lane / 16 * 8] + part * 32 + lane / 8 % 2 * 16);
        }
        float d_a[4][2];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 both = *reinterpret_cast<const float2*>(&stage.d_a[part][col + n * 8 + lane % 4 * 2]);
            d_a[n][0] = both.x, d_a[n][1] = both.y;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint32_t b0 = b[n / 2][n % 2 * 2], b1 = b[n / 2][n % 2 * 2 + 1];
                // Integers that start at these bits are, read as floats, `ROUND` more than they are: no conversion is
                // needed.
                constexpr int start = int(ROUND_BITS);
                int first[4] = {start, start, start, start}, other[4] = {start, start, start, start};
                if constexpr (F::HALVES || F::SPLIT) {
                    multiply16(first, a[i][0], a[i][1], b0);
                    multiply16(other, a[i][2], a[i][3], b1);
                } else {
                    multiply32(first, a[i], b0, b1);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int r = row + i * 16 + j / 2 * 8 + lane / 4;
                    const float d = stage.d[part][r], by = d * d_a[n][j % 2];
                    float& sum = acc[i][n][j];
                    if constexpr (F::SPLIT) {
                        sum = fma(__int_as_float(first[j]) - ROUND, by, sum);
                        sum = fma(__int_as_float(other[j]) - ROUND, stage.second[part][r] * d_a[n][j % 2], sum);
                    } else if constexpr (F::HALVES) {
                        const float s0 = stage.s[0][part][r], s1 = stage.s[1][part][r];
                        const float whole = fma(__int_as_float(first[j]), s0, -ROUND * s0) +
                                            fma(__int_as_float(other[j]), s1, -ROUND * s1);
                        sum = fma(whole, by, sum);
                    } else if constexpr (SCALED<F>) {
                        const float s = stage.s[0][part][r];
                        sum = fma(fma(__int_as_float(first[j]), s, -ROUND * s), by, sum);
                    } else {
                        sum = fma(__int_as_float(first[j]) - ROUND, by, sum);
                    }
                    if constexpr (F::MINIMUM != 0) {
                        const uint32_t sums = stage.sums[part][col + n * 8 + lane % 4 * 2 + j % 2];
                        const float low = float(int16_t(sums & 0xffff)), high = float(int16_t(sums >> 16));
                        const float m = F::HALVES ? fma(stage.m[0][part][r], low, stage.m[1][part][r] * high)
                                                  : stage.m[0][part][r] * (low + high);
                        const float scale = stage.second[part][r] * d_a[n][j % 2];
                        sum = fma(m, F::MINIMUM > 0 ? scale : -scale, sum);
                    }
                }
            }
        }
    }
};

/// Tiles of 128 rows and up to 128 columns, or 64 at a time. Twins: `WIDE` and `Products::wide_grid`.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <class F>
using Wide = Hopper<F>;
#else
template <class F>
using Wide = Many<F>;
#endif

}  // namespace strata
