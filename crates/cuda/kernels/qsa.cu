// Block-sparse attention: docs/qwen4exp.md, section 2.3; rounding: docs/arithmetic.md, "Attention".
#include "floats.cuh"
#include "window.cuh"

namespace strata {

constexpr int CHUNK = 256;

__device__ inline float stored(const float* at) { return *at; }
__device__ inline float stored(const uint16_t* at) { return half_to_float(*at); }
__device__ inline void store(float* at, float x) { *at = x; }
__device__ inline void store(uint16_t* at, float x) { *at = float_to_half(x); }

/// What the kernels know of a layer. Twins of all parameters: `src/ops/qsa.rs`.
struct Attention {
    const Row* rows;
    /// `[context][cos, sin][rotary / 2]`
    const float* rope;
    /// `[sequences]` caches of `stride` bytes: keys, then the rest from these bytes on.
    uint8_t* cache;
    uint64_t stride, values, raw, pooled;
    uint32_t count, heads, kv_heads, dim, index_heads, index_dim, rotary, block, budget;
    float eps;

    template <class T>
    __device__ T* keys(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride) + position * kv_heads * dim;
    }
    template <class T>
    __device__ T* value_rows(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride + values) + position * kv_heads * dim;
    }
    template <class T>
    __device__ T* raw_keys(uint32_t slot, uint64_t position) const {
        return reinterpret_cast<T*>(cache + slot * stride + raw) + position * index_dim;
    }
    template <class T>
    __device__ T* pooled_keys(uint32_t slot, uint64_t which) const {
        return reinterpret_cast<T*>(cache + slot * stride + pooled) + which * index_dim;
    }
    /// Whether a query that sees `visible` tokens chooses among their blocks.
    __device__ bool chooses(uint32_t visible) const { return block > 0 && visible / block > budget / block; }
};

/// Rotates a head's half-split pairs by a row of the table.
__device__ inline void rotate(float* head, const float* row, uint32_t rotary, int lane) {
    const uint32_t half = rotary / 2;
    for (uint32_t i = lane; i < half; i += WARP) {
        const float a = head[i], b = head[half + i], cos = row[i], sin = row[half + i];
        head[i] = fma(a, cos, -(b * sin));
        head[half + i] = fma(b, cos, a * sin);
    }
}

struct RotateParams {
    Attention a;
    /// `[rows][heads][stride]`, of which the first `dim` values are normed and rotated.
    float* x;
    const float* gamma;
    uint32_t heads, stride, dim;
};

/// A warp a head.
extern "C" __global__ void __launch_bounds__(128) strata_norm_rotate(const __grid_constant__ RotateParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (at >= p.a.count * p.heads) {
        return;
    }
    float* x = p.x + uint64_t(at) * p.stride;
    const float scale = rms_scale(x, p.dim, p.a.eps, lane);
    for (uint32_t j = lane; j < p.dim; j += WARP) {
        x[j] = x[j] * scale * p.gamma[j];
    }
    __syncwarp();
    rotate(x, p.a.rope + uint64_t(p.a.rows[at / p.heads].position) * p.a.rotary, p.a.rotary, lane);
}

struct AppendParams {
    Attention a;
    /// `[rows][kv_heads * dim]` each, and `[rows][index_dim]`.
    const float* keys;
    const float* values;
    const float* raw;
};

/// Stores the rows' keys, values and raw indexer keys. Grid: values, rows.
template <class T>
__device__ void append(const AppendParams& p) {
    const uint32_t j = blockIdx.x * blockDim.x + threadIdx.x, width = p.a.kv_heads * p.a.dim;
    for (uint32_t r = blockIdx.y; r < p.a.count; r += gridDim.y) {
        const Row row = p.a.rows[r];
        if (j < width) {
            store(p.a.keys<T>(row.slot, row.position) + j, p.keys[uint64_t(r) * width + j]);
            store(p.a.value_rows<T>(row.slot, row.position) + j, p.values[uint64_t(r) * width + j]);
        }
        if (p.a.block > 0 && j < p.a.index_dim) {
            store(p.a.raw_keys<T>(row.slot, row.position) + j, p.raw[uint64_t(r) * p.a.index_dim + j]);
        }
    }
}

struct PoolParams {
    Attention a;
    const float* gamma;
    /// Room of `index_dim` floats a row.
    float* room;
};

/// Pools the keys of every block whose last token is a row of the window. A warp a row.
template <class T>
__device__ void pool(const PoolParams& p) {
    const uint32_t r = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (r >= p.a.count) {
        return;
    }
    const Row row = p.a.rows[r];
    if ((row.position + 1) % p.a.block != 0) {
        return;
    }
    const uint32_t first = row.position + 1 - p.a.block;
    float* key = p.room + uint64_t(r) * p.a.index_dim;
    for (uint32_t j = lane; j < p.a.index_dim; j += WARP) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < p.a.block; i++) {
            sum = sum + stored(p.a.raw_keys<T>(row.slot, first + i) + j);
        }
        key[j] = __fdiv_rn(sum, float(p.a.block));
    }
    __syncwarp();
    const float scale = rms_scale(key, p.a.index_dim, p.a.eps, lane);
    for (uint32_t j = lane; j < p.a.index_dim; j += WARP) {
        key[j] = key[j] * scale * p.gamma[j];
    }
    __syncwarp();
    rotate(key, p.a.rope + uint64_t(first) * p.a.rotary, p.a.rotary, lane);
    __syncwarp();
    for (uint32_t j = lane; j < p.a.index_dim; j += WARP) {
        store(p.a.pooled_keys<T>(row.slot, first / p.a.block) + j, key[j]);
    }
}

struct SelectParams {
    Attention a;
    /// `[rows][index_heads][index_dim]`
    const float* queries;
    /// Room of `[rows][most]` scores, one for each block of the longest sequence.
    float* scores;
    uint64_t most;
    /// `[rows][budget / block]`: the chosen blocks, ascending.
    uint32_t* chosen;
};

/// Scores of all blocks that a row sees: a sum over index heads, ascending, of what is positive of their dots. A warp a block at a time.
/// Grid: blocks, rows.
template <class T>
__device__ void score(const SelectParams& p) {
    const Row row = p.a.rows[blockIdx.y];
    const uint32_t visible = row.position + 1, warps = gridDim.x * blockDim.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (!p.a.chooses(visible)) {
        return;
    }
    const float* queries = p.queries + uint64_t(blockIdx.y) * p.a.index_heads * p.a.index_dim;
    for (uint32_t b = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; b < visible / p.a.block; b += warps) {
        const T* key = p.a.pooled_keys<T>(row.slot, b);
        float sum = 0.0f;
        for (uint32_t h = 0; h < p.a.index_heads; h++) {
            float acc = 0.0f;
            for (uint32_t j = lane; j < p.a.index_dim; j += WARP) {
                acc = fma(stored(key + j), queries[h * p.a.index_dim + j], acc);
            }
            sum = sum + fmaxf(fold(acc), 0.0f);
        }
        if (lane == 0) {
            p.scores[blockIdx.y * p.most + b] = sum;
        }
    }
}

constexpr int SELECTORS = 256;

/// The sum over a block's threads of what comes before each, and of all.
__device__ inline uint32_t before(uint32_t own, uint32_t* room, uint32_t& all) {
    const int thread = threadIdx.x, lane = thread % WARP;
    uint32_t sum = own;
    for (int width = 1; width < WARP; width *= 2) {
        const uint32_t other = __shfl_up_sync(ALL, sum, width);
        sum += lane >= width ? other : 0;
    }
    __syncthreads();
    if (lane == WARP - 1) {
        room[thread / WARP] = sum;
    }
    __syncthreads();
    uint32_t base = 0;
    all = 0;
    for (int w = 0; w < SELECTORS / WARP; w++) {
        base += w < thread / WARP ? room[w] : 0;
        all += room[w];
    }
    return base + sum - own;
}

/// The blocks with the largest scores, ascending; ties to the lower block. A block of threads a row: the least chosen score digit by digit,
/// then a pass in order.
extern "C" __global__ void __launch_bounds__(SELECTORS) strata_select(const __grid_constant__ SelectParams p) {
    __shared__ uint32_t digits[256], room[SELECTORS / WARP];
    __shared__ uint32_t prefix, left;
    const uint32_t visible = p.a.rows[blockIdx.x].position + 1, thread = threadIdx.x;
    if (!p.a.chooses(visible)) {
        return;
    }
    const uint32_t blocks = visible / p.a.block, kept = p.a.budget / p.a.block;
    // Scores are not negative, so their bits are in their order.
    const uint32_t* scores = reinterpret_cast<const uint32_t*>(p.scores + blockIdx.x * p.most);
    if (thread == 0) {
        prefix = 0, left = kept;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        digits[thread] = 0;
        __syncthreads();
        for (uint32_t b = thread; b < blocks; b += SELECTORS) {
            const uint32_t score = scores[b];
            if (shift == 24 || score >> (shift + 8) == prefix >> (shift + 8)) {
                atomicAdd(digits + (score >> shift & 255), 1u);
            }
        }
        __syncthreads();
        if (thread == 0) {
            uint32_t digit = 255, rest = left;
            while (digits[digit] < rest) {
                rest -= digits[digit--];
            }
            prefix |= digit << shift, left = rest;
        }
        __syncthreads();
    }
    // `left` blocks have the least chosen score.
    uint32_t written = 0, tied = 0;
    for (uint32_t first = 0; first < blocks; first += SELECTORS) {
        const uint32_t b = first + thread, score = b < blocks ? scores[b] : 0;
        const bool ties = b < blocks && score == prefix;
        uint32_t ties_here, chosen_here;
        const uint32_t rank = tied + before(ties, room, ties_here);
        const bool chosen = b < blocks && (score > prefix || (ties && rank < left));
        const uint32_t at = written + before(chosen, room, chosen_here);
        if (chosen) {
            p.chosen[uint64_t(blockIdx.x) * kept + at] = b;
        }
        tied += ties_here, written += chosen_here;
    }
}

struct AttendParams {
    Attention a;
    /// `[rows][heads][2][dim]`: per head the query, then its gate.
    const float* queries;
    const uint32_t* chosen;
    /// `[rows][heads][chunks][2 + dim]`: the largest score, the sum of exponentials, values.
    float* partials;
    /// `[rows][heads * dim]`
    float* out;
    Target quantised;
    uint32_t chunks;
};

/// The position of the `i`-th key that a row attends to.
__device__ inline uint32_t position_of(const Attention& a, const uint32_t* chosen, bool chooses, uint32_t visible, uint32_t i) {
    if (!chooses) {
        return i;
    }
    const uint32_t kept = a.budget / a.block * a.block;
    return i < kept ? chosen[i / a.block] * a.block + i % a.block : visible / a.block * a.block + (i - kept);
}

/// How many keys a row attends to.
__device__ inline uint32_t attended(const Attention& a, uint32_t visible) {
    return a.chooses(visible) ? a.budget / a.block * a.block + visible % a.block : visible;
}

constexpr int ATTENDERS = 256;

/// Attends the query heads of one key/value head to one chunk of a row's keys. Grid: chunks, key/value heads, rows.
/// `GROUP` is the most query heads of a key/value head, `PARTS` the most values of a head in a lane.
template <class T, int GROUP, int PARTS>
__device__ void attend(const AttendParams& p) {
    __shared__ float scores[CHUNK][GROUP];
    __shared__ uint32_t positions[CHUNK];
    __shared__ float staged[GROUP][PARTS * WARP];
    const Attention& a = p.a;
    const Row row = a.rows[blockIdx.z];
    const uint32_t visible = row.position + 1, kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    const uint32_t all = attended(a, visible), first = blockIdx.x * CHUNK;
    if (first >= all) {
        return;
    }
    const uint32_t keys = min(uint32_t(CHUNK), all - first);
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const uint32_t* chosen = p.chosen + uint64_t(blockIdx.z) * (a.block > 0 ? a.budget / a.block : 0);
    for (uint32_t i = thread; i < keys; i += ATTENDERS) {
        positions[i] = position_of(a, chosen, a.chooses(visible), visible, first + i);
    }
    const float* queries = p.queries + (uint64_t(blockIdx.z) * a.heads + kv_head * group) * 2 * a.dim;
    for (uint32_t i = thread; i < group * a.dim; i += ATTENDERS) {
        staged[i / a.dim][i % a.dim] = queries[uint64_t(i / a.dim) * 2 * a.dim + i % a.dim];
    }
    __syncthreads();
    const float scale = rsqrt(float(a.dim));
    constexpr int AT_ONCE = 4;
    for (uint32_t i = warp * AT_ONCE; i < keys; i += ATTENDERS / WARP * AT_ONCE) {
        float key[AT_ONCE][PARTS];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            const T* from = a.keys<T>(row.slot, positions[min(i + c, keys - 1)]) + kv_head * a.dim;
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                key[c][j] = lane + WARP * j < a.dim ? stored(from + lane + WARP * j) : 0.0f;
            }
        }
        for (uint32_t h = 0; h < group; h++) {
            float acc[AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                const uint32_t at = lane + WARP * j;
                const float q = at < a.dim ? staged[h][at] : 0.0f;
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    acc[c] = at < a.dim ? fma(key[c][j], q, acc[c]) : acc[c];
                }
            }
            const float sum = fold_many(acc, lane);
            const uint32_t own = i + folded<AT_ONCE>(lane);
            if (lane % (WARP / AT_ONCE) == 0 && own < keys) {
                scores[own][h] = sum * scale;
            }
        }
    }
    __syncthreads();
    for (uint32_t h = warp; h < group; h += ATTENDERS / WARP) {
        float most = from_bits(0xff800000u);
        for (uint32_t i = lane; i < keys; i += WARP) {
            most = scores[i][h] > most ? scores[i][h] : most;
        }
        for (int width = WARP / 2; width > 0; width /= 2) {
            const float other = __shfl_xor_sync(ALL, most, width);
            most = other > most ? other : most;
        }
        float sum = 0.0f;
        for (uint32_t i = lane; i < keys; i += WARP) {
            scores[i][h] = exp(scores[i][h] - most);
            sum = sum + scores[i][h];
        }
        sum = fold(sum);
        if (lane == 0) {
            float* out = p.partials + ((uint64_t(blockIdx.z) * a.heads + kv_head * group + h) * p.chunks + blockIdx.x) * (2 + a.dim);
            out[0] = most, out[1] = sum;
        }
    }
    __syncthreads();
    for (uint32_t j = thread; j < a.dim; j += ATTENDERS) {
        float acc[GROUP] = {};
#pragma unroll 4
        for (uint32_t i = 0; i < keys; i++) {
            const float value = stored(a.value_rows<T>(row.slot, positions[i]) + kv_head * a.dim + j);
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                acc[h] = fma(scores[i][h], value, acc[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            if (h < group) {
                p.partials[((uint64_t(blockIdx.z) * a.heads + kv_head * group + h) * p.chunks + blockIdx.x) * (2 + a.dim) + 2 + j] = acc[h];
            }
        }
    }
}

/// Merges a head's chunks in order, and finishes it: `acc / sum * sigmoid(gate)`. Grid: heads, rows.
extern "C" __global__ void __launch_bounds__(128) strata_merge(const __grid_constant__ AttendParams p) {
    const Attention& a = p.a;
    const uint32_t chunks = (attended(a, a.rows[blockIdx.y].position + 1) + CHUNK - 1) / CHUNK, width = 2 + a.dim;
    const uint64_t head = uint64_t(blockIdx.y) * a.heads + blockIdx.x;
    const float* from = p.partials + head * p.chunks * width;
    for (uint32_t j = threadIdx.x; j < a.dim; j += blockDim.x) {
        float largest = from[0], sum = from[1], acc = from[2 + j];
        for (uint32_t c = 1; c < chunks; c++) {
            const float* chunk = from + uint64_t(c) * width;
            const float most = chunk[0] > largest ? chunk[0] : largest;
            const float before = exp(largest - most), now = exp(chunk[0] - most);
            largest = most;
            sum = fma(sum, before, chunk[1] * now);
            acc = fma(acc, before, chunk[2 + j] * now);
        }
        const float gate = p.queries[(head * 2 + 1) * a.dim + j];
        const float value = __fdiv_rn(acc, sum) * sigmoid(gate);
        p.out[head * a.dim + j] = value;
        p.quantised.put(value, head * a.dim + j);
    }
}

#define STRATA_ATTEND(T, NAME, GROUP, PARTS)                                                                         \
    extern "C" __global__ void __launch_bounds__(ATTENDERS) strata_attend_##NAME##_##GROUP##_##PARTS(               \
        const __grid_constant__ AttendParams p) {                                                                   \
        attend<T, GROUP, PARTS>(p);                                                                                 \
    }
#define STRATA_STORED(T, NAME)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) strata_append_##NAME(const __grid_constant__ AppendParams p) { \
        append<T>(p);                                                                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) strata_pool_##NAME(const __grid_constant__ PoolParams p) {     \
        pool<T>(p);                                                                                                  \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) strata_score_##NAME(const __grid_constant__ SelectParams p) {  \
        score<T>(p);                                                                                                 \
    }                                                                                                                \
    STRATA_ATTEND(T, NAME, 4, 4)                                                                                     \
    STRATA_ATTEND(T, NAME, 4, 8)                                                                                     \
    STRATA_ATTEND(T, NAME, 16, 4)                                                                                    \
    STRATA_ATTEND(T, NAME, 16, 8)
STRATA_STORED(float, f32)
STRATA_STORED(uint16_t, f16)

}  // namespace strata
