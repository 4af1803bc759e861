// Hyper-connection mixers: docs/qwen4exp.md, section 2.1.
#include "floats.cuh"

namespace strata {

/// Twins of all parameters: `src/ops/mixer.rs`.
struct NormParams {
    const float* x;
    /// Which row of `x` each row is, or null.
    const uint32_t* rows;
    /// `[groups * width]`
    const float* gamma;
    float* out;
    Target quantised;
    /// Rows times groups.
    uint32_t count;
    uint32_t groups, width;
    float eps;
};

constexpr int NORMERS = 256;
constexpr int STAGED = 4096;

/// `out[row][group] = rms(x[row][group]) * gamma[group]`, a block of threads a group. The sum of squares is one warp's, in the contract's order;
/// what it adds is brought by all of them.
extern "C" __global__ void __launch_bounds__(NORMERS) strata_norm(const __grid_constant__ NormParams p) {
    __shared__ float staged[STAGED];
    __shared__ float found;
    const uint32_t at = blockIdx.x;
    const int lane = threadIdx.x % WARP;
    const uint32_t row = at / p.groups, group = at % p.groups;
    const uint32_t from = p.rows == nullptr ? row : p.rows[row];
    const float* x = p.x + (size_t(from) * p.groups + group) * p.width;
    const float* gamma = p.gamma + size_t(group) * p.width;
    float* out = p.out + size_t(at) * p.width;
    float squares = 0.0f;
    for (uint32_t from = 0; from < p.width; from += STAGED) {
        const uint32_t here = min(uint32_t(STAGED), p.width - from);
        __syncthreads();
        for (uint32_t j = threadIdx.x; j < here; j += NORMERS) {
            staged[j] = x[from + j];
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            each_value(staged, here, lane, [&](int, float value) { squares = fma(value, value, squares); });
        }
    }
    if (threadIdx.x < WARP) {
        squares = fold(squares);
        if (lane == 0) {
            found = rsqrt(__fdiv_rn(squares, float(p.width)) + p.eps);
        }
    }
    __syncthreads();
    const float scale = found;
    const size_t first = size_t(at) * p.width;
    for (uint32_t j = threadIdx.x; j < p.width; j += NORMERS) {
        const float normed = (p.width <= STAGED ? staged[j] : x[j]) * scale * gamma[j];
        out[j] = normed;
        p.quantised.put(normed, first + j);
    }
}

struct GatesParams {
    float* low;
    float* inject;
    Target quantised;
    uint32_t low_count, inject_count;
    float streams;
};

/// `silu(low / S)` and `2 sigmoid(inject / S)`, in place.
extern "C" __global__ void __launch_bounds__(256) strata_mixer_gates(const __grid_constant__ GatesParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.low_count) {
        const float low = silu(__fdiv_rn(p.low[i], p.streams));
        p.low[i] = low;
        p.quantised.put(low, i);
    } else if (i - p.low_count < p.inject_count) {
        float& inject = p.inject[i - p.low_count];
        inject = 2.0f * sigmoid(__fdiv_rn(inject, p.streams));
    }
}

struct MixParams {
    /// `[rows][streams][width]`
    const float* gates;
    const float* normed;
    /// `[rows][width]`
    float* u;
    Target quantised;
    uint32_t count, streams, width;
};

/// `u = (sum over streams, ascending, of sigmoid(gate) * normed) / S`.
extern "C" __global__ void __launch_bounds__(256) strata_mix(const __grid_constant__ MixParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) {
        return;
    }
    const size_t first = size_t(i / p.width) * p.streams * p.width + i % p.width;
    float u = 0.0f;
    for (uint32_t s = 0; s < p.streams; s++) {
        const size_t at = first + size_t(s) * p.width;
        u = fma(sigmoid(p.gates[at]), p.normed[at], u);
    }
    u = __fdiv_rn(u, float(p.streams));
    p.u[i] = u;
    p.quantised.put(u, i);
}

struct ScatterParams {
    const float* y;
    const float* inject;
    float* x;
    uint32_t count, streams, width;
};

/// `x[t, s] = fma(inject[t, s], y[t], x[t, s])`.
extern "C" __global__ void __launch_bounds__(256) strata_scatter(const __grid_constant__ ScatterParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) {
        return;
    }
    const uint32_t row = i / (p.streams * p.width), stream = i / p.width % p.streams;
    p.x[i] = fma(p.inject[row * p.streams + stream], p.y[size_t(row) * p.width + i % p.width], p.x[i]);
}

struct JoinParams {
    /// `[rows][width]`
    const float* embeddings;
    /// `[rows][streams][width]`
    const float* x;
    const float* e_norm;
    const float* h_norm;
    /// `[rows][streams][2][width]`
    float* out;
    uint32_t count, streams, width;
    float eps;
};

/// The draft block's input: per row and stream the normed embedding, then the normed residual. A warp each.
extern "C" __global__ void __launch_bounds__(128) strata_join(const __grid_constant__ JoinParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (at >= p.count) {
        return;
    }
    const float* e = p.embeddings + size_t(at / p.streams) * p.width;
    const float* h = p.x + size_t(at) * p.width;
    const float* h_norm = p.h_norm + size_t(at % p.streams) * p.width;
    const float e_scale = rms_scale(e, p.width, p.eps, lane), h_scale = rms_scale(h, p.width, p.eps, lane);
    float* out = p.out + size_t(at) * 2 * p.width;
    for (uint32_t j = lane; j < p.width; j += WARP) {
        out[j] = e[j] * e_scale * p.e_norm[j];
        out[p.width + j] = h[j] * h_scale * h_norm[j];
    }
}

}  // namespace strata
