// What multiplies in the wide products of Hopper: weights and activations as f16 integers.
//
// f16 holds a weight times its sub-scale exactly (where it doesn't, two of them do), and the tensor cores' f32 sums of
// such products stay below 2^24, so that they are the contract's integers, already as floats: two f32 operations to a
// value and unit are left, the scales' product and the FMA. Minimums are a second product, with the minimum in place of
// the weights.
//
// Groups of four warps, each with 64 rows of a tile and all of its columns, go through a ring of chunks in shared memory
// that others fill. Weights lie there as bytes; they become f16 in the registers that the matrix instruction reads them
// from. A group waits for its products and adds them before it starts the next unit's; meanwhile other groups have
// theirs. A warp would gain little by products of its own on the way: while matrix instructions with f32 sums and f32
// FMAs run on a multiprocessor together, each gets little more than half of its rate.
#pragma once

#include <cstddef>
#include <type_traits>

#include "matrix.cuh"

namespace strata {

/// A tile of a product: `rows` rows with `cols` columns.
struct Tile {
    /// Rows as a file has them, or decoded ones.
    const uint8_t* weights;
    /// The columns' pieces.
    const uint8_t* pieces;
    /// Where kernels take columns as they are: their numbers, or null where they follow `first`.
    const uint32_t* which;
    uint32_t first;
    /// `out[col * stride + row]`
    float* out;
    int rows, cols;
    /// Finished sums are multiplied with it.
    float scale;
};

/// Units of a chunk; columns of a tile.
constexpr int CHUNK = 2, TILE_COLS = 128;
/// Columns come in pieces, one for the columns of a tile and each chunk: per column 128 bytes, 64 values of f16, whose
/// 16-byte parts are swizzled as the matrix instruction wants them; then the units' scales, of 16 columns each those
/// that one thread has next to each other. Whole sixteens of columns.
constexpr uint32_t COLUMN_BYTES = CHUNK * 32 * 2 + CHUNK * 4;
__device__ constexpr uint32_t whole_sixteens(uint32_t cols) { return (cols + 15) / 16 * 16; }
__device__ constexpr uint32_t chunks_of(uint32_t units) { return (units + CHUNK - 1) / CHUNK; }
__device__ constexpr uint32_t scale_place(uint32_t c) {
    return c / 16 * 16 + c % 8 / 2 * 4 + c % 16 / 8 * 2 + c % 2;
}

/// Where a unit's pieces start, in columns, by its first place and its number: none meets the next.
__device__ inline size_t first_piece(uint32_t place, uint32_t unit) { return (place + 15) / 16 * 16 + unit * 16; }

/// Formats that are multiplied alike: see `formats.cuh`.
template <bool MINIMUM_, bool SPLIT_, bool LARGE_, bool SCALED_>
struct Kind {
    static constexpr bool MINIMUM = MINIMUM_, SPLIT = SPLIT_, LARGE = LARGE_, SCALED = SCALED_;
    static constexpr bool SECOND = MINIMUM || SPLIT;
};
template <class F>
using KindOf = Kind<F::MINIMUM != 0, F::SPLIT, F::LARGE, SCALED<F>>;

/// The scales of a unit, the sub-scales of its halves as a pair of f16.
struct alignas(8) ScalesOne {
    float d;
    uint32_t s;
};

/// With a second term's scale, and the minimums of halves as a pair of f16.
struct alignas(16) ScalesTwo {
    float d;
    uint32_t s;
    float second;
    uint32_t m;
};

__device__ inline void load_shared(ScalesOne& to, SharedAddress from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(to.d), "=r"(to.s) : "r"(from));
}
__device__ inline void load_shared(ScalesTwo& to, SharedAddress from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to.d), "=r"(to.s), "=f"(to.second), "=r"(to.m)
                 : "r"(from));
}

/// Rows of a chunk, decoded.
template <class K, int ROWS_>
struct Decoded {
    static constexpr int ROWS = ROWS_;
    using Scales = std::conditional_t<K::SECOND, ScalesTwo, ScalesOne>;
    uint4 w[ROWS][CHUNK * 2];
    Scales scales[CHUNK][ROWS];

    /// 16 weights of a row. Those of eight rows lie in different banks.
    __device__ static int place(int row, int sixteen) { return sixteen ^ (row / 2 % 4); }

    /// A unit that isn't `there` gets scales that add nothing: no sum is -0.
    template <class F>
    __device__ void put(const Unit& u, int row, int part, bool there) {
        // Signed weights as 128 more.
        constexpr uint32_t flip = F::MINIMUM != 0 || F::ZERO > 0 ? 0 : 0x80808080u,
                           more = F::ZERO > 0 ? (128 - F::ZERO) * 0x01010101u : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t* from = u.w + 4 * half;
            w[row][place(row, part * 2 + half)] = {(from[0] ^ flip) + more, (from[1] ^ flip) + more,
                                                   (from[2] ^ flip) + more, (from[3] ^ flip) + more};
        }
        Scales own;
        own.d = there ? u.d[0] : 0.0f;
        own.s = K::SCALED ? integer_pair(u.s[0], u.s[1]) : 0;
        if constexpr (K::SECOND) {
            const float second = F::SPLIT ? u.d[1] : F::MINIMUM > 0 ? u.d_min : -u.d_min;
            own.second = there ? second : 0.0f;
            own.m = F::SPLIT ? 0 : integer_pair(u.m[0], u.m[1]);
        }
        scales[part][row] = own;
    }
};

template <class K, int ROWS>
struct alignas(1024) Chunk {
    uint4 columns[TILE_COLS * COLUMN_BYTES / 16];
    Decoded<K, ROWS> rows;
};

/// A ring of chunks: which are filled, which are free.
template <class K, int ROWS, int CHUNKS>
struct Ring {
    Chunk<K, ROWS> chunks[CHUNKS];
    /// What a tile's segments so far come to, of each thread that multiplies.
    float4 totals[TILE_COLS / 8][ROWS * 2];
    Barrier filled[CHUNKS], emptied[CHUNKS];

    /// Where somebody is in it.
    struct Turn {
        int chunk = 0;
        uint32_t phase = 0;

        __device__ void next() {
            chunk++;
            if (chunk == CHUNKS) {
                chunk = 0, phase ^= 1;
            }
        }
    };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    /// So many warps tell that a chunk is filled, beside the thread that brings columns, and so many that it is free.
    __device__ void init(int fillers, int multipliers) {
        for (int i = 0; i < CHUNKS; i++) {
            filled[i].init(fillers * TELLING + 1);
            emptied[i].init(multipliers * TELLING);
        }
    }
#endif
};

template <class K, int ROWS, int CHUNKS>
struct Multiplier;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class K, int ROWS, int CHUNKS>
struct Multiplier {
    using InRing = Ring<K, ROWS, CHUNKS>;
    using InChunk = Chunk<K, ROWS>;
    using Turn = typename InRing::Turn;
    /// Warps that multiply.
    static constexpr int WARPS = ROWS / 16;

    using Rows = Decoded<K, ROWS>;
    using Scales = typename Rows::Scales;

    /// A unit of 16 rows as it lies in shared memory. A lane has four consecutive weights of rows `lane / 4` and 8
    /// more, of the first 16 and of the others.
    struct Fetched {
        uint32_t w[4];
        Scales scales[2];

        __device__ void fetch(SharedAddress weights, SharedAddress first_scales) {
            load_matrices(w, weights);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                load_shared(scales[r], first_scales + r * 8 * int(sizeof(Scales)));
            }
        }
    };

    /// A unit's weights of 16 rows, times their sub-scales, as the matrix instruction wants them: the unit's halves.
    /// What f16 can't hold of the products is in `rest`. A lane has rows `lane / 4` and 8 more.
    struct Weights {
        uint32_t a[2][4];
        uint32_t rest[K::LARGE ? 2 : 1][4];
        uint32_t m[K::SECOND ? 2 : 1];
        float d[2], second[K::SECOND ? 2 : 1];

        /// Takes what was fetched.
        __device__ void take(const Fetched& from) {
            const uint32_t(&w)[4] = from.w;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Scales scales = from.scales[r];
                d[r] = scales.d;
                if constexpr (K::SECOND) {
                    second[r] = scales.second, m[r] = scales.m;
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t s = __byte_perm(scales.s, 0, h == 0 ? 0x1010 : 0x3232);
                    const uint32_t pairs[2] = {low_pair(w[2 * h + r]), high_pair(w[2 * h + r])};
                    constexpr uint32_t less = K::MINIMUM ? LESS_1024 : LESS_1152;
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        if constexpr (K::LARGE) {
                            const uint32_t value = add_pair(pairs[k], less);
                            const uint32_t near = multiply_pair(value, s);
                            a[h][r + 2 * k] = near;
                            rest[h][r + 2 * k] = fma_pair(value, s, negate_pair(near));
                        } else if constexpr (K::SCALED) {
                            a[h][r + 2 * k] = fma_pair(pairs[k], s, multiply_pair(s, less));
                        } else {
                            a[h][r + 2 * k] = add_pair(pairs[k], less);
                        }
                    }
                }
            }
        }

        /// Starts `c = weights * columns`, of the first term or of the second; `b` describes the columns.
        template <int N>
        __device__ void start(float (&c)[N], uint64_t b, int term) const {
            // Minimums in place of weights: those of halves. The compiler shall make them before the first instruction.
            uint32_t low[4], high[4];
            if (K::MINIMUM && term == 1) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    low[i] = kept(__byte_perm(m[i % 2], 0, 0x1010));
                    high[i] = kept(__byte_perm(m[i % 2], 0, 0x3232));
                }
            }
            before_multiply();
            if (term == 0) {
                multiply(c, a[0], b, 0);
                if constexpr (!K::SPLIT) {
                    multiply(c, a[1], b + 2, 1);
                }
                if constexpr (K::LARGE) {
                    multiply(c, rest[0], b, 1);
                    multiply(c, rest[1], b + 2, 1);
                }
            } else if constexpr (K::SPLIT) {
                multiply(c, a[1], b + 2, 0);
            } else if constexpr (K::MINIMUM) {
                multiply(c, low, b, 0);
                multiply(c, high, b + 2, 1);
            }
            commit_multiply();
        }
    };

    /// `N` columns of `chunks` chunks; the last 32 of them may be fewer.
    template <int N>
    __device__ static void tile(InRing& ring, int chunks, size_t stride, const Tile& tile, Turn& turn, int warp,
                                int lane) {
        constexpr int TERMS = K::SECOND ? 2 : 1, SEGMENT_CHUNKS = SEGMENT / CHUNK;
        const int row = warp * 16, own_row = row + lane % 16;
        const uint32_t scales_at = whole_sixteens(tile.cols);
        float sum[N / 2] = {};
        // To find a place in shared memory anew costs more than to keep it.
        const SharedAddress chunks_at = kept(shared_at(ring.chunks)), emptied = kept(shared_at(ring.emptied));
        const uint32_t own_weights = kept(offsetof(InChunk, rows) + own_row * (CHUNK * 32) +
                                          Rows::place(own_row, lane / 16) * 16),
                       own_scales = kept(offsetof(InChunk, rows) + offsetof(Rows, scales) +
                                         (row + lane / 4) * sizeof(Scales)),
                       own_d_a = kept(scales_at * (CHUNK * 64) + lane % 4 * 16);
        auto unit = [&](SharedAddress chunk, int part) {
            Fetched fetched;
            fetched.fetch(chunk + (own_weights ^ part * 32), chunk + own_scales + part * (ROWS * int(sizeof(Scales))));
            Weights weights;
            weights.take(fetched);
            const SharedAddress d_a = chunk + own_d_a + part * scales_at * 4;
            // Shared memory's address in 16 bytes; 1,024 bytes from one group of 8 columns to the next; parts swizzled
            // over 128 bytes.
            const uint64_t columns = uint64_t(chunk >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                float c[N / 2];
                weights.start(c, columns + part * 4, term);
                const float d[2] = {term == 0 ? weights.d[0] : weights.second[0],
                                    term == 0 ? weights.d[1] : weights.second[K::SECOND]};
                add<N>(c, d, d_a, tile.cols, sum);
            }
        };
#pragma unroll 1
        for (int from = 0; from < chunks; from += SEGMENT_CHUNKS) {
#pragma unroll 1
            for (int i = from; i < min(from + SEGMENT_CHUNKS, chunks); i++) {
                ring.filled[turn.chunk].wait(turn.phase);
                const SharedAddress chunk = chunks_at + turn.chunk * int(sizeof(InChunk));
                // Unrolled, there would not be enough registers.
#pragma unroll 1
                for (int part = 0; part < CHUNK; part++) {
                    unit(chunk, part);
                }
                Barrier::tell_at(emptied + turn.chunk * 8, lane);
                turn.next();
            }
            end_segment<N>(ring, from == 0, from + SEGMENT_CHUNKS >= chunks, warp * WARP + lane, sum);
            if (from + SEGMENT_CHUNKS >= chunks) {
                put<N>(tile, stride, row + lane / 4, lane % 4 * 2, sum);
            }
#pragma unroll
            for (float& value : sum) {
                value = 0.0f;
            }
        }
    }

   private:
    /// Waits for integers and adds them, times scales.
    template <int N>
    __device__ static void add(float (&c)[N / 2], const float (&d)[2], SharedAddress d_a, int cols,
                               float (&sum)[N / 2]) {
        // Loads that are on their way before the products are there; for more there are no registers.
        constexpr int AHEAD = K::SECOND || K::LARGE ? 1 : 2;
        float4 by[N / 16];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            load_shared(by[i], d_a + i * 64);
        }
        multiplied<0>(c);
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            // 16 columns: the same for all threads.
            if (i < N / 16 - 1 || N == TILE_COLS || i * 16 < cols) {
                if (i + AHEAD < N / 16) {
                    load_shared(by[i + AHEAD], d_a + (i + AHEAD) * 64);
                }
                const float four[4] = {by[i].x, by[i].y, by[i].z, by[i].w};
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[i * 8 + j] = fma(c[i * 8 + j], d[j / 2 % 2] * four[j / 4 * 2 + j % 2], sum[i * 8 + j]);
                }
            }
        }
    }

    /// Adds a segment's sums to those before, and keeps them for the next.
    template <int N>
    __device__ static void end_segment(InRing& ring, bool first, bool last, int thread, float (&sum)[N / 2]) {
        float4* total = &ring.totals[0][thread];
        if (!first) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float4 before = total[i * (ROWS * 2)];
                sum[4 * i] = before.x + sum[4 * i], sum[4 * i + 1] = before.y + sum[4 * i + 1];
                sum[4 * i + 2] = before.z + sum[4 * i + 2], sum[4 * i + 3] = before.w + sum[4 * i + 3];
            }
        }
        if (!last) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                total[i * (ROWS * 2)] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
            }
        }
    }

    /// Leaves finished sums.
    template <int N>
    __device__ static void put(const Tile& tile, size_t stride, int row, int col, const float (&sum)[N / 2]) {
        float* at = tile.out + col * stride + row;
        // Addresses are not to be computed before the sums are, when there are no registers for them.
        asm volatile("" : "+l"(at));
        const bool rows[2] = {row < tile.rows, row + 8 < tile.rows}, all = tile.rows == ROWS && tile.cols == N;
        const int cols = tile.cols - col;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (all || (rows[i / 2 % 2] && i / 4 * 8 + i % 2 < cols)) {
                at[i / 2 % 2 * 8 + (i % 2 == 0 ? 0 : stride)] = sum[i] * tile.scale;
            }
            if (i % 4 == 3) {
                at += 8 * stride;
            }
        }
    }
};

#endif

}  // namespace strata
