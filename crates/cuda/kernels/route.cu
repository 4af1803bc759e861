// Routing, grouping, and the sum over experts: docs/qwen4exp.md, section 2.4. Nothing here asks the host: how many rows
// an expert has is known on the device only.
#include "floats.cuh"

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
    /// One: how many units.
    uint32_t* units;
    uint32_t rows, used, all, tile;
};

struct ChooseParams {
    Routing r;
    /// `[rows][all]`, overwritten.
    float* logits;
};

/// The largest and the smallest of a warp's values.
__device__ inline uint32_t largest_of(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    for (int width = WARP / 2; width > 0; width /= 2) {
        x = max(x, __shfl_xor_sync(ALL, x, width));
    }
    return x;
#endif
}
__device__ inline uint32_t smallest_of(uint32_t x) { return ~largest_of(~x); }

/// Whether `a` is larger than `b`: nothing is larger than what isn't a number, as for the CPU.
__device__ inline float larger(float a, float b) { return a > b ? a : b; }

constexpr uint32_t CHOOSERS = 512;

/// Softmax over a row's logits `x`, which are overwritten, the `used` largest (ties, and what isn't a number, to the
/// lower id), renormalised, by id. Of a block of `CHOOSERS` threads; thread `i` below `used`, at most 32, gets expert
/// and share number `i`. Each warp finds the largest of its own, in order; the first warp merges what they found.
__device__ inline void choose(const Routing& r, float* x, uint32_t& expert, float& share) {
    constexpr uint32_t WARPS = CHOOSERS / WARP;
    __shared__ uint32_t best_rank[WARPS][WARP], best_at[WARPS][WARP], chosen[WARP];
    __shared__ float maxima[WARPS], sorted[WARP], sum_of_all;
    const uint32_t thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    float largest = from_bits(0xff800000u);
    for (uint32_t j = thread; j < r.all; j += CHOOSERS) {
        largest = larger(x[j], largest);
    }
    for (int width = WARP / 2; width > 0; width /= 2) {
        largest = larger(__shfl_xor_sync(ALL, largest, width), largest);
    }
    if (lane == 0) {
        maxima[warp] = largest;
    }
    __syncthreads();
    largest = maxima[0];
    for (uint32_t w = 1; w < WARPS; w++) {
        largest = larger(maxima[w], largest);
    }
    for (uint32_t j = thread; j < r.all; j += CHOOSERS) {
        x[j] = exp(x[j] - largest);
    }
    __syncthreads();
    if (warp == 0) {
        float sum = 0.0f;
        each_value(x, r.all, lane, [&](int, float value) { sum = sum + value; });
        sum = fold(sum);
        if (lane == 0) {
            sum_of_all = sum;
        }
    }
    __syncthreads();
    // Shares are not negative, so their bits are in their order; what isn't a number comes last. 0 is for those that
    // don't exist.
    auto rank = [](float value) { return isnan(value) ? 1 : to_bits(value) + 2; };
    for (uint32_t j = thread; j < r.all; j += CHOOSERS) {
        x[j] = __fdiv_rn(x[j], sum_of_all);
    }
    uint32_t last_rank = ~0u, last_at = 0;
    for (uint32_t i = 0; i < r.used; i++) {
        // The next one of the warp's own, behind the last.
        uint32_t best = 0, at = ~0u;
        for (uint32_t j = thread; j < r.all; j += CHOOSERS) {
            const uint32_t own = rank(x[j]);
            if (own > best && (own < last_rank || (own == last_rank && j > last_at))) {
                best = own, at = j;
            }
        }
        last_rank = largest_of(best);
        last_at = smallest_of(best == last_rank ? at : ~0u);
        if (lane == i) {
            best_rank[warp][i] = last_rank, best_at[warp][i] = last_at;
        }
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t next = 0, mine = 0;
        for (uint32_t i = 0; i < r.used; i++) {
            const bool there = lane < WARPS && next < r.used;
            const uint32_t own = there ? best_rank[lane][next] : 0, at = there ? best_at[lane][next] : ~0u;
            const uint32_t found = smallest_of(own == largest_of(own) ? at : ~0u);
            next += found == at;
            mine = lane == i ? found : mine;
        }
        chosen[lane] = lane < r.used ? mine : ~0u;
        __syncwarp();
        uint32_t place = 0;
        for (uint32_t i = 0; i < r.used; i++) {
            place += chosen[i] < mine;
        }
        __syncwarp();
        if (lane < r.used) {
            chosen[place] = mine, sorted[place] = x[mine];
        }
        __syncwarp();
        float total = 0.0f;
        for (uint32_t i = 0; i < r.used; i++) {
            total = total + sorted[i];
        }
        if (lane < r.used) {
            expert = chosen[lane], share = __fdiv_rn(sorted[lane], total);
        }
    }
    __syncthreads();
}

/// A block a row.
extern "C" __global__ void __launch_bounds__(CHOOSERS) strata_choose(const __grid_constant__ ChooseParams p) {
    const uint32_t row = blockIdx.x;
    pass();
    ready();
    uint32_t expert;
    float share;
    choose(p.r, p.logits + uint64_t(row) * p.r.all, expert, share);
    if (threadIdx.x < p.r.used) {
        p.r.experts[row * p.r.used + threadIdx.x] = expert;
        p.r.shares[row * p.r.used + threadIdx.x] = share;
    }
}

/// Groups the pairs of a few rows, at most 1,024 with these experts, by one block. Everything is counted by comparing
/// pairs with pairs.
__device__ inline void group_few(const Routing& r, const uint32_t* experts) {
    __shared__ uint32_t heads[1024];
    const uint32_t pairs = r.rows * r.used;
    // A pair's place is behind all pairs of lower experts and behind the lower pairs of its own; a unit starts with
    // every `tile`-th of an expert.
    auto count = [&](uint32_t pair, uint32_t& place, uint32_t& rank, uint32_t& all) {
        place = rank = all = 0;
        for (uint32_t i = 0; i < pairs; i++) {
            const uint32_t other = experts[i], own = experts[pair];
            place += other < own || (other == own && i < pair);
            rank += other == own && i < pair;
            all += other == own;
        }
    };
    uint32_t place, rank, all;
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += CHOOSERS) {
        count(pair, place, rank, all);
        r.places[pair] = place;
        r.order[place] = pair / r.used;
        heads[place] = rank % r.tile == 0;
    }
    __syncthreads();
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += CHOOSERS) {
        count(pair, place, rank, all);
        uint32_t unit = 0;
        for (uint32_t i = 0; i < place; i++) {
            unit += heads[i];
        }
        if (rank % r.tile == 0) {
            r.unit_expert[unit] = experts[pair];
            r.unit_first[unit] = place;
            r.unit_places[unit] = min(r.tile, all - rank);
        }
        if (place + 1 == pairs) {
            *r.units = unit + heads[place];
        }
    }
}

/// Chooses for one row and groups its pairs, by one block.
extern "C" __global__ void __launch_bounds__(CHOOSERS) strata_choose_one(const __grid_constant__ ChooseParams p) {
    __shared__ uint32_t experts[WARP];
    pass();
    ready();
    uint32_t expert;
    float share;
    choose(p.r, p.logits, expert, share);
    if (threadIdx.x < p.r.used) {
        experts[threadIdx.x] = expert;
        p.r.experts[threadIdx.x] = expert, p.r.shares[threadIdx.x] = share;
    }
    __syncthreads();
    group_few(p.r, experts);
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
        *r.units = unit_base;
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
            const uint32_t a = thread >= width ? places[thread - width] : 0,
                           b = thread >= width ? units[thread - width] : 0;
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

/// Twins of this and the next: `src/ops/experts.rs`.
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
