// Gated DeltaNet: docs/qwen4exp.md, section 2.2. The delta rule is the sequential f32 update, in prompts too; its parallelism is
// sequences, heads and state columns.
#include "floats.cuh"
#include "window.cuh"

namespace strata {

/// Where a layer keeps its recurrent state. Twin of all parameters: `src/ops/gdn.rs`.
struct Recurrent {
    /// `[sequences][version][floats]`
    float* data;
    /// `[sequences]`: the committed versions.
    const uint32_t* committed;
    uint64_t floats;

    /// The version that a portion starts from, and the one that it writes.
    __device__ const float* from(const Portion& portion) const {
        return version(portion.slot, committed[portion.slot] ^ portion.goes_on);
    }
    __device__ float* to(const Portion& portion) const { return version(portion.slot, committed[portion.slot] ^ 1); }

   private:
    __device__ float* version(uint32_t slot, uint32_t which) const { return data + (uint64_t(slot) * 2 + which) * floats; }
};

struct GateParams {
    float* alpha;
    float* beta;
    const float* a;
    const float* bias;
    uint32_t count, heads;
};

/// `exp(a * softplus(alpha + bias))` in place of alpha, `sigmoid(beta)`; rows of one value per head.
extern "C" __global__ void __launch_bounds__(128) strata_gdn_gates(const __grid_constant__ GateParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) {
        const uint32_t head = i % p.heads;
        p.alpha[i] = exp(p.a[head] * softplus(p.alpha[i] + p.bias[head]));
        p.beta[i] = sigmoid(p.beta[i]);
    }
}

/// The rows that a causal depthwise convolution looks back at.
struct ConvParams {
    Recurrent state;
    const Portion* portions;
    /// `[rows][channels]`
    const float* rows;
    /// `[channels][kernel]`
    const float* taps;
    float* out;
    /// Where the history starts in a version.
    uint64_t history;
    uint32_t channels, kernel, dilation;
};

/// The convolution of one channel and row `t` of a portion: taps by FMA from zero, oldest first.
__device__ inline float convolve(const ConvParams& p, const Portion& portion, const float* history, uint32_t t, uint32_t channel) {
    const uint32_t back = (p.kernel - 1) * p.dilation;
    const float* rows = p.rows + uint64_t(portion.row) * p.channels + channel;
    float acc = 0.0f;
    for (uint32_t j = 0; j < p.kernel; j++) {
        const uint32_t at = t + j * p.dilation;
        const float x = at < back ? history[uint64_t(at) * p.channels + channel] : rows[uint64_t(at - back) * p.channels];
        acc = fma(p.taps[uint64_t(channel) * p.kernel + j], x, acc);
    }
    return acc;
}

/// The GDN convolution and its SiLU. Grid: channels, rows of the longest portion, portions.
extern "C" __global__ void __launch_bounds__(128) strata_gdn_conv(const __grid_constant__ ConvParams p) {
    const Portion portion = p.portions[blockIdx.z];
    const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x;
    const float* history = p.state.from(portion) + p.history;
    for (uint32_t t = blockIdx.y; t < portion.rows && channel < p.channels; t += gridDim.y) {
        p.out[uint64_t(portion.row + t) * p.channels + channel] = silu(convolve(p, portion, history, t, channel));
    }
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

/// `x += gate * value + silu(convolution)`: the n-gram block's. Grid as above.
extern "C" __global__ void __launch_bounds__(128) strata_ngram_conv(const __grid_constant__ AddConvParams p) {
    const Portion portion = p.conv.portions[blockIdx.z];
    const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x;
    const float* history = p.conv.state.from(portion) + p.conv.history;
    for (uint32_t t = blockIdx.y; t < portion.rows && channel < p.conv.channels; t += gridDim.y) {
        const uint64_t row = portion.row + t;
        const float gate = p.gates[row * p.streams + channel / p.width], value = p.values[row * p.width + channel % p.width];
        const float acc = silu(convolve(p.conv, portion, history, t, channel));
        float& x = p.x[row * p.conv.channels + channel];
        x = x + (gate * value + acc);
    }
}

/// Makes the pending history what the convolution's rows leave. A thread a channel, ascending, so that it may be the same version.
extern "C" __global__ void __launch_bounds__(128) strata_history(const __grid_constant__ ConvParams p) {
    const Portion portion = p.portions[blockIdx.y];
    const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x, back = (p.kernel - 1) * p.dilation;
    if (channel >= p.channels) {
        return;
    }
    const float* from = p.state.from(portion) + p.history + channel;
    float* to = p.state.to(portion) + p.history + channel;
    const float* rows = p.rows + uint64_t(portion.row) * p.channels + channel;
    for (uint32_t i = 0; i < back; i++) {
        const uint32_t at = i + portion.rows;
        to[uint64_t(i) * p.channels] =
            at < back ? from[uint64_t(at) * p.channels] : rows[uint64_t(at - back) * p.channels];
    }
}

struct UnitNormParams {
    /// `[rows][stride]`: queries, then keys, of `dim` values a head.
    float* x;
    uint64_t stride;
    uint32_t count, heads, dim;
    float eps, scale;
};

/// `x * rsqrt(sum of squares + eps) * scale` in place, a warp a head; the scale is the queries' only.
extern "C" __global__ void __launch_bounds__(128) strata_unit_norm(const __grid_constant__ UnitNormParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, head = at % (2 * p.heads);
    const int lane = threadIdx.x % WARP;
    if (at >= p.count) {
        return;
    }
    float* x = p.x + at / (2 * p.heads) * p.stride + uint64_t(head) * p.dim;
    const float norm = rsqrt(fold(lane_squares(x, p.dim, lane)) + p.eps), scale = head < p.heads ? p.scale : 1.0f;
    for (uint32_t j = lane; j < p.dim; j += WARP) {
        x[j] = x[j] * norm * scale;
    }
}

struct DeltaParams {
    Recurrent state;
    const Portion* portions;
    /// `[rows][channels]`: queries, keys, values.
    const float* conv;
    const float* decay;
    const float* strength;
    /// `[rows][value_heads][value_dim]`
    float* out;
    uint32_t channels, key_heads, value_heads, key_dim, value_dim;
};

constexpr int COLUMNS = 8;

/// The delta rule for `COLUMNS` state columns of one head by a warp. A lane has the elements `lane + 32 i` of each column.
/// Grid: groups of four warps' columns, value heads, portions.
template <int PARTS>
__device__ void delta(const DeltaParams& p) {
    const Portion portion = p.portions[blockIdx.z];
    const uint32_t head = blockIdx.y, key_head = head % p.key_heads;
    const uint32_t first = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * COLUMNS;
    const int lane = threadIdx.x % WARP;
    if (first >= p.value_dim) {
        return;
    }
    const uint64_t at = (uint64_t(head) * p.value_dim + first) * p.key_dim;
    const float* from = p.state.from(portion) + at;
    float state[COLUMNS][PARTS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const uint32_t j = lane + WARP * i;
            state[c][i] = first + c < p.value_dim && j < p.key_dim ? from[uint64_t(c) * p.key_dim + j] : 0.0f;
        }
    }
    const uint32_t keys = p.key_heads * p.key_dim;
    const int own = folded<COLUMNS>(lane);
    const uint32_t column = first + own;
    const bool writes = lane % (WARP / COLUMNS) == 0 && column < p.value_dim;
    // What a row brings is loaded `AHEAD` rows before it is used: the chain from row to row is short, memory is far.
    constexpr int AHEAD = PARTS > 4 ? 2 : 4;
    float q_ahead[AHEAD][PARTS], k_ahead[AHEAD][PARTS], v_ahead[AHEAD], decay_ahead[AHEAD], strength_ahead[AHEAD];
    auto load = [&](uint32_t t, int to) {
        const uint64_t row = portion.row + min(t, portion.rows - 1);
        const float* conv = p.conv + row * p.channels;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const uint32_t j = lane + WARP * i;
            q_ahead[to][i] = j < p.key_dim ? conv[key_head * p.key_dim + j] : 0.0f;
            k_ahead[to][i] = j < p.key_dim ? conv[keys + key_head * p.key_dim + j] : 0.0f;
        }
        v_ahead[to] = column < p.value_dim ? conv[2 * keys + head * p.value_dim + column] : 0.0f;
        decay_ahead[to] = p.decay[row * p.value_heads + head];
        strength_ahead[to] = p.strength[row * p.value_heads + head];
    };
    auto step = [&](uint32_t t, int from) {
        const uint64_t row = portion.row + t;
        float q[PARTS], k[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            q[i] = q_ahead[from][i], k[i] = k_ahead[from][i];
        }
        const float v = v_ahead[from], decay = decay_ahead[from], strength = strength_ahead[from];
        load(t + AHEAD, from);
        float acc[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            acc[c] = 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                state[c][i] = state[c][i] * decay;
                acc[c] = fma(state[c][i], k[i], acc[c]);
            }
        }
        const float mine = strength * (v - fold_many(acc, lane));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float by = __shfl_sync(ALL, mine, c * (WARP / COLUMNS));
            acc[c] = 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                state[c][i] = fma(by, k[i], state[c][i]);
                acc[c] = fma(state[c][i], q[i], acc[c]);
            }
        }
        const float o = fold_many(acc, lane);
        if (writes) {
            p.out[(row * p.value_heads + head) * p.value_dim + column] = o;
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        load(i, i);
    }
    for (uint32_t t = 0; t < portion.rows; t += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (t + i < portion.rows) {
                step(t + i, i);
            }
        }
    }
    float* to = p.state.to(portion) + at;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const uint32_t j = lane + WARP * i;
            if (first + c < p.value_dim && j < p.key_dim) {
                to[uint64_t(c) * p.key_dim + j] = state[c][i];
            }
        }
    }
}

#define STRATA_DELTA(PARTS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(128) strata_delta_##PARTS(const __grid_constant__ DeltaParams p) { \
        delta<PARTS>(p);                                                                                              \
    }
STRATA_DELTA(1)
STRATA_DELTA(2)
STRATA_DELTA(4)
STRATA_DELTA(8)

struct GatedNormParams {
    float* o;
    const float* z;
    const float* gamma;
    Target quantised;
    uint32_t count, dim;
    float eps;
};

/// `rms(o) * gamma * sigmoid(z)` in place, a warp a head.
extern "C" __global__ void __launch_bounds__(128) strata_gated_norm(const __grid_constant__ GatedNormParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (at >= p.count) {
        return;
    }
    float* o = p.o + uint64_t(at) * p.dim;
    const float* z = p.z + uint64_t(at) * p.dim;
    const float scale = rms_scale(o, p.dim, p.eps, lane);
    for (uint32_t j = lane; j < p.dim; j += WARP) {
        const float value = o[j] * scale * p.gamma[j] * sigmoid(z[j]);
        o[j] = value;
        p.quantised.put(value, uint64_t(at) * p.dim + j);
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

/// The n-gram block's gate of one row and stream, and the norm of the gated value: docs/qwen4exp.md, section 2.5. A warp each.
extern "C" __global__ void __launch_bounds__(128) strata_gated_value(const __grid_constant__ GatedValueParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (at >= p.count) {
        return;
    }
    const uint32_t row = at / p.streams, stream = at % p.streams;
    const float *key = p.keys + uint64_t(at) * p.width, *query = p.x + uint64_t(at) * p.width;
    const float* value = p.values + uint64_t(row) * p.width;
    const float *gamma_k = p.norm_key + uint64_t(stream) * p.width, *gamma_q = p.norm_query + uint64_t(stream) * p.width;
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
