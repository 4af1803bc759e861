// Routing, grouping, and the sum over experts: docs/qwen4exp.md, section 2.4. Nothing here asks the host: how many rows
// an expert has is known on the device only.
#include "choose.cuh"

namespace strata {

/// What the router leaves. Pairs are (row, place among the row's experts), numbered `row * used + place`. Twins:
/// `src/ops/route.rs`.
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
    /// Per expert where its units end; the last says how many there are, and for a few rows is the only one.
    uint32_t* unit_ends;
    uint32_t rows, used, all, tile;
    /// Experts that the host computes: those from `from` on whose address isn't in the device's memory. They get places, but no units. Null
    /// for none. Twin: `LeftOut` in `src/tiers/portion.rs`.
    const uint64_t* slots;
    uint64_t first, end, from;

    __device__ bool left_out(uint32_t expert) const {
        return slots != nullptr && expert >= from && (slots[expert] < first || slots[expert] >= end);
    }
};

struct ChooseParams {
    Routing r;
    /// `[rows][all]`
    const float* logits;
};

constexpr uint32_t CHOOSERS = 512;

/// A block a row.
extern "C" __global__ void __launch_bounds__(CHOOSERS) strata_choose(const __grid_constant__ ChooseParams p) {
    __shared__ __align__(16) uint8_t room[choice_room(MOST_EXPERTS)];
    const uint32_t row = blockIdx.x, i = threadIdx.x;
    const Routing& r = p.r;
    pass();
    ready();
    const Choice choice = choose(p.logits + uint64_t(row) * r.all, r.all, r.used, room);
    if (i < r.used) {
        r.experts[row * r.used + i] = choice.expert;
        r.shares[row * r.used + i] = choice.share;
    }
}

/// Experts of a thread that groups.
constexpr uint32_t OF_A_THREAD = 4, PAIRS = 1024;

/// Groups the pairs of a few rows, at most `PAIRS`, by one block. Which of an expert's places a pair gets may differ from
/// run to run; no result depends on it.
extern "C" __global__ void __launch_bounds__(CHOOSERS) strata_group_few(const __grid_constant__ Routing r) {
    constexpr uint32_t ALL_EXPERTS = CHOOSERS * OF_A_THREAD, TURNS = PAIRS / CHOOSERS;
    __shared__ uint32_t counts[ALL_EXPERTS], of_warps[CHOOSERS / WARP];
    const uint32_t thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, pairs = r.rows * r.used;
    pass();
    for (uint32_t i = thread; i < ALL_EXPERTS; i += CHOOSERS) {
        counts[i] = 0;
    }
    __syncthreads();
    ready();
    // Places and units so far, of pairs of lower experts; both are few.
    uint32_t place_base = 0, unit_base = 0;
    for (uint32_t from = 0; from < r.all; from += ALL_EXPERTS) {
        uint32_t expert[TURNS], rank[TURNS];
#pragma unroll
        for (uint32_t i = 0; i < TURNS; i++) {
            const uint32_t pair = thread + i * CHOOSERS;
            expert[i] = pair < pairs ? r.experts[pair] - from : ALL_EXPERTS;
            rank[i] = expert[i] < ALL_EXPERTS ? atomicAdd(counts + expert[i], 1u) : 0;
        }
        __syncthreads();
        uint32_t own[OF_A_THREAD], sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < OF_A_THREAD; i++) {
            own[i] = counts[thread * OF_A_THREAD + i];
            sum += own[i] | (own[i] + r.tile - 1) / r.tile << 16;
        }
        uint32_t before = sum;
#pragma unroll
        for (uint32_t width = 1; width < WARP; width *= 2) {
            const uint32_t other = __shfl_up_sync(ALL, before, width);
            before += lane >= width ? other : 0;
        }
        if (lane == WARP - 1) {
            of_warps[warp] = before;
        }
        before -= sum;
        __syncthreads();
        uint32_t all = 0;
#pragma unroll
        for (uint32_t w = 0; w < CHOOSERS / WARP; w++) {
            before += w < warp ? of_warps[w] : 0;
            all += of_warps[w];
        }
        uint32_t place = place_base + (before & 0xffff), unit = unit_base + (before >> 16);
#pragma unroll
        for (uint32_t i = 0; i < OF_A_THREAD; i++) {
            counts[thread * OF_A_THREAD + i] = place;
            for (uint32_t first = 0; first < own[i]; first += r.tile) {
                r.unit_expert[unit] = from + thread * OF_A_THREAD + i;
                r.unit_first[unit] = place + first;
                r.unit_places[unit] = min(r.tile, own[i] - first);
                unit++;
            }
            place += own[i];
        }
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < TURNS; i++) {
            if (expert[i] < ALL_EXPERTS) {
                const uint32_t pair = thread + i * CHOOSERS, to = counts[expert[i]] + rank[i];
                r.places[pair] = to;
                r.order[to] = pair / r.used;
            }
        }
        place_base += all & 0xffff, unit_base += all >> 16;
        __syncthreads();
        for (uint32_t i = thread; i < ALL_EXPERTS; i += CHOOSERS) {
            counts[i] = 0;
        }
        __syncthreads();
    }
    if (thread == 0) {
        r.unit_ends[r.all - 1] = unit_base;
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
        const uint32_t own = count == 0 || r.left_out(expert) ? 0 : (count + r.tile - 1) / r.tile;
        places[thread] = count, units[thread] = own;
        __syncthreads();
        for (uint32_t width = 1; width < 1024; width *= 2) {
            const uint32_t a = thread >= width ? places[thread - width] : 0,
                           b = thread >= width ? units[thread - width] : 0;
            __syncthreads();
            places[thread] += a, units[thread] += b;
            __syncthreads();
        }
        const uint32_t place = place_base + places[thread] - count, unit = unit_base + units[thread] - own;
        if (expert < r.all) {
            r.counts[expert] = place;
            r.unit_ends[expert] = unit + own;
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
}

/// Puts every pair to a place of its expert: `counts` is where the expert's places end, afterwards. Which one may differ from run to run; no
/// result depends on it.
extern "C" __global__ void __launch_bounds__(256) strata_place(const __grid_constant__ Routing r) {
    const uint32_t pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair < r.rows * r.used) {
        const uint32_t place = atomicAdd(r.counts + r.experts[pair], 1u);
        r.places[pair] = place;
        r.order[place] = pair / r.used;
    }
}

/// Twins of this and the next: `src/ops/experts.rs`.
struct SwigluParams {
    float* gate;
    const float* up;
    Target quantised;
    /// Values; or those of a routing's places from `*before`, or 0 for null, up to `*end`, `width` each.
    uint64_t count;
    const uint32_t* before;
    const uint32_t* end;
    uint32_t width;
};

/// `silu(gate) * up` in place of the gate.
extern "C" __global__ void __launch_bounds__(256) strata_swiglu(const __grid_constant__ SwigluParams p) {
    pass();
    ready();
    uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, count = p.count;
    if (p.end != nullptr) {
        i += p.before == nullptr ? 0 : uint64_t(*p.before) * p.width;
        count = uint64_t(*p.end) * p.width;
    }
    if (i < count) {
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
