// Products of block-format rows with many quantised columns on Hopper: weights and activations as f16 integers.
//
// f16 holds a weight times its sub-scale exactly (where it doesn't, two of them do), and the tensor cores' f32 sums of
// such products stay below 2^24, so that they are the contract's integers, already as floats: two f32 operations to a
// value and unit are left, the scales' product and the FMA. Minimums are a second product, with the minimum in place of
// the weights.
//
// Blocks of threads stay and take tiles of `ROWS` rows and up to `COLS` columns one after the other. Half of the warps
// bring blocks as they are, a few at a time, decode them into a ring of chunks and start the copies of the columns,
// without regard to where a tile ends; the others multiply. Shared memory has the weights as bytes; they become f16 in
// the registers that the matrix instruction reads them from.
#pragma once

#include <type_traits>

#include "shared.cuh"
#include "terms.cuh"

namespace strata {

/// A counter that threads tell and wait on.
struct Barrier {
    uint64_t state;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __device__ void init(int times) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(&state)), "r"(times) : "memory");
    }
    /// What the warp did before is done.
    __device__ void tell(int lane) {
        __syncwarp();
        if (lane == 0) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_at(&state)) : "memory");
        }
    }
    /// This thread's copies until here are done, once they are.
    __device__ void tell_copied() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_at(&state)) : "memory");
    }
    __device__ void wait(uint32_t phase) {
        asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(
                         shared_at(&state)),
                     "r"(phase)
                     : "memory");
    }
#endif
};

/// Pairs of f16.
__device__ inline uint32_t add_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
/// A pair of integers in -512..512, as f16.
__device__ inline uint32_t integer_pair(int low, int high) {
    return add_pair(0x66006600u + low + (uint32_t(high) << 16), 0xe600e600u);
}
/// Two bytes from 0 to 255 as f16 of 1024 more.
__device__ inline uint32_t low_pair(uint32_t bytes) { return __byte_perm(bytes, 0x64646464u, 0x4140); }
__device__ inline uint32_t high_pair(uint32_t bytes) { return __byte_perm(bytes, 0x64646464u, 0x4342); }
/// -1024 and -1152, in pairs.
constexpr uint32_t LESS_1024 = 0xe400e400u, LESS_1152 = 0xe480e480u;

/// 16 values of a column as f16, in the order that the matrix instruction meets them: a lane has four consecutive
/// weights, and takes the first two for its values 2 l, 2 l + 1, and the others for 2 l + 8, 2 l + 9 of 16.
__device__ inline void widen(const uint4& q, uint4 (&halves)[2]) {
    const uint32_t words[4] = {q.x ^ 0x80808080u, q.y ^ 0x80808080u, q.z ^ 0x80808080u, q.w ^ 0x80808080u};
    uint32_t out[8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out[k] = add_pair(low_pair(words[k]), LESS_1152);
        out[k + 4] = add_pair(high_pair(words[k]), LESS_1152);
    }
    halves[0] = uint4{out[0], out[1], out[2], out[3]};
    halves[1] = uint4{out[4], out[5], out[6], out[7]};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// `c = a * b`, or `c += a * b`, by four warps: `a` 64 rows of 16 values in registers, `b` columns of 16 values in
// shared memory. Not done before `multiplied`.

/// 16 columns.
__device__ inline void multiply(float (&c)[8], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 32 columns.
__device__ inline void multiply(float (&c)[16], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 48 columns.
__device__ inline void multiply(float (&c)[24], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %29, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, %28, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 64 columns.
__device__ inline void multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ inline void before_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until all products but those of the last `LEFT` commits are done.
template <int LEFT, int N>
__device__ inline void multiplied(float (&c)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(c[i])::"memory");
    }
}

#endif

/// A tile of a product: `rows` rows at `weights` with `cols` columns.
struct Tile {
    const uint8_t* weights;
    /// The columns' numbers, or null where they follow `first`.
    const uint32_t* which;
    uint32_t first;
    /// `out[col * stride + row]`
    float* out;
    int rows, cols;
    /// Finished sums are multiplied with it.
    float scale;
};

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

template <class F>
struct Hopper {
    static constexpr int ROWS = 128, COLS = 128, THREADS = 512, BLOCKS = 1;
    /// Units of a chunk, chunks of the ring, units that are brought at a time.
    static constexpr int CHUNK = 2, CHUNKS = 4, BROUGHT = 8;
    static constexpr int PER_BLOCK = F::LEN / 32;
    /// Warps of each kind.
    static constexpr int WARPS = THREADS / WARP / 2;
    /// 16-byte pieces of a row as it is brought, whole ones; odd, against bank conflicts.
    static constexpr int RAW = (BROUGHT / PER_BLOCK * F::BYTES + 30) / 16 | 1;

    using Scales = std::conditional_t<SECOND<F>, ScalesTwo, ScalesOne>;

    struct alignas(1024) Chunk {
        /// Per column 128 bytes: 64 values of f16, the 16-byte pieces swizzled as the matrix instruction wants them.
        uint4 q[COLS][8];
        /// Eight rows start in different banks.
        uint8_t w[ROWS][CHUNK * 32 + 16];
        Scales scales[CHUNK][ROWS];
        /// Of 16 columns each, those that one thread has next to each other.
        float d_a[CHUNK][COLS];
    };

    struct Shared {
        Chunk chunks[CHUNKS];
        uint4 raw[2][ROWS][RAW];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
        /// Chunks that are filled, chunks that are free.
        Barrier filled[CHUNKS], emptied[CHUNKS];
        /// The tile after the one that is decoded, per warp.
        Tile next[WARPS];
    };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    /// Multiplies the tiles `tiles(i)`, `i` from the block's number on in steps of the grid, up to the first without
    /// rows.
    template <class Tiles>
    __device__ static void run(Shared& shared, const Columns& x, const uint16_t* halves, int units, size_t stride,
                               Tiles tiles) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (threadIdx.x == 0) {
            for (int i = 0; i < CHUNKS; i++) {
                shared.filled[i].init(WARPS + THREADS / 2);
                shared.emptied[i].init(WARPS);
            }
        }
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
        __syncthreads();
        if (warp >= WARPS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
            fill(shared, x.d, halves, units, tiles, warp - WARPS, lane);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
            multiply_all(shared, units, stride, tiles, warp, lane);
        }
    }

   private:
    /// Where a chunk is in the ring.
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

    /// Starts to bring a warp's rows, units from `from` on. Pieces of 16 bytes that have a byte of them are wholly in
    /// the same allocation.
    __device__ static void bring(Shared& shared, int slot, const Tile& tile, uint32_t row_bytes, int units, int from,
                                 int warp, int lane) {
        const int bytes = min(BROUGHT, units - from) / PER_BLOCK * F::BYTES;
        const uint8_t* at = tile.weights + size_t(from / PER_BLOCK) * F::BYTES;
#pragma unroll 1
        for (int i = 0; i < (ROWS / WARPS * RAW + WARP - 1) / WARP; i++) {
            const int r = (i * WARP + lane) / RAW, piece = (i * WARP + lane) % RAW, row = warp * (ROWS / WARPS) + r;
            const uint8_t* block = at + size_t(min(row, tile.rows - 1)) * row_bytes;
            const int past = reinterpret_cast<uintptr_t>(block) & 15;
            if (r < ROWS / WARPS && piece * 16 < past + bytes) {
                start_copy<16>(&shared.raw[slot][row][piece], block - past + piece * 16, 16);
            }
        }
    }

    /// What a thread brings of a tile's columns: one of the eight pieces of every 32nd column, and a scale.
    struct Source {
        const uint16_t* halves;
        const float* d;
        /// From `halves` on.
        uint32_t own[COLS / 32];

        __device__ Source(const Tile& tile, const float* d, const uint16_t* halves, int units, int thread) {
            auto col = [&](int wanted) {
                const int c = min(wanted, tile.cols - 1);
                return tile.which == nullptr ? tile.first + c : tile.which[c];
            };
#pragma unroll
            for (int i = 0; i < COLS / 32; i++) {
                own[i] = col(thread / 8 + i * 32) * uint32_t(units) * 32 + thread % 8 * 8;
            }
            this->halves = halves;
            this->d = d + size_t(col(thread % COLS)) * units + thread / COLS;
        }

        /// Starts to bring the next chunk's, of which there are `left` units.
        __device__ void bring(Chunk& chunk, int left, int thread) {
#pragma unroll
            for (int i = 0; i < COLS / 32; i++) {
                const int col = thread / 8 + i * 32;
                start_copy<16>(&chunk.q[col][thread % 8 ^ col % 8], halves + own[i], thread % 8 / 4 < left ? 16 : 0);
            }
            const int c = thread % COLS;
            start_copy<4>(&chunk.d_a[thread / COLS][c / 16 * 16 + c % 8 / 2 * 4 + c % 16 / 8 * 2 + c % 2], d,
                          thread / COLS < left ? 4 : 0);
            halves += CHUNK * 32, d += CHUNK;
        }
    };

    /// A unit that isn't `there` gets scales that add nothing: no sum is -0.
    __device__ static void decode(Chunk& chunk, const Unit& u, int row, int part, bool there) {
        uint4* to = reinterpret_cast<uint4*>(chunk.w[row] + part * 32);
        // Signed weights as 128 more.
        constexpr uint32_t flip = F::MINIMUM != 0 || F::ZERO > 0 ? 0 : 0x80808080u,
                           more = F::ZERO > 0 ? (128 - F::ZERO) * 0x01010101u : 0;
        to[0] = uint4{(u.w[0] ^ flip) + more, (u.w[1] ^ flip) + more, (u.w[2] ^ flip) + more, (u.w[3] ^ flip) + more};
        to[1] = uint4{(u.w[4] ^ flip) + more, (u.w[5] ^ flip) + more, (u.w[6] ^ flip) + more, (u.w[7] ^ flip) + more};
        Scales scales;
        scales.d = there ? u.d[0] : 0.0f;
        scales.s = SCALED<F> ? integer_pair(u.s[0], u.s[1]) : 0;
        if constexpr (SECOND<F>) {
            const float second = F::SPLIT ? u.d[1] : F::MINIMUM > 0 ? u.d_min : -u.d_min;
            scales.second = there ? second : 0.0f;
            scales.m = F::SPLIT ? 0 : integer_pair(u.m[0], u.m[1]);
        }
        chunk.scales[part][row] = scales;
    }

    /// The warps that fill chunks. Each brings and decodes its own rows.
    template <class Tiles>
    __device__ static void fill(Shared& shared, const float* d, const uint16_t* halves, int units, Tiles tiles,
                                int warp, int lane) {
        const int thread = warp * WARP + lane, row = warp * (ROWS / WARPS) + lane % 16, part = lane / 16;
        const uint32_t row_bytes = uint32_t(units / PER_BLOCK) * F::BYTES;
        // Not in registers: it is needed once.
        Tile& next = shared.next[warp];
        Turn turn;
        int slot = 0;
        uint32_t number = blockIdx.x;
        Tile tile = tiles(number);
        if (tile.rows == 0) {
            return;
        }
        bring(shared, slot, tile, row_bytes, units, 0, warp, lane);
        Source source(tile, d, halves, units, thread);
        while (tile.rows > 0) {
            number += gridDim.x;
            __syncwarp();
            if (lane == 0) {
                next = tiles(number);
            }
            __syncwarp();
            const uint32_t own =
                uint32_t(reinterpret_cast<uintptr_t>(tile.weights)) + min(row, tile.rows - 1) * row_bytes;
            const uint8_t* block = nullptr;
            for (int from = 0; from < units; from += CHUNK) {
                const int at = from % BROUGHT;
                if (at == 0) {
                    await_all_copies();
                    __syncwarp();
                    if (from + BROUGHT < units) {
                        bring(shared, slot ^ 1, tile, row_bytes, units, from + BROUGHT, warp, lane);
                    } else if (next.rows > 0) {
                        bring(shared, slot ^ 1, next, row_bytes, units, 0, warp, lane);
                    }
                    block = reinterpret_cast<const uint8_t*>(shared.raw[slot][row]) +
                            ((own + from / PER_BLOCK * F::BYTES) & 15);
                    slot ^= 1;
                }
                shared.emptied[turn.chunk].wait(turn.phase ^ 1);
                Chunk& chunk = shared.chunks[turn.chunk];
                source.bring(chunk, units - from, thread);
                shared.filled[turn.chunk].tell_copied();
                const int unit = at + part;
                decode(chunk, F::unit(block + unit / PER_BLOCK * F::BYTES, unit % PER_BLOCK, shared.grid), row, part,
                       from + part < units);
                shared.filled[turn.chunk].tell(lane);
                turn.next();
            }
            tile = next;
            if (tile.rows > 0) {
                source = Source(tile, d, halves, units, thread);
            }
        }
    }

    /// The warps that multiply.
    template <class Tiles>
    __device__ static void multiply_all(Shared& shared, int units, size_t stride, Tiles tiles, int warp, int lane) {
        Turn turn;
        uint32_t number = blockIdx.x;
        Tile tile = tiles(number);
        while (tile.rows > 0) {
            number += gridDim.x;
            const Tile next = tiles(number);
            if (tile.cols > 96) {
                multiply_tile<64>(shared, units, stride, tile, turn, warp, lane);
            } else if (tile.cols > 64) {
                multiply_tile<48>(shared, units, stride, tile, turn, warp, lane);
            } else if (tile.cols > 32) {
                multiply_tile<32>(shared, units, stride, tile, turn, warp, lane);
            } else {
                multiply_tile<16>(shared, units, stride, tile, turn, warp, lane);
            }
            tile = next;
        }
    }

    /// A unit's weights of 16 rows, times their sub-scales, as the matrix instruction wants them: the unit's halves.
    /// What f16 can't hold of the products is in `rest`. A lane has rows `lane / 4` and 8 more.
    struct Weights {
        uint32_t a[2][4];
        uint32_t rest[F::LARGE ? 2 : 1][4];
        uint32_t m[SECOND<F> ? 2 : 1];
        float d[2], second[SECOND<F> ? 2 : 1];

        __device__ void load(const Chunk& chunk, int part, int row, int lane) {
            // Rows 0..8 and 8..16 of the first 16 bytes, then of the others: a lane has four consecutive ones each
            // time.
            uint32_t w[4];
            load_matrices(w, chunk.w[row + lane % 16] + part * 32 + lane / 16 * 16);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Scales scales = chunk.scales[part][row + lane / 4 + 8 * r];
                d[r] = scales.d;
                if constexpr (SECOND<F>) {
                    second[r] = scales.second, m[r] = scales.m;
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t s = __byte_perm(scales.s, 0, h == 0 ? 0x1010 : 0x3232);
                    const uint32_t pairs[2] = {low_pair(w[2 * h + r]), high_pair(w[2 * h + r])};
                    constexpr uint32_t less = F::MINIMUM != 0 ? LESS_1024 : LESS_1152;
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        if constexpr (F::LARGE) {
                            const uint32_t value = add_pair(pairs[k], less);
                            const uint32_t near = multiply_pair(value, s);
                            a[h][r + 2 * k] = near;
                            rest[h][r + 2 * k] = fma_pair(value, s, near ^ 0x80008000u);
                        } else if constexpr (SCALED<F>) {
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
            before_multiply();
            if (term == 0) {
                multiply(c, a[0], b, 0);
                if constexpr (!F::SPLIT) {
                    multiply(c, a[1], b + 2, 1);
                }
                if constexpr (F::LARGE) {
                    multiply(c, rest[0], b, 1);
                    multiply(c, rest[1], b + 2, 1);
                }
            } else if constexpr (F::SPLIT) {
                multiply(c, a[1], b + 2, 0);
            } else if constexpr (SECOND<F>) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t upper = __byte_perm(m[0], 0, h == 0 ? 0x1010 : 0x3232);
                    const uint32_t lower = __byte_perm(m[1], 0, h == 0 ? 0x1010 : 0x3232);
                    const uint32_t both[4] = {upper, lower, upper, lower};
                    multiply(c, both, b + 2 * h, h);
                }
            }
            commit_multiply();
        }
    };

    /// Twice `N` columns. While four warps' instructions are on one half, the warps scale and add the other.
    template <int N>
    __device__ static void multiply_tile(Shared& shared, int units, size_t stride, const Tile& tile, Turn& turn,
                                         int warp, int lane) {
        constexpr int TERMS = SECOND<F> ? 2 : 1;
        float sum[2][N / 2] = {};
        const int row = warp * 16;
        for (int from = 0; from < units; from += CHUNK) {
            shared.filled[turn.chunk].wait(turn.phase);
            // The matrix instruction sees what was copied.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            const Chunk& chunk = shared.chunks[turn.chunk];
            // Shared memory's address in 16 bytes; 1,024 bytes from one group of 8 columns to the next; pieces swizzled
            // over 128 bytes.
            const uint64_t columns = uint64_t(shared_at(chunk.q) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
            float c[2][N / 2];
            Weights weights[CHUNK];
            weights[0].load(chunk, 0, row, lane);
            weights[0].start(c[0], columns, 0);
            weights[0].start(c[1], columns + N * 8, 0);
#pragma unroll
            for (int step = 0; step < CHUNK * TERMS; step++) {
                if (step == TERMS - 1) {
                    weights[1].load(chunk, 1, row, lane);
                }
                const int part = step / TERMS, term = step % TERMS, next = (step + 1) / TERMS;
                const Weights& w = weights[part];
                const float* d_a = chunk.d_a[part] + lane % 4 * 4;
                const float d[2] = {term == 0 ? w.d[0] : w.second[0], term == 0 ? w.d[1] : w.second[SECOND<F>]};
                const bool more = step + 1 < CHUNK * TERMS;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    // The first are there when the products are.
                    float4 by[2];
#pragma unroll
                    for (int i = 0; i < 2 && i < N / 16; i++) {
                        by[i] = *reinterpret_cast<const float4*>(d_a + n * N + i * 16);
                    }
                    if (more || n == 0) {
                        multiplied<1>(c[n]);
                    } else {
                        multiplied<0>(c[n]);
                    }
                    add<N>(c[n], d, by, d_a + n * N, tile.cols - n * N, sum[n]);
                    if (more) {
                        weights[next % CHUNK].start(c[n], columns + n * N * 8 + next * 4, (step + 1) % TERMS);
                    }
                }
            }
            shared.emptied[turn.chunk].tell(lane);
            turn.next();
            const bool last = from + CHUNK >= units;
            if (last || (from + CHUNK) % SEGMENT == 0) {
                put<N>(tile, stride, from < SEGMENT, last, row + lane / 4, lane % 4 * 2, sum);
            }
        }
    }

    /// Integers times scales, of the columns that are there.
    template <int N>
    __device__ static void add(const float (&c)[N / 2], const float (&d)[2], float4 (&by)[2], const float* d_a,
                               int cols, float (&sum)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const float4 now = by[i % 2];
            if (i + 2 < N / 16) {
                by[i % 2] = *reinterpret_cast<const float4*>(d_a + (i + 2) * 16);
            }
            // 16 columns: the same for all threads.
            if (i < N / 16 - 2 || i * 16 < cols) {
                const float four[4] = {now.x, now.y, now.z, now.w};
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[i * 8 + j] = fma(c[i * 8 + j], d[j / 2 % 2] * four[j / 4 * 2 + j % 2], sum[i * 8 + j]);
                }
            }
        }
    }

    /// Adds a segment's sums to what is there, and starts the next.
    template <int N>
    __device__ static void put(const Tile& tile, size_t stride, bool first, bool last, int row, int col,
                               float (&sum)[2][N / 2]) {
        float* at = tile.out + col * stride + row;
        // Addresses are not to be computed before the sums are, when there are no registers for them.
        asm volatile("" : "+l"(at));
        const bool rows[2] = {row < tile.rows, row + 8 < tile.rows};
        const int cols = tile.cols - col;
        const float scale = last ? tile.scale : 1.0f;
        float before[N] = {};
        if (!first) {
            const float* from = at;
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (rows[i / 2 % 2] && i / 4 * 8 + i % 2 < cols) {
                    before[i] = from[i / 2 % 2 * 8 + (i % 2 == 0 ? 0 : stride)];
                }
                if (i % 4 == 3) {
                    from += 8 * stride;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            float& value = sum[i / (N / 2)][i % (N / 2)];
            if (rows[i / 2 % 2] && i / 4 * 8 + i % 2 < cols) {
                at[i / 2 % 2 * 8 + (i % 2 == 0 ? 0 : stride)] = (before[i] + value) * scale;
            }
            value = 0.0f;
            if (i % 4 == 3) {
                at += 8 * stride;
            }
        }
    }
#endif
};

}  // namespace strata
