// Prompts on Hopper: dense products with so many columns that the rows are decoded before, once; columns in pieces; and
// what mixers and experts do between products.
#include "decoded.cuh"

namespace strata {

/// Quantised columns in pieces. Grid: chunks, tiles or units.
extern "C" __global__ void __launch_bounds__(256) strata_pieces(const __grid_constant__ PiecesParams p) {
    make_pieces(p);
}

/// What a matrix's segments come to, added in ascending order.
struct AddSegmentsParams {
    /// `[segments][count]`
    const float4* sums;
    float4* out;
    uint32_t count, segments;
};

extern "C" __global__ void __launch_bounds__(256) strata_add_segments(const __grid_constant__ AddSegmentsParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) {
        return;
    }
    float4 sum = p.sums[i];
    for (uint32_t s = 1; s < p.segments; s++) {
        const float4 next = p.sums[size_t(s) * p.count + i];
        sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
    }
    p.out[i] = sum;
}

/// Twin: `src/ops/wide.rs`.
struct HiddenPiecesParams {
    /// `[places][units * 32]`
    const float* gate;
    const float* up;
    uint4* out;
    const uint32_t* unit_first;
    const uint32_t* unit_places;
    /// Where the routing's units start, null for the first, and end.
    const uint32_t* before;
    const uint32_t* count;
    uint32_t units;
};

/// `silu(gate) * up` of a routing's places, in pieces. Eight threads have a unit of a column. Grid: chunks, units of the
/// routing.
extern "C" __global__ void __launch_bounds__(256)
    strata_hidden_pieces(const __grid_constant__ HiddenPiecesParams p) {
    const uint32_t number = (p.before == nullptr ? 0 : *p.before) + blockIdx.y, chunk = blockIdx.x;
    if (number >= *p.count) {
        return;
    }
    const uint32_t first = p.unit_first[number], cols = p.unit_places[number], whole = whole_sixteens(cols);
    uint4* out = p.out + (first_piece(first, number) * chunks_of(p.units) + size_t(chunk) * whole) *
                             (COLUMN_BYTES / 8) / 2;
    float* scales = reinterpret_cast<float*>(out + whole * 8);
    const uint32_t part = threadIdx.x / 8 % CHUNK, eighth = threadIdx.x % 8, unit = chunk * CHUNK + part;
    for (uint32_t c = threadIdx.x / (8 * CHUNK); c < whole; c += blockDim.x / (8 * CHUNK)) {
        float4 hidden = {};
        if (c < cols && unit < p.units) {
            const size_t at = (size_t(first + c) * p.units + unit) * 8 + eighth;
            const float4 gate = reinterpret_cast<const float4*>(p.gate)[at],
                         up = reinterpret_cast<const float4*>(p.up)[at];
            hidden = {swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)};
        }
        const float four[4] = {hidden.x, hidden.y, hidden.z, hidden.w};
        const QuantisedSeveral block = quantise_several(four);
        const uint32_t bytes = block.q ^ 0x80808080u, at = part * 4 + eighth / 4 * 2;
        uint32_t* row = reinterpret_cast<uint32_t*>(out + c * 8);
        row[(at ^ c % 8) * 4 + eighth % 4] = add_pair(low_pair(bytes), LESS_1152);
        row[((at + 1) ^ c % 8) * 4 + eighth % 4] = add_pair(high_pair(bytes), LESS_1152);
        if (eighth == 0) {
            scales[part * whole + scale_place(c)] = block.d;
        }
    }
}

/// Twin: `src/ops/mixer.rs`; see `strata_mix`.
struct MixManyParams {
    const float4* gates;
    const float4* normed;
    float4* u;
    Target quantised;
    /// Fours of all rows; of a row.
    uint32_t count, streams, width;
};

/// `strata_mix` of rows of whole units, four values a thread.
extern "C" __global__ void __launch_bounds__(256) strata_mix_many(const __grid_constant__ MixManyParams p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, at = min(i, p.count - 1);
    const size_t first = size_t(at / p.width) * p.streams * p.width + at % p.width;
    float u[4] = {};
    for (uint32_t s = 0; s < p.streams; s++) {
        const float4 gate = p.gates[first + size_t(s) * p.width], normed = p.normed[first + size_t(s) * p.width];
        u[0] = fma(sigmoid(gate.x), normed.x, u[0]);
        u[1] = fma(sigmoid(gate.y), normed.y, u[1]);
        u[2] = fma(sigmoid(gate.z), normed.z, u[2]);
        u[3] = fma(sigmoid(gate.w), normed.w, u[3]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u[k] = __fdiv_rn(u[k], float(p.streams));
    }
    if (i < p.count) {
        p.u[i] = {u[0], u[1], u[2], u[3]};
    }
    p.quantised.put_several(u, size_t(at) * 4, i < p.count);
}

using plain = Kind<false, false, false, false>;
using scaled = Kind<false, false, false, true>;
using large = Kind<false, false, true, true>;
using minimum = Kind<true, false, false, false>;
using scaled_minimum = Kind<true, false, false, true>;
using split = Kind<false, true, false, SCALED<Nvfp4>>;

/// A kind's number. Twin: `KINDS` in `src/ops/wide.rs`.
template <class K>
constexpr uint32_t NUMBER = std::is_same_v<K, plain>            ? 0
                            : std::is_same_v<K, scaled>         ? 1
                            : std::is_same_v<K, large>          ? 2
                            : std::is_same_v<K, minimum>        ? 3
                            : std::is_same_v<K, scaled_minimum> ? 4
                            : std::is_same_v<K, split>          ? 5
                                                                : 6;

/// Other GPUs load these kernels too, but have nothing to run, nor that much shared memory.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STRATA_RUN(K) OfDecoded<K>::run(p)
#define STRATA_SHARED(K) sizeof(OfDecoded<K>::Shared)
#else
#define STRATA_RUN(K)
#define STRATA_SHARED(K) 0
#endif
#define STRATA_KIND(K)                                                                         \
    extern "C" __device__ uint32_t strata_decoded_##K##_shared = STRATA_SHARED(K);             \
    extern "C" __global__ void __launch_bounds__(OfDecoded<K>::THREADS, 1)                     \
        strata_decoded_##K(const __grid_constant__ DecodedParams p) {                          \
        STRATA_RUN(K);                                                                         \
    }
STRATA_KIND(plain)
STRATA_KIND(scaled)
STRATA_KIND(large)
STRATA_KIND(minimum)
STRATA_KIND(scaled_minimum)
STRATA_KIND(split)

#define STRATA_KERNELS(F, NAME)                                                                       \
    static_assert(NUMBER<KindOf<F>> < 6, "");                                                         \
    /* The format's kind, and the bytes of a tile's rows of a chunk. */                               \
    extern "C" __device__ uint32_t strata_kind_##NAME[2] = {NUMBER<KindOf<F>>,                        \
                                                            sizeof(Decoded<KindOf<F>, DENSE_ROWS>)};  \
    extern "C" __global__ void __launch_bounds__(DECODED_ROWS * 2)                                    \
        strata_decode_rows_##NAME(const __grid_constant__ DecodeRowsParams p) {                       \
        decode_rows<F>(p);                                                                            \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
