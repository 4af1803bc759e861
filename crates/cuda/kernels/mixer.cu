// Hyper-connection mixers: docs/qwen4exp.md, section 2.1.
#include "one.cuh"

namespace strata {

/// What a mixer's write leaves to do: `x[t, s] = fma(inject[t, s], y[t], x[t, s])`. Twins of all parameters:
/// `src/ops/mixer.rs`.
struct Write {
    /// `[rows][width]`, or null where nothing is left.
    const float* y;
    /// `[rows][streams]`
    const float* inject;

    __device__ float at(uint32_t row, uint32_t streams, uint32_t stream, uint32_t width, uint32_t j, float x) const {
        return fma(inject[row * streams + stream], y[size_t(row) * width + j], x);
    }
};

struct NormParams {
    float* x;
    /// Which row of `x` each row is, or null.
    const uint32_t* rows;
    /// `[groups * width]`
    const float* gamma;
    float* out;
    /// Of width that is a multiple of 32.
    Target quantised;
    Write write;
    uint32_t groups, width;
    float eps;
};

constexpr int NORMERS = 640;
constexpr int STAGED = 4096;

/// `out[row][group] = rms(x[row][group]) * gamma[group]`, a block of threads a group, after the write that was left.
/// The sum of squares is one warp's, in the contract's order; what it adds is brought by all of them.
extern "C" __global__ void __launch_bounds__(NORMERS) strata_norm(const __grid_constant__ NormParams p) {
    __shared__ __align__(16) float staged[STAGED];
    __shared__ float found;
    pass();
    const uint32_t at = blockIdx.x;
    const int lane = threadIdx.x % WARP;
    const uint32_t row = at / p.groups, group = at % p.groups;
    const float* gamma = p.gamma + size_t(group) * p.width;
    ready();
    const uint32_t from = p.rows == nullptr ? row : p.rows[row];
    float* x = p.x + (size_t(from) * p.groups + group) * p.width;
    float* out = p.out + size_t(at) * p.width;
    float squares = 0.0f;
    for (uint32_t from = 0; from < p.width; from += STAGED) {
        const uint32_t here = min(uint32_t(STAGED), p.width - from);
        __syncthreads();
        for (uint32_t j = threadIdx.x; j < here; j += NORMERS) {
            float value = x[from + j];
            if (p.write.y != nullptr) {
                value = p.write.at(row, p.groups, group, p.width, from + j, value);
                x[from + j] = value;
            }
            staged[j] = value;
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
    if (p.width > STAGED || p.width % 4 != 0) {
        for (uint32_t j = threadIdx.x; j < p.width; j += NORMERS) {
            out[j] = (p.width > STAGED ? x[j] : staged[j]) * scale * gamma[j];
        }
        return;
    }
    for (uint32_t base = threadIdx.x / WARP * WARP * 4; base < p.width; base += NORMERS * 4) {
        const uint32_t j = base + lane * 4;
        float4 normed = {};
        if (j < p.width) {
            const float4 value = *reinterpret_cast<const float4*>(staged + j),
                         by = *reinterpret_cast<const float4*>(gamma + j);
            normed = {value.x * scale * by.x, value.y * scale * by.y, value.z * scale * by.z, value.w * scale * by.w};
            *reinterpret_cast<float4*>(out + j) = normed;
        }
        const float four[4] = {normed.x, normed.y, normed.z, normed.w};
        p.quantised.put_several(four, first + j, j < p.width);
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
    /// Of `strata_mix_many`: rows that aren't whole units are never quantised.
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
    p.u[i] = __fdiv_rn(u, float(p.streams));
}

struct WriteParams {
    Write write;
    float* x;
    uint32_t count, streams, width;
};

/// A write that no norm came for.
extern "C" __global__ void __launch_bounds__(256) strata_write(const __grid_constant__ WriteParams p) {
    pass();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    ready();
    if (i < p.count) {
        p.x[i] =
            p.write.at(i / (p.streams * p.width), p.streams, i / p.width % p.streams, p.width, i % p.width, p.x[i]);
    }
}

struct DescendParams {
    /// `[streams][width]`, and the write that is left to do, which goes to `moved`: other blocks of threads still read `x`.
    const float* x;
    /// Which row of `x` it is, or null.
    const uint32_t* rows;
    Write write;
    float* moved;
    /// `[streams * width]`
    const float* gamma;
    /// `[rank][streams * width]`
    const uint8_t* down;
    /// `[streams * width]`
    float* normed;
    /// `[rank][segments]`: each row's segments, not yet added up.
    float* partial;
    /// Rows of a block of threads.
    uint32_t rank, streams, width, share, row_bytes;
    /// `2^32 / width`, rounded up: what a value's number is multiplied with for its stream's.
    uint32_t inverse_width;
    float eps;
    Split split;
};

/// The first half of a mixer's read for one row: the norms, and the products with `down` of one segment of the contract
/// for some rows. Each block of threads norms and quantises its segment for itself, which is less than waiting for
/// another kernel. Grid: segments, rows. Twin of what it lays out: `OneRow::new` in `ops/mixer.rs`.
template <class F>
__device__ void descend(const DescendParams& p) {
    using Rows = One<F>;
    extern __shared__ __align__(LINE) uint8_t room[];
    __shared__ Arrival arrival;
    /// A segment has values of as many streams at most as it has units.
    __shared__ float scales[SEGMENT];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t wide = p.streams * p.width, segment = blockIdx.x, from = segment * SEGMENT * 32;
    const uint32_t here = min(uint32_t(SEGMENT) * 32, wide - from), units = here / 32;
    const uint32_t begin = blockIdx.y * p.share, rows = min(p.share, p.rank - begin);
    const uint32_t bytes = units / Rows::PER_BLOCK * F::BYTES, piece = brought(SEGMENT / Rows::PER_BLOCK * F::BYTES);
    // The streams that the segment has values of.
    const uint32_t first = from / p.width, last = (from + here - 1) / p.width;
    pass();
    int8_t* q = reinterpret_cast<int8_t*>(room);
    float* d = reinterpret_cast<float*>(q + SEGMENT * 32);
    uint32_t* sums = reinterpret_cast<uint32_t*>(d + SEGMENT);
    uint8_t* raw = reinterpret_cast<uint8_t*>(sums + SEGMENT);
    uint8_t* terms = raw + p.share * piece;
    float* staged = reinterpret_cast<float*>(terms);
    const One<F> after(terms, int(p.share), SEGMENT, 1, nullptr);
    if (threadIdx.x == 0) {
        arrival.init(int(rows) + (F::GRID > 0 ? 1 : 0));
    }
    auto row_at = [&](uint32_t r) {
        return p.down + size_t(begin + r) * p.row_bytes + segment * (SEGMENT / Rows::PER_BLOCK) * F::BYTES;
    };
    for (uint32_t r = 0; r < rows; r++) {
        arrival.bring(raw + r * piece, row_at(r), bytes);
    }
    // The streams lie where the terms will be; what is larger counts.
    const uint32_t* grid = nullptr;
    if constexpr (F::GRID > 0) {
        const uint32_t of_terms = reinterpret_cast<uint8_t*>(after.first) - room;
        const uint32_t of_streams = reinterpret_cast<uint8_t*>(staged + (last - first + 1) * p.width) - room;
        uint8_t* end = room + (max(of_terms, of_streams) + 15) / 16 * 16;
        grid = reinterpret_cast<const uint32_t*>(arrival.bring<16>(end, F::codebook(), F::GRID * 4));
    }
    // Gammas of the first values that this thread norms: weights wait for nobody.
    float4 gammas[2] = {};
#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
        const uint32_t i = 4 * (threadIdx.x + n * blockDim.x);
        if (i < here) {
            gammas[n] = *reinterpret_cast<const float4*>(p.gamma + from + i);
        }
    }
    ready();
    const float* x = p.x + (p.rows == nullptr ? 0 : size_t(*p.rows) * wide) + first * p.width;
    // Several loads of a thread are under way before the first is used.
    constexpr uint32_t AHEAD = 4;
    const uint32_t fours = p.width / 4, count = (last - first + 1) * fours;
    for (uint32_t base = threadIdx.x; base < count; base += AHEAD * blockDim.x) {
        float4 values[AHEAD], y[AHEAD] = {};
        float by[AHEAD] = {};
#pragma unroll
        for (uint32_t n = 0; n < AHEAD; n++) {
            const uint32_t i = base + n * blockDim.x;
            if (i < count) {
                values[n] = reinterpret_cast<const float4*>(x)[i];
                if (p.write.y != nullptr) {
                    y[n] = reinterpret_cast<const float4*>(p.write.y)[i % fours];
                    by[n] = p.write.inject[first + i / fours];
                }
            }
        }
#pragma unroll
        for (uint32_t n = 0; n < AHEAD; n++) {
            const uint32_t i = base + n * blockDim.x;
            if (i < count) {
                float4 value = values[n];
                if (p.write.y != nullptr) {
                    value = {fma(by[n], y[n].x, value.x), fma(by[n], y[n].y, value.y), fma(by[n], y[n].z, value.z),
                             fma(by[n], y[n].w, value.w)};
                }
                reinterpret_cast<float4*>(staged)[i] = value;
            }
        }
    }
    __syncthreads();
    for (uint32_t stream = first + warp; stream <= last; stream += blockDim.x / WARP) {
        const float scale = rms_scale(staged + (stream - first) * p.width, int(p.width), p.eps, lane);
        if (lane == 0) {
            scales[stream - first] = scale;
        }
    }
    __syncthreads();
    uint32_t turn = 0;
    for (uint32_t base = warp * WARP * 4; base < here; base += blockDim.x * 4, turn++) {
        const uint32_t i = base + lane * 4, at = from + i;
        float four[4] = {};
        if (i < here) {
            const float scale = scales[__umulhi(at, p.inverse_width) - first];
            const float4 value = *reinterpret_cast<const float4*>(staged + at - first * p.width);
            const float4 by = turn == 0   ? gammas[0]
                              : turn == 1 ? gammas[1]
                                          : *reinterpret_cast<const float4*>(p.gamma + at);
            four[0] = value.x * scale * by.x, four[1] = value.y * scale * by.y;
            four[2] = value.z * scale * by.z, four[3] = value.w * scale * by.w;
            if (blockIdx.y == 0) {
                *reinterpret_cast<float4*>(p.normed + at) = {four[0], four[1], four[2], four[3]};
                if (p.write.y != nullptr) {
                    *reinterpret_cast<float4*>(p.moved + at) = value;
                }
            }
        }
        const QuantisedSeveral block = quantise_several(four);
        if (i < here) {
            *reinterpret_cast<uint32_t*>(q + i) = block.q;
            if (i % 32 == 0) {
                d[i / 32] = block.d;
                sums[i / 32] = block.sums;
            }
        }
    }
    __syncthreads();
    arrival.wait(0, 0);
    const Rows one(terms, int(p.share), int(units), 0, grid);
    const int groups = int(units) / Rows::SHARE, slot = p.split.slot(), across = int(p.split.across);
    if (slot < across) {
        for (int group = p.split.group(); group < groups; group += int(p.split.lanes)) {
            typename Rows::Column column;
            column.load({q, d, sums}, group);
            one.put_rows(slot, across, int(rows), group, column,
                         [&](int r) { return raw + r * piece + in_line(row_at(r)); });
        }
    }
    __syncthreads();
    one.add_up(p.split, int(rows), [&](int r, float sum) { p.partial[size_t(begin + r) * gridDim.x + segment] = sum; });
}

#define STRATA_DESCEND(F, NAME)                                                          \
    extern "C" __global__ void __launch_bounds__(ONE_THREADS, 2) strata_descend_##NAME(  \
        const __grid_constant__ DescendParams p) {                                       \
        descend<F>(p);                                                                   \
    }
STRATA_BLOCK_FORMATS(STRATA_DESCEND)

struct NarrowParams {
    /// `[streams * width][rank]`
    const uint8_t* up;
    const float* scale;
    /// `[rank][segments]`: the products with `down`, whose segments are to be added up; and what they are multiplied
    /// with, or null.
    const float* partial;
    const float* down_scale;
    /// `[streams][width]`: what becomes of `x`, if it changes.
    const float* moved;
    float* x;
    /// `[streams][streams * width]` of a float format, and where their finished products go; null without inject
    /// weights.
    const uint8_t* inject;
    float* injected;
    /// `[streams][width]`
    const float* normed;
    float* u;
    Target quantised;
    /// A `Code`.
    uint32_t inject_format;
    uint32_t rank, width, streams, segments;
    Split split;
};

/// One inject weight: the last blocks have one each.
__device__ inline void inject(const NarrowParams& p, uint8_t* room, uint32_t stream) {
    __shared__ Arrival arrivals[PIECES];
    const uint32_t wide = p.streams * p.width;
    auto emit = [&](uint32_t row, float sum) {
        p.injected[row] = 2.0f * sigmoid(__fdiv_rn(sum, float(p.streams)));
    };
    switch (p.inject_format) {
        case CODE_f32:
            return float_rows(room, arrivals, reinterpret_cast<const float*>(p.inject), stream, 1, p.normed, wide, emit);
        case CODE_f16:
            return float_rows(room, arrivals, reinterpret_cast<const Half*>(p.inject), stream, 1, p.normed, wide, emit);
        default:
            return float_rows(room, arrivals, reinterpret_cast<const Bfloat*>(p.inject), stream, 1, p.normed, wide, emit);
    }
}

/// The rest of a mixer's read for one row, behind the products with `down`: gates, the products with `up`, the mix. A
/// block of threads has the same 32 values of all streams. Twin of what it lays out: `OneRow::new` in `ops/mixer.rs`.
template <class F>
__device__ void narrow(const NarrowParams& p) {
    extern __shared__ __align__(LINE) uint8_t room[];
    pass();
    const uint32_t j = blockIdx.x * 32;
    if (j >= p.width) {
        return inject(p, room, blockIdx.x - p.width / 32);
    }
    using Rows = One<F>;
    __shared__ Arrival arrival;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, units = p.rank / 32, rows = 32 * p.streams;
    const uint32_t row_bytes = units / Rows::PER_BLOCK * F::BYTES, piece = brought(32 * row_bytes);
    int8_t* q = reinterpret_cast<int8_t*>(room);
    float* d = reinterpret_cast<float*>(q + p.rank);
    uint32_t* sums = reinterpret_cast<uint32_t*>(d + units);
    float* gates = reinterpret_cast<float*>(sums + units);
    uint8_t* raw_room = room + (p.rank + 8 * units + 4 * rows + LINE - 1) / LINE * LINE;
    uint8_t* terms = raw_room + p.streams * piece;
    const One<F> last(terms, rows, units, 1, nullptr);
    if (threadIdx.x == 0) {
        arrival.init(p.streams + (F::GRID > 0 ? 1 : 0));
    }
    const uint8_t* raw = nullptr;
    for (uint32_t s = 0; s < p.streams; s++) {
        const uint8_t* from = p.up + size_t(s * p.width + j) * row_bytes;
        const uint8_t* at = arrival.bring(raw_room + s * piece, from, 32 * row_bytes);
        raw = s == 0 ? at : raw;
    }
    const uint32_t* grid = nullptr;
    if constexpr (F::GRID > 0) {
        uint8_t* at = reinterpret_cast<uint8_t*>(last.first);
        grid = reinterpret_cast<const uint32_t*>(arrival.bring<16>(at, F::codebook(), F::GRID * 4));
    }
    const Rows one(terms, rows, units, 0, grid);
    ready();
    // Loads that are used last start first.
    constexpr uint32_t AHEAD = 8;
    float normed[AHEAD];
#pragma unroll
    for (uint32_t s = 0; s < AHEAD; s++) {
        normed[s] = warp == 0 && s < p.streams ? p.normed[size_t(s) * p.width + j + lane] : 0.0f;
    }
    // A few streams: what there is of each is on its way meanwhile.
    const bool moves = p.moved != nullptr && warp < int(p.streams);
    const size_t place = warp * p.width + j + lane;
    const float moved = moves ? p.moved[place] : 0.0f;
    for (int unit = warp; unit < units; unit += blockDim.x / WARP) {
        float low = 0.0f;
        const float* partial = p.partial + size_t(unit * 32 + lane) * p.segments;
        for (uint32_t s = 0; s < p.segments; s += AHEAD) {
            float parts[AHEAD];
#pragma unroll
            for (uint32_t n = 0; n < AHEAD; n++) {
                parts[n] = s + n < p.segments ? partial[s + n] : 0.0f;
            }
#pragma unroll
            for (uint32_t n = 0; n < AHEAD; n++) {
                low = s + n < p.segments ? low + parts[n] : low;
            }
        }
        low = p.down_scale == nullptr ? low : low * *p.down_scale;
        const Quantised block = quantise(silu(__fdiv_rn(low, float(p.streams))));
        q[unit * 32 + lane] = int8_t(block.q);
        if (lane == 0) {
            d[unit] = block.d;
            sums[unit] = block.sums;
        }
    }
    if (moves) {
        p.x[place] = moved;
    }
    for (uint32_t s = warp + blockDim.x / WARP; p.moved != nullptr && s < p.streams; s += blockDim.x / WARP) {
        p.x[s * p.width + j + lane] = p.moved[s * p.width + j + lane];
    }
    __syncthreads();
    arrival.wait(0, 0);
    const int groups = units / Rows::SHARE, slot = p.split.slot(), across = int(p.split.across);
    if (slot < across) {
        for (int group = p.split.group(); group < groups; group += int(p.split.lanes)) {
            typename Rows::Column column;
            column.load({q, d, sums}, group);
            one.put_rows(slot, across, rows, group, column,
                         [&](int r) { return raw + r / 32 * piece + r % 32 * row_bytes; });
        }
    }
    __syncthreads();
    one.add_up(p.split, rows, [&](int r, float sum) { gates[r] = sigmoid(p.scale == nullptr ? sum : sum * *p.scale); });
    __syncthreads();
    if (warp == 0) {
        float u = 0.0f;
#pragma unroll
        for (uint32_t s = 0; s < AHEAD; s++) {
            u = s < p.streams ? fma(gates[s * 32 + lane], normed[s], u) : u;
        }
        for (uint32_t s = AHEAD; s < p.streams; s++) {
            u = fma(gates[s * 32 + lane], p.normed[size_t(s) * p.width + j + lane], u);
        }
        u = __fdiv_rn(u, float(p.streams));
        p.u[j + lane] = u;
        p.quantised.put(u, j + lane);
    }
}

#define STRATA_NARROW(F, NAME)                                                           \
    extern "C" __global__ void __launch_bounds__(ONE_THREADS, 2) strata_narrow_##NAME(   \
        const __grid_constant__ NarrowParams p) {                                        \
        narrow<F>(p);                                                                    \
    }
STRATA_BLOCK_FORMATS(STRATA_NARROW)

/// Twin: `src/ops/draft.rs`.
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
