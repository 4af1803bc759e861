// What is in host memory, brought by kernels: experts for a window in which some of them have rows, and what the host computed.
#include "desk.cuh"

namespace strata {

/// Where the host is asked for experts, if some can't be read. Twin: `WantedParams` in `src/tiers/desk.rs`.
struct Wanted {
    /// Of the layer; null where all can be read.
    uint32_t* words;
    /// Experts, with their places in the upper half: in host memory.
    uint32_t* experts;
    /// How many: on the device.
    uint32_t* count;
};

/// Twin: `src/ops/fetch.rs`.
struct FetchParams {
    /// Per expert of the layer the address of its copy.
    const uint64_t* slots;
    /// The same for experts that have rows, once this is done: all on the device.
    uint64_t* fetched;
    /// Room for copies.
    uint8_t* room;
    /// The device's memory.
    uint64_t first, end;
    const uint32_t* unit_expert;
    const uint32_t* units;
    Wanted wanted;
    /// Of a copy, a multiple of `LINE`.
    uint32_t bytes;
    /// Whether a copy has its expert's place in the room, not its unit's. Twin: `Ring::bring` in `src/tiers/ring.rs`.
    uint32_t by_expert;

    __device__ uint32_t place(uint32_t unit, uint32_t expert) const { return by_expert != 0 ? expert : unit; }
};

/// What a thread has under way at once, in 16 bytes, and a block of threads.
constexpr uint32_t UNDER_WAY = 8, FETCHERS = 256, PART = UNDER_WAY * FETCHERS * 16;

/// Whether a unit is the first of its expert's, which follow one another: it stands for the expert.
__device__ inline bool stands(const FetchParams& p, uint32_t unit) {
    return unit == 0 || p.unit_expert[unit - 1] != p.unit_expert[unit];
}

/// By one block of threads: asks the host for the experts that can't be read.
__device__ void ask(const FetchParams& p) {
    __shared__ uint32_t count;
    if (threadIdx.x == 0) {
        count = 0;
    }
    __syncthreads();
    for (uint32_t unit = threadIdx.x; unit < *p.units; unit += FETCHERS) {
        const uint32_t expert = p.unit_expert[unit];
        if (stands(p, unit) && p.slots[expert] == 0) {
            p.wanted.experts[atomicAdd(&count, 1u)] = expert | p.place(unit, expert) << 16;
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *p.wanted.count = count;
        p.wanted.words[COUNT] = count;
        Desk::say(p.wanted.words + ASKED, count > 0 ? 1 : NOTHING);
    }
}

/// Waits for the experts that the host was asked for. One thread.
extern "C" __global__ void strata_brought(const __grid_constant__ Wanted p) {
    if (threadIdx.x == 0 && *p.count > 0) {
        while (Desk::hear(p.words + ANSWERED) == 0) {
            __nanosleep(500);
        }
        Desk::say(p.words + ANSWERED, 0);
    }
}

/// Fetches the experts of a routing's units.
extern "C" __global__ void __launch_bounds__(FETCHERS) strata_fetch(const __grid_constant__ FetchParams p) {
    const uint32_t parts = (p.bytes + PART - 1) / PART, all = *p.units * parts;
    if (p.wanted.words != nullptr && blockIdx.x == 0) {
        ask(p);
    }
    for (uint32_t number = blockIdx.x; number < all; number += gridDim.x) {
        const uint32_t unit = number / parts, part = number % parts, expert = p.unit_expert[unit];
        if (!stands(p, unit)) {
            continue;
        }
        const uint64_t at = p.slots[expert];
        const bool there = at >= p.first && at < p.end;
        uint8_t* to = p.room + size_t(p.place(unit, expert)) * p.bytes;
        if (part == 0 && threadIdx.x == 0) {
            p.fetched[expert] = there ? at : reinterpret_cast<uint64_t>(to);
        }
        // The host brings those at zero.
        if (there || at == 0) {
            continue;
        }
        const uint8_t* from = reinterpret_cast<const uint8_t*>(at);
        const uint32_t begin = part * PART + threadIdx.x * 16;
        uint4 pieces[UNDER_WAY];
#pragma unroll
        for (uint32_t i = 0; i < UNDER_WAY; i++) {
            const uint32_t place = begin + i * FETCHERS * 16;
            pieces[i] = place < p.bytes ? __ldcs(reinterpret_cast<const uint4*>(from + place)) : uint4{};
        }
#pragma unroll
        for (uint32_t i = 0; i < UNDER_WAY; i++) {
            const uint32_t place = begin + i * FETCHERS * 16;
            if (place < p.bytes) {
                *reinterpret_cast<uint4*>(to + place) = pieces[i];
            }
        }
    }
}

/// Twin: `src/ops/fetch.rs`.
struct RowsParams {
    /// `[count][width]`, in host memory, and the place of each row in `to`, `[..][width]`.
    const float* rows;
    const uint32_t* places;
    float* to;
    uint32_t count, width;
};

/// Brings rows that the host computed to their places. By a kernel, which took less than copies did beside those of experts (docs/experiments.md).
extern "C" __global__ void __launch_bounds__(FETCHERS) strata_bring_rows(const __grid_constant__ RowsParams p) {
    for (uint32_t row = blockIdx.x; row < p.count; row += gridDim.x) {
        const float* from = p.rows + size_t(row) * p.width;
        float* to = p.to + size_t(p.places[row]) * p.width;
        for (uint32_t first = threadIdx.x; first < p.width; first += UNDER_WAY * FETCHERS) {
            float values[UNDER_WAY];
#pragma unroll
            for (uint32_t i = 0; i < UNDER_WAY; i++) {
                const uint32_t at = first + i * FETCHERS;
                values[i] = at < p.width ? __ldcs(from + at) : 0.0f;
            }
#pragma unroll
            for (uint32_t i = 0; i < UNDER_WAY; i++) {
                const uint32_t at = first + i * FETCHERS;
                if (at < p.width) {
                    to[at] = values[i];
                }
            }
        }
    }
}

}  // namespace strata
