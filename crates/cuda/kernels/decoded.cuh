// Products of many columns with rows that were decoded before, once for all of them, on Hopper: nothing but bulk copies
// and what multiplies.
#pragma once

#include "hopper.cuh"

namespace strata {

/// Twins of all: `src/ops/wide.rs`.
struct DecodeRowsParams {
    const uint8_t* weights;
    /// `[rows / DENSE_ROWS][chunks]`
    void* out;
    uint32_t rows, units;
};

/// Rows of a tile; rows that a block of threads decodes. Twins: `ROWS`, `DECODED` in `src/ops/wide.rs`.
constexpr int DENSE_ROWS = 192, DECODED_ROWS = 64;

/// Decodes `DECODED_ROWS` rows and `BROUGHT` units of them. Grid: pieces of rows, rows.
template <class F>
__device__ void decode_rows(const DecodeRowsParams& p) {
    using Raw = Rows<F>;
    using To = Decoded<KindOf<F>, DENSE_ROWS>;
    __shared__ __align__(16) uint4 raw[DECODED_ROWS][Raw::RAW];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = warp * Raw::EACH + lane % 16;
    const int first = blockIdx.y * DECODED_ROWS, rows = min(int(p.rows) - first, DECODED_ROWS), units = p.units;
    const int from = blockIdx.x * Raw::BROUGHT, chunks = chunks_of(units);
    const uint32_t row_bytes = uint32_t(units / Raw::PER_BLOCK) * F::BYTES;
    const uint8_t* weights = p.weights + size_t(first) * row_bytes;
    Raw::bring(raw, weights, rows, row_bytes, units, from, warp, lane);
    await_all_copies();
    __syncwarp();
    To* to = static_cast<To*>(p.out) + size_t(first / DENSE_ROWS) * chunks + from / CHUNK;
    const uint8_t* own = weights + size_t(min(row, rows - 1)) * row_bytes;
    for (int at = lane / 16; at < Raw::BROUGHT && from + at / CHUNK * CHUNK < units; at += CHUNK) {
        const Unit u = Raw::unit(raw[row], own, from, at, F::codebook());
        to[at / CHUNK].template put<F>(u, first % DENSE_ROWS + row, at % CHUNK, from + at < units);
    }
}

/// Twin: as above.
struct DecodedParams {
    const uint8_t* rows;
    const uint8_t* pieces;
    /// `[cols][stride]`
    float* out;
    const float* scale;
    /// Rows that are here, and of `out`.
    uint32_t count, stride, cols, units;
    /// Whether each segment's sums go to an `out` of their own, one behind the other, not to be added.
    uint32_t apart;
};

template <class K>
struct OfDecoded {
    static constexpr int CHUNKS = K::SECOND ? 3 : 4, ROWS = DENSE_ROWS, THREADS = ROWS * 2 + 4 * WARP;
    using Rows = Decoded<K, ROWS>;
    /// Tiles of so many columns next to each other are taken one after the other: their pieces stay in the cache.
    static constexpr uint32_t ACROSS = 8;
    using Multiplies = Multiplier<K, ROWS, CHUNKS>;
    struct Shared {
        Ring<K, ROWS, CHUNKS> ring;
    };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    struct Place {
        uint32_t tall, col, from, chunks;
    };

    /// Where the `number`-th tile is.
    __device__ static Place place(const DecodedParams& p, uint32_t number) {
        const uint32_t tall = (p.count + ROWS - 1) / ROWS, wide = (p.cols + TILE_COLS - 1) / TILE_COLS;
        const uint32_t segment = number / (tall * wide), all = chunks_of(p.units);
        number %= tall * wide;
        const uint32_t group = number / (ACROSS * tall), across = min(ACROSS, wide - group * ACROSS);
        number -= group * ACROSS * tall;
        const uint32_t from = segment * (SEGMENT / CHUNK);
        return {number / across, (group * ACROSS + number % across) * TILE_COLS, from,
                p.apart ? min(uint32_t(SEGMENT / CHUNK), all - from) : all};
    }

    __device__ static void run(const DecodedParams& p) {
        extern __shared__ __align__(1024) uint8_t aligned[];
        auto& ring = reinterpret_cast<Shared*>(aligned)->ring;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (threadIdx.x == 0) {
            ring.init(0, Multiplies::WARPS);
        }
        __syncthreads();
        const uint32_t all = chunks_of(p.units), segments = p.apart ? (p.units + SEGMENT - 1) / SEGMENT : 1;
        const uint32_t tiles =
            (p.count + ROWS - 1) / ROWS * ((p.cols + TILE_COLS - 1) / TILE_COLS) * segments;
        typename Multiplies::Turn turn;
        if (warp >= Multiplies::WARPS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
            if (threadIdx.x != Multiplies::WARPS * WARP) {
                return;
            }
            for (uint32_t number = blockIdx.x; number < tiles; number += gridDim.x) {
                const Place at = place(p, number);
                const uint32_t bytes = whole_sixteens(min(uint32_t(TILE_COLS), p.cols - at.col)) * COLUMN_BYTES;
                const uint8_t* rows = p.rows + (size_t(at.tall) * all + at.from) * sizeof(Rows);
                const uint8_t* pieces = p.pieces + size_t(at.col) * COLUMN_BYTES * all + size_t(at.from) * bytes;
                for (uint32_t i = 0; i < at.chunks; i++) {
                    ring.emptied[turn.chunk].wait(turn.phase ^ 1);
                    Barrier& filled = ring.filled[turn.chunk];
                    filled.expect(sizeof(Rows) + bytes);
                    filled.bring_bulk(&ring.chunks[turn.chunk].rows, rows, sizeof(Rows));
                    filled.bring_bulk(ring.chunks[turn.chunk].columns, pieces, bytes);
                    rows += sizeof(Rows), pieces += bytes;
                    turn.next();
                }
            }
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
            const float scale = p.scale == nullptr ? 1.0f : *p.scale;
            for (uint32_t number = blockIdx.x; number < tiles; number += gridDim.x) {
                const Place at = place(p, number);
                const size_t segment = p.apart ? at.from / (SEGMENT / CHUNK) : 0;
                Tile tile = {};
                tile.out = p.out + (segment * p.cols + at.col) * p.stride + at.tall * ROWS;
                tile.rows = min(uint32_t(ROWS), p.count - at.tall * ROWS);
                tile.cols = min(uint32_t(TILE_COLS), p.cols - at.col);
                tile.scale = scale;
                Multiplies::template tile<TILE_COLS>(ring, at.chunks, p.stride, tile, turn, warp, lane);
            }
        }
    }
#endif
};

/// Twin: as above.
struct PiecesParams {
    const int8_t* q;
    const float* d;
    uint4* out;
    /// Per place its column, and what places a unit of a routing has; null where tiles follow one another.
    const uint32_t* order;
    const uint32_t* unit_first;
    const uint32_t* unit_places;
    const uint32_t* count;
    uint32_t cols, units;
};

/// Quantised columns as pieces. Grid: chunks, tiles or units.
__device__ inline void make_pieces(const PiecesParams& p) {
    const uint32_t number = blockIdx.y, chunk = blockIdx.x;
    if (p.count != nullptr && number >= *p.count) {
        return;
    }
    const uint32_t first = p.count == nullptr ? number * TILE_COLS : p.unit_first[number];
    const uint32_t cols =
        p.count == nullptr ? min(uint32_t(TILE_COLS), p.cols - first) : p.unit_places[number];
    const uint32_t whole = whole_sixteens(cols);
    const size_t start = p.count == nullptr ? first : first_piece(first, number);
    uint4* out = p.out + (start * chunks_of(p.units) + size_t(chunk) * whole) * (COLUMN_BYTES / 8) / 2;
    auto column = [&](uint32_t c) { return size_t(p.order == nullptr ? first + c : p.order[first + c]); };
    const uint32_t part = threadIdx.x % 8, unit = chunk * CHUNK + part / 4;
    for (uint32_t c = threadIdx.x / 8; c < whole; c += blockDim.x / 8) {
        uint4 halves = {};
        if (c < cols && unit < p.units) {
            const size_t at = (column(c) * p.units + unit) * 2 + part % 4 / 2;
            halves = widen(reinterpret_cast<const uint4*>(p.q)[at], part % 2);
        }
        out[c * 8 + (part ^ c % 8)] = halves;
    }
    float* scales = reinterpret_cast<float*>(out + whole * 8);
    for (uint32_t i = threadIdx.x; i < CHUNK * whole; i += blockDim.x) {
        const uint32_t c = i % whole, unit = chunk * CHUNK + i / whole;
        scales[i / whole * whole + scale_place(c)] =
            c < cols && unit < p.units ? p.d[column(c) * p.units + unit] : 0.0f;
    }
}

}  // namespace strata
