// Routing, grouping, and the sum over experts: docs/qwen4exp.md, section 2.4. Nothing here asks the host: how many rows an expert has is
// known on the device only.
#include "floats.cuh"

namespace strata {

/// What the router leaves. Pairs are (row, place among the row's experts), numbered `row * used + place`. Twins: `src/ops/route.rs`.
struct Routing {
    /// Per pair its expert, ascending in a row, and the expert's share.
    uint32_t* experts;
    float* shares;
    /// Per pair its place in the order of experts; per place the pair's row.
    uint32_t* places;
    uint32_t* order;
    /// Per expert how many pairs, then the next free place.
    uint32_t* counts;
    /// Units of work, up to `tile` places of one expert: its expert, its first place, how many.
    uint32_t* unit_expert;
    uint32_t* unit_first;
    uint32_t* unit_places;
    /// One: how many units.
    uint32_t* units;
    uint32_t rows, used, all, tile;
};

struct ChooseParams {
    Routing r;
    /// `[rows][all]`, overwritten.
    float* logits;
};

/// Softmax over a row's logits, the `used` largest (ties, and what isn't a number, to the lower id), renormalised, by id. A warp a row.
extern "C" __global__ void __launch_bounds__(128) strata_choose(const __grid_constant__ ChooseParams p) {
    const uint32_t row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= p.r.rows) {
        return;
    }
    float* x = p.logits + uint64_t(row) * p.r.all;
    float largest = from_bits(0xff800000u);
    for (uint32_t j = lane; j < p.r.all; j += WARP) {
        largest = x[j] > largest ? x[j] : largest;
    }
    for (int width = WARP / 2; width > 0; width /= 2) {
        const float other = __shfl_xor_sync(ALL, largest, width);
        largest = other > largest ? other : largest;
    }
    float sum = 0.0f;
    for (uint32_t j = lane; j < p.r.all; j += WARP) {
        x[j] = exp(x[j] - largest);
        sum = sum + x[j];
    }
    sum = fold(sum);
    for (uint32_t j = lane; j < p.r.all; j += WARP) {
        x[j] = __fdiv_rn(x[j], sum);
    }
    // Shares are not negative, so their bits are in their order; what isn't a number comes last. A lane's ranks stay in registers, as many as
    // there are; 0 is for those that were chosen, and those that don't exist.
    constexpr uint32_t HELD = 16;
    uint32_t ranks[HELD];
    auto rank = [&](uint32_t j) { return j >= p.r.all ? 0 : isnan(x[j]) ? 1 : to_bits(x[j]) + 2; };
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        ranks[i] = rank(lane + WARP * i);
    }
    uint64_t below = ~0ull;
    for (uint32_t i = 0; i < p.r.used; i++) {
        uint64_t best = 0;
#pragma unroll
        for (uint32_t h = 0; h < HELD; h++) {
            const uint64_t own = uint64_t(ranks[h]) << 32 | uint32_t(~(lane + WARP * h));
            best = ranks[h] > 0 && own > best ? own : best;
        }
        for (uint32_t j = lane + WARP * HELD; j < p.r.all; j += WARP) {
            const uint64_t own = uint64_t(rank(j)) << 32 | uint32_t(~j);
            best = own < below && own > best ? own : best;
        }
        for (int width = WARP / 2; width > 0; width /= 2) {
            const uint64_t other = __shfl_xor_sync(ALL, best, width);
            best = other > best ? other : best;
        }
        below = best;
        const uint32_t chosen = ~uint32_t(best);
#pragma unroll
        for (uint32_t h = 0; h < HELD; h++) {
            ranks[h] = chosen == lane + WARP * h ? 0 : ranks[h];
        }
        if (lane == 0) {
            p.r.experts[row * p.r.used + i] = chosen;
        }
    }
    __syncwarp();
    if (lane == 0) {
        uint32_t* experts = p.r.experts + row * p.r.used;
        float* shares = p.r.shares + row * p.r.used;
        for (uint32_t i = 1; i < p.r.used; i++) {
            for (uint32_t at = i; at > 0 && experts[at] < experts[at - 1]; at--) {
                const uint32_t moved = experts[at];
                experts[at] = experts[at - 1];
                experts[at - 1] = moved;
            }
        }
        float total = 0.0f;
        for (uint32_t i = 0; i < p.r.used; i++) {
            total = total + x[experts[i]];
        }
        for (uint32_t i = 0; i < p.r.used; i++) {
            shares[i] = __fdiv_rn(x[experts[i]], total);
        }
    }
}

/// How many pairs each expert has; `counts` was zero.
extern "C" __global__ void __launch_bounds__(256) strata_count(const __grid_constant__ Routing r) {
    const uint32_t pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair < r.rows * r.used) {
        atomicAdd(r.counts + r.experts[pair], 1u);
    }
}

/// First places and units of all experts, by one block.
extern "C" __global__ void __launch_bounds__(1024) strata_scan(const __grid_constant__ Routing r) {
    __shared__ uint32_t places[1024], units[1024];
    __shared__ uint32_t place_base, unit_base;
    const uint32_t thread = threadIdx.x;
    if (thread == 0) {
        place_base = unit_base = 0;
    }
    for (uint32_t first = 0; first < r.all; first += 1024) {
        const uint32_t expert = first + thread, count = expert < r.all ? r.counts[expert] : 0;
        const uint32_t own = (count + r.tile - 1) / r.tile;
        places[thread] = count, units[thread] = own;
        __syncthreads();
        for (uint32_t width = 1; width < 1024; width *= 2) {
            const uint32_t a = thread >= width ? places[thread - width] : 0, b = thread >= width ? units[thread - width] : 0;
            __syncthreads();
            places[thread] += a, units[thread] += b;
            __syncthreads();
        }
        const uint32_t place = place_base + places[thread] - count, unit = unit_base + units[thread] - own;
        if (expert < r.all) {
            r.counts[expert] = place;
            for (uint32_t i = 0; i < own; i++) {
                r.unit_expert[unit + i] = expert;
                r.unit_first[unit + i] = place + i * r.tile;
                r.unit_places[unit + i] = min(r.tile, count - i * r.tile);
            }
        }
        __syncthreads();
        if (thread == 1023) {
            place_base += places[1023], unit_base += units[1023];
        }
        __syncthreads();
    }
    if (thread == 0) {
        *r.units = unit_base;
    }
}

/// Puts every pair to a place of its expert. Which one may differ from run to run; no result depends on it.
extern "C" __global__ void __launch_bounds__(256) strata_place(const __grid_constant__ Routing r) {
    const uint32_t pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair < r.rows * r.used) {
        const uint32_t place = atomicAdd(r.counts + r.experts[pair], 1u);
        r.places[pair] = place;
        r.order[place] = pair / r.used;
    }
}

struct SwigluParams {
    float* gate;
    const float* up;
    Target quantised;
    uint64_t count;
};

/// `silu(gate) * up` in place of the gate.
extern "C" __global__ void __launch_bounds__(256) strata_swiglu(const __grid_constant__ SwigluParams p) {
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) {
        const float hidden = swiglu(p.gate[i], p.up[i]);
        p.gate[i] = hidden;
        p.quantised.put(hidden, i);
    }
}

struct CombineParams {
    Routing r;
    /// `[places][width]`
    const float* products;
    /// `[rows][width]`
    const float* shared;
    /// `[rows]`: the shared expert's gate, before the sigmoid.
    const float* scalar;
    float* y;
    uint32_t width;
};

/// `y = sum over experts, ascending id, of p_e * product_e + sigmoid(scalar) * shared`. Grid: values, rows.
extern "C" __global__ void __launch_bounds__(128) strata_combine(const __grid_constant__ CombineParams p) {
    const uint32_t j = blockIdx.x * blockDim.x + threadIdx.x;
    for (uint32_t row = blockIdx.y; row < p.r.rows && j < p.width; row += gridDim.y) {
        float y = 0.0f;
        for (uint32_t i = row * p.r.used; i < (row + 1) * p.r.used; i++) {
            y = fma(p.r.shares[i], p.products[uint64_t(p.r.places[i]) * p.width + j], y);
        }
        p.y[uint64_t(row) * p.width + j] = fma(sigmoid(p.scalar[row]), p.shared[uint64_t(row) * p.width + j], y);
    }
}

}  // namespace strata
