// Routed experts' products for a few rows: units of a routing, of a few places each.
//
// A warp has a strip of an expert's rows, one a lane, and hardly anything to do with other warps: chunks of its rows and
// of the columns are on their way to its part of shared memory while the one before is multiplied. A lane walks its row
// in order, so that the contract's sums are registers. All lanes are at the same unit, whose values they read together.
#include "floats.cuh"
#include "shared.cuh"
#include "terms.cuh"

namespace strata {

/// Twin: `src/ops/experts.rs`.
struct ExpertsFewParams {
    /// Per expert the address of its slot.
    const uint64_t* slots;
    /// Where the rows start in a slot; the up rows, where those of the gate start the slot.
    uint64_t offset;
    Columns x;
    /// Per place its column, or null where places are columns.
    const uint32_t* order;
    /// `[places][rows]`
    float* out;
    /// Per expert what its products are multiplied with, or null.
    const float* scales;
    const float* up_scales;
    Target hidden;
    const uint32_t* unit_expert;
    const uint32_t* unit_first;
    const uint32_t* unit_places;
    const uint32_t* units;
    uint32_t rows, k;
};

/// Places that are multiplied together, at most.
constexpr int PLACES = 3;
/// Warps of a block of threads, at most. Twin: `src/ops/experts.rs`.
constexpr int MOST_WARPS = 24;

/// Units of a chunk: about a hundred bytes of a row, if blocks are no longer.
template <class F>
constexpr int CHUNK = F::LEN == 256 || 256 / F::LEN * F::BYTES <= 98 ? 8 : 128 / F::LEN * F::BYTES <= 98 ? 4 : 2;

/// A warp's chunks in shared memory.
template <class F>
struct Chunk {
    static constexpr int UNITS = CHUNK<F>, PER_BLOCK = F::LEN / 32, BYTES = UNITS / PER_BLOCK * F::BYTES;
    static_assert(UNITS % PER_BLOCK == 0 && SEGMENT % UNITS == 0, "");
    /// Pieces of 16 bytes that a row's part can lie in, if blocks start at multiples of `F::ALIGN`; an odd number of them
    /// is from a row to the next, so that eight rows start in different banks.
    static constexpr int PIECES = (BYTES + 16 - F::ALIGN + 15) / 16, PITCH = 16 * (PIECES | 1);
    static constexpr bool SUMS = F::ZERO > 0 || F::MINIMUM != 0;

    struct Column {
        uint4 q[UNITS][2];
        float d[UNITS < 4 ? 4 : UNITS];
        uint32_t sums[SUMS ? UNITS < 4 ? 4 : UNITS : 4];
    };
    uint8_t rows[WARP * PITCH];
    Column columns[PLACES];

    /// Where a row is. Rows whose addresses differ by four modulo 16 are in different banks.
    __device__ static uint32_t place(uint32_t row) { return (row / 4 + row % 4 * 8) * PITCH; }

    /// Starts copying `bytes` bytes of half of the rows, of which there are `count`: the first lies at `from`. Eight lanes
    /// a row.
    __device__ void start_rows(int half, const uint8_t* from, uint32_t row_bytes, uint32_t count, uint32_t bytes,
                               int lane) {
        constexpr int TURNS = WARP / 2 / 4;
        const uint32_t own = lane % 8 * 16, row = lane / 8;
        const SharedAddress to = shared_at(rows) + place(row) + half * TURNS * PITCH + own;
        // What is read are the 16 bytes that this lies in.
        const uint8_t* at = from + row * row_bytes + own;
        auto start = [&](int i, const uint8_t* whole, uint32_t off) {
#pragma unroll
            for (int more = 0; more < PIECES; more += 8) {
                if (own + more * 16 < off + bytes) {
                    start_copy<16>(to + i * PITCH + more * 16, whole + more * 16);
                }
            }
        };
        if (row_bytes % 4 == 0 && count >= WARP / 2) {
            // Every fourth row is as far from a border.
            const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(at)) & 15;
            const uint8_t* whole = at - off;
#pragma unroll
            for (int i = 0; i < TURNS; i++, whole += 4 * row_bytes) {
                start(i, whole, off);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < TURNS; i++, at += 4 * row_bytes) {
                const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(at)) & 15;
                if (row + 4 * i < count) {
                    start(i, at - off, off);
                }
            }
        }
    }
    /// The same for a column's units from `from` on, `here` of them.
    __device__ void start_column(int number, const Columns& x, int from, int here, int lane) {
        Column& to = columns[number];
        if (lane < 2 * here) {
            start_copy<16>(reinterpret_cast<uint4*>(to.q) + lane, reinterpret_cast<const uint4*>(x.q) + from * 2 + lane);
        }
        if (lane < here) {
            start_copy<4>(to.d + lane, x.d + from + lane);
            if constexpr (SUMS) {
                start_copy<4>(to.sums + lane, x.sums + from + lane);
            }
        }
    }
};

/// A strip of rows of a unit, and its `count` places from number `part` on.
struct Strip {
    uint32_t number, part, expert, place, count, first;
    /// The first rows of both halves, and the columns.
    const uint8_t* lower;
    const uint8_t* upper;
    uint32_t columns[PLACES];
};

/// The sums of a lane's row and `N` columns.
template <class F, int N>
struct Sums {
    float acc[N], total[N];

    __device__ void start() {
#pragma unroll
        for (int n = 0; n < N; n++) {
            acc[n] = total[n] = 0.0f;
        }
    }
    __device__ void end_segment() {
#pragma unroll
        for (int n = 0; n < N; n++) {
            total[n] = total[n] + acc[n];
            acc[n] = 0.0f;
        }
    }
    /// Adds `here` units of a row.
    __device__ void add(const Chunk<F>& chunk, const uint8_t* row, int here, const uint32_t* grid) {
        constexpr int STEP = CHUNK<F> < 4 ? CHUNK<F> : 4, PER_BLOCK = Chunk<F>::PER_BLOCK;
#pragma unroll 1
        for (int from = 0; from < here; from += STEP) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                if (F::LEN < 256 && from + i >= here) {
                    break;
                }
                const uint8_t* block = row + from / PER_BLOCK * F::BYTES;
                const Unit unit = PER_BLOCK >= STEP ? F::unit(block, (from % PER_BLOCK) | i, grid)
                                                    : F::unit(block + i / PER_BLOCK * F::BYTES, i % PER_BLOCK, grid);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const auto& column = chunk.columns[n];
                    float2 first, second;
                    terms<F>(unit, column.q[from + i][0], column.q[from + i][1], column.d[from + i],
                             Chunk<F>::SUMS ? column.sums[from + i] : 0, first, second);
                    acc[n] = fma(first.x, first.y, acc[n]);
                    if constexpr (SECOND<F>) {
                        acc[n] = fma(second.x, second.y, acc[n]);
                    }
                }
            }
        }
    }
};

/// Products of rows; or gate and up products, a warp 16 each, with their SwiGLU, quantised by two warps together.
template <class F, bool HIDDEN>
__device__ void experts_few(const ExpertsFewParams& p) {
    extern __shared__ __align__(16) uint8_t room[];
    __shared__ float exchanged[HIDDEN ? MOST_WARPS : 1][PLACES][WARP];
    constexpr uint32_t STAGES = 2, HALF = WARP / 2, HEIGHT = HIDDEN ? HALF : WARP;
    pass();
    // Not to be found out anew in loops.
    const int lane = int(kept(threadIdx.x % WARP));
    const uint32_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    auto* grid = reinterpret_cast<uint32_t*>(room);
    auto* chunks = reinterpret_cast<Chunk<F>*>(grid + F::GRID) + warp * STAGES;
    for (int i = threadIdx.x; i < F::GRID / 4; i += blockDim.x) {
        start_copy<16>(grid + 4 * i, F::codebook() + 4 * i);
    }
    const int units = p.k / 32;
    const uint32_t row_bytes = units / Chunk<F>::PER_BLOCK * F::BYTES, strips = (p.rows + HEIGHT - 1) / HEIGHT;
    await_all_copies();
    __syncthreads();
    ready();
    const uint32_t count = *p.units * strips;
    // From place `part` of a unit on. Neighbouring strips are neighbouring warps'.
    auto strip_of = [&](uint32_t number, uint32_t part) {
        Strip s;
        s.number = number, s.part = part, s.count = 0;
        if (number < count) {
            const uint32_t unit = number / strips;
            s.expert = p.unit_expert[unit], s.place = p.unit_first[unit] + part;
            s.count = p.unit_places[unit] - part, s.first = (number - unit * strips) * HEIGHT;
            const uint8_t* slot = reinterpret_cast<const uint8_t*>(p.slots[s.expert]) + size_t(s.first) * row_bytes;
            s.lower = HIDDEN ? slot : slot + p.offset;
            s.upper = slot + p.offset + (HIDDEN ? 0 : HALF * row_bytes);
#pragma unroll
            for (uint32_t n = 0; n < PLACES; n++) {
                const uint32_t place = s.place + min(n, s.count - 1);
                s.columns[n] = p.order == nullptr ? place : p.order[place];
            }
        }
        return s;
    };
    // What is copied, and multiplied: the former is a chunk ahead.
    Strip ahead = strip_of((blockIdx.x + warp / 2 * gridDim.x) * 2 + warp % 2, 0), s = ahead;
    int copied = 0;
    uint32_t stage = 0;
    auto start = [&] {
        if (copied >= units) {
            ahead = ahead.count > PLACES ? strip_of(ahead.number, ahead.part + PLACES)
                                         : strip_of(ahead.number + gridDim.x * warps, 0);
            copied = 0;
        }
        if (ahead.count > 0) {
            const int here = min(CHUNK<F>, units - copied);
            const uint32_t at = copied / Chunk<F>::PER_BLOCK * F::BYTES, bytes = here / Chunk<F>::PER_BLOCK * F::BYTES;
            const uint32_t left = HIDDEN ? WARP : p.rows - ahead.first;
            Chunk<F>& chunk = chunks[stage];
            chunk.start_rows(0, ahead.lower + at, row_bytes, left, bytes, lane);
            chunk.start_rows(1, ahead.upper + at, row_bytes, HIDDEN ? left : left - min(left, HALF), bytes, lane);
#pragma unroll
            for (int n = 0; n < PLACES; n++) {
                if (n < int(ahead.count)) {
                    chunk.start_column(n, p.x.from(ahead.columns[n], p.k), copied, here, lane);
                }
            }
        }
        end_copies();
        copied += CHUNK<F>, stage ^= 1;
    };
    start();
    uint32_t turn = 0;
    while (s.count > 0) {
        auto walk = [&](auto sums) {
            constexpr int N = sizeof(sums.total) / sizeof(float);
            sums.start();
            const uint8_t* own = lane < int(HALF) ? s.lower : s.upper;
            const uint32_t low = uint32_t(reinterpret_cast<uintptr_t>(own)) + lane % HALF * row_bytes;
#pragma unroll 1
            for (int from = 0; from < units; from += CHUNK<F>) {
                __syncwarp();
                start();
                await_copies<1>();
                __syncwarp();
                const Chunk<F>& chunk = chunks[stage];
                const uint8_t* row = chunk.rows + Chunk<F>::place(lane) +
                                     ((low + from / Chunk<F>::PER_BLOCK * F::BYTES) & 15);
                sums.add(chunk, row, min(CHUNK<F>, units - from), grid);
                if ((from + CHUNK<F>) % SEGMENT == 0 || from + CHUNK<F> >= units) {
                    sums.end_segment();
                }
            }
            if constexpr (HIDDEN) {
                const float* scales = lane < int(HALF) ? p.scales : p.up_scales;
                const float scale = scales == nullptr ? 1.0f : scales[s.expert];
                auto& hidden = exchanged[warp / 2 * 2 + turn];
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float product = sums.total[n] * scale, up = __shfl_down_sync(ALL, product, HALF);
                    if (lane < int(HALF)) {
                        hidden[n][warp % 2 * HALF + lane] = swiglu(product, up);
                    }
                }
                asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / 2), "n"(2 * WARP) : "memory");
                for (uint32_t n = warp % 2; n < N; n += 2) {
                    const float value = hidden[n][lane];
                    const size_t at = size_t(s.place + n) * p.rows + s.first / WARP * WARP + lane;
                    p.out[at] = value;
                    p.hidden.put(value, at);
                }
                turn ^= 1;
            } else {
                const float scale = p.scales == nullptr ? 1.0f : p.scales[s.expert];
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (s.first + lane < p.rows) {
                        p.out[size_t(s.place + n) * p.rows + s.first + lane] = sums.total[n] * scale;
                    }
                }
            }
        };
        if (s.count == 1) {
            walk(Sums<F, 1>{});
        } else if (s.count == 2) {
            walk(Sums<F, 2>{});
        } else {
            walk(Sums<F, PLACES>{});
        }
        s = ahead;
    }
}

/// Words that the host lays out shared memory by: bytes of the code book, and of a warp. Twin: `Several`.
#define STRATA_KERNELS(F, NAME)                                                                                      \
    extern "C" __device__ uint32_t strata_experts_few_##NAME[2] = {F::GRID * 4, 2 * sizeof(Chunk<F>)};               \
    extern "C" __global__ void __launch_bounds__(MOST_WARPS* WARP, 1)                                                \
        strata_rows_few_##NAME(const __grid_constant__ ExpertsFewParams p) {                                         \
        experts_few<F, false>(p);                                                                                    \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(MOST_WARPS* WARP, 1)                                                \
        strata_hidden_few_##NAME(const __grid_constant__ ExpertsFewParams p) {                                       \
        experts_few<F, true>(p);                                                                                     \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
