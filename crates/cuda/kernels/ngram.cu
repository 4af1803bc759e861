// The n-gram block: docs/qwen4exp.md, section 2.5. Twins of all parameters: `src/ops/ngram.rs`.
#include "floats.cuh"
#include "recurrent.cuh"

namespace strata {

/// The convolution of one channel and row `t` of a portion: taps by FMA from zero, oldest first.
__device__ inline float convolve(const ConvParams& p, const Portion& portion, const float* history, uint32_t t,
                                 uint32_t channel) {
    const uint32_t back = (p.kernel - 1) * p.dilation;
    const float* rows = p.rows + uint64_t(portion.row) * p.channels + channel;
    float acc = 0.0f;
    for (uint32_t j = 0; j < p.kernel; j++) {
        const uint32_t at = t + j * p.dilation;
        const float x =
            at < back ? history[uint64_t(at) * p.channels + channel] : rows[uint64_t(at - back) * p.channels];
        acc = fma(p.taps[uint64_t(channel) * p.kernel + j], x, acc);
    }
    return acc;
}

struct AddConvParams {
    ConvParams conv;
    /// `[rows][streams]`
    const float* gates;
    /// `[rows][width]`
    const float* values;
    /// `[rows][streams][width]`
    float* x;
    uint32_t streams, width;
};

/// `x += gate * value + silu(convolution)`: the n-gram block's. Grid: channels, rows of the longest portion, portions.
extern "C" __global__ void __launch_bounds__(128) strata_ngram_conv(const __grid_constant__ AddConvParams p) {
    const Portion portion = p.conv.portions[blockIdx.z];
    const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x;
    const float* history = p.conv.state.from(portion) + p.conv.history;
    for (uint32_t t = blockIdx.y; t < portion.rows && channel < p.conv.channels; t += gridDim.y) {
        const uint64_t row = portion.row + t;
        const float gate = p.gates[row * p.streams + channel / p.width],
                    value = p.values[row * p.width + channel % p.width];
        const float acc = silu(convolve(p.conv, portion, history, t, channel));
        float& x = p.x[row * p.conv.channels + channel];
        x = x + (gate * value + acc);
    }
}

struct GatedValueParams {
    const float* keys;
    const float* x;
    const float* values;
    /// Gammas `[streams * width]` of keys, queries and gated values.
    const float* norm_key;
    const float* norm_query;
    const float* norm_conv;
    float* gates;
    float* normed;
    uint32_t streams, width;
    float eps;
};

/// The n-gram block's gate of one row and stream, and the norm of the gated value: docs/qwen4exp.md, section 2.5. A block
/// of threads each, which brings what single warps then sum up in the contract's order.
extern "C" __global__ void __launch_bounds__(512) strata_gated_value(const __grid_constant__ GatedValueParams p) {
    extern __shared__ float staged[];
    __shared__ float scales[2], gate_of_all, scale_of_all;
    const uint32_t at = blockIdx.x, row = at / p.streams, stream = at % p.streams;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float *key = staged, *query = staged + p.width, *value = staged + 2 * p.width;
#pragma unroll 4
    for (uint32_t j = threadIdx.x; j < p.width; j += blockDim.x) {
        key[j] = p.keys[uint64_t(at) * p.width + j];
        query[j] = p.x[uint64_t(at) * p.width + j];
        value[j] = p.values[uint64_t(row) * p.width + j];
    }
    __syncthreads();
    if (warp < 2) {
        const float scale = rms_scale(warp == 0 ? key : query, p.width, p.eps, lane);
        if (lane == 0) {
            scales[warp] = scale;
        }
    }
    __syncthreads();
    const float *gamma_k = p.norm_key + uint64_t(stream) * p.width,
                *gamma_q = p.norm_query + uint64_t(stream) * p.width;
    for (uint32_t j = threadIdx.x; j < p.width; j += blockDim.x) {
        key[j] = key[j] * scales[0] * gamma_k[j];
        query[j] = query[j] * scales[1] * gamma_q[j];
    }
    __syncthreads();
    if (warp == 0) {
        float dot = 0.0f;
        each_value(key, p.width, lane, [&](uint32_t j, float k) { dot = fma(k, query[j], dot); });
        const float score = __fdiv_rn(fold(dot), __fsqrt_rn(float(p.width)));
        const float root = __fsqrt_rn(fmaxf(fabsf(score), 1e-6f));
        const float gate = sigmoid(score == 0.0f ? 0.0f : copysignf(root, score));
        float squares = 0.0f;
        each_value(value, p.width, lane, [&](int, float v) {
            const float gated = gate * v;
            squares = fma(gated, gated, squares);
        });
        const float scale = rsqrt(__fdiv_rn(fold(squares), float(p.width)) + p.eps);
        if (lane == 0) {
            p.gates[at] = gate_of_all = gate;
            scale_of_all = scale;
        }
    }
    __syncthreads();
    for (uint32_t j = threadIdx.x; j < p.width; j += blockDim.x) {
        p.normed[uint64_t(at) * p.width + j] =
            gate_of_all * value[j] * scale_of_all * p.norm_conv[uint64_t(stream) * p.width + j];
    }
}

}  // namespace strata
