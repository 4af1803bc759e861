// Gated DeltaNet: docs/qwen4exp.md, section 2.2. The delta rule is the sequential f32 update, in prompts too; its parallelism is
// sequences, heads and state columns.
#include "copies.cuh"
#include "delta.cuh"
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

/// A head's decay, `exp(a * softplus(alpha + bias))`.
__device__ inline float decay(const GateParams& p, uint32_t at) {
    const uint32_t head = at % p.heads;
    return exp(p.a[head] * softplus(p.alpha[at] + p.bias[head]));
}

/// Decays in place of alpha, `sigmoid(beta)`; rows of one value per head.
extern "C" __global__ void __launch_bounds__(128) strata_gdn_gates(const __grid_constant__ GateParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) {
        p.alpha[i] = decay(p, i);
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

/// Makes the pending history of a channel what the convolution's rows leave; ascending, so that it may be the same version.
__device__ inline void advance(const ConvParams& p, const Portion& portion, uint32_t channel) {
    const uint32_t back = (p.kernel - 1) * p.dilation;
    const float* from = p.state.from(portion) + p.history + channel;
    float* to = p.state.to(portion) + p.history + channel;
    const float* rows = p.rows + uint64_t(portion.row) * p.channels + channel;
    for (uint32_t i = 0; i < back; i++) {
        const uint32_t at = i + portion.rows;
        to[uint64_t(i) * p.channels] =
            at < back ? from[uint64_t(at) * p.channels] : rows[uint64_t(at - back) * p.channels];
    }
}

/// The histories of all channels. Grid: channels, portions.
extern "C" __global__ void __launch_bounds__(128) strata_history(const __grid_constant__ ConvParams p) {
    const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel < p.channels) {
        advance(p, p.portions[blockIdx.y], channel);
    }
}

struct UnitNormParams {
    /// `[rows][stride]`: queries, then keys, of `dim` values a head.
    const float* x;
    /// `[rows][heads][query, key][padded]`, as `shared_place` says; zeros behind `dim`.
    float* out;
    uint64_t stride;
    uint32_t count, heads, dim, padded;
    float eps, scale;
};

/// `x * rsqrt(sum of squares + eps) * scale` of a head, by a warp; the scale is the queries' only.
__device__ inline void unit_norm(const UnitNormParams& p, const float* x, bool is_key, float* out, int lane) {
    const float norm = rsqrt(fold(lane_squares(x, p.dim, lane)) + p.eps), scale = is_key ? 1.0f : p.scale;
    for (uint32_t j = lane; j < p.padded; j += WARP) {
        out[shared_place(j)] = j < p.dim ? x[j] * norm * scale : 0.0f;
    }
}

/// All heads, a warp each.
extern "C" __global__ void __launch_bounds__(128) strata_unit_norm(const __grid_constant__ UnitNormParams p) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, row = at / (2 * p.heads), head = at % (2 * p.heads);
    if (at < p.count) {
        const bool is_key = head >= p.heads;
        float* out = p.out + ((uint64_t(row) * p.heads + head % p.heads) * 2 + is_key) * p.padded;
        unit_norm(p, p.x + row * p.stride + uint64_t(head) * p.dim, is_key, out, threadIdx.x % WARP);
    }
}

struct DeltaParams {
    Recurrent state;
    const Portion* portions;
    /// As `UnitNormParams::out`.
    const float* keys;
    /// `[rows]` of `value_stride` values; the first `[value_heads][value_dim]` are values.
    const float* values;
    const float* decay;
    const float* strength;
    /// `[rows][value_heads][value_dim]`
    float* out;
    uint64_t value_stride;
    uint32_t key_heads, value_heads, key_dim, value_dim;
};

/// What four tokens bring for a warp's columns.
template <int PARTS, int COLUMNS>
struct Four {
    struct {
        float q[PARTS * WARP], k[PARTS * WARP];
    } keys[4];
    float v[4][OWN][(COLUMNS + 1) & ~1];
    float2 gates[4];
};

/// The delta rule of a portion for `OWN * COLUMNS` columns of one head, by a warp alone. Grid: warps' columns, value heads, portions.
template <int PARTS, int COLUMNS>
__device__ void delta(const DeltaParams& p) {
    constexpr int HERE = OWN * COLUMNS, VALUES = (4 * HERE + WARP - 1) / WARP;
    // Those of two turns to come, of this one, and of the one before: its last output is still to be computed.
    __shared__ __align__(16) Four<PARTS, COLUMNS> fours[4];
    const Portion portion = p.portions[blockIdx.z];
    const uint32_t head = blockIdx.y, key_head = head % p.key_heads, first = blockIdx.x * HERE;
    const int lane = threadIdx.x, r = sharer(lane), g = group(lane);
    const uint32_t own = first + g * COLUMNS;
    const uint64_t at = uint64_t(head) * p.value_dim * p.key_dim, row = portion.row;
    Columns<PARTS, COLUMNS> columns;
    columns.load(p.state.from(portion) + at, own, p.value_dim, p.key_dim, r);

    const uint32_t row_keys = p.key_heads * 2 * PARTS * WARP;
    const float* keys = p.keys + row * row_keys + key_head * 2 * PARTS * WARP + lane * 4;
    const float* values[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const uint32_t token = (i * WARP + lane) / HERE, column = (i * WARP + lane) % HERE;
        values[i] = p.values + (row + token) * p.value_stride + head * p.value_dim + first + column;
    }
    const float* gates = (lane % 2 == 0 ? p.decay : p.strength) + (row + lane / 2) * p.value_heads + head;
    uint32_t brought = 0;
    auto bring = [&] {
        Four<PARTS, COLUMNS>& to = fours[brought / 4 % 4];
        const int left = int(portion.rows - min(brought, portion.rows));
        brought += 4;
#pragma unroll
        for (int token = 0; token < 4; token++) {
            if (token < left) {
#pragma unroll
                for (int part = 0; part < (2 * PARTS + 3) / 4; part++) {
                    if (PARTS > 1 || lane < 2 * PARTS * WARP / 4) {
                        start_copy<16>(to.keys[token].q + lane * 4 + part * 4 * WARP, keys + part * 4 * WARP);
                    }
                }
            }
            keys += row_keys;
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int token = (i * WARP + lane) / HERE, column = (i * WARP + lane) % HERE;
            if (token < min(left, 4) && first + column < p.value_dim) {
                start_copy<4>(&to.v[token][column / COLUMNS][column % COLUMNS], values[i]);
            }
            values[i] += 4 * p.value_stride;
        }
        if (lane / 2 < min(left, 4)) {
            start_copy<4>(reinterpret_cast<float*>(to.gates) + lane, gates);
        }
        gates += 4 * p.value_heads;
        end_copies();
    };

    auto take = [&](const Four<PARTS, COLUMNS>& from, int i, auto meanwhile) {
        float key[PARTS][OWN], value[COLUMNS];
        own_values<PARTS>(from.keys[i].k, r, key);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            value[c] = from.v[i][g][c];
        }
        const float2 gate = from.gates[i];
        columns.step(key, value, gate.x, gate.y, meanwhile);
    };
    // Without a part of a sum in the address of the query, that is loaded and multiplied before the sum's exchange, and the chain waits for both.
    const uint32_t nothing = portion.rows >> 31;
    auto output = [&](const Columns<PARTS, COLUMNS>& state, const float* query, float started, float (&sums)[COLUMNS]) {
        float x[PARTS][OWN];
        own_values<PARTS>(query + (to_bits(started) & nothing), r, x);
        state.own_dots(x, sums);
    };
    // The outputs of four tokens are folded together, when the last of them is there: while the next four are taken in.
    const uint32_t stride = p.value_heads * p.value_dim;
    float* out = p.out + row * stride + head * p.value_dim + own;
    float outputs[4][COLUMNS];
    const float* query = fours[0].keys[0].q;
    auto put_four = [&](uint32_t before) {
        float mine[COLUMNS];
        columns.exchange_four(outputs, r, mine);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            if (before >= 4 && r % 2 == 0 && own + c < p.value_dim) {
                out[uint64_t(before - 4 + r / 2) * stride + c] = mine[c];
            }
        }
    };
    bring();
    bring();
    uint32_t t = 0;
    for (; t + 4 <= portion.rows; t += 4) {
        const Four<PARTS, COLUMNS>& here = fours[t / 4 % 4];
        await_copies<1>();
        __syncwarp();
        bring();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            take(here, i, [&](const Columns<PARTS, COLUMNS>& before, float started) {
                output(before, query, started, outputs[(i + 3) % 4]);
                if (i == 0) {
                    put_four(t);
                }
            });
            query = here.keys[i].q;
        }
    }
    output(columns, query, 0.0f, outputs[3]);
    put_four(t);
    await_copies<0>();
    __syncwarp();
    for (uint32_t i = 0; t + i < portion.rows; i++) {
        const Four<PARTS, COLUMNS>& here = fours[t / 4 % 4];
        take(here, i, [](const Columns<PARTS, COLUMNS>&, float) {});
        float sums[COLUMNS];
        output(columns, here.keys[i].q, 0.0f, sums);
        columns.exchange(sums);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            if (r == 0 && own + c < p.value_dim) {
                out[uint64_t(t + i) * stride + c] = sums[c];
            }
        }
    }
    columns.store(p.state.to(portion) + at, own, p.value_dim, p.key_dim, r);
}

#define STRATA_DELTA(PARTS, COLUMNS)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARP) strata_delta_##PARTS(const __grid_constant__ DeltaParams p) { \
        delta<PARTS, COLUMNS>(p);                                                                                \
    }
// Three columns a thread: 48 heads of 128 columns are 528 warps, one for each scheduler of 132 multiprocessors.
STRATA_DELTA(1, 3)
STRATA_DELTA(2, 3)
STRATA_DELTA(4, 3)
STRATA_DELTA(8, 1)

struct GatedNormParams {
    float* o;
    const float* z;
    const float* gamma;
    Target quantised;
    uint32_t count, dim;
    float eps;
};

/// `rms(o) * gamma * sigmoid(z)` of a row's head, whose first value is the `at`-th, by a warp.
__device__ inline void gated_norm(const GatedNormParams& p, const float* o, const float* z, uint64_t at, int lane) {
    const float scale = rms_scale(o, p.dim, p.eps, lane);
    for (uint32_t j = lane; j < p.dim; j += WARP) {
        const float value = o[j] * scale * p.gamma[j] * sigmoid(z[j]);
        p.o[at + j] = value;
        p.quantised.put(value, at + j);
    }
}

/// In place, for all rows and heads, a warp each.
extern "C" __global__ void __launch_bounds__(128) strata_gated_norm(const __grid_constant__ GatedNormParams p) {
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (warp < p.count) {
        const uint64_t at = uint64_t(warp) * p.dim;
        gated_norm(p, p.o + at, p.z + at, at, threadIdx.x % WARP);
    }
}

/// Everything between the products, for portions of a few rows that go on from the committed version.
struct FewParams {
    ConvParams conv;
    GateParams gates;
    UnitNormParams unit_norm;
    DeltaParams delta;
    GatedNormParams gated_norm;
};

/// Rows of a portion, and values of a head, at most.
constexpr int FEW_ROWS = 8, FEW_VALUES = 128;
constexpr int FEW_THREADS = 512;

/// A block of threads has a value head; what its key head brings is computed by all its value heads. Grid: value heads, portions.
template <int PARTS>
__device__ void few(const FewParams& p) {
    constexpr int COLUMNS = FEW_VALUES * SHARERS / FEW_THREADS, WARPS = FEW_THREADS / WARP;
    __shared__ float raw[FEW_ROWS][2 * PARTS * WARP + FEW_VALUES];
    __shared__ __align__(16) float keys[FEW_ROWS][2][PARTS * WARP];
    __shared__ float z[FEW_ROWS][FEW_VALUES], o[FEW_ROWS][FEW_VALUES];
    __shared__ float2 gates[FEW_ROWS];
    const DeltaParams& d = p.delta;
    const Portion portion = d.portions[blockIdx.y];
    const uint32_t head = blockIdx.x, key_head = head % d.key_heads;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = sharer(lane);
    const uint32_t own = (warp * OWN + group(lane)) * COLUMNS;
    const uint64_t at = uint64_t(head) * d.value_dim * d.key_dim;
    // The state comes from afar: it is asked for first, and used last.
    Columns<PARTS, COLUMNS> columns;
    columns.load(d.state.from(portion) + at, own, d.value_dim, d.key_dim, r);
    auto place = [&](uint32_t row) { return ((uint64_t(portion.row) + row) * d.value_heads + head) * d.value_dim; };
    for (uint32_t row = warp; row < portion.rows; row += WARPS) {
        for (uint32_t j = lane; j < d.value_dim; j += WARP) {
            start_copy<4>(&z[row][j], p.gated_norm.z + place(row) + j);
        }
    }
    end_copies();

    const float* history = p.conv.state.from(portion) + p.conv.history;
    const uint32_t own_keys = 2 * d.key_dim, all_keys = own_keys * d.key_heads;
    for (uint32_t i = threadIdx.x; i < own_keys + d.value_dim; i += FEW_THREADS) {
        const bool is_value = i >= own_keys;
        const uint32_t channel = is_value ? all_keys + head * d.value_dim + i - own_keys
                                          : (i / d.key_dim * d.key_heads + key_head) * d.key_dim + i % d.key_dim;
        for (uint32_t t = 0; t < portion.rows; t++) {
            raw[t][i] = silu(convolve(p.conv, portion, history, t, channel));
        }
        if (is_value || head < d.key_heads) {
            advance(p.conv, portion, channel);
        }
    }
    if (warp == WARPS - 1 && lane < portion.rows) {
        const uint32_t gate = (portion.row + lane) * d.value_heads + head;
        gates[lane] = {decay(p.gates, gate), sigmoid(p.gates.beta[gate])};
    }
    __syncthreads();
    for (uint32_t i = warp; i < 2 * portion.rows; i += WARPS) {
        const bool is_key = i % 2;
        unit_norm(p.unit_norm, raw[i / 2] + is_key * d.key_dim, is_key, keys[i / 2][is_key], lane);
    }
    await_copies<0>();
    __syncthreads();
    for (uint32_t t = 0; t < portion.rows; t++) {
        float key[PARTS][OWN], query[PARTS][OWN], value[COLUMNS];
        own_values<PARTS>(keys[t][0], r, query);
        own_values<PARTS>(keys[t][1], r, key);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            value[c] = raw[t][own_keys + own + c];
        }
        columns.step(key, value, gates[t].x, gates[t].y, [](const Columns<PARTS, COLUMNS>&, float) {});
        columns.own_dots(query, value);
        columns.exchange(value);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            if (r == 0) {
                o[t][own + c] = value[c];
            }
        }
    }
    columns.store(d.state.to(portion) + at, own, d.value_dim, d.key_dim, r);
    __syncthreads();
    for (uint32_t t = warp; t < portion.rows; t += WARPS) {
        gated_norm(p.gated_norm, o[t], z[t], place(t), lane);
    }
}

#define STRATA_FEW(PARTS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) strata_gdn_few_##PARTS(const __grid_constant__ FewParams p) { \
        few<PARTS>(p);                                                                                                 \
    }
STRATA_FEW(1)
STRATA_FEW(2)
STRATA_FEW(4)

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
