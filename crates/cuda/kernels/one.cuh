// Products with one column: what decoding is made of.
//
// A block of threads has consecutive rows of a matrix, whose bytes lie in one piece and are copied to shared memory as
// they are, chunk by chunk: the first ones before the kernel in front is done, for weights wait for nobody. A thread has
// the same units of every row, and keeps the column's values for them. It turns them into terms; then a thread per row
// and segment of the contract adds these up in their order. How many rows a chunk has is the host's choice:
// `ops/one.rs`.
#pragma once

#include "floats.cuh"
#include "shared.cuh"
#include "terms.cuh"

namespace strata {

/// Threads of a block, at most.
constexpr int ONE_THREADS = 320;

/// How threads share the groups of rows, and a warp's lanes the segments. Twin: `Split` in `ops/one.rs`, which knows why
/// `inverse` and `inverse_segments` divide numbers of threads and of lanes.
struct Split {
    /// Threads of a row, rows at once, and `2^20 / lanes`.
    uint32_t lanes, across, inverse;
    /// Segments of a row, rows that a warp adds up at once, and `2^10 / segments`.
    uint32_t segments, together, inverse_segments;

    /// Which of the rows at once this thread has: one beyond `across` for none.
    __device__ int slot() const { return int(threadIdx.x * inverse >> 20); }
    /// Its first group of the row.
    __device__ int group() const { return int(threadIdx.x) - slot() * int(lanes); }
};

/// Units of a block format that have bytes in common are decoded together.
template <class F>
struct One {
    static constexpr int PER_BLOCK = F::LEN / 32, SHARE = F::SHARE, GROUPS = PER_BLOCK / SHARE;
    /// Rows that are decoded at once: short units hide each other's latency.
    static constexpr int ABREAST = SHARE == 1 ? 2 : 1;

    /// A column's values for the units of a group.
    struct Column {
        uint4 low[SHARE], high[SHARE];
        float d[SHARE];
        uint32_t sums[SHARE];

        /// From device memory.
        __device__ void load(const Columns& x, int group) {
            const uint4* q = reinterpret_cast<const uint4*>(x.q) + group * (2 * SHARE);
#pragma unroll
            for (int c = 0; c < SHARE; c++) {
                low[c] = q[2 * c], high[c] = q[2 * c + 1];
                d[c] = x.d[group * SHARE + c], sums[c] = x.sums[group * SHARE + c];
            }
        }
    };

    /// Terms of a unit for each row of a chunk.
    float2* first;
    float2* second;
    const uint32_t* grid;
    int units, stride;

    /// In `room`, for `rows` rows of `units` units, `turns` times. Twin: `Formats::terms` in `ops/one.rs`.
    __device__ One(uint8_t* room, int rows, int units, int turn, const uint32_t* grid) : grid(grid), units(units) {
        // Rows start at multiples of 16 bytes, and eight of them in different banks.
        stride = units + 2 + (units & 1);
        first = reinterpret_cast<float2*>(room) + (SECOND<F> ? 2 : 1) * turn * rows * stride;
        second = first + rows * stride;
    }

    /// The terms of row `r` of a chunk for a group of units, of a row that lies at `row`.
    __device__ void put(int r, const uint8_t* row, uint32_t group, const Column& x) const {
        const uint8_t* block = row + group / GROUPS * F::BYTES;
        const int from = int(group % GROUPS * SHARE);
        float2 one[SHARE], two[SHARE];
#pragma unroll
        for (int c = 0; c < SHARE; c++) {
            // The bytes in common are loaded once: the compiler sees which ones they are.
            const Unit u = F::unit(block, from | c, grid);
            terms<F>(u, x.low[c], x.high[c], x.d[c], x.sums[c], one[c], two[c]);
        }
        store(first + r * stride + group * SHARE, one);
        if constexpr (SECOND<F>) {
            store(second + r * stride + group * SHARE, two);
        }
    }

    /// Terms of rows `r`, `r + across`, .. below `rows`; `at(r)` says where a row lies.
    template <class Rows>
    __device__ void put_rows(int r, int across, int rows, int group, const Column& x, Rows at) const {
#pragma unroll 1
        for (; r + (ABREAST - 1) * across < rows; r += ABREAST * across) {
#pragma unroll
            for (int i = 0; i < ABREAST; i++) {
                put(r + i * across, at(r + i * across), group, x);
            }
        }
        if (ABREAST > 1 && r < rows) {
            put(r, at(r), group, x);
        }
    }

    /// Calls `emit(r, sum)` for every row of a chunk once, when all terms are there; by `warps` warps, of which this is
    /// number `warp`.
    template <class Emit>
    __device__ void add_up(const Split& split, int rows, int warp, int warps, Emit emit) const {
        const int lane = threadIdx.x % WARP, together = int(split.together), segments = int(split.segments);
        const int row = int(lane * split.inverse_segments >> 10), segment = lane - row * segments;
        for (int from = warp * together; from < rows; from += warps * together) {
            const int r = from + row;
            const bool there = row < together && r < rows;
            float sum = 0.0f;
            if (there) {
                const int at = r * stride + segment * SEGMENT;
                sum = chain<F>(first + at, second + at, min(SEGMENT, units - segment * SEGMENT));
            }
            float total = 0.0f;
            for (int s = 0; s < segments; s++) {
                total = total + __shfl_sync(ALL, sum, row * segments + s);
            }
            if (there && segment == 0) {
                emit(r, total);
            }
        }
    }
    /// By all warps of the block.
    template <class Emit>
    __device__ void add_up(const Split& split, int rows, Emit emit) const {
        add_up(split, rows, threadIdx.x / WARP, blockDim.x / WARP, emit);
    }

   private:
    __device__ static void store(float2* to, const float2 (&terms)[SHARE]) {
        if constexpr (SHARE == 1) {
            *to = terms[0];
        } else {
#pragma unroll
            for (int c = 0; c < SHARE; c += 2) {
                *reinterpret_cast<float4*>(to + c) = {terms[c].x, terms[c].y, terms[c + 1].x, terms[c + 1].y};
            }
        }
    }
};

/// Values of a float row that are brought at once. Twin: `ops/one.rs`.
constexpr uint32_t PIECE = 2560;
/// Bytes of shared memory of a piece, of a row or of the column.
constexpr uint32_t PIECE_BYTES = brought(4 * PIECE);

/// Pieces of a row that are under way at once. Twin: `ops/one.rs`.
constexpr int PIECES = 4;

/// Products of up to a row per warp with a column: rows `first` to `first + rows` of `w`, pieces of which come to as
/// many buffers of `rows + 1` pieces as a row has, at most `PIECES`. Calls `emit(r, sum)` in one thread for each. All
/// threads come here; waits for the kernel in front once the first pieces of the rows are under way.
template <class T, class Emit>
__device__ inline void float_rows(uint8_t* room, Arrival (&arrivals)[PIECES], const T* w, uint32_t first, uint32_t rows,
                                  const float* x, uint32_t k, Emit emit) {
    const int lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP, buffer = (rows + 1) * PIECE_BYTES, pieces = (k + PIECE - 1) / PIECE;
    const uint32_t turns = min(pieces, uint32_t(PIECES));
    if (threadIdx.x < turns) {
        arrivals[threadIdx.x].init(int(rows) + 1);
    }
    __syncthreads();
    auto bring_rows = [&](uint32_t piece, uint32_t turn) {
        const uint32_t from = piece * PIECE;
        for (uint32_t r = 0; r < rows; r++) {
            arrivals[turn].bring(room + turn * buffer + r * PIECE_BYTES, w + size_t(first + r) * k + from,
                                 min(PIECE, k - from) * uint32_t(sizeof(T)));
        }
    };
    auto bring_x = [&](uint32_t piece, uint32_t turn) {
        const uint32_t from = piece * PIECE;
        arrivals[turn].bring(room + turn * buffer + rows * PIECE_BYTES, x + from, min(PIECE, k - from) * 4);
        end_copies();
    };
    for (uint32_t piece = 0; piece < turns; piece++) {
        bring_rows(piece, piece);
    }
    ready();
    for (uint32_t piece = 0; piece < turns; piece++) {
        bring_x(piece, piece);
    }
    float acc = 0.0f;
    for (uint32_t piece = 0, turn = 0, round = 0; piece < pieces; piece++) {
        const uint32_t from = piece * PIECE;
        arrivals[turn].wait(round, int(min(turns, pieces - piece)) - 1);
        if (warp < rows) {
            const uint8_t* at = room + turn * buffer;
            const T* row =
                reinterpret_cast<const T*>(at + warp * PIECE_BYTES + in_line(w + size_t(first + warp) * k + from));
            const float* column = reinterpret_cast<const float*>(at + rows * PIECE_BYTES + in_line(x + from));
            const uint32_t here = min(PIECE, k - from);
#pragma unroll 16
            for (uint32_t j = lane; j < here; j += WARP) {
                acc = fma(widen(row + j), column[j], acc);
            }
        }
        if (piece + turns < pieces) {
            __syncthreads();
            bring_rows(piece + turns, turn);
            bring_x(piece + turns, turn);
        }
        if (++turn == turns) {
            turn = 0, round++;
        }
    }
    if (warp < rows) {
        const float sum = fold(acc);
        if (lane == 0) {
            emit(first + warp, sum);
        }
    }
}

}  // namespace strata
