// Gated DeltaNet: docs/qwen4exp.md, section 2.2. The delta rule is the sequential f32 update, in prompts too; its
// parallelism is sequences, heads and state columns. Twins of all parameters: `src/ops/gdn.rs`.
#include "delta.cuh"
#include "recurrent.cuh"
#include "shared.cuh"

namespace strata {

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

/// Makes the pending history of a channel what the convolution's rows leave; ascending, so that it may be the same
/// version.
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
    /// `[rows][heads][query, key][padded]`, as `shared_place` says; zeros behind `dim`.
    float* out;
    uint32_t heads, dim, padded;
    float eps, scale;
};

/// `x * rsqrt(sum of squares + eps) * scale` of a head, by a warp; the scale is the queries' only.
__device__ inline void unit_norm(const UnitNormParams& p, const float* x, bool is_key, float* out, int lane) {
    const float norm = rsqrt(fold(lane_squares(x, p.dim, lane)) + p.eps), scale = is_key ? 1.0f : p.scale;
    for (uint32_t j = lane; j < p.padded; j += WARP) {
        out[shared_place(j)] = j < p.dim ? x[j] * norm * scale : 0.0f;
    }
}

/// What makes queries, keys and values of a convolution's rows; the values go to its `out`, `[rows][values]`.
struct QkvParams {
    ConvParams conv;
    UnitNormParams unit_norm;
};

/// Rows that a block of threads walks; those that it has at once.
constexpr int WALK = 64, RUN = 8;
/// Channels of a block of threads, at most.
constexpr int MOST_CHANNELS = 256;

/// The convolution, its SiLU, and the unit norms. A thread has a channel, whose taps and last rows it keeps. Grid:
/// heads of queries and keys, then groups of values; walks of the longest portion; portions.
template <int TAPS>
__device__ void make_qkv(const QkvParams& params) {
    __shared__ float heads[2][RUN][MOST_CHANNELS];
    const ConvParams& p = params.conv;
    const UnitNormParams& n = params.unit_norm;
    const Portion portion = p.portions[blockIdx.z];
    const int first = blockIdx.y * WALK, last = min(first + WALK, int(portion.rows));
    const uint32_t keys = 2 * n.heads * n.dim, group = blockIdx.x;
    const bool is_head = group < 2 * n.heads;
    const uint32_t channel =
        is_head ? group * n.dim + threadIdx.x : keys + (group - 2 * n.heads) * blockDim.x + threadIdx.x;
    const bool has = is_head ? threadIdx.x < n.dim : channel < p.channels;
    const int unused = TAPS - int(p.kernel), back = int(p.kernel) - 1;
    const float* history = p.state.from(portion) + p.history + channel;
    const float* rows = p.rows + uint64_t(portion.row) * p.channels + channel;
    float taps[TAPS], window[TAPS - 1 + RUN];
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        taps[j] = has && j >= unused ? p.taps[uint64_t(channel) * p.kernel + j - unused] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) {
        const int t = first + j - (TAPS - 1);
        const float* from = t < 0 ? history + int64_t(t + back) * p.channels : rows + int64_t(t) * p.channels;
        window[j] = has && t + back >= 0 ? *from : 0.0f;
    }
    for (int t = first, turn = 0; t < last; t += RUN, turn ^= 1) {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            window[TAPS - 1 + i] = has && t + i < last ? rows[uint64_t(t + i) * p.channels] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            float acc = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; j++) {
                acc = j < unused ? acc : fma(taps[j], window[i + j], acc);
            }
            const float value = silu(acc);
            if (is_head) {
                heads[turn][i][threadIdx.x] = value;
            } else if (has && t + i < last) {
                p.out[(uint64_t(portion.row) + t + i) * (p.channels - keys) + channel - keys] = value;
            }
        }
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) {
            window[j] = window[RUN + j];
        }
        if (is_head) {
            __syncthreads();
            const bool is_key = group >= n.heads;
            for (int i = threadIdx.x / WARP; i < min(RUN, last - t); i += blockDim.x / WARP) {
                float* out =
                    n.out + (((uint64_t(portion.row) + t + i) * n.heads + group % n.heads) * 2 + is_key) * n.padded;
                unit_norm(n, heads[turn][i], is_key, out, threadIdx.x % WARP);
            }
        }
    }
}

#define STRATA_QKV(TAPS)                                             \
    extern "C" __global__ void __launch_bounds__(MOST_CHANNELS)      \
        strata_gdn_qkv_##TAPS(const __grid_constant__ QkvParams p) { \
        make_qkv<TAPS>(p);                                           \
    }
STRATA_QKV(4)
STRATA_QKV(8)

struct DeltaParams {
    Recurrent state;
    const Portion* portions;
    /// As `UnitNormParams::out`.
    const float* keys;
    /// `[rows][value_heads][value_dim]`
    const float* values;
    const float* decay;
    const float* strength;
    /// `[rows][value_heads][value_dim]`
    float* out;
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

/// The delta rule of a portion for `OWN * COLUMNS` columns of one head, by a warp alone. Grid: warps' columns, value
/// heads, portions.
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
    StateColumns<PARTS, COLUMNS> columns;
    const float* before = p.state.from(portion) + at;
    columns.each(r, [&](float& value, uint32_t c, uint32_t j) {
        value = own + c < p.value_dim && j < p.key_dim ? before[(own + c) * p.key_dim + j] : 0.0f;
    });

    const uint32_t stride = p.value_heads * p.value_dim;
    const uint32_t row_keys = p.key_heads * 2 * PARTS * WARP;
    const float* keys = p.keys + row * row_keys + key_head * 2 * PARTS * WARP + lane * 4;
    const float* values[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const uint32_t token = (i * WARP + lane) / HERE, column = (i * WARP + lane) % HERE;
        values[i] = p.values + (row + token) * stride + head * p.value_dim + first + column;
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
            values[i] += 4 * stride;
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
    // Without a part of a sum in the address of the query, that is loaded and multiplied before the sum's exchange, and
    // the chain waits for both.
    const uint32_t nothing = portion.rows >> 31;
    auto output = [&](const StateColumns<PARTS, COLUMNS>& state, const float* query, float started,
                      float(&sums)[COLUMNS]) {
        float x[PARTS][OWN];
        own_values<PARTS>(query + (to_bits(started) & nothing), r, x);
        state.own_dots(x, sums);
    };
    // The outputs of four tokens are folded together, when the last of them is there: while the next four are taken in.
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
            take(here, i, [&](const StateColumns<PARTS, COLUMNS>& before, float started) {
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
        take(here, i, [](const StateColumns<PARTS, COLUMNS>&, float) {});
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
    float* behind = p.state.to(portion) + at;
    columns.each(r, [&](float value, uint32_t c, uint32_t j) {
        if (own + c < p.value_dim && j < p.key_dim) {
            behind[(own + c) * p.key_dim + j] = value;
        }
    });
}

#define STRATA_DELTA(PARTS, COLUMNS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(WARP) strata_delta_##PARTS(const __grid_constant__ DeltaParams p) { \
        delta<PARTS, COLUMNS>(p);                                                                                    \
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

/// `rms(o) * gamma * sigmoid(z)` of a row's head, whose first value is the `at`-th, from its unit of 32 `first` on,
/// every `step`-th, by a warp. Quantised values are not left as they are too.
__device__ inline void gated_norm(const GatedNormParams& p, const float* o, const float* gamma, const float* z,
                                  uint64_t at, int lane, uint32_t first, uint32_t step) {
    const float scale = rms_scale(o, p.dim, p.eps, lane);
    for (uint32_t j = first * WARP + lane; j < p.dim; j += step * WARP) {
        const float value = o[j] * scale * gamma[j] * sigmoid(z[j]);
        if (p.quantised.q == nullptr) {
            p.o[at + j] = value;
        }
        p.quantised.put(value, at + j);
    }
}

/// In place, for all rows and heads, a warp each.
extern "C" __global__ void __launch_bounds__(128) strata_gated_norm(const __grid_constant__ GatedNormParams p) {
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (warp < p.count && p.dim == 4 * WARP && p.quantised.q != nullptr) {
        // Four consecutive values a lane, quantised together.
        const uint64_t at = uint64_t(warp) * p.dim + 4 * lane;
        const float4 z = *reinterpret_cast<const float4*>(p.z + at),
                     gamma = *reinterpret_cast<const float4*>(p.gamma + 4 * lane),
                     o = *reinterpret_cast<const float4*>(p.o + at);
        const float scale = rms_scale(p.o + at - 4 * lane, p.dim, p.eps, lane);
        const float four[4] = {o.x * scale * gamma.x * sigmoid(z.x), o.y * scale * gamma.y * sigmoid(z.y),
                               o.z * scale * gamma.z * sigmoid(z.z), o.w * scale * gamma.w * sigmoid(z.w)};
        p.quantised.put_several(four, at);
    } else if (warp < p.count) {
        const uint64_t at = uint64_t(warp) * p.dim;
        gated_norm(p, p.o + at, p.gamma, p.z + at, at, lane, 0, 1);
    }
}

/// Everything between the products, for portions of a few rows that go on from the committed version.
struct FewParams {
    QkvParams qkv;
    GateParams gates;
    DeltaParams delta;
    GatedNormParams gated_norm;
};

/// Rows of a portion, taps, and values of a head, at most.
constexpr int FEW_ROWS = 8, FEW_TAPS = 4, FEW_VALUES = 128;
constexpr int FEW_THREADS = 512;

/// What a block of threads has of a head. Everything comes here first, at once: to fetch it where it is used would take
/// several times as long.
template <int PARTS>
struct FewShared {
    static constexpr int KEY = PARTS * WARP, CHANNELS = 2 * KEY + FEW_VALUES;
    /// StateColumns, so far apart that those of a warp's groups lie in different banks.
    float state[FEW_VALUES][KEY + 4];
    /// The history and the rows of the query's, the key's and the value's channels; the convolution's results take
    /// their places, and the outputs those of the values.
    float rows[FEW_TAPS - 1 + FEW_ROWS][CHANNELS];
    union {
        float taps[CHANNELS * FEW_TAPS];
        float keys[FEW_ROWS][2][KEY];
    };
    float z[FEW_ROWS][FEW_VALUES], gamma[FEW_VALUES];
    float2 gates[FEW_ROWS];
};

/// Starts a warp's copy of `count` values, a multiple of four.
__device__ inline void bring(float* to, const float* from, uint32_t count, int lane) {
#pragma unroll 1
    for (uint32_t j = 4 * lane; j < count; j += 4 * WARP) {
        start_copy<16>(to + j, from + j);
    }
}

/// A block of threads has a value head; what its key head brings is computed by all its value heads. Grid: value heads,
/// portions.
template <int PARTS>
__device__ void few(const FewParams& p) {
    using Shared = FewShared<PARTS>;
    constexpr int COLUMNS = FEW_VALUES * SHARERS / FEW_THREADS, WARPS = FEW_THREADS / WARP;
    extern __shared__ __align__(16) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    pass();
    const DeltaParams& d = p.delta;
    const ConvParams& conv = p.qkv.conv;
    // The host brought it before the kernels in front.
    const Portion portion = d.portions[blockIdx.y];
    const uint32_t head = blockIdx.x, key_head = head % d.key_heads, dim = d.key_dim;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = sharer(lane);
    const int rows = portion.rows, back = conv.kernel - 1;
    auto place = [&](uint32_t row) { return ((uint64_t(portion.row) + row) * d.value_heads + head) * d.value_dim; };

    // The channels of the query, the key and the value: the first of each, how many, and where they are among those
    // here.
    auto channel = [&](uint32_t part) {
        return part < 2 ? (part * d.key_heads + key_head) * dim : 2 * d.key_heads * dim + head * d.value_dim;
    };
    auto count = [&](uint32_t part) { return part < 2 ? dim : d.value_dim; };
    auto bring_rows = [&](int first, int last, const float* from) {
#pragma unroll 1
        for (int i = 3 * first + warp; i < 3 * last; i += WARPS) {
            const int part = i % 3, row = i / 3;
            bring(s.rows[row] + part * dim, from + uint64_t(row - first) * conv.channels + channel(part), count(part),
                  lane);
        }
    };
    // What an earlier step left, and weights, wait for nobody: no kernel of this step writes this version.
    bring_rows(0, back, conv.state.from(portion) + conv.history);
    if (warp < 3) {
        bring(s.taps + warp * dim * conv.kernel, conv.taps + uint64_t(channel(warp)) * conv.kernel,
              count(warp) * conv.kernel, lane);
    }
    const uint64_t at = uint64_t(head) * d.value_dim * dim;
    const float* before = d.state.from(portion) + at;
    for (uint32_t c = warp; c < d.value_dim; c += WARPS) {
        if (4 * lane < dim) {
            start_copy<16>(&s.state[c][4 * lane], before + uint64_t(c) * dim + 4 * lane);
        } else if (4 * lane < Shared::KEY) {
            *reinterpret_cast<float4*>(&s.state[c][4 * lane]) = {};
        }
    }
    if (warp == WARPS - 1) {
        bring(s.gamma, p.gated_norm.gamma, d.value_dim, lane);
    }
    ready();
    bring_rows(back, back + rows, conv.rows + uint64_t(portion.row) * conv.channels);
    end_copies();
#pragma unroll 1
    for (int t = warp; t < rows; t += WARPS) {
        bring(s.z[t], p.gated_norm.z + place(t), d.value_dim, lane);
    }
    end_copies();
    if (warp == WARPS - 1 && lane < rows) {
        const uint32_t gate = (portion.row + lane) * d.value_heads + head;
        s.gates[lane] = {decay(p.gates, gate), sigmoid(p.gates.beta[gate])};
    }

    await_copies<1>();
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 2 * dim + d.value_dim; i += FEW_THREADS) {
        const uint32_t part = min(i / dim, 2u);
        if (part == 2 || head < d.key_heads) {
            float* to = conv.state.to(portion) + conv.history + channel(part) + i - part * dim;
            for (int j = 0; j < back; j++) {
                to[uint64_t(j) * conv.channels] = s.rows[rows + j][i];
            }
        }
#pragma unroll 1
        for (int t = 0; t < rows; t++) {
            float acc = 0.0f;
#pragma unroll 4
            for (int j = 0; j <= back; j++) {
                acc = fma(s.taps[i * conv.kernel + j], s.rows[t + j][i], acc);
            }
            s.rows[t][i] = silu(acc);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < 2 * rows; i += WARPS) {
        const bool is_key = i % 2;
        unit_norm(p.qkv.unit_norm, s.rows[i / 2] + is_key * dim, is_key, s.keys[i / 2][is_key], lane);
    }
    await_copies<0>();
    __syncthreads();

    const uint32_t own = (warp * OWN + group(lane)) * COLUMNS;
    StateColumns<PARTS, COLUMNS> columns;
    columns.each(r, [&](float& value, uint32_t c, uint32_t j) { value = s.state[own + c][j]; });
    auto put = [&](const StateColumns<PARTS, COLUMNS>& state, int t) {
        float query[PARTS][OWN], sums[COLUMNS];
        own_values<PARTS>(s.keys[t][0], r, query);
        state.own_dots(query, sums);
        state.exchange(sums);
        // Outputs take the places of values, which all of a group have read.
        __syncwarp();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            if (r == 0) {
                s.rows[t][2 * dim + own + c] = sums[c];
            }
        }
    };
#pragma unroll 1
    for (int t = 0; t < rows; t++) {
        float key[PARTS][OWN], value[COLUMNS];
        own_values<PARTS>(s.keys[t][1], r, key);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            value[c] = s.rows[t][2 * dim + own + c];
        }
        columns.step(key, value, s.gates[t].x, s.gates[t].y, [](const StateColumns<PARTS, COLUMNS>&, float) {});
        put(columns, t);
    }
    columns.each(r, [&](float value, uint32_t c, uint32_t j) { s.state[own + c][j] = value; });
    __syncthreads();
    float* behind = d.state.to(portion) + at;
    for (uint32_t c = warp; c < d.value_dim; c += WARPS) {
        if (4 * lane < dim) {
            *reinterpret_cast<float4*>(behind + uint64_t(c) * dim + 4 * lane) =
                *reinterpret_cast<const float4*>(&s.state[c][4 * lane]);
        }
    }
    // A warp a unit: quantising one after the other is a long chain.
    constexpr int UNITS = FEW_VALUES / WARP;
#pragma unroll 1
    for (int i = warp; i < UNITS * rows; i += WARPS) {
        const int t = i / UNITS;
        gated_norm(p.gated_norm, s.rows[t] + 2 * dim, s.gamma, s.z[t], place(t), lane, i % UNITS, UNITS);
    }
}

#define STRATA_FEW(PARTS)                                                                      \
    extern "C" __device__ uint32_t strata_gdn_few_##PARTS##_shared = sizeof(FewShared<PARTS>); \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2)                               \
        strata_gdn_few_##PARTS(const __grid_constant__ FewParams p) {                          \
        few<PARTS>(p);                                                                         \
    }
STRATA_FEW(1)
STRATA_FEW(2)
STRATA_FEW(4)

}  // namespace strata
