// Dense products with one column, of all formats.
#include "one.cuh"

namespace strata {

/// One of the matrices that a launch multiplies with the same column. Twins of both: `ops/one.rs`.
struct OneMatrix {
    const uint8_t* weights;
    float* out;
    const float* scale;
    /// A `Code`; rows of a block of threads, and the number of the first block.
    uint32_t format, rows, share, first, row_bytes;
};

struct OneParams {
    OneMatrix matrices[6];
    /// Quantised, and as it is, for float weights.
    Columns x;
    const float* floats;
    /// `[k]` each, or null: instead of quantised columns, `silu(gate) * up`, which every block of threads computes; and
    /// where in shared memory. Those were there before the kernel in front let this one start, so it waits for that one
    /// only to end behind it.
    const float* gate;
    const float* up;
    uint32_t made;
    /// Matrices; rows of a chunk; buffers for chunks, one or two, and the bytes of each.
    uint32_t count, chunk, turns, buffer, k;
    /// Warps that only add up, where there are two buffers.
    uint32_t adders;
    Split split;
};

/// The SwiGLU of a column's gate and up products, quantised.
__device__ inline Columns make_hidden(const OneParams& p, uint8_t* room) {
    int8_t* q = reinterpret_cast<int8_t*>(room);
    float* d = reinterpret_cast<float*>(q + p.k);
    uint32_t* sums = reinterpret_cast<uint32_t*>(d + p.k / 32);
    for (uint32_t base = threadIdx.x / WARP * WARP * 4; base < p.k; base += blockDim.x * 4) {
        const uint32_t i = base + threadIdx.x % WARP * 4;
        float4 gate = {}, up = {};
        if (i < p.k) {
            // Past the first-level cache, where another layer's may lie: nobody has waited for the kernel in front.
            gate = __ldcg(reinterpret_cast<const float4*>(p.gate + i)), up = __ldcg(reinterpret_cast<const float4*>(p.up + i));
        }
        const float four[4] = {swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)};
        const QuantisedSeveral block = quantise_several(four);
        if (i < p.k) {
            *reinterpret_cast<uint32_t*>(q + i) = block.q;
            if (i % 32 == 0) {
                d[i / 32] = block.d, sums[i / 32] = block.sums;
            }
        }
    }
    __syncthreads();
    return {q, d, sums};
}

/// A block's rows of a block format, chunk by chunk.
template <class F>
__device__ void block_rows(const OneParams& p, const OneMatrix& m, uint8_t* room) {
    using Rows = One<F>;
    __shared__ Arrival arrivals[2], book;
    const uint32_t begin = (blockIdx.x - m.first) * m.share, end = min(begin + m.share, m.rows);
    const uint32_t row_bytes = m.row_bytes, chunk = p.chunk;
    const int units = p.k / 32;
    uint8_t* terms = room + p.turns * p.buffer;
    auto bring = [&](uint32_t first, int turn) {
        arrivals[turn].bring(room + turn * p.buffer, m.weights + size_t(first) * row_bytes,
                             min(chunk, end - first) * row_bytes);
        end_copies();
    };
    if (threadIdx.x == 0) {
        arrivals[0].init(1), arrivals[1].init(1), book.init(1);
    }
    const uint32_t* grid = nullptr;
    if constexpr (F::GRID > 0) {
        const One<F> last(terms, chunk, units, p.turns, nullptr);
        uint8_t* at = reinterpret_cast<uint8_t*>(last.first);
        grid = reinterpret_cast<const uint32_t*>(book.bring<16>(at, F::codebook(), F::GRID * 4));
    }
    bring(begin, 0);
    if (p.turns > 1 && begin + chunk < end) {
        bring(begin + chunk, 1);
    }
    __syncthreads();
    // Where there are several chunks, some warps add up one while the others turn the next into terms.
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, decoders = warps - int(p.adders);
    const int groups = units / Rows::SHARE, lanes = int(p.split.lanes), across = int(p.split.across);
    const int mine = p.split.group(), slot = p.split.slot();
    if (p.gate == nullptr) {
        ready();
    }
    const Columns x = p.gate == nullptr ? p.x : make_hidden(p, room + p.made);
    typename Rows::Column column;
    if (slot < across) {
        column.load(x, mine);
    }
    auto add_up = [&](uint32_t first, int turn, int warp, int warps) {
        const Rows one(terms, chunk, units, turn, grid);
        one.add_up(p.split, min(chunk, end - first), warp, warps,
                   [&](int r, float sum) { m.out[first + r] = m.scale == nullptr ? sum : sum * *m.scale; });
    };
    int turn = 0;
    for (uint32_t first = begin, number = 0; first < end; first += chunk, number++) {
        const int rows = min(chunk, end - first);
        const bool more = p.turns > 1 && first + chunk < end;
        arrivals[turn].wait(number / p.turns, more, warp < decoders);
        if (F::GRID > 0 && number == 0) {
            book.wait(0, more);
        }
        if (warp < decoders) {
            const Rows one(terms, chunk, units, turn, grid);
            const uint8_t* raw = room + turn * p.buffer + in_line(m.weights + size_t(first) * row_bytes);
            for (int group = mine; group < groups && slot < across; group += lanes) {
                if (group != mine || (number > 0 && groups > lanes)) {
                    column.load(x, group);
                }
                one.put_rows(slot, across, rows, group, column, [&](int r) { return raw + r * row_bytes; });
            }
        } else if (number > 0) {
            add_up(first - chunk, turn ^ 1, warp - decoders, int(p.adders));
        }
        __syncthreads();
        if (first + p.turns * chunk < end) {
            bring(first + p.turns * chunk, turn);
        }
        // The last chunk is for all warps; so is each, where there is but one buffer.
        if (p.turns == 1 || first + chunk >= end) {
            add_up(first, turn, warp, warps);
            __syncthreads();
        }
        turn ^= int(p.turns - 1);
    }
    if (p.gate != nullptr) {
        ready();
    }
}

/// A block's rows of float weights: one for each warp.
template <class T>
__device__ void float_rows(const OneParams& p, const OneMatrix& m, uint8_t* room) {
    __shared__ Arrival arrivals[PIECES];
    const uint32_t begin = (blockIdx.x - m.first) * m.share, rows = min(m.share, m.rows - begin);
    float_rows(room, arrivals, reinterpret_cast<const T*>(m.weights), begin, rows, p.floats, p.k,
               [&](uint32_t row, float sum) { m.out[row] = m.scale == nullptr ? sum : sum * *m.scale; });
}

/// The matrix of this block of threads.
__device__ inline const OneMatrix& matrix_of(const OneParams& p) {
    uint32_t which = 0;
    while (which + 1 < p.count && blockIdx.x >= p.matrices[which + 1].first) {
        which++;
    }
    return p.matrices[which];
}

/// Rows of several matrices, of one block format and of floats, with the same column. A block of threads has rows of
/// one.
template <class Blocks>
__device__ void one(const OneParams& p, Blocks blocks) {
    extern __shared__ __align__(LINE) uint8_t one_room[];
    pass();
    const OneMatrix& m = matrix_of(p);
    switch (m.format) {
        case CODE_f32:
            return float_rows<float>(p, m, one_room);
        case CODE_f16:
            return float_rows<Half>(p, m, one_room);
        case CODE_bf16:
            return float_rows<Bfloat>(p, m, one_room);
        default:
            blocks(m, one_room);
    }
}

/// Float matrices only.
extern "C" __global__ void __launch_bounds__(ONE_THREADS, 2) strata_one_floats(const __grid_constant__ OneParams p) {
    one(p, [](const OneMatrix&, uint8_t*) {});
}

/// A kernel for every block format; whether its units have two terms, the words of its code book, and units that have
/// bytes in common. Twin: `Traits` in `ops/one.rs`.
#define STRATA_KERNELS(F, NAME)                                                                 \
    extern "C" __device__ uint32_t strata_format_##NAME[3] = {SECOND<F>, F::GRID, F::SHARE};    \
    extern "C" __global__ void __launch_bounds__(ONE_THREADS, 2) strata_one_##NAME(             \
        const __grid_constant__ OneParams p) {                                                  \
        one(p, [&](const OneMatrix& m, uint8_t* room) { block_rows<F>(p, m, room); });          \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
