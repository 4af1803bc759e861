// The choice of a row's experts: docs/qwen4exp.md, section 2.4.
#pragma once

#include "floats.cuh"

namespace strata {

/// Experts of a layer, at most. Twin: `MOST_EXPERTS` in `ops/route.rs`.
constexpr uint32_t MOST_EXPERTS = 2048;
/// Threads of a block that chooses, at most.
constexpr uint32_t MOST_CHOOSERS = 512;

/// A float's bits so that integers are in the floats' order, all of them above 0; and back.
__device__ inline uint32_t in_order(float x) {
    const uint32_t bits = to_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float out_of_order(uint32_t x) { return from_bits(x >> 31 ? x & 0x7fffffffu : ~x); }

/// Thread `i` has the `i`-th of the experts, by id.
struct Choice {
    uint32_t expert;
    float share;
};

/// Bytes of shared memory for a choice from so many. Twin: `ops/route.rs`.
__device__ constexpr uint32_t choice_room(uint32_t all) { return 16 * all; }

/// Softmax over a row's logits `x`, the `used` largest (ties, and what isn't a number, to the lower id), at most 32 and
/// all of them, renormalised. By all threads of a block.
///
/// A lane of all warps has a largest share. Where those of `used` lanes are as large as a bound, no share below it is
/// chosen: that leaves a few more than `used`, which are compared with each other.
__device__ inline Choice choose(const float* x, uint32_t all, uint32_t used, uint8_t* room) {
    __shared__ uint32_t best[MOST_CHOOSERS / WARP][WARP], chosen[WARP], count;
    uint64_t* candidates = reinterpret_cast<uint64_t*>(room);
    float *values = reinterpret_cast<float*>(candidates + all), *shares = values + all;
    const uint32_t thread = threadIdx.x, threads = blockDim.x, lane = thread % WARP, warp = thread / WARP;
    auto best_of_lane = [&](uint32_t own) {
        best[warp][lane] = own;
        __syncthreads();
        own = 0;
#pragma unroll 4
        for (uint32_t w = 0; w < threads / WARP; w++) {
            own = max(own, best[w][lane]);
        }
        return own;
    };
    uint32_t largest = 0;
    for (uint32_t j = thread; j < all; j += threads) {
        values[j] = x[j];
        largest = max(largest, isnan(values[j]) ? 0 : in_order(values[j]));
    }
    if (thread == 0) {
        count = 0;
    }
    const float top = out_of_order(warp_max(best_of_lane(largest)));
    for (uint32_t j = thread; j < all; j += threads) {
        values[j] = exp(values[j] - top);
    }
    __syncthreads();
    // Every warp for itself: to wait for one of them takes longer.
    float sum = 0.0f;
    each_value(values, all, lane, [&](int, float value) { sum = sum + value; });
    sum = fold(sum);
    // Shares are not negative, so their bits are in their order; what isn't a number comes last. 0 is for those that
    // don't exist.
    auto key = [](float share) { return isnan(share) ? 1 : to_bits(share) + 2; };
    uint32_t own = 0;
    for (uint32_t j = thread; j < all; j += threads) {
        shares[j] = __fdiv_rn(values[j], sum);
        own = max(own, key(shares[j]));
    }
    own = best_of_lane(own);
    uint32_t above = 0;
#pragma unroll
    for (uint32_t i = 1; i < WARP; i++) {
        above += __shfl_xor_sync(ALL, own, i) > own;
    }
    const uint32_t bound = max(1u, ~warp_max(above < used ? ~own : 0));
    for (uint32_t j = thread; j < all; j += threads) {
        if (key(shares[j]) >= bound) {
            candidates[atomicAdd(&count, 1u)] = uint64_t(key(shares[j])) << 32 | ~j;
        }
    }
    __syncthreads();
    const uint32_t found = count;
    for (uint32_t c = thread; c < found; c += threads) {
        const uint64_t candidate = candidates[c];
        uint32_t larger = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < found; i++) {
            larger += candidates[i] > candidate;
        }
        if (larger < used) {
            chosen[larger] = ~uint32_t(candidate);
        }
    }
    __syncthreads();
    Choice choice = {};
    if (warp == 0) {
        // In order of their ids, in which they are summed.
        const uint32_t mine = lane < used ? chosen[lane] : ~0u;
        uint32_t place = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < used; i++) {
            place += chosen[i] < mine;
        }
        const float share = lane < used ? shares[mine] : 0.0f;
        __syncwarp();
        if (lane < used) {
            chosen[place] = mine, values[place] = share;
        }
        __syncwarp();
        float total = 0.0f;
#pragma unroll 4
        for (uint32_t i = 0; i < used; i++) {
            total = total + values[i];
        }
        if (lane < used) {
            choice = {chosen[lane], __fdiv_rn(values[lane], total)};
        }
    }
    return choice;
}

}  // namespace strata
