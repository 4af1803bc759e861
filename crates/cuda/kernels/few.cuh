// Products of block-format rows with a few quantised columns: several sequences, or a draft that is verified.
//
// A warp has a strip of eight rows and walks them in chunks of units. Chunks of rows and columns are on their way to a
// ring in shared memory while earlier ones are multiplied; rows are the warp's own business, columns are shared by the
// warps of a group. A lane decodes a unit of one row, four units of the strip at a time; the warp's integer tensor cores
// multiply them, with columns in the place of rows: strips are small, so that many warps share a matrix. The contract's
// sum of a row and column is a register of one lane: terms go nowhere else. Segments have sums of their own, added at
// the end: a long row's can be other groups' work.
#pragma once

#include "many.cuh"

namespace strata {

/// `a * b` of a unit, and of its halves: `a` 16 columns, `b` 8 rows.
__device__ inline void products32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
        "%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
#else
    c[0] = c[1] = c[2] = c[3] = 0;
    multiply32(c, a, b0, b1);
#endif
}
__device__ inline void products16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
#else
    c[0] = c[1] = c[2] = c[3] = 0;
    multiply16(c, a0, a1, b);
#endif
}

/// What groups and rings are made of, for rows of format `F` and up to `COLS` columns: 8, 16 or 32. Twin: `ops/few.rs`.
template <class F, int COLS>
struct Few {
    static constexpr int ROWS = 8, CHUNK = 8, PER_BLOCK = F::LEN / 32;
    /// Units that are decoded at once.
    static constexpr int STEP = WARP / ROWS;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // Nothing is copied meanwhile.
    static constexpr int STAGES = 2;
#else
    static constexpr int STAGES = COLS < 32 ? 3 : 2;
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

    /// What a unit has beside its weights.
    static constexpr bool SUB = SCALED<F> && !F::SPLIT;
    static constexpr int HALVES = F::HALVES ? 2 : 1;
    static constexpr int COUNT = 1 + (SUB ? HALVES : 0) + (F::SPLIT ? 1 : 0) + (F::MINIMUM == 0 ? 0 : SUB ? 1 + HALVES : 1);
    static constexpr int VECTOR = COUNT <= 2 ? COUNT : COUNT <= 4 ? 4 : 8;
    struct alignas(VECTOR < 4 ? VECTOR * 4 : 16) Scales {
        /// The scale; integer sub-scales, or the other scale; the minimum's scale, and integer minimums where they
        /// aren't 1.
        uint32_t v[VECTOR];
    };
    static constexpr int MINIMUM_AT = SUB ? 1 + HALVES : 1;
    /// What a warp decodes to: units of its rows, which start in different banks.
    static constexpr uint32_t LINE = STEP * 32 + 16;
    struct alignas(16) Decoded {
        uint8_t w[ROWS][LINE];
        Scales scales[WARP];
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
            const int row = lane / 4;
            if (row < rows) {
                const uint8_t* first = weights + row * row_bytes + from / PER_BLOCK * F::BYTES;
                const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(first)) & 15, whole = off + bytes;
                const uint32_t own = lane % 4 * 16;
                first += int(own) - int(off);
                const SharedAddress to = shared_at(ring) + stage * stage_bytes() + (strip * ROWS + row) * ROW + own;
#pragma unroll
                for (uint32_t at = 0; at < ROW; at += 64) {
                    if (at + own < whole) {
                        start_copy<16>(to + at, first + at);
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
            const int lane = threadIdx.x % WARP;
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
                    const int i = number + lane / ROWS;
                    return F::unit(own + i / PER_BLOCK * F::BYTES, i % PER_BLOCK, grid);
                };
                if (F::LEN == 256 || here == CHUNK) {
                    Unit u = unit(0);
#pragma unroll
                    for (int i = 0; i < CHUNK; i += STEP) {
                        multiply.put(u, i / STEP % 2, lane);
                        if (i + STEP < CHUNK) {
                            u = unit(i + STEP);
                        }
                        multiply.add(i / STEP % 2, columns, i, STEP, lane);
                    }
                } else {
#pragma unroll 1
                    for (int i = 0; i < here; i += STEP) {
                        Unit u = {};
                        if (i + lane / ROWS < here) {
                            u = unit(i);
                        }
                        multiply.put(u, i / STEP % 2, lane);
                        multiply.add(i / STEP % 2, columns, i, here - i, lane);
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

    /// The sums of segments, `[segments][COLS][strips * ROWS]`; of a group that has all of them, in order, their sum.
    struct Sums {
        float* all;
        bool whole;

        __device__ float* of(int segment, int col, int strips) const {
            return all + (segment * COLS + col) * (strips * ROWS);
        }
        __device__ void put(int segment, int col, int row, int strips, float sum) const {
            float& to = of(whole ? 0 : segment, col, strips)[row];
            to = whole ? (segment == 0 ? 0.0f : to) + sum : sum;
        }
        /// A row and column's, added in order.
        __device__ float sum(int segments, int col, int row, int strips) const {
            float total = 0.0f;
            for (int s = 0; s < (whole ? 1 : segments); s++) {
                total = total + of(s, col, strips)[row];
            }
            return total;
        }
    };

    /// The columns by tensor cores.
    struct Together {
        /// Sums that a lane has of 16 columns, or of eight: of two rows each.
        static constexpr int TILES = (COLS + 15) / 16, OWN = COLS < 16 ? 2 : 4;
        Sums sums;
        Decoded* decoded;
        float acc[TILES][OWN] = {};

        /// What the lane decoded, for the warp.
        __device__ void put(Unit u, int turn, int lane) {
            centre<F>(u);
            uint4* to = reinterpret_cast<uint4*>(decoded[turn].w[lane % ROWS] + lane / ROWS * 32);
            to[0] = uint4{u.w[0], u.w[1], u.w[2], u.w[3]};
            to[1] = uint4{u.w[4], u.w[5], u.w[6], u.w[7]};
            Scales s = {};
            s.v[0] = to_bits(u.d[0]);
            if constexpr (SUB) {
                s.v[1] = uint32_t(u.s[0]);
                if constexpr (F::HALVES) {
                    s.v[2] = uint32_t(u.s[1]);
                }
            }
            if constexpr (F::SPLIT) {
                s.v[1] = to_bits(u.d[1]);
            }
            if constexpr (F::MINIMUM != 0) {
                s.v[MINIMUM_AT] = to_bits(u.d_min);
                if constexpr (SUB) {
                    s.v[MINIMUM_AT + 1] = uint32_t(u.m[0]);
                    if constexpr (F::HALVES) {
                        s.v[MINIMUM_AT + 2] = uint32_t(u.m[1]);
                    }
                }
            }
            decoded[turn].scales[lane] = s;
            __syncwarp();
        }

        /// Adds `here` units from number `i` of a chunk on, at most `STEP`.
        __device__ void add(int turn, const Chunk& x, int i, int here, int lane) {
            const Decoded& from = decoded[turn];
#pragma unroll
            for (int two = 0; two < STEP; two += 2) {
                // Both halves of a unit of the rows, then of the next unit.
                uint32_t b[4];
                load_matrices(b, from.w[lane % 8] + two * 32 + lane / 8 * 16);
                Scales scales[2][2];
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    scales[u][0] = from.scales[(two + u) * ROWS + lane % 4 * 2];
                    scales[u][1] = from.scales[(two + u) * ROWS + lane % 4 * 2 + 1];
                }
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    uint32_t a[2][4] = {};
                    if constexpr (COLS < 16) {
                        // The same of eight columns.
                        uint32_t both[4];
                        load_matrices(both, x.q + lane % 8 * COLUMN + (i + two) * 32 + lane / 8 * 16);
                        a[0][0] = both[0], a[0][2] = both[1], a[1][0] = both[2], a[1][2] = both[3];
                    } else {
#pragma unroll
                        for (int u = 0; u < 2; u++) {
                            load_matrices(a[u],
                                          x.q + (n * 16 + lane % 16) * COLUMN + (i + two + u) * 32 + lane / 16 * 16);
                        }
                    }
#pragma unroll
                    for (int u = 0; u < 2; u++) {
                        const uint32_t at = (i + two + u) * x.room + n * 16 + lane / 4;
                        float d[OWN / 2];
                        uint32_t sums[OWN / 2];
#pragma unroll
                        for (int c = 0; c < OWN / 2; c++) {
                            d[c] = x.d[at + 8 * c], sums[c] = F::MINIMUM != 0 ? x.sums[at + 8 * c] : 0;
                        }
                        unit(acc[n], a[u], b[2 * u], b[2 * u + 1], scales[u], d, sums, two + u < here);
                    }
                }
            }
        }

        /// Adds a unit's terms to the sums of columns `lane / 4` and 8 more, and of rows `lane % 4 * 2` and the next.
        __device__ static void unit(float (&acc)[OWN], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const Scales (&scales)[2], const float (&d)[OWN / 2],
                                    const uint32_t (&sums)[OWN / 2], bool there) {
            int first[4], other[4];
            if constexpr (F::HALVES || F::SPLIT) {
                products16(first, a[0], a[1], b0);
                products16(other, a[2], a[3], b1);
            } else {
                products32(first, a, b0, b1);
            }
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const uint32_t(&s)[VECTOR] = scales[j % 2].v;
                const float d_a = d[j / 2], by = from_bits(s[0]) * d_a;
                float sum = acc[j];
                if constexpr (F::SPLIT) {
                    sum = fma(float(first[j]), by, sum);
                    sum = fma(float(other[j]), from_bits(s[1]) * d_a, sum);
                } else if constexpr (F::HALVES) {
                    sum = fma(float(first[j] * int(s[1]) + other[j] * int(s[2])), by, sum);
                } else if constexpr (SUB) {
                    sum = fma(float(first[j] * int(s[1])), by, sum);
                } else {
                    sum = fma(float(first[j]), by, sum);
                }
                if constexpr (F::MINIMUM != 0) {
                    const int low = int16_t(sums[j / 2] & 0xffff), high = int16_t(sums[j / 2] >> 16);
                    const int m = !SUB        ? low + high
                                  : F::HALVES ? int(s[MINIMUM_AT + 1]) * low + int(s[MINIMUM_AT + F::HALVES + 1]) * high
                                              : int(s[MINIMUM_AT + 1]) * (low + high);
                    const float scale = from_bits(s[MINIMUM_AT]) * d_a;
                    sum = fma(float(m), F::MINIMUM > 0 ? scale : -scale, sum);
                }
                acc[j] = there ? sum : acc[j];
            }
        }

        __device__ void end(int segment, int strip, int strips, int lane) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    sums.put(segment, n * 16 + lane / 4 + j / 2 * 8, strip * ROWS + lane % 4 * 2 + j % 2, strips,
                             acc[n][j]);
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
#define STRATA_FEW_LAYOUT(F, NAME)                                                                                  \
    extern "C" __device__ uint32_t strata_few_##NAME[6] = {                                                         \
        F::GRID * 4,       2 * sizeof(Few<F, 8>::Decoded), Few<F, 8>::ROW, Few<F, 8>::COLUMN_BYTES,                 \
        Few<F, 8>::STAGES, Few<F, 32>::STAGES};

}  // namespace strata
