// Dense products with so many columns that the rows are decoded before, once; and columns in pieces.
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STRATA_RUN(K) OfDecoded<K>::run(p)
#else
#define STRATA_RUN(K)
#endif
#define STRATA_KIND(K)                                                                         \
    extern "C" __device__ uint32_t strata_decoded_##K##_shared = sizeof(OfDecoded<K>::Shared); \
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
    /* The format's kind, and the bytes of 128 rows of a chunk. */                                    \
    extern "C" __device__ uint32_t strata_kind_##NAME[2] = {NUMBER<KindOf<F>>, sizeof(Decoded<KindOf<F>>)}; \
    extern "C" __global__ void __launch_bounds__(256)                                                 \
        strata_decode_rows_##NAME(const __grid_constant__ DecodeRowsParams p) {                       \
        decode_rows<F>(p);                                                                            \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
