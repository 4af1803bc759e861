// Attention of few rows, over all multiprocessors: scores by a first kernel, a warp four keys; then a block of threads a chunk and 32 of the
// values' columns, the last of which merges the chunks. Any width of a head, any format of a cache.
#include "qsa.cuh"
#include "tile.cuh"

namespace strata {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
/// Keys that a warp has at once.
constexpr int AT_ONCE = 4;

/// Scores. `PARTS` is the most values of a head in a lane. Grid: 32 keys, key/value heads, rows.
template <class T, int PARTS>
__device__ void weigh(const AttendParams& p) {
    constexpr int HEADS = 4;
    __shared__ float staged[16][PARTS * WARP];
    const Attention& a = p.a;
    const Row row = a.rows[blockIdx.z];
    const uint32_t visible = row.position + 1, kv_head = blockIdx.y, group = a.heads / a.kv_heads, all = attended(a, visible);
    const int thread = threadIdx.x, lane = thread % WARP;
    const uint32_t first = (blockIdx.x * WARPS + thread / WARP) * AT_ONCE;
    if (blockIdx.x * WARPS * AT_ONCE >= all) {
        return;
    }
    const uint32_t* chosen = p.chosen + uint64_t(blockIdx.z) * (a.block > 0 ? a.budget / a.block : 0);
    T keys[AT_ONCE][PARTS];
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
        const uint32_t at = position_of(a, chosen, a.chooses(visible), visible, min(first + c, all - 1));
        const T* from = a.keys<T>(row.slot, at) + kv_head * a.dim;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            keys[c][j] = lane + WARP * j < a.dim ? from[lane + WARP * j] : T(0);
        }
    }
    const uint64_t head = uint64_t(blockIdx.z) * a.heads + kv_head * group;
    const float* queries = p.queries + head * 2 * a.dim;
#pragma unroll 4
    for (uint32_t i = thread; i < group * a.dim; i += THREADS) {
        staged[i / a.dim][i % a.dim] = queries[uint64_t(i / a.dim) * 2 * a.dim + i % a.dim];
    }
    __syncthreads();
    float x[AT_ONCE][PARTS];
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            x[c][j] = stored(&keys[c][j]);
        }
    }
    const float scale = rsqrt(float(a.dim));
    for (uint32_t h = 0; h < group; h += HEADS) {
        float acc[HEADS * AT_ONCE] = {};
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            const uint32_t at = lane + WARP * j;
#pragma unroll
            for (int n = 0; n < HEADS; n++) {
                const float q = staged[min(h + n, group - 1)][at];
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    float& sum = acc[n * AT_ONCE + c];
                    sum = at < a.dim ? fma(x[c][j], q, sum) : sum;
                }
            }
        }
        const float sum = fold_many(acc, lane);
        const int which = folded<HEADS * AT_ONCE>(lane);
        const uint32_t own = h + which / AT_ONCE, key = first + which % AT_ONCE;
        if (lane % (WARP / (HEADS * AT_ONCE)) == 0 && own < group && key < all) {
            p.scores[(head + own) * p.span + key] = sum * scale;
        }
    }
}

/// What a block of threads has of a chunk.
template <class T>
struct Gathering {
    T values[CHUNK][WARP];
    float weights[16][CHUNK];
    uint32_t positions[CHUNK];
    float largest[16], sums[16];
    bool last;
};

/// A head's result: `acc / sum * sigmoid(gate)`.
__device__ inline void finish(const AttendParams& p, uint64_t head, uint32_t j, float acc, float sum) {
    if (j < p.a.dim) {
        const float gate = p.queries[(head * 2 + 1) * p.a.dim + j];
        const float value = __fdiv_rn(acc, sum) * sigmoid(gate);
        p.out[head * p.a.dim + j] = value;
        p.quantised.put(value, head * p.a.dim + j);
    }
}

/// Attends to a chunk. Grid: chunks, key/value heads and slices, rows.
template <class T>
__device__ void gather(const AttendParams& p) {
    extern __shared__ __align__(16) uint8_t raw[];
    Gathering<T>& shared = *reinterpret_cast<Gathering<T>*>(raw);
    const Attention& a = p.a;
    const Row row = a.rows[blockIdx.z];
    const uint32_t visible = row.position + 1, slices = (a.dim + WARP - 1) / WARP;
    const uint32_t kv_head = blockIdx.y / slices, slice = blockIdx.y % slices, group = a.heads / a.kv_heads;
    const uint32_t all = attended(a, visible), first = blockIdx.x * CHUNK, chunks = (all + CHUNK - 1) / CHUNK;
    if (first >= all) {
        return;
    }
    const uint32_t keys = min(uint32_t(CHUNK), all - first);
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const uint32_t* chosen = p.chosen + uint64_t(blockIdx.z) * (a.block > 0 ? a.budget / a.block : 0);
    static_assert(CHUNK == THREADS);
    shared.positions[thread] = position_of(a, chosen, a.chooses(visible), visible, min(first + thread, all - 1));
    __syncthreads();
    // The values are under way while the exponentials are computed.
    const uint32_t width = min(uint32_t(WARP), a.dim - slice * WARP);
    const T* values = a.value_rows<T>(row.slot, 0) + kv_head * a.dim + slice * WARP;
    const uint64_t stride = uint64_t(a.kv_heads) * a.dim;
    if (a.dim % (16 / sizeof(T)) == 0) {
        const uint32_t pieces = width * sizeof(T) / 16;
        for (uint32_t i = thread; i < keys * pieces; i += THREADS) {
            const uint32_t key = i / pieces, piece = i % pieces;
            const uint32_t to = uint32_t(__cvta_generic_to_shared(shared.values[key])) + piece * 16;
            copy16(to, reinterpret_cast<const uint8_t*>(values + shared.positions[key] * stride) + piece * 16);
        }
    } else {
        for (uint32_t i = thread; i < keys * width; i += THREADS) {
            shared.values[i / width][i % width] = values[shared.positions[i / width] * stride + i % width];
        }
    }
    close_group();
    const uint64_t head = uint64_t(blockIdx.z) * a.heads + kv_head * group;
    for (uint32_t h = warp; h < group; h += WARPS) {
        const float* from = p.scores + (head + h) * p.span + first + lane;
        float scores[CHUNK / WARP], most = from_bits(0xff800000u), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK / WARP; i++) {
            scores[i] = i * WARP + lane < keys ? from[i * WARP] : from_bits(0xff800000u);
        }
#pragma unroll
        for (int i = 0; i < CHUNK / WARP; i++) {
            most = fmaxf(most, scores[i]);
        }
        for (int width = WARP / 2; width > 0; width /= 2) {
            most = fmaxf(most, __shfl_xor_sync(ALL, most, width));
        }
#pragma unroll
        for (int i = 0; i < CHUNK / WARP; i++) {
            const float e = exp(scores[i] - most);
            shared.weights[h][i * WARP + lane] = e;
            sum = i * WARP + lane < keys ? sum + e : sum;
        }
        sum = fold(sum);
        if (lane == 0) {
            shared.largest[h] = most, shared.sums[h] = sum;
        }
    }
    close_group();
    all_but_the_latest();
    __syncthreads();
    float* partials = p.partials + slice * (2 + WARP) + head * p.chunks * slices * (2 + WARP);
    const uint64_t per_chunk = uint64_t(slices) * (2 + WARP), per_head = p.chunks * per_chunk;
    constexpr int HEADS = 2;
    for (uint32_t h = warp * HEADS; h < group; h += WARPS * HEADS) {
        float acc[HEADS] = {};
        uint32_t key = 0;
#pragma unroll 2
        for (; key + 4 <= keys; key += 4) {
            const float4 e = *reinterpret_cast<const float4*>(shared.weights[h] + key);
            const float4 f = *reinterpret_cast<const float4*>(shared.weights[h + 1] + key);
            const float x[4] = {stored(&shared.values[key][lane]), stored(&shared.values[key + 1][lane]),
                                stored(&shared.values[key + 2][lane]), stored(&shared.values[key + 3][lane])};
            acc[0] = fma(e.x, x[0], acc[0]), acc[1] = fma(f.x, x[0], acc[1]);
            acc[0] = fma(e.y, x[1], acc[0]), acc[1] = fma(f.y, x[1], acc[1]);
            acc[0] = fma(e.z, x[2], acc[0]), acc[1] = fma(f.z, x[2], acc[1]);
            acc[0] = fma(e.w, x[3], acc[0]), acc[1] = fma(f.w, x[3], acc[1]);
        }
        for (; key < keys; key++) {
            const float x = stored(&shared.values[key][lane]);
            acc[0] = fma(shared.weights[h][key], x, acc[0]), acc[1] = fma(shared.weights[h + 1][key], x, acc[1]);
        }
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            if (h + n < group && chunks == 1) {
                finish(p, head + h + n, slice * WARP + lane, acc[n], shared.sums[h + n]);
            } else if (h + n < group) {
                float* to = partials + (h + n) * per_head + blockIdx.x * per_chunk;
                to[2 + lane] = acc[n];
                if (lane == 0) {
                    to[0] = shared.largest[h + n], to[1] = shared.sums[h + n];
                }
            }
        }
    }
    if (chunks == 1) {
        return;
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        shared.last = atomicAdd(p.done + uint64_t(blockIdx.z) * a.kv_heads * slices + blockIdx.y, 1u) == chunks - 1;
    }
    __syncthreads();
    if (!shared.last) {
        return;
    }
    __threadfence();
    for (uint32_t h = warp; h < group; h += WARPS) {
        constexpr int BEHIND = 8;
        const float* from = partials + h * per_head;
        float largest = __ldcg(from), sum = __ldcg(from + 1), acc = __ldcg(from + 2 + lane);
        for (uint32_t c = 1; c < chunks; c += BEHIND) {
            float chunk[BEHIND][3];
#pragma unroll
            for (int i = 0; i < BEHIND; i++) {
                const float* at = from + min(c + i, chunks - 1) * per_chunk;
                chunk[i][0] = __ldcg(at), chunk[i][1] = __ldcg(at + 1), chunk[i][2] = __ldcg(at + 2 + lane);
            }
#pragma unroll
            for (int i = 0; i < BEHIND; i++) {
                if (c + i < chunks) {
                    const float most = chunk[i][0] > largest ? chunk[i][0] : largest;
                    const float before = exp(largest - most), now = exp(chunk[i][0] - most);
                    largest = most;
                    sum = fma(sum, before, chunk[i][1] * now);
                    acc = fma(acc, before, chunk[i][2] * now);
                }
            }
        }
        finish(p, head + h, slice * WARP + lane, acc, sum);
    }
}

#define STRATA_ATTEND(T, NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_weigh_##NAME##_128(const __grid_constant__ AttendParams p) {   \
        weigh<T, 4>(p);                                                                                                         \
    }                                                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_weigh_##NAME##_256(const __grid_constant__ AttendParams p) {   \
        weigh<T, 8>(p);                                                                                                         \
    }                                                                                                                           \
    extern "C" __device__ uint32_t strata_gather_##NAME##_shared = sizeof(Gathering<T>);                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) strata_gather_##NAME(const __grid_constant__ AttendParams p) {        \
        gather<T>(p);                                                                                                           \
    }
STRATA_ATTEND(float, f32)
STRATA_ATTEND(uint16_t, f16)

}  // namespace strata
