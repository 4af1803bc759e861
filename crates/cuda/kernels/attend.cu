// Attention of few rows, over all multiprocessors: scores by a first kernel, a warp four keys; then a block of threads
// a chunk and 32 of the values' columns, the last of which merges the chunks. Any width of a head, any format of a
// cache.
#include "qsa.cuh"
#include "shared.cuh"

namespace strata {

/// Of the blocks of threads that score, and that gather: a warp for each of sixteen query heads.
constexpr int WEIGHERS = 128, GATHERERS = 512;
/// Keys that a warp scores at once.
constexpr int AT_ONCE = 4;

/// Scores. `PARTS` is the most values of a head in a lane. Grid: 16 keys, key/value heads, rows.
template <class T, int PARTS>
__device__ void weigh(const AttendParams& p) {
    constexpr int HEADS = 4;
    __shared__ float staged[16][PARTS * WARP];
    const Attention& a = p.a;
    const Row row = a.rows[blockIdx.z];
    const uint32_t visible = row.position + 1, kv_head = blockIdx.y, group = a.heads / a.kv_heads,
                   all = attended(a, visible);
    const int thread = threadIdx.x, lane = thread % WARP;
    constexpr int WARPS = WEIGHERS / WARP;
    const uint32_t first = (blockIdx.x * WARPS + thread / WARP) * AT_ONCE;
    if (blockIdx.x * WARPS * AT_ONCE >= all) {
        return;
    }
    const uint32_t* chosen = p.chosen + uint64_t(blockIdx.z) * (a.block > 0 ? a.budget / a.block : 0);
    const uint32_t at = position_of(a, chosen, a.chooses(visible), visible, min(first + lane % AT_ONCE, all - 1));
    T keys[AT_ONCE][PARTS];
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
        const T* from = a.keys<T>(row.slot, __shfl_sync(ALL, at, c)) + kv_head * a.dim;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            keys[c][j] = lane + WARP * j < a.dim ? from[lane + WARP * j] : T(0);
        }
    }
    const uint64_t head = uint64_t(blockIdx.z) * a.heads + kv_head * group;
    const float* queries = p.queries + head * 2 * a.dim;
#pragma unroll 3
    for (uint32_t h = thread / WARP; h < group; h += WARPS) {
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            const uint32_t at = lane + WARP * j;
            staged[h][at] = at < a.dim ? queries[uint64_t(h) * 2 * a.dim + at] : 0.0f;
        }
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
#pragma unroll 1
    for (uint32_t h = 0; h < group; h += HEADS) {
        float acc[HEADS * AT_ONCE] = {};
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            const uint32_t at = lane + WARP * j;
#pragma unroll
            for (int n = 0; n < HEADS; n++) {
                const float q = staged[h + n][at];
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    acc[n * AT_ONCE + c] = fma(x[c][j], q, acc[n * AT_ONCE + c]);
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
    // A warp weighs the keys of a head: its scores are on their way first.
    const uint64_t head = uint64_t(blockIdx.z) * a.heads + kv_head * group;
    float scores[CHUNK / WARP];
#pragma unroll
    for (int i = 0; i < CHUNK / WARP; i++) {
        const bool is = warp < group && i * WARP + lane < keys;
        scores[i] = is ? p.scores[(head + warp) * p.span + first + i * WARP + lane] : from_bits(0xff800000u);
    }
    if (thread < CHUNK) {
        shared.positions[thread] = position_of(a, chosen, a.chooses(visible), visible, min(first + thread, all - 1));
    }
    __syncthreads();
    // The values are under way while the exponentials are computed.
    const uint32_t width = min(uint32_t(WARP), a.dim - slice * WARP);
    const T* values = a.value_rows<T>(row.slot, 0) + kv_head * a.dim + slice * WARP;
    const uint64_t stride = uint64_t(a.kv_heads) * a.dim;
    if (a.dim * sizeof(T) % 16 == 0 && a.values % 16 == 0 && a.stride % 16 == 0) {
        constexpr uint32_t PIECES = WARP * sizeof(T) / 16;
#pragma unroll 1
        for (uint32_t i = thread; i < keys * PIECES; i += GATHERERS) {
            const uint32_t key = i / PIECES, piece = i % PIECES;
            const SharedAddress to = shared_at(shared.values[key]) + piece * 16;
            if (piece * 16 < width * sizeof(T)) {
                start_copy<16>(to,
                               reinterpret_cast<const uint8_t*>(values + shared.positions[key] * stride) + piece * 16);
            }
        }
    } else {
#pragma unroll 1
        for (uint32_t i = thread; i < keys * width; i += GATHERERS) {
            shared.values[i / width][i % width] = values[shared.positions[i / width] * stride + i % width];
        }
    }
    if (warp < group) {
        float most = from_bits(0xff800000u), sum = 0.0f;
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
            shared.weights[warp][i * WARP + lane] = e;
            sum = i * WARP + lane < keys ? sum + e : sum;
        }
        sum = fold(sum);
        if (lane == 0) {
            shared.largest[warp] = most, shared.sums[warp] = sum;
        }
    }
    await_all_copies();
    __syncthreads();
    const uint64_t per_chunk = uint64_t(slices) * (2 + WARP);
    const auto partial = [&](uint32_t h, uint32_t chunk) {
        return p.partials + ((head + h) * p.chunks + chunk) * per_chunk + slice * (2 + WARP);
    };
    constexpr int HEADS = 2;
    if (warp * HEADS < group) {
        const uint32_t h = warp * HEADS;
        float acc[HEADS] = {};
        uint32_t key = 0;
        constexpr int AHEAD = 8;
#pragma unroll 2
        for (; key + AHEAD <= keys; key += AHEAD) {
            float x[AHEAD], e[HEADS][AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                x[i] = stored(&shared.values[key + i][lane]);
            }
#pragma unroll
            for (int n = 0; n < HEADS; n++) {
#pragma unroll
                for (int i = 0; i < AHEAD; i += 4) {
                    *reinterpret_cast<float4*>(e[n] + i) =
                        *reinterpret_cast<const float4*>(shared.weights[h + n] + key + i);
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                acc[0] = fma(e[0][i], x[i], acc[0]), acc[1] = fma(e[1][i], x[i], acc[1]);
            }
        }
#pragma unroll 1
        for (; key < keys; key++) {
            const float x = stored(&shared.values[key][lane]);
            acc[0] = fma(shared.weights[h][key], x, acc[0]), acc[1] = fma(shared.weights[h + 1][key], x, acc[1]);
        }
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            if (h + n < group) {
                float* to = partial(h + n, blockIdx.x);
                to[2 + lane] = acc[n];
                if (lane == 0) {
                    to[0] = shared.largest[h + n], to[1] = shared.sums[h + n];
                }
            }
        }
    }
    __syncthreads();
    if (thread == 0) {
        shared.last = is_last(p.done + uint64_t(blockIdx.z) * a.kv_heads * slices + blockIdx.y, chunks);
    }
    __syncthreads();
    if (!shared.last || warp >= group) {
        return;
    }
    // The last one merges the chunks in order, a warp a head: first each lane has a chunk's factors, then a value.
    const uint32_t j = slice * WARP + lane;
    const float gate = j < a.dim ? p.queries[((head + warp) * 2 + 1) * a.dim + j] : 0.0f;
    float largest = from_bits(0xff800000u), sum = 0.0f, acc = 0.0f;
#pragma unroll 1
    for (uint32_t done = 0; done < chunks; done += WARP) {
        const float* from = partial(warp, min(done + lane, chunks - 1));
        const float own = from[0], own_sum = from[1];
        float most = fmaxf(own, largest);
        for (int width = 1; width < WARP; width *= 2) {
            const float other = __shfl_up_sync(ALL, most, width);
            most = lane >= width ? fmaxf(most, other) : most;
        }
        float behind = __shfl_up_sync(ALL, most, 1);
        behind = lane == 0 ? largest : behind;
        const float before = exp(behind - most), now = exp(own - most);
        largest = __shfl_sync(ALL, most, WARP - 1);
#pragma unroll 4
        for (uint32_t i = 0; i < min(uint32_t(WARP), chunks - done); i++) {
            const float value = partial(warp, done + i)[2 + lane], of_chunk = __shfl_sync(ALL, own_sum, i);
            const float b = __shfl_sync(ALL, before, i), n = __shfl_sync(ALL, now, i);
            const bool first = done + i == 0;
            sum = first ? of_chunk : fma(sum, b, of_chunk * n);
            acc = first ? value : fma(acc, b, value * n);
        }
    }
    if (j < a.dim) {
        const float value = __fdiv_rn(acc, sum) * sigmoid(gate);
        p.out[(head + warp) * a.dim + j] = value;
        p.quantised.put(value, (head + warp) * a.dim + j);
    }
}

#define STRATA_ATTEND(T, NAME)                                                           \
    extern "C" __global__ void __launch_bounds__(WEIGHERS)                               \
        strata_weigh_##NAME##_128(const __grid_constant__ AttendParams p) {              \
        pass();                                                                          \
        ready();                                                                         \
        weigh<T, 4>(p);                                                                  \
    }                                                                                    \
    extern "C" __global__ void __launch_bounds__(WEIGHERS)                               \
        strata_weigh_##NAME##_256(const __grid_constant__ AttendParams p) {              \
        pass();                                                                          \
        ready();                                                                         \
        weigh<T, 8>(p);                                                                  \
    }                                                                                    \
    extern "C" __device__ uint32_t strata_gather_##NAME##_shared = sizeof(Gathering<T>); \
    extern "C" __global__ void __launch_bounds__(GATHERERS, 2)                           \
        strata_gather_##NAME(const __grid_constant__ AttendParams p) {                   \
        pass();                                                                          \
        ready();                                                                         \
        gather<T>(p);                                                                    \
    }
STRATA_ATTEND(float, f32)
STRATA_ATTEND(uint16_t, f16)

}  // namespace strata
