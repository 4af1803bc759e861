// Attention of a prompt's rows. A row and key/value head is the work of two warps, which never leave the
// multiprocessor: chunk after chunk they score 16 keys at a time each, in register tiles of all query heads by four
// keys, then gather half of every value each, and merge the chunk into the row's results, where the chunks before it
// wait.
#include "qsa.cuh"
#include "tile.cuh"

namespace strata {

constexpr int ATTENDERS = 2 * WARP;
/// Keys whose values a warp has at once.
constexpr int GATHERED = 32;

/// Floats that a thread reads at once.
template <int N>
struct alignas(4 * N) Vector {
    float x[N];
};

template <int HEADS, int DIM>
struct Attend {
    static_assert(HEADS % 4 == 0 && HEADS <= 16 && DIM % 128 == 0 && DIM <= 256);
    /// Values of a head that a thread gathers, and heads whose scores it has in the end.
    static constexpr int VALUES = DIM / ATTENDERS, QUARTER = HEADS / 4;
    /// Bytes of a key, and its copies.
    static constexpr int BYTES = 2 * DIM, PIECES = BYTES / 16;

    struct Shared {
        /// Permuted.
        float queries[HEADS][DIM];
        /// Scores of a chunk, then their exponentials.
        float scores[HEADS][CHUNK];
        /// Per warp two buffers: of 16 keys, or of half of 32 values.
        uint8_t staged[2][2][STEP * BYTES];
    };
    static_assert(STEP * BYTES == GATHERED * BYTES / 2);

    /// What a warp works on. Rows of the caches are `stride` copies of 16 bytes apart.
    Shared& shared;
    const uint32_t* chosen;
    const uint8_t* keys;
    const uint8_t* values;
    uint32_t stride;
    /// How many keys there are, how many of them are chosen in blocks, and where the others begin.
    uint32_t all, kept, rest;
    /// Tokens of a block, and 2^32 by it, rounded up: `i / block` without a division, for all that one sequence may
    /// have.
    uint32_t block, inverse;
    int lane, half;

    /// A key's number, and its block if that was chosen.
    struct Place {
        uint32_t i, chosen;
    };
    /// Asks where a key lies; the last, for those behind it.
    __device__ Place ask(uint32_t i) const {
        i = min(i, all - 1);
        return {i, i < kept ? chosen[block == 1 ? i : __umulhi(i, inverse)] : 0};
    }
    /// Where it lies, in copies of 16 bytes.
    __device__ uint32_t answer(Place place) const {
        const uint32_t within = block == 1 ? 0 : place.i - __umulhi(place.i, inverse) * block;
        return (place.i < kept ? place.chosen * block + within : rest + (place.i - kept)) * stride;
    }

    __device__ SharedAddress staged(int buffer) const { return shared_at(shared.staged[half][buffer]); }

    /// Starts copies of the warp's 16 keys, a lane's place among the 32 of both warps.
    __device__ void stage_keys(Place place, int buffer) const {
        constexpr int AT_ONCE = WARP / PIECES;
        const uint32_t row = answer(place);
        const SharedAddress to = staged(buffer) + lane / PIECES * BYTES;
        const uint8_t* from = keys + lane % PIECES * 16;
#pragma unroll
        for (int i = 0; i < STEP; i += AT_ONCE) {
            const uint32_t own = __shfl_sync(ALL, row, half * STEP + i + lane / PIECES);
            const uint32_t piece = swap(lane % PIECES, i + lane / PIECES);
            start_copy_at(to + i * BYTES + piece * 16, from, own);
        }
    }

    /// Starts copies of the warp's half of 32 values.
    __device__ void stage_values(Place place, int buffer) const {
        constexpr int AT_ONCE = 2 * WARP / PIECES;
        const uint32_t row = answer(place);
        const SharedAddress to = staged(buffer) + lane * 16;
        const uint8_t* from = values + half * DIM + lane % (PIECES / 2) * 16;
#pragma unroll
        for (int i = 0; i < GATHERED; i += AT_ONCE) {
            const uint32_t own = __shfl_sync(ALL, row, i + lane / (PIECES / 2));
            start_copy_at(to + i * DIM, from, own);
        }
    }

    /// Scores of the warp's keys of a chunk, and the largest of each head, which it leaves at the start of its second
    /// buffer.
    __device__ void score(uint32_t first, uint32_t count, float scale) const {
        Place next = ask(first + lane);
        if (half * STEP < count) {
            stage_keys(next, 0);
        }
        end_copies();
        next = ask(first + 2 * STEP + lane);
        float largest[QUARTER];
#pragma unroll
        for (int h = 0; h < QUARTER; h++) {
            largest[h] = from_bits(0xff800000u);
        }
        int buffer = 0;
#pragma unroll 1
        for (uint32_t done = half * STEP; done < count; done += 2 * STEP) {
            if (done + 2 * STEP < count) {
                stage_keys(next, buffer ^ 1);
                next = ask(first + done - half * STEP + 4 * STEP + lane);
            }
            end_copies();
            all_but_the_latest();
            float sums[QUARTER][2];
            dots(shared.queries, staged(buffer), lane, sums);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t key = done + key_of(lane, n);
                if (key < count) {
#pragma unroll
                    for (int h = 0; h < QUARTER; h++) {
                        const float score = sums[h][n] * scale;
                        shared.scores[lane / 8 * QUARTER + h][key] = score;
                        largest[h] = fmaxf(largest[h], score);
                    }
                }
            }
            // The buffer is free once every lane has read it.
            __syncwarp();
            buffer ^= 1;
        }
#pragma unroll
        for (int h = 0; h < QUARTER; h++) {
            for (int width = 4; width > 0; width /= 2) {
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL, largest[h], width));
            }
            if (lane % 8 == 0) {
                reinterpret_cast<float*>(shared.staged[half][1])[lane / 8 * QUARTER + h] = largest[h];
            }
        }
    }

    /// Turns half of the heads' scores into exponentials. `largest` is of head `lane`, and so are the sums, which the
    /// other warp has not.
    __device__ float exponentials(uint32_t count, float largest) const {
        float sums = 0.0f;
#pragma unroll 1
        for (int h = half * (HEADS / 2); h < (half + 1) * (HEADS / 2); h++) {
            const float most = __shfl_sync(ALL, largest, h);
            float* scores = shared.scores[h] + lane;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < CHUNK / WARP; i++) {
                const float e = exp(scores[i * WARP] - most);
                scores[i * WARP] = e;
                sum = i * WARP + lane < count ? sum + e : sum;
            }
            sum = fold(sum);
            sums = lane == h ? sum : sums;
        }
        return sums;
    }

    /// A key's values of this thread.
    __device__ void value(int buffer, uint32_t key, float (&x)[VALUES]) const {
        const uint8_t* from = shared.staged[half][buffer] + key * DIM + lane * VALUES * 2;
        uint32_t pairs[VALUES / 2];
        if constexpr (VALUES == 4) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            pairs[0] = two.x, pairs[1] = two.y;
        } else {
            pairs[0] = *reinterpret_cast<const uint32_t*>(from);
        }
#pragma unroll
        for (int j = 0; j < VALUES / 2; j++) {
            x[2 * j] = half_to_float(uint16_t(pairs[j]));
            x[2 * j + 1] = half_to_float(uint16_t(pairs[j] >> 16));
        }
    }

    /// Values times exponentials of a chunk, whose first 32 are under way; `next` is a lane's place among the next 32.
    __device__ void gather(uint32_t first, uint32_t count, Place next, float (&acc)[HEADS][VALUES]) const {
        int buffer = 0;
#pragma unroll 1
        for (uint32_t done = 0; done < count; done += GATHERED) {
            if (done + GATHERED < count) {
                stage_values(next, buffer ^ 1);
                next = ask(first + done + 2 * GATHERED + lane);
            }
            end_copies();
            all_but_the_latest();
            const uint32_t here = min(uint32_t(GATHERED), count - done);
            uint32_t key = 0;
#pragma unroll 1
            for (; key + 4 <= here; key += 4) {
                float x[4][VALUES];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    value(buffer, key + c, x[c]);
                }
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float4 e = *reinterpret_cast<const float4*>(shared.scores[h] + done + key);
#pragma unroll
                    for (int j = 0; j < VALUES; j++) {
                        acc[h][j] = fma(e.x, x[0][j], acc[h][j]);
                        acc[h][j] = fma(e.y, x[1][j], acc[h][j]);
                        acc[h][j] = fma(e.z, x[2][j], acc[h][j]);
                        acc[h][j] = fma(e.w, x[3][j], acc[h][j]);
                    }
                }
            }
#pragma unroll 1
            for (; key < here; key++) {
                float x[VALUES];
                value(buffer, key, x);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float e = shared.scores[h][done + key];
#pragma unroll
                    for (int j = 0; j < VALUES; j++) {
                        acc[h][j] = fma(e, x[j], acc[h][j]);
                    }
                }
            }
            __syncwarp();
            buffer ^= 1;
        }
    }

    /// Attends, and finishes: `acc / sum * sigmoid(gate)`.
    __device__ void run(const AttendParams& p, const float* queries, uint64_t head, uint32_t group) {
        using Values = Vector<VALUES>;
#pragma unroll
        for (int n = 0; n < HEADS * DIM / 4 / ATTENDERS; n++) {
            const uint32_t i = (n * ATTENDERS + threadIdx.x) * 4, h = i / DIM, j = i % DIM;
            const Vector<4> q =
                h < group ? *reinterpret_cast<const Vector<4>*>(queries + uint64_t(h) * 2 * DIM + j) : Vector<4>{};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                shared.queries[h][permuted(j + c)] = q.x[c];
            }
        }
        __syncthreads();
        const float scale = rsqrt(float(DIM));
        // The chunks before wait where the results will be: registers are dear.
        const uint64_t own = half * (DIM / 2) + lane * VALUES;
        Values* out = reinterpret_cast<Values*>(p.out + head * DIM + own);
        // Of head `lane`; a warp has the sums of half of the heads.
        float largest = 0.0f, sum = 0.0f;
        for (uint32_t first = 0; first < all; first += CHUNK) {
            const uint32_t count = min(uint32_t(CHUNK), all - first);
            score(first, count, scale);
            // Values are under way while the other warp comes.
            stage_values(ask(first + lane), 0);
            end_copies();
            const Place next = ask(first + GATHERED + lane);
            __syncthreads();
            const int h = min(lane, HEADS - 1);
            const float here = fmaxf(reinterpret_cast<float*>(shared.staged[0][1])[h],
                                     reinterpret_cast<float*>(shared.staged[1][1])[h]);
            const float here_sum = exponentials(count, here);
            __syncthreads();
            float acc[HEADS][VALUES] = {};
            gather(first, count, next, acc);
            const float most = first == 0 ? here : fmaxf(here, largest);
            const float before = exp(largest - most), now = exp(here - most);
            sum = first == 0 ? here_sum : fma(sum, before, here_sum * now);
            largest = most;
            if (first > 0) {
                Values held[HEADS];
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    held[h] = h < group ? out[h * (DIM / VALUES)] : Values{};
                }
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float b = __shfl_sync(ALL, before, h), n = __shfl_sync(ALL, now, h);
#pragma unroll
                    for (int j = 0; j < VALUES; j++) {
                        acc[h][j] = fma(held[h].x[j], b, acc[h][j] * n);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                Values values;
#pragma unroll
                for (int j = 0; j < VALUES; j++) {
                    values.x[j] = acc[h][j];
                }
                if (h < group) {
                    out[h * (DIM / VALUES)] = values;
                }
            }
            // Both warps have read the scores: the next may be written.
            __syncthreads();
        }
        if (lane / (HEADS / 2) == half) {
            shared.scores[0][lane] = sum;
        }
        __syncthreads();
        const Values* gates = reinterpret_cast<const Values*>(queries + DIM + own);
        Values next = out[0], next_gate = gates[0];
#pragma unroll 1
        for (uint32_t h = 0; h < group; h++) {
            Values values = next;
            const Values gate = next_gate;
            const uint32_t behind = min(h + 1, group - 1);
            next = out[behind * (DIM / VALUES)], next_gate = gates[behind * (2 * DIM / VALUES)];
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                values.x[j] = __fdiv_rn(values.x[j], shared.scores[0][h]) * sigmoid(gate.x[j]);
            }
            out[h * (DIM / VALUES)] = values;
            p.quantised.put_several(values.x, (head + h) * DIM + own);
        }
    }
};

/// Grid: rows times key/value heads, the last row first: it has the most to do.
template <int HEADS, int DIM>
__device__ void attend_many(const AttendParams& p) {
    extern __shared__ __align__(128) uint8_t raw[];
    const Attention& a = p.a;
    const uint32_t r = a.count - 1 - blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads,
                   group = a.heads / a.kv_heads;
    const Row row = a.rows[r];
    const uint32_t visible = row.position + 1, block = max(a.block, 1u);
    const uint64_t head = uint64_t(r) * a.heads + kv_head * group;
    Attend<HEADS, DIM> attend = {
        *reinterpret_cast<typename Attend<HEADS, DIM>::Shared*>(raw),
        p.chosen + uint64_t(r) * (a.budget / block),
        reinterpret_cast<const uint8_t*>(a.keys<uint16_t>(row.slot, 0) + kv_head * DIM),
        reinterpret_cast<const uint8_t*>(a.value_rows<uint16_t>(row.slot, 0) + kv_head * DIM),
        a.kv_heads * Attend<HEADS, DIM>::PIECES,
        attended(a, visible),
        a.chooses(visible) ? a.budget / block * block : 0,
        a.chooses(visible) ? visible / block * block : 0,
        block,
        0xffffffffu / block + 1,
        int(threadIdx.x % WARP),
        int(threadIdx.x / WARP),
    };
    attend.run(p, p.queries + head * 2 * DIM, head, group);
}

// Four blocks of threads a multiprocessor, where it has 228 KB: 56 KB each, with the one that is the system's.
#define STRATA_ATTEND(HEADS, DIM)                                                                                    \
    extern "C" __device__ uint32_t strata_attend_many_##HEADS##_##DIM##_shared = sizeof(Attend<HEADS, DIM>::Shared); \
    extern "C" __global__ void __launch_bounds__(ATTENDERS, 4)                                                       \
        strata_attend_many_##HEADS##_##DIM(const __grid_constant__ AttendParams p) {                                 \
        attend_many<HEADS, DIM>(p);                                                                                  \
    }
STRATA_ATTEND(4, 128)
STRATA_ATTEND(12, 128)
STRATA_ATTEND(4, 256)
STRATA_ATTEND(12, 256)

}  // namespace strata
