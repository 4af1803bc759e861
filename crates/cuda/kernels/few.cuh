// Products of block-format rows with a few quantised columns: several sequences, or a draft that is verified.
//
// A warp has a strip of 16 rows and walks them in chunks of units. Chunks of rows and columns are on their way to a ring
// in shared memory while earlier ones are multiplied; rows are the warp's own business, columns are shared by the warps
// of a group. A lane decodes a unit of one row, two units of the strip at a time, for the warp's integer tensor cores. The
// contract's sum of a row and column is a register of one lane: terms go nowhere else. Segments have sums of their own, added at the end: a long row's can be
// other groups' work.
#pragma once

#include "many.cuh"

namespace strata {

/// `start + a * b` of a unit, and of its halves: `a` 16 rows, `b` 8 columns. All sums start alike.
__device__ inline void products32(int (&c)[4], int start, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
        "%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
#else
    c[0] = c[1] = c[2] = c[3] = start;
    multiply32(c, a, b0, b1);
#endif
}
__device__ inline void products16(int (&c)[4], int start, uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(start));
#else
    c[0] = c[1] = c[2] = c[3] = start;
    multiply16(c, a0, a1, b);
#endif
}

/// What groups and rings are made of, for rows of format `F`. Twin: `ops/few.rs`.
template <class F>
struct Few {
    static constexpr int ROWS = 16, CHUNK = 8, PER_BLOCK = F::LEN / 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // Nothing is copied meanwhile.
    static constexpr int STAGES = 2;
#else
    static constexpr int STAGES = 3;
#endif
    static_assert(SEGMENT % CHUNK == 0 && CHUNK % PER_BLOCK == 0);
    /// Bytes of a row's chunk, the 16-byte pieces that they can lie in, and the bytes of those.
    static constexpr uint32_t CHUNK_BYTES = CHUNK / PER_BLOCK * F::BYTES, PIECES = (CHUNK_BYTES + 30) / 16,
                              ROW = PIECES * 16;
    /// Bytes of a column's chunk of values: eight of them start in different banks.
    static constexpr uint32_t COLUMN = CHUNK * 32 + 16;
    /// Whether sums of a column's values are wanted.
    static constexpr bool SUMS = F::ZERO > 0 || F::MINIMUM != 0;
    /// Bytes of a chunk of a column with its scales and sums.
    static constexpr uint32_t COLUMN_BYTES = COLUMN + CHUNK * 4 * (SUMS ? 2 : 1);

    /// Floats of a unit beside its weights.
    static constexpr bool SUB = SCALED<F> && !F::SPLIT;
    static constexpr int HALVES = F::HALVES ? 2 : 1;
    static constexpr int COUNT = 1 + (SUB ? HALVES : 0) + (F::SPLIT ? 1 : 0) + (F::MINIMUM == 0 ? 0 : SUB ? 1 + HALVES : 1);
    static constexpr int VECTOR = COUNT <= 2 ? COUNT : COUNT <= 4 ? 4 : 8;
    struct alignas(VECTOR < 4 ? VECTOR * 4 : 16) Scales {
        /// The scale; sub-scales, or the other scale; the minimum's scale, and minimums where they aren't 1.
        float v[VECTOR];
    };
    static constexpr int MINIMUM_AT = SUB ? 1 + HALVES : 1;
    /// What a warp decodes to: two units of its rows, eight of which start in different banks.
    static constexpr uint32_t LINE = 2 * 32 + 16;
    struct alignas(16) Decoded {
        uint8_t w[ROWS][LINE];
        Scales scales[2 * ROWS];
    };

    /// A chunk of columns in shared memory.
    struct Chunk {
        /// `[cols]` of `COLUMN` bytes.
        const uint8_t* q;
        /// `[CHUNK][room]`
        const float* d;
        const uint32_t* sums;
        uint32_t room;
    };

    /// Some warps of a block with the same columns, and the warp in it. `strips` are the group's.
    struct Group {
        uint8_t* ring;
        const uint32_t* grid;
        /// The strip's first row in memory, and its rows; which strip it is.
        const uint8_t* weights;
        uint32_t row_bytes;
        int rows, strip, strips, barrier;
        Columns x;
        /// Whole columns in shared memory, chunk after chunk where tensor cores multiply, or null where they are brought.
        uint8_t* resident;
        int cols, room, units;

        __device__ uint32_t stage_bytes() const {
            return strips * ROWS * ROW + (resident == nullptr ? room * COLUMN_BYTES : 0);
        }
        __device__ uint8_t* columns(int stage, int from) const {
            return resident == nullptr ? ring + stage * stage_bytes() + strips * ROWS * ROW
                                       : resident + from / CHUNK * room * COLUMN_BYTES;
        }
        /// Puts values to a resident column, quantised: of 32 consecutive ones eight threads have four each.
        __device__ void put(int col, int unit, const float (&four)[4], bool there) const {
            const QuantisedSeveral block = quantise_several(four);
            if (there) {
                const int part = threadIdx.x % 8;
                uint8_t* to = columns(0, unit);
                *reinterpret_cast<uint32_t*>(to + col * COLUMN + unit % CHUNK * 32 + part * 4) = block.q;
                if (part == 0) {
                    const uint32_t at = unit % CHUNK * room + col;
                    reinterpret_cast<float*>(to + room * COLUMN)[at] = block.d;
                    if constexpr (SUMS) {
                        reinterpret_cast<uint32_t*>(to + room * COLUMN)[CHUNK * room + at] = block.sums;
                    }
                }
            }
        }
        __device__ Chunk chunk(int stage, int from) const {
            const uint8_t* q = columns(stage, from);
            const float* d = reinterpret_cast<const float*>(q + room * COLUMN);
            return {q, d, reinterpret_cast<const uint32_t*>(d + CHUNK * room), uint32_t(room)};
        }
        /// Where the unit chunk that starts with `from` lies in a stage, of a row.
        __device__ const uint8_t* row(int stage, int row, int from) const {
            const uint32_t at = uint32_t(reinterpret_cast<uintptr_t>(weights)) + row * row_bytes;
            return ring + stage * stage_bytes() + (strip * ROWS + row) * ROW +
                   ((at + from / PER_BLOCK * F::BYTES) & 15);
        }
        __device__ void sync(bool all) const {
            if (all) {
                __syncthreads();
            } else if (strips == 1 || resident != nullptr) {
                __syncwarp();
            } else {
                asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(strips * WARP) : "memory");
            }
        }

        /// Starts copying the strip's rows, from unit `from` on `here` of them: four lanes a row.
        __device__ void start_rows(int stage, int from, int here, int lane) const {
            const uint32_t bytes = here / PER_BLOCK * F::BYTES;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = lane / 4 + half * 8;
                if (row < rows) {
                    const uint8_t* first = weights + row * row_bytes + from / PER_BLOCK * F::BYTES;
                    const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(first)) & 15, whole = off + bytes;
                    const uint32_t own = lane % 4 * 16;
                    first += int(own) - int(off);
                    const SharedAddress to =
                        shared_at(ring) + stage * stage_bytes() + (strip * ROWS + row) * ROW + own;
#pragma unroll
                    for (uint32_t at = 0; at < ROW; at += 64) {
                        if (at + own < whole) {
                            start_copy<16>(to + at, first + at);
                        }
                    }
                }
            }
        }
        /// The same for the group's columns, by all its warps.
        __device__ void start_columns(int stage, int from, int here, int lane) const {
            if (resident != nullptr) {
                return;
            }
            const SharedAddress to = shared_at(columns(stage, from));
            const int thread = strip * WARP + lane, threads = strips * WARP;
            const int piece = thread % (CHUNK * 2), unit = thread % CHUNK;
            if (piece < here * 2) {
                int col = thread / (CHUNK * 2);
                const int8_t* q = x.q + (size_t(col) * units + from) * 32 + piece * 16;
                SharedAddress place = to + col * COLUMN + piece * 16;
                const int step = threads / (CHUNK * 2);
                const uint32_t stride = step * units * 32;
#pragma unroll 1
                for (; col < cols; col += step, q += stride, place += step * COLUMN) {
                    start_copy<16>(place, q);
                }
            }
            if (unit < here) {
                int col = thread / CHUNK;
                const uint32_t step = threads / CHUNK, stride = step * units;
                uint32_t at = col * units + from + unit;
                SharedAddress place = to + room * COLUMN + (unit * room + col) * 4;
#pragma unroll 1
                for (; col < cols; col += step, at += stride, place += step * 4) {
                    start_copy<4>(place, x.d + at);
                    if constexpr (SUMS) {
                        start_copy<4>(place + CHUNK * room * 4, x.sums + at);
                    }
                }
            }
        }

        /// Walks units `from..to`, a whole number of segments but for the last. `multiply` gets the units, and is told
        /// when a segment ends. `before` is called when the copies of rows are under way, and before columns are read.
        /// All warps of the block come here, with as much to do or less.
        template <class Multiply, class Before>
        __device__ void walk(int from, int to, Multiply& multiply, Before before) const {
            const int lane = threadIdx.x % WARP, half = lane / ROWS;
            __syncwarp();
            for (int i = 0; i < STAGES - 1; i++) {
                const int at = from + i * CHUNK;
                if (at < to) {
                    start_rows(i, at, min(CHUNK, to - at), lane);
                }
            }
            before();
            for (int i = 0; i < STAGES - 1; i++) {
                const int at = from + i * CHUNK;
                if (at < to) {
                    start_columns(i, at, min(CHUNK, to - at), lane);
                }
                end_copies();
            }
            int stage = 0, next = STAGES - 1;
#pragma unroll 1
            for (int at = from; at < to; at += CHUNK) {
                await_copies<STAGES - 2>();
                sync(at == from);
                const int ahead = at + (STAGES - 1) * CHUNK, here = min(CHUNK, to - at);
                if (ahead < to) {
                    start_rows(next, ahead, min(CHUNK, to - ahead), lane);
                    start_columns(next, ahead, min(CHUNK, to - ahead), lane);
                }
                end_copies();
                const Chunk columns = chunk(stage, at);
                const uint8_t* own = row(stage, lane % ROWS, at);
                auto unit = [&](int number) {
                    const int i = number + half;
                    return F::unit(own + i / PER_BLOCK * F::BYTES, i % PER_BLOCK, grid);
                };
                if (F::LEN == 256 || here == CHUNK) {
                    Unit u = unit(0);
#pragma unroll
                    for (int i = 0; i < CHUNK; i += 2) {
                        multiply.put(u, i / 2 % 2, lane);
                        const Unit now = u;
                        if (i + 2 < CHUNK) {
                            u = unit(i + 2);
                        }
                        multiply.add(now, i / 2 % 2, columns, at, i, true, lane);
                    }
                } else {
#pragma unroll 1
                    for (int i = 0; i < here; i += 2) {
                        Unit u = {};
                        if (i + half < here) {
                            u = unit(i);
                        }
                        multiply.put(u, i / 2 % 2, lane);
                        multiply.add(u, i / 2 % 2, columns, at, i, i + 1 < here, lane);
                        __syncwarp();
                    }
                }
                if ((at + CHUNK) % SEGMENT == 0 || at + CHUNK >= to) {
                    multiply.end(at / SEGMENT, strip, strips, lane);
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                next = next + 1 == STAGES ? 0 : next + 1;
            }
        }
    };

    /// The sums of segments, `[segments][room][strips * ROWS]`.
    struct Sums {
        float* all;
        int room;

        __device__ float* of(int segment, int col, int strips) const {
            return all + (segment * room + col) * (strips * ROWS);
        }
        /// A row and column's, added in order.
        __device__ float sum(int segments, int col, int row, int strips) const {
            float total = 0.0f;
            for (int s = 0; s < segments; s++) {
                total = total + of(s, col, strips)[row];
            }
            return total;
        }
    };

    /// Up to `8 * TILES` columns, by tensor cores.
    template <int TILES>
    struct Together {
        Sums sums;
        Decoded* decoded;
        float acc[TILES][4] = {};

        /// What the lane decoded, for the warp.
        __device__ void put(Unit u, int turn, int lane) {
            centre<F>(u);
            uint4* to = reinterpret_cast<uint4*>(decoded[turn].w[lane % ROWS] + lane / ROWS * 32);
            to[0] = uint4{u.w[0], u.w[1], u.w[2], u.w[3]};
            to[1] = uint4{u.w[4], u.w[5], u.w[6], u.w[7]};
            Scales s = {};
            s.v[0] = u.d[0];
            if constexpr (SUB) {
                s.v[1] = float(u.s[0]);
                if constexpr (F::HALVES) {
                    s.v[2] = float(u.s[1]);
                }
            }
            if constexpr (F::SPLIT) {
                s.v[1] = u.d[1];
            }
            if constexpr (F::MINIMUM != 0) {
                s.v[MINIMUM_AT] = u.d_min;
                if constexpr (SUB) {
                    s.v[MINIMUM_AT + 1] = float(u.m[0]);
                    if constexpr (F::HALVES) {
                        s.v[MINIMUM_AT + 2] = float(u.m[1]);
                    }
                }
            }
            decoded[turn].scales[lane] = s;
            __syncwarp();
        }

        __device__ void add(const Unit&, int turn, const Chunk& x, int, int i, bool both, int lane) {
            const Decoded& from = decoded[turn];
            uint32_t a[2][4];
            Scales scales[2][2];
#pragma unroll
            for (int u = 0; u < 2; u++) {
                load_matrices(a[u], from.w[lane % 16] + u * 32 + lane / 16 * 16);
                scales[u][0] = from.scales[u * ROWS + lane / 4];
                scales[u][1] = from.scales[u * ROWS + lane / 4 + 8];
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                uint32_t b[4];
                // Both halves of a unit of 8 columns, then of the next unit.
                load_matrices(b, x.q + (n * 8 + lane % 8) * COLUMN + (i + lane / 16) * 32 + lane / 8 % 2 * 16);
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const uint32_t at = (i + u) * x.room + n * 8 + lane % 4 * 2;
                    unit(acc[n], a[u], b[2 * u], b[2 * u + 1], scales[u], *reinterpret_cast<const float2*>(x.d + at),
                         F::MINIMUM != 0 ? *reinterpret_cast<const uint2*>(x.sums + at) : uint2{}, u == 0 || both);
                }
            }
        }

        /// Adds a unit's terms to the sums of rows `lane / 4` and 8 more, and of columns `lane % 4 * 2` and the next.
        __device__ static void unit(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const Scales (&scales)[2], float2 d_a, uint2 sums, bool there) {
            // As in `Many::unit`.
            constexpr int start = int(ROUND_BITS);
            int first[4], other[4];
            if constexpr (F::HALVES || F::SPLIT) {
                products16(first, start, a[0], a[1], b0);
                products16(other, start, a[2], a[3], b1);
            } else {
                products32(first, start, a, b0, b1);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float(&s)[VECTOR] = scales[j / 2].v;
                const float d = j % 2 == 0 ? d_a.x : d_a.y, by = s[0] * d;
                float sum = acc[j];
                if constexpr (F::SPLIT) {
                    sum = fma(__int_as_float(first[j]) - ROUND, by, sum);
                    sum = fma(__int_as_float(other[j]) - ROUND, s[1] * d, sum);
                } else if constexpr (F::HALVES) {
                    const float whole = fma(__int_as_float(first[j]), s[1], -ROUND * s[1]) +
                                        fma(__int_as_float(other[j]), s[2], -ROUND * s[2]);
                    sum = fma(whole, by, sum);
                } else if constexpr (SUB) {
                    sum = fma(fma(__int_as_float(first[j]), s[1], -ROUND * s[1]), by, sum);
                } else {
                    sum = fma(__int_as_float(first[j]) - ROUND, by, sum);
                }
                if constexpr (F::MINIMUM != 0) {
                    const uint32_t two = j % 2 == 0 ? sums.x : sums.y;
                    const float low = float(int16_t(two & 0xffff)), high = float(int16_t(two >> 16));
                    const float m = !SUB        ? low + high
                                    : F::HALVES ? fma(s[MINIMUM_AT + 1], low, s[MINIMUM_AT + F::HALVES + 1] * high)
                                                : s[MINIMUM_AT + 1] * (low + high);
                    const float scale = s[MINIMUM_AT] * d;
                    sum = fma(m, F::MINIMUM > 0 ? scale : -scale, sum);
                }
                acc[j] = there ? sum : acc[j];
            }
        }

        __device__ void end(int segment, int strip, int strips, int lane) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums.of(segment, n * 8 + lane % 4 * 2 + j % 2, strips)[strip * ROWS + lane / 4 + j / 2 * 8] =
                        acc[n][j];
                    acc[n][j] = 0.0f;
                }
            }
        }
    };

    /// The code book, before `Group::walk`.
    __device__ static const uint32_t* prepare(uint32_t* room) {
        for (int i = threadIdx.x; i < F::GRID / 4; i += blockDim.x) {
            start_copy<16>(room + 4 * i, F::codebook() + 4 * i);
        }
        return room;
    }
};

/// Words that the host lays out shared memory by. Twin: `Layout` in `ops/few.rs`.
#define STRATA_FEW_LAYOUT(F, NAME)                                                                                \
    extern "C" __device__ uint32_t strata_few_##NAME[5] = {F::GRID * 4, 2 * sizeof(Few<F>::Decoded), Few<F>::ROW, \
                                                           Few<F>::COLUMN_BYTES, Few<F>::STAGES};

}  // namespace strata
