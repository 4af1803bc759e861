// Experts that are in host memory, brought to device memory for a window in which some of them have rows.
#include "shared.cuh"

namespace strata {

/// Twin: `src/ops/fetch.rs`.
struct FetchParams {
    /// Per expert of the layer the address of its copy.
    const uint64_t* slots;
    /// The same for experts that have rows, once this is done: all on the device.
    uint64_t* fetched;
    /// Room for a copy per unit.
    uint8_t* room;
    /// The device's memory.
    uint64_t first, end;
    const uint32_t* unit_expert;
    const uint32_t* units;
    /// Of a copy, a multiple of `LINE`.
    uint32_t bytes;
};

/// What a thread has under way at once, in 16 bytes, and a block of threads.
constexpr uint32_t UNDER_WAY = 8, FETCHERS = 256, PART = UNDER_WAY * FETCHERS * 16;

/// Fetches the experts of a routing's units. An expert's units follow one another: the first of them stands for it.
extern "C" __global__ void __launch_bounds__(FETCHERS) strata_fetch(const __grid_constant__ FetchParams p) {
    const uint32_t parts = (p.bytes + PART - 1) / PART, all = *p.units * parts;
    for (uint32_t number = blockIdx.x; number < all; number += gridDim.x) {
        const uint32_t unit = number / parts, part = number % parts, expert = p.unit_expert[unit];
        if (unit > 0 && p.unit_expert[unit - 1] == expert) {
            continue;
        }
        const uint64_t at = p.slots[expert];
        const bool there = at >= p.first && at < p.end;
        uint8_t* to = p.room + size_t(unit) * p.bytes;
        if (part == 0 && threadIdx.x == 0) {
            p.fetched[expert] = there ? at : reinterpret_cast<uint64_t>(to);
        }
        if (there) {
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

}  // namespace strata
