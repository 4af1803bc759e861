// Products of block-format rows with many quantised columns on Hopper, decoded where they are multiplied.
//
// Blocks of threads stay and take tiles one after the other. Half of the warps bring blocks as they are, a few at a
// time, decode them into the ring of chunks and start the copies of the columns, without regard to where a tile ends;
// the others multiply.
#pragma once

#include "multiply.cuh"

namespace strata {

/// Brings and decodes rows of a format, by warps of `EACH` rows each.
template <class F>
struct Rows {
    static constexpr int EACH = 16;
    /// Units that are brought at a time.
    static constexpr int BROUGHT = 8, PER_BLOCK = F::LEN / 32;
    /// 16-byte pieces of a row as it is brought, whole ones; odd, against bank conflicts.
    static constexpr int RAW = (BROUGHT / PER_BLOCK * F::BYTES + 30) / 16 | 1;

    /// Starts to bring a warp's rows, `EACH` or as many as there are from its first on, units from `from` on. Pieces of
    /// 16 bytes that have a byte of them are wholly in the same allocation.
    __device__ static void bring(uint4 (*raw)[RAW], const uint8_t* weights, int rows, uint32_t row_bytes, int units,
                                 int from, int warp, int lane) {
        const int bytes = min(BROUGHT, units - from) / PER_BLOCK * F::BYTES;
        const uint8_t* at = weights + size_t(from / PER_BLOCK) * F::BYTES;
#pragma unroll 1
        for (int i = 0; i < (EACH * RAW + WARP - 1) / WARP; i++) {
            const int r = (i * WARP + lane) / RAW, piece = (i * WARP + lane) % RAW, row = warp * EACH + r;
            const uint8_t* block = at + size_t(min(row, rows - 1)) * row_bytes;
            const int past = reinterpret_cast<uintptr_t>(block) & 15;
            if (r < EACH && piece * 16 < past + bytes) {
                start_copy<16>(&raw[row][piece], block - past + piece * 16);
            }
        }
    }

    /// The `at`-th unit of a row that starts at `row` in device memory, of those that were brought from unit `from` on.
    __device__ static Unit unit(const uint4* raw, const uint8_t* row, int from, int at, const uint32_t* grid) {
        const uint32_t past = uint32_t(reinterpret_cast<uintptr_t>(row)) + uint32_t(from / PER_BLOCK * F::BYTES);
        const uint8_t* block = reinterpret_cast<const uint8_t*>(raw) + (past & 15);
        return F::unit(block + at / PER_BLOCK * F::BYTES, at % PER_BLOCK, grid);
    }
};

template <class F>
struct Hopper {
    static constexpr int ROWS = 128, COLS = TILE_COLS, THREADS = 512, BLOCKS = 1;
    using K = KindOf<F>;
    using Raw = Rows<F>;
    /// As many chunks as there is room for.
    static constexpr int CHUNKS =
        sizeof(Ring<K, ROWS, 4>) + 2 * ROWS * Raw::RAW * 16 + F::GRID * 4 <= 225 * 1024 ? 4 : 3;
    using Multiplies = Multiplier<K, ROWS, CHUNKS>;
    /// Warps of each kind.
    static constexpr int WARPS = THREADS / WARP / 2;

    struct Shared {
        Ring<K, ROWS, CHUNKS> ring;
        uint4 raw[2][ROWS][Raw::RAW];
        uint32_t grid[F::GRID > 0 ? F::GRID : 1];
        /// The tile after the one that is decoded, per warp.
        Tile next[WARPS];
    };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    /// Multiplies the tiles `tiles(i)`, `i` from the block's number on in steps of the grid, up to the first without
    /// rows.
    template <class Tiles>
    __device__ static void run(Shared& shared, const Columns&, int units, size_t stride, Tiles tiles) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (threadIdx.x == 0) {
            shared.ring.init(WARPS, WARPS);
        }
        for (int i = threadIdx.x; i < F::GRID; i += THREADS) {
            shared.grid[i] = F::codebook()[i];
        }
        __syncthreads();
        if (warp >= WARPS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
            fill(shared, units, tiles, warp - WARPS, lane);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
            multiply_all(shared, units, stride, tiles, warp, lane);
        }
    }

   private:
    using Turn = typename Ring<K, ROWS, CHUNKS>::Turn;

    /// The warps that fill chunks. Each brings and decodes its own rows.
    template <class Tiles>
    __device__ static void fill(Shared& shared, int units, Tiles tiles, int warp, int lane) {
        static_assert(ROWS == WARPS * Raw::EACH, "");
        const int row = warp * Raw::EACH + lane % 16, part = lane / 16;
        const uint32_t row_bytes = uint32_t(units / Raw::PER_BLOCK) * F::BYTES;
        // Not in registers: it is needed once.
        Tile& next = shared.next[warp];
        Turn turn;
        int slot = 0;
        uint32_t number = blockIdx.x;
        Tile tile = tiles(number);
        if (tile.rows == 0) {
            return;
        }
        Raw::bring(shared.raw[slot], tile.weights, tile.rows, row_bytes, units, 0, warp, lane);
        while (tile.rows > 0) {
            number += gridDim.x;
            __syncwarp();
            if (lane == 0) {
                next = tiles(number);
            }
            __syncwarp();
            const uint8_t* own = tile.weights + min(row, tile.rows - 1) * row_bytes;
            const uint32_t bytes = whole_sixteens(tile.cols) * COLUMN_BYTES;
            for (int from = 0; from < units; from += CHUNK) {
                const int at = from % Raw::BROUGHT;
                if (at == 0) {
                    await_all_copies();
                    __syncwarp();
                    if (from + Raw::BROUGHT < units) {
                        Raw::bring(shared.raw[slot ^ 1], tile.weights, tile.rows, row_bytes, units,
                                   from + Raw::BROUGHT, warp, lane);
                    } else if (next.rows > 0) {
                        Raw::bring(shared.raw[slot ^ 1], next.weights, next.rows, row_bytes, units, 0, warp, lane);
                    }
                    slot ^= 1;
                }
                const Unit u = Raw::unit(shared.raw[slot ^ 1][row], own, from - at, at + part, shared.grid);
                shared.ring.emptied[turn.chunk].wait(turn.phase ^ 1);
                Chunk<K, ROWS>& chunk = shared.ring.chunks[turn.chunk];
                Barrier& filled = shared.ring.filled[turn.chunk];
                if (warp == 0 && lane == 0) {
                    filled.expect(bytes);
                    filled.bring_bulk(chunk.columns, tile.pieces + size_t(from / CHUNK) * bytes, bytes);
                }
                chunk.rows.template put<F>(u, row, part, from + part < units);
                filled.tell(lane);
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
        const int chunks = chunks_of(units);
        while (tile.rows > 0) {
            number += gridDim.x;
            const Tile next = tiles(number);
            if (tile.cols > 96) {
                Multiplies::template tile<128>(shared.ring, chunks, stride, tile, turn, warp, lane);
            } else if (tile.cols > 64) {
                Multiplies::template tile<96>(shared.ring, chunks, stride, tile, turn, warp, lane);
            } else if (tile.cols > 32) {
                Multiplies::template tile<64>(shared.ring, chunks, stride, tile, turn, warp, lane);
            } else {
                Multiplies::template tile<32>(shared.ring, chunks, stride, tile, turn, warp, lane);
            }
            tile = next;
        }
    }
#endif
};

}  // namespace strata
