// Products of block-format rows with many quantised columns on Hopper: weights and activations as f16 integers.
//
// f16 holds a weight times its sub-scale exactly (where it doesn't, two of them do), and the tensor cores' f32 sums of such products stay
// below 2^24, so that they are the contract's integers, already as floats: two f32 operations to a value and unit are left, the scales'
// product and the FMA. Minimums are a second product, with the minimum in place of the weights.
//
// Blocks of threads stay and take tiles of `ROWS` rows and up to `COLS` columns one after the other. Half of the warps bring blocks as they
// are, a few at a time, and decode them and the columns into a ring of chunks, without regard to where a tile ends; the others multiply.
#pragma once

#include <type_traits>

#include "few.cuh"

namespace strata {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// A counter that warps tell and wait on.
struct Barrier {
    uint64_t state;

    __device__ void init(int warps) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(warps) : "memory");
    }
    /// What the warp did before is done.
    __device__ void tell(int lane) {
        __syncwarp();
        if (lane == 0) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
        }
    }
    __device__ void wait(uint32_t phase) {
        asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(
                         shared_address(&state)),
                     "r"(phase)
                     : "memory");
    }
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// `c = a * b`, or `c += a * b`, by four warps: `a` 64 rows of 16 values in registers, `b` columns of 16 values in shared memory. Not done
// before `multiplied`.

/// 16 columns.
__device__ inline void multiply(float (&c)[8], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0; "
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 32 columns.
__device__ inline void multiply(float (&c)[16], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                   "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 48 columns.
__device__ inline void multiply(float (&c)[24], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0; "
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23}, "
                 "{%24, %25, %26, %27}, %28, p, 1, 1, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                   "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
                   "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 64 columns.
__device__ inline void multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                   "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
                   "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                   "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
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
    /// Words of a row as it is brought, from a multiple of four bytes on; odd, against bank conflicts.
    static constexpr int WORDS = (BROUGHT / PER_BLOCK * F::BYTES + (F::ALIGN == 4 ? 0 : 4 - F::ALIGN) + 3) / 4;
    static constexpr int RAW = WORDS | 1;
    static constexpr bool SCALED = F::HALVES || F::GRID > 0 || F::LEN == 256;
    /// Whether a unit has two terms.
    static constexpr bool TWO = F::MINIMUM != 0 || F::SPLIT;

    using Scales = std::conditional_t<TWO, ScalesTwo, ScalesOne>;

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
        uint32_t raw[2][ROWS][RAW];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
        /// Chunks that are filled, chunks that are free.
        Barrier filled[CHUNKS], emptied[CHUNKS];
    };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    /// Multiplies the tiles `tiles(i)`, `i` from the block's number on in steps of the grid, up to the first without rows.
    template <class Tiles>
    __device__ static void run(Shared& shared, const Columns& x, int units, size_t stride, Tiles tiles) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (threadIdx.x == 0) {
            for (int i = 0; i < CHUNKS; i++) {
                shared.filled[i].init(WARPS);
                shared.emptied[i].init(WARPS);
            }
        }
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
        __syncthreads();
        if (warp >= WARPS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
            fill(shared, x, units, tiles, warp - WARPS, lane);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
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

    /// Starts to bring a warp's rows, units from `from` on.
    __device__ static void bring(uint32_t (*raw)[RAW], const Tile& tile, size_t row_bytes, int units, int from, int warp, int lane) {
        const int bytes = min(BROUGHT, units - from) / PER_BLOCK * F::BYTES;
        const uint8_t* at = tile.weights + size_t(from / PER_BLOCK) * F::BYTES;
#pragma unroll 4
        for (int r = 0; r < ROWS / WARPS; r++) {
            const int row = warp * (ROWS / WARPS) + r;
            const uint8_t* block = at + min(row, tile.rows - 1) * row_bytes;
            const int past = reinterpret_cast<uintptr_t>(block) & 3;
#pragma unroll
            for (int i = 0; i < (WORDS + WARP - 1) / WARP; i++) {
                const int word = i * WARP + lane, left = past + bytes - 4 * word;
                if (left > 0) {
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(&raw[row][word])),
                                 "l"(block - past + 4 * word), "r"(min(left, 4)));
                }
            }
        }
        asm volatile("cp.async.commit_group;");
    }

    /// What a thread brings of a tile's columns: two quarters of a chunk's values, of columns 64 apart, and a scale.
    struct Source {
        uint32_t col[3];

        __device__ Source(const Tile& tile, int thread) {
            const int wanted[3] = {thread / 4, thread / 4 + COLS / 2, thread % COLS};
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int c = min(wanted[i], tile.cols - 1);
                col[i] = tile.which == nullptr ? tile.first + c : tile.which[c];
            }
        }
    };

    struct Piece {
        uint4 q[2];
        float d;

        __device__ void load(const Source& source, const Columns& x, int units, int from, int thread) {
            const int unit = min(from + thread % 4 / 2, units - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                q[i] = reinterpret_cast<const uint4*>(x.q)[(size_t(source.col[i]) * units + unit) * 2 + thread % 2];
            }
            d = x.d[size_t(source.col[2]) * units + min(from + thread / COLS, units - 1)];
        }

        /// The matrix instruction takes from a lane's four consecutive weights the first two for its values 2 l, 2 l + 1, and the others for
        /// 2 l + 8, 2 l + 9 of 16; the columns' values are put in the same places.
        __device__ void store(Chunk& chunk, int thread) const {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = thread / 4 + i * (COLS / 2), piece = thread % 4 * 2;
                const uint32_t words[4] = {q[i].x, q[i].y, q[i].z, q[i].w};
                uint32_t first[4], other[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint32_t bytes = words[k] ^ 0x80808080u;
                    first[k] = add_pair(low_pair(bytes), LESS_1152);
                    other[k] = add_pair(high_pair(bytes), LESS_1152);
                }
                chunk.q[col][piece ^ col % 8] = uint4{first[0], first[1], first[2], first[3]};
                chunk.q[col][(piece + 1) ^ col % 8] = uint4{other[0], other[1], other[2], other[3]};
            }
            const int col = thread % COLS;
            chunk.d_a[thread / COLS][col / 16 * 16 + col % 8 / 2 * 4 + col % 16 / 8 * 2 + col % 2] = d;
        }
    };

    __device__ static void decode(Chunk& chunk, const Unit& u, int row, int part) {
        uint4* to = reinterpret_cast<uint4*>(chunk.w[row] + part * 32);
        // Signed weights as 128 more.
        constexpr uint32_t flip = F::MINIMUM != 0 || F::ZERO > 0 ? 0 : 0x80808080u, more = F::ZERO > 0 ? (128 - F::ZERO) * 0x01010101u : 0;
        to[0] = uint4{(u.w[0] ^ flip) + more, (u.w[1] ^ flip) + more, (u.w[2] ^ flip) + more, (u.w[3] ^ flip) + more};
        to[1] = uint4{(u.w[4] ^ flip) + more, (u.w[5] ^ flip) + more, (u.w[6] ^ flip) + more, (u.w[7] ^ flip) + more};
        Scales scales;
        scales.d = u.d[0];
        scales.s = SCALED ? integer_pair(u.s[0], u.s[1]) : 0;
        if constexpr (TWO) {
            scales.second = F::SPLIT ? u.d[1] : F::MINIMUM > 0 ? u.d_min : -u.d_min;
            scales.m = F::SPLIT ? 0 : integer_pair(u.m[0], u.m[1]);
        }
        chunk.scales[part][row] = scales;
    }

    /// The warps that fill chunks. Each brings and decodes its own rows.
    template <class Tiles>
    __device__ static void fill(Shared& shared, const Columns& x, int units, Tiles tiles, int warp, int lane) {
        const int thread = warp * WARP + lane, row = warp * (ROWS / WARPS) + lane % 16, part = lane / 16;
        const size_t row_bytes = size_t(units / PER_BLOCK) * F::BYTES;
        Turn turn;
        int slot = 0;
        uint32_t number = blockIdx.x;
        Tile tile = tiles(number);
        if (tile.rows == 0) {
            return;
        }
        bring(shared.raw[0], tile, row_bytes, units, 0, warp, lane);
        Source source(tile, thread);
        Piece piece;
        piece.load(source, x, units, 0, thread);
        while (tile.rows > 0) {
            number += gridDim.x;
            const Tile next = tiles(number);
            const uint32_t own = uint32_t(reinterpret_cast<uintptr_t>(tile.weights)) + min(row, tile.rows - 1) * uint32_t(row_bytes);
            for (int from = 0; from < units; from += CHUNK) {
                const int at = from % BROUGHT, start = from - at;
                if (at == 0) {
                    asm volatile("cp.async.wait_all;" ::: "memory");
                    __syncwarp();
                    if (start + BROUGHT < units) {
                        bring(shared.raw[slot ^ 1], tile, row_bytes, units, start + BROUGHT, warp, lane);
                    } else if (next.rows > 0) {
                        bring(shared.raw[slot ^ 1], next, row_bytes, units, 0, warp, lane);
                    }
                    slot ^= 1;
                }
                const Piece now = piece;
                if (from + CHUNK < units) {
                    piece.load(source, x, units, from + CHUNK, thread);
                } else if (next.rows > 0) {
                    source = Source(next, thread);
                    piece.load(source, x, units, 0, thread);
                }
                const uint32_t past = (own + start / PER_BLOCK * F::BYTES) & 3;
                const uint8_t* block = reinterpret_cast<const uint8_t*>(shared.raw[slot ^ 1][row]) + past;
                const int unit = at + part;
                shared.emptied[turn.chunk].wait(turn.phase ^ 1);
                Chunk& chunk = shared.chunks[turn.chunk];
                decode(chunk, F::unit(block + unit / PER_BLOCK * F::BYTES, unit % PER_BLOCK, shared.grid), row, part);
                now.store(chunk, thread);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                shared.filled[turn.chunk].tell(lane);
                turn.next();
            }
            tile = next;
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

    /// Twice `N` columns.
    template <int N>
    __device__ static void multiply_tile(Shared& shared, int units, size_t stride, const Tile& tile, Turn& turn, int warp, int lane) {
        float sum[2][N / 2] = {};
        const int row = warp * 16;
        for (int from = 0; from < units; from += CHUNK) {
            shared.filled[turn.chunk].wait(turn.phase);
            const Chunk& chunk = shared.chunks[turn.chunk];
#pragma unroll
            for (int part = 0; part < CHUNK; part++) {
                if (from + part < units) {
                    unit<N>(chunk, part, tile.cols, row, lane, sum);
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

    /// Adds one unit's terms to a warp's sums.
    template <int N>
    __device__ static void unit(const Chunk& chunk, int part, int cols, int row, int lane, float (&sum)[2][N / 2]) {
        // Rows 0..8 and 8..16 of the first 16 bytes, then of the others: a lane has four consecutive ones each time.
        uint32_t w[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(shared_address(chunk.w[row + lane % 16] + part * 32 + lane / 16 * 16)));
        const Scales scales[2] = {chunk.scales[part][row + lane / 4], chunk.scales[part][row + lane / 4 + 8]};
        // Halves of the unit.
        uint32_t a[2][4], rest[F::LARGE ? 2 : 1][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t s = __byte_perm(scales[r].s, 0, h == 0 ? 0x1010 : 0x3232);
                const uint32_t pairs[2] = {low_pair(w[2 * h + r]), high_pair(w[2 * h + r])};
                constexpr uint32_t less = F::MINIMUM != 0 ? LESS_1024 : LESS_1152;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    if constexpr (F::LARGE) {
                        const uint32_t value = add_pair(pairs[k], less);
                        const uint32_t near = multiply_pair(value, s);
                        a[h][r + 2 * k] = near;
                        rest[h][r + 2 * k] = fma_pair(value, s, near ^ 0x80008000u);
                    } else if constexpr (SCALED) {
                        a[h][r + 2 * k] = fma_pair(pairs[k], s, multiply_pair(s, less));
                    } else {
                        a[h][r + 2 * k] = add_pair(pairs[k], less);
                    }
                }
            }
        }
        // Shared memory's address in 16 bytes; 1,024 bytes from one group of 8 columns to the next; pieces swizzled over 128 bytes.
        const uint64_t columns = uint64_t(shared_address(chunk.q) >> 4) + part * 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        float c[2][N / 2];
        before_multiply();
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint64_t b = columns + n * (N * 128 / 16);
            multiply(c[n], a[0], b, 0);
            if constexpr (!F::SPLIT) {
                multiply(c[n], a[1], b + 2, 1);
            }
            if constexpr (F::LARGE) {
                multiply(c[n], rest[0], b, 1);
                multiply(c[n], rest[1], b + 2, 1);
            }
            commit_multiply();
        }
        const float* d_a = chunk.d_a[part] + lane % 4 * 4;
        const float d[2] = {scales[0].d, scales[1].d};
        multiplied<1>(c[0]);
        add<N>(c[0], d, d_a, cols, sum[0]);
        multiplied<0>(c[1]);
        add<N>(c[1], d, d_a + N, cols - N, sum[1]);
        if constexpr (TWO) {
            uint32_t m[2][4];
            if constexpr (!F::SPLIT) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    m[i / 4][i % 4] = __byte_perm(scales[i % 2].m, 0, i < 4 ? 0x1010 : 0x3232);
                }
            }
            before_multiply();
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint64_t b = columns + n * (N * 128 / 16);
                if constexpr (F::SPLIT) {
                    multiply(c[n], a[1], b + 2, 0);
                } else {
                    multiply(c[n], m[0], b, 0);
                    multiply(c[n], m[1], b + 2, 1);
                }
                commit_multiply();
            }
            const float second[2] = {scales[0].second, scales[1].second};
            multiplied<1>(c[0]);
            add<N>(c[0], second, d_a, cols, sum[0]);
            multiplied<0>(c[1]);
            add<N>(c[1], second, d_a + N, cols - N, sum[1]);
        }
    }

    /// Integers times scales, of the columns that are there.
    template <int N>
    __device__ static void add(const float (&c)[N / 2], const float (&d)[2], const float* d_a, int cols, float (&sum)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            // 16 columns: the same for all threads.
            if (i < N / 16 - 2 || i * 16 < cols) {
                const float4 by = *reinterpret_cast<const float4*>(d_a + i * 16);
                const float four[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[i * 8 + j] = fma(c[i * 8 + j], d[j / 2 % 2] * four[j / 4 * 2 + j % 2], sum[i * 8 + j]);
                }
            }
        }
    }

    /// Adds a segment's sums to what is there, and starts the next.
    template <int N>
    __device__ static void put(const Tile& tile, size_t stride, bool first, bool last, int row, int col, float (&sum)[2][N / 2]) {
        float* at = tile.out + col * stride + row;
        // Addresses are not to be computed before the sums are, when there are no registers for them.
        asm volatile("" : "+l"(at));
        const bool rows[2] = {row < tile.rows, row + 8 < tile.rows};
        const int cols = tile.cols - col;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float* own = at;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int c = i * 8 + j % 2;
                float& value = sum[i / (N / 8)][i % (N / 8) * 4 + j];
                if (rows[j / 2] && c < cols) {
                    float* to = own + j / 2 * 8 + (j % 2 == 0 ? 0 : stride);
                    const float total = (first ? 0.0f : *to) + value;
                    *to = last ? total * tile.scale : total;
                }
                value = 0.0f;
            }
            at += 8 * stride;
            asm volatile("" : "+l"(at));
        }
    }
#endif
};

}  // namespace strata
