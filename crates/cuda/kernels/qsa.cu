// What comes before attention: norms and rotation of queries and keys, the caches' new rows, pooled keys.
// docs/qwen4exp.md, section 2.3.
#include "qsa.cuh"

namespace strata {

/// The widest head.
constexpr int WIDEST = 256;
constexpr int PREPARERS = 128;

struct PrepareParams {
    Attention a;
    /// `[rows][heads][2][dim]`: queries, which are normed and rotated in place, and gates.
    float* queries;
    /// `[rows][index_heads][index_dim]`, likewise.
    float* index_queries;
    /// `[rows][kv_heads][dim]` each, and `[rows][index_dim]`.
    const float* keys;
    const float* values;
    const float* raw;
    const float* query_gamma;
    const float* key_gamma;
    const float* index_query_gamma;
    const float* index_key_gamma;
    /// `[rows][counters]`: zeroed for those that count behind this.
    uint32_t* counts;
    uint32_t counters;
};

/// Norms a head in `x`, in place, and rotates its half-split pairs by a row of the table; of a warp.
__device__ inline void norm_rotate(float* x, const float* gamma, uint32_t dim, const float* row, uint32_t rotary,
                                   float eps, int lane) {
    constexpr int PARTS = WIDEST / WARP;
    float values[PARTS], gammas[PARTS], acc = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t j = lane + WARP * i;
        gammas[i] = j < dim ? gamma[j] : 0.0f;
        values[i] = j < dim ? x[j] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        acc = lane + WARP * i < dim ? fma(values[i], values[i], acc) : acc;
    }
    const float scale = rsqrt(__fdiv_rn(fold(acc), float(dim)) + eps);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t j = lane + WARP * i;
        if (j < dim) {
            x[j] = values[i] * scale * gammas[i];
        }
    }
    __syncwarp();
    const uint32_t half = rotary / 2;
    for (uint32_t i = lane; i < half; i += WARP) {
        const float a = x[i], b = x[half + i], cos = row[i], sin = row[half + i];
        x[i] = fma(a, cos, -(b * sin));
        x[half + i] = fma(b, cos, a * sin);
    }
    __syncwarp();
}

/// A warp a head: of queries, of keys, of values, of index queries; and one for the raw indexer key, which pools the
/// keys of a block that ends with its row.
template <class T>
__device__ void prepare(const PrepareParams& p) {
    __shared__ float staged[PREPARERS / WARP][WIDEST];
    const Attention& a = p.a;
    const int lane = threadIdx.x % WARP;
    const uint32_t warp = (blockIdx.x * PREPARERS + threadIdx.x) / WARP,
                   all = a.heads + 2 * a.kv_heads + a.index_heads + 1;
    const uint32_t r = warp / all;
    uint32_t head = warp % all;
    if (r >= a.count) {
        return;
    }
    const Row row = a.rows[r];
    for (uint32_t i = head * WARP + lane; i < p.counters; i += all * WARP) {
        p.counts[uint64_t(r) * p.counters + i] = 0;
    }
    // What is normed: where it comes from and where it goes, in place or to the cache.
    float* x = staged[threadIdx.x / WARP];
    const float *from = nullptr, *gamma;
    float* in_place = nullptr;
    T* to = nullptr;
    uint32_t dim = a.dim, position = row.position;
    if (head < a.heads) {
        from = in_place = p.queries + (uint64_t(r) * a.heads + head) * 2 * a.dim, gamma = p.query_gamma;
    } else if ((head -= a.heads) < a.kv_heads) {
        from = p.keys + (uint64_t(r) * a.kv_heads + head) * a.dim, gamma = p.key_gamma;
        to = a.keys<T>(row.slot, row.position) + head * a.dim;
    } else if ((head -= a.kv_heads) < a.kv_heads) {
        const float* values = p.values + (uint64_t(r) * a.kv_heads + head) * a.dim;
        to = a.value_rows<T>(row.slot, row.position) + head * a.dim;
        for (uint32_t j = lane; j < a.dim; j += WARP) {
            store(to + j, values[j]);
        }
        return;
    } else if ((head -= a.kv_heads) < a.index_heads) {
        from = in_place = p.index_queries + (uint64_t(r) * a.index_heads + head) * a.index_dim;
        dim = a.index_dim, gamma = p.index_query_gamma;
    } else {
        if (a.block == 0) {
            return;
        }
        const float* raw = p.raw + uint64_t(r) * a.index_dim;
        to = a.raw_keys<T>(row.slot, row.position);
        for (uint32_t j = lane; j < a.index_dim; j += WARP) {
            store(to + j, raw[j]);
        }
        if ((row.position + 1) % a.block != 0) {
            return;
        }
        // Tokens of the block that are in this window may not be in the cache yet: they are read as it will store them.
        position = row.position + 1 - a.block, dim = a.index_dim, gamma = p.index_key_gamma;
        uint32_t here = 0;
        for (uint32_t back = lane; back < a.block && back <= r; back += WARP) {
            const Row other = a.rows[r - back];
            here += other.slot == row.slot && other.position + back == row.position;
        }
        for (int width = WARP / 2; width > 0; width /= 2) {
            here += __shfl_xor_sync(ALL, here, width);
        }
        constexpr int PARTS = WIDEST / WARP;
        float sums[PARTS] = {};
        const T* before = a.raw_keys<T>(row.slot, position);
#pragma unroll 2
        for (uint32_t i = 0; i < a.block - here; i++) {
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
                const uint32_t j = lane + WARP * n;
                sums[n] = j < dim ? sums[n] + stored(before + i * dim + j) : 0.0f;
            }
        }
#pragma unroll 2
        for (uint32_t back = here; back > 0; back--) {
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
                const uint32_t j = lane + WARP * n;
                if (j < dim) {
                    T key;
                    store(&key, p.raw[uint64_t(r - (back - 1)) * dim + j]);
                    sums[n] = sums[n] + stored(&key);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            if (lane + WARP * n < dim) {
                x[lane + WARP * n] = __fdiv_rn(sums[n], float(a.block));
            }
        }
        to = a.pooled_keys<T>(row.slot, position / a.block);
    }
    if (from != nullptr) {
        for (uint32_t j = lane; j < dim; j += WARP) {
            x[j] = from[j];
        }
    }
    norm_rotate(x, gamma, dim, a.rope + uint64_t(position) * a.rotary, a.rotary, a.eps, lane);
    for (uint32_t j = lane; j < dim; j += WARP) {
        if (in_place != nullptr) {
            in_place[j] = x[j];
        } else {
            store(to + j, x[j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(PREPARERS) strata_prepare_f32(const __grid_constant__ PrepareParams p) {
    pass();
    ready();
    prepare<float>(p);
}
extern "C" __global__ void __launch_bounds__(PREPARERS) strata_prepare_f16(const __grid_constant__ PrepareParams p) {
    pass();
    ready();
    prepare<uint16_t>(p);
}

}  // namespace strata
