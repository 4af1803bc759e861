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
    uint32_t count, streams, width;
    float eps;
};

/// The n-gram block's gate of one row and stream, and the norm of the gated value: docs/qwen4exp.md, section 2.5. A
/// warp each.
extern "C" __global__ void __launch_bounds__(128) strata_gated_value(const __grid_constant__ GatedValueParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (at >= p.count) {
        return;
    }
    const uint32_t row = at / p.streams, stream = at % p.streams;
    const float *key = p.keys + uint64_t(at) * p.width, *query = p.x + uint64_t(at) * p.width;
    const float* value = p.values + uint64_t(row) * p.width;
    const float *gamma_k = p.norm_key + uint64_t(stream) * p.width,
                *gamma_q = p.norm_query + uint64_t(stream) * p.width;
    const float k_scale = rms_scale(key, p.width, p.eps, lane), q_scale = rms_scale(query, p.width, p.eps, lane);
    float dot = 0.0f;
    for (uint32_t j = lane; j < p.width; j += WARP) {
        dot = fma(key[j] * k_scale * gamma_k[j], query[j] * q_scale * gamma_q[j], dot);
    }
    const float score = __fdiv_rn(fold(dot), __fsqrt_rn(float(p.width)));
    const float root = __fsqrt_rn(fmaxf(fabsf(score), 1e-6f));
    const float gate = sigmoid(score == 0.0f ? 0.0f : copysignf(root, score));
    float squares = 0.0f;
    for (uint32_t j = lane; j < p.width; j += WARP) {
        const float gated = gate * value[j];
        squares = fma(gated, gated, squares);
    }
    const float scale = rsqrt(__fdiv_rn(fold(squares), float(p.width)) + p.eps);
    for (uint32_t j = lane; j < p.width; j += WARP) {
        p.normed[uint64_t(at) * p.width + j] = gate * value[j] * scale * p.norm_conv[uint64_t(stream) * p.width + j];
    }
    if (lane == 0) {
        p.gates[at] = gate;
    }
}

}  // namespace strata
