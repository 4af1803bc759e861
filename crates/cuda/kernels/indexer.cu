// Which blocks of tokens a row attends to: their scores, and the largest of these. docs/qwen4exp.md, section 2.3.
#include "qsa.cuh"
#include "tile.cuh"

namespace strata {

struct IndexerParams {
    Attention a;
    /// `[rows][index_heads][index_dim]`
    const float* queries;
    /// Room of `[rows][most]` scores, one for each block of the longest sequence.
    float* scores;
    uint64_t most;
    /// `[rows][budget / block]`: the chosen blocks, ascending.
    uint32_t* chosen;
    /// `[rows]`: blocks of threads that have scored; zeros before.
    uint32_t* done;
    /// `[rows][2048]`: how many scores there are by their first digit, zeros before; null where whoever selects counts.
    uint32_t* counts;
};

/// Scores are not negative, so their bits are in their order; digits of 11, 11 and 10 of them.
constexpr int DIGITS = 2048, FIRST_DIGIT = 21;
constexpr int MOST_SELECTORS = 1024;

struct Selecting {
    uint32_t digits[DIGITS], above[MOST_SELECTORS / WARP], chosen[MOST_SELECTORS / WARP], tied[MOST_SELECTORS / WARP];
    uint32_t prefix, left;
};

/// The sum of what the lanes before have.
__device__ inline uint32_t before_lane(uint32_t own, int lane) {
    uint32_t sum = own;
    for (int width = 1; width < WARP; width *= 2) {
        const uint32_t other = __shfl_up_sync(ALL, sum, width);
        sum += lane >= width ? other : 0;
    }
    return sum - own;
}

/// The blocks with the largest scores, ascending; ties to the lower block. By a block of threads, a stretch of the
/// blocks a warp: the least chosen score digit by digit, then a pass in order.
template <int SELECTORS>
__device__ void select(const IndexerParams& p, uint32_t r, Selecting& shared) {
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const uint32_t blocks = (p.a.rows[r].position + 1) / p.a.block, kept = p.a.budget / p.a.block;
    const uint32_t* scores = reinterpret_cast<const uint32_t*>(p.scores + r * p.most);
    const uint32_t rounds = (blocks + SELECTORS - 1) / SELECTORS, first = warp * rounds * WARP + lane;
    const uint32_t end = min(blocks, (warp + 1) * rounds * WARP);
    // Calls `use(block, score, whether there is one)` in order, by all lanes together. Several scores are on their way
    // at once.
    const auto each = [&](auto use) {
        constexpr int AHEAD = 8;
#pragma unroll 1
        for (uint32_t i = 0; i < rounds; i += AHEAD) {
            uint32_t here[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                const uint32_t b = first + (i + n) * WARP;
                here[n] = i + n < rounds && b < end ? scores[b] : 0;
            }
#pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                const uint32_t b = first + (i + n) * WARP;
                use(b, here[n], i + n < rounds && b < end);
            }
        }
    };
    uint32_t prefix = 0, left = kept;
#pragma unroll 1
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0   ? FIRST_DIGIT
                          : pass == 1 ? 10
                                      : 0,
                  end = pass == 0   ? 32
                        : pass == 1 ? FIRST_DIGIT
                                    : 10;
        const uint32_t upper = pass == 0 ? 0 : 0xffffffffu << end % 32;
        const bool counted = pass == 0 && p.counts != nullptr;
        for (int i = thread; i < DIGITS; i += SELECTORS) {
            shared.digits[i] = counted ? __ldcg(p.counts + uint64_t(r) * DIGITS + i) : 0;
        }
        __syncthreads();
        if (!counted) {
            each([&](uint32_t, uint32_t score, bool is) {
                if (is && ((score ^ prefix) & upper) == 0) {
                    atomicAdd(shared.digits + (score >> shift & ((1u << (end - shift)) - 1)), 1u);
                }
            });
            __syncthreads();
        }
        // A thread has some digits in a row, the largest first.
        constexpr int OWN = DIGITS / SELECTORS;
        uint32_t own = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            own += shared.digits[DIGITS - 1 - thread * OWN - i];
        }
        uint32_t above = before_lane(own, lane);
        if (lane == WARP - 1) {
            shared.above[warp] = above + own;
        }
        __syncthreads();
        for (int w = 0; w < warp; w++) {
            above += shared.above[w];
        }
        if (above < left && left <= above + own) {
            uint32_t digit = DIGITS - 1 - thread * OWN, rest = left - above;
            while (shared.digits[digit] < rest) {
                rest -= shared.digits[digit--];
            }
            shared.prefix = prefix | digit << shift, shared.left = rest;
        }
        __syncthreads();
        prefix = shared.prefix, left = shared.left;
    }
    // `left` blocks have the least chosen score.
    uint32_t chosen = 0, tied = 0;
    each([&](uint32_t, uint32_t score, bool is) {
        chosen += is && score > prefix;
        tied += is && score == prefix;
    });
    for (int width = WARP / 2; width > 0; width /= 2) {
        chosen += __shfl_xor_sync(ALL, chosen, width), tied += __shfl_xor_sync(ALL, tied, width);
    }
    if (lane == 0) {
        shared.chosen[warp] = chosen, shared.tied[warp] = tied;
    }
    __syncthreads();
    uint32_t written = 0, rank = 0;
    for (int w = 0; w < warp; w++) {
        written += shared.chosen[w] + min(shared.tied[w], left - min(left, rank));
        rank += shared.tied[w];
    }
    const uint32_t lower = (1u << lane) - 1;
    each([&](uint32_t b, uint32_t score, bool is) {
        const uint32_t ties = __ballot_sync(ALL, is && score == prefix);
        const bool takes = is && (score > prefix || (score == prefix && rank + __popc(ties & lower) < left));
        const uint32_t taken = __ballot_sync(ALL, takes);
        if (takes) {
            p.chosen[uint64_t(r) * kept + written + __popc(taken & lower)] = b;
        }
        written += __popc(taken), rank += __popc(ties);
    });
}

/// Scores of all blocks that a row sees: a sum over index heads, ascending, of what is positive of their dots. A warp
/// some blocks at a time; the last block of threads selects. Grid: blocks, rows. `PARTS` is the most values of a head
/// in a lane.
template <class T, int PARTS>
__device__ void choose(const IndexerParams& p) {
    constexpr int AT_ONCE = 4;
    __shared__ Selecting shared;
    __shared__ bool last;
    const Attention& a = p.a;
    const Row row = a.rows[blockIdx.y];
    const uint32_t visible = row.position + 1;
    if (!a.chooses(visible)) {
        return;
    }
    // A block of threads counts its own scores' first digits: there are few, and all the machine would meet at their
    // places.
    for (int i = threadIdx.x; i < DIGITS; i += MOST_SELECTORS) {
        shared.digits[i] = 0;
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    const uint32_t blocks = visible / a.block, warps = gridDim.x * (MOST_SELECTORS / WARP);
    const float* queries = p.queries + uint64_t(blockIdx.y) * a.index_heads * a.index_dim;
    for (uint32_t b = (blockIdx.x * MOST_SELECTORS + threadIdx.x) / WARP * AT_ONCE; b < blocks; b += warps * AT_ONCE) {
        float x[AT_ONCE][PARTS];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            const T* key = a.pooled_keys<T>(row.slot, min(b + c, blocks - 1));
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                x[c][j] = lane + WARP * j < a.index_dim ? stored(key + lane + WARP * j) : 0.0f;
            }
        }
        float sum = 0.0f;
        for (uint32_t h = 0; h < a.index_heads; h++) {
            float acc[AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                const uint32_t at = lane + WARP * j;
                const float q = at < a.index_dim ? queries[h * a.index_dim + at] : 0.0f;
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    acc[c] = fma(x[c][j], q, acc[c]);
                }
            }
            sum = sum + fmaxf(fold_many(acc, lane), 0.0f);
        }
        const uint32_t own = b + folded<AT_ONCE>(lane);
        if (lane % (WARP / AT_ONCE) == 0 && own < blocks) {
            p.scores[blockIdx.y * p.most + own] = sum;
            atomicAdd(shared.digits + (to_bits(sum) >> FIRST_DIGIT), 1u);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; p.counts != nullptr && i < DIGITS; i += MOST_SELECTORS) {
        if (shared.digits[i] > 0) {
            atomicAdd(p.counts + uint64_t(blockIdx.y) * DIGITS + i, shared.digits[i]);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = is_last(p.done + blockIdx.y, gridDim.x);
    }
    __syncthreads();
    if (last) {
        select<MOST_SELECTORS>(p, blockIdx.y, shared);
    }
}

constexpr int SELECTORS = 256;

/// The choice of many rows, whose scores are there.
extern "C" __global__ void __launch_bounds__(SELECTORS) strata_select_blocks(const __grid_constant__ IndexerParams p) {
    __shared__ Selecting shared;
    if (p.a.chooses(p.a.rows[blockIdx.x].position + 1)) {
        select<SELECTORS>(p, blockIdx.x, shared);
    }
}

/// Scores of many rows, of four index heads of 128 values in caches of f16: a warp four rows, whose keys a block of
/// threads shares.
struct ScoreMany {
    static constexpr int HEADS = 4, DIM = 128, BYTES = 2 * DIM, WARPS = 4, THREADS = WARPS * WARP;
    /// Rows of a block of threads; blocks of tokens in shared memory at once, and in all.
    static constexpr int ROWS = WARPS * 4, TILE = 64, SPAN = 1024;

    struct Shared {
        float queries[WARPS][4 * HEADS][DIM];
        uint8_t keys[2][TILE * BYTES];
    };

    __device__ static void stage(Shared& shared, int buffer, const uint8_t* keys, uint32_t first, uint32_t blocks) {
        constexpr int PIECES = BYTES / 16;
        const SharedAddress to = shared_at(shared.keys[buffer]);
#pragma unroll
        for (int i = 0; i < TILE * PIECES / THREADS; i++) {
            const uint32_t at = i * THREADS + threadIdx.x, key = at / PIECES, piece = at % PIECES;
            start_copy_at(to + key * BYTES + swap(piece, key) * 16, keys,
                          min(first + key, blocks - 1) * PIECES + piece);
        }
    }

    /// Grid: spans, rows by sixteen.
    __device__ static void run(const IndexerParams& p) {
        extern __shared__ __align__(128) uint8_t raw[];
        Shared& shared = *reinterpret_cast<Shared*>(raw);
        const Attention& a = p.a;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const uint32_t first_row = blockIdx.y * ROWS, end_row = min(first_row + ROWS, a.count);
        const uint32_t own = first_row + warp * 4 + lane / 8,
                       own_visible = own < end_row ? a.rows[own].position + 1 : 0;
        const bool chooses = a.chooses(own_visible);
        const uint32_t own_blocks = chooses ? own_visible / a.block : 0, first = blockIdx.x * SPAN;
        if (!__syncthreads_or(own_blocks > first)) {
            return;
        }
        for (uint32_t i = threadIdx.x; i < ROWS * HEADS * DIM; i += THREADS) {
            const uint32_t j = i % DIM, head = i / DIM % (4 * HEADS),
                           row = min(first_row + i / (HEADS * DIM), end_row - 1);
            shared.queries[i / (4 * HEADS * DIM)][head][permuted(j)] =
                p.queries[(uint64_t(row) * HEADS + head % HEADS) * DIM + j];
        }
        // Rows of a window belong to one sequence after the other.
        for (uint32_t from = first_row, to; from < end_row; from = to) {
            const uint32_t slot = a.rows[from].slot;
            for (to = from + 1; to < end_row && a.rows[to].slot == slot; to++) {}
            const uint32_t blocks = min((a.rows[to - 1].position + 1) / a.block, first + SPAN);
            if (blocks <= first) {
                continue;
            }
            const uint8_t* keys = reinterpret_cast<const uint8_t*>(a.pooled_keys<uint16_t>(slot, 0));
            const bool mine = own >= from && own < to;
            stage(shared, 0, keys, first, blocks);
            end_copies();
            int buffer = 0;
            for (uint32_t tile = first; tile < blocks; tile += TILE, buffer ^= 1) {
                if (tile + TILE < blocks) {
                    stage(shared, buffer ^ 1, keys, tile + TILE, blocks);
                }
                end_copies();
                all_but_the_latest();
                __syncthreads();
#pragma unroll 1
                for (int step = 0; step < TILE; step += STEP) {
                    float sums[HEADS][2];
                    dots(shared.queries[warp], shared_at(shared.keys[buffer]) + step * BYTES, lane, sums);
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float sum = 0.0f;
#pragma unroll
                        for (int h = 0; h < HEADS; h++) {
                            sum = sum + fmaxf(sums[h][n], 0.0f);
                        }
                        const uint32_t b = tile + step + key_of(lane, n);
                        if (mine && b < own_blocks) {
                            p.scores[own * p.most + b] = sum;
                        }
                    }
                }
                __syncthreads();
            }
        }
    }
};

extern "C" __device__ uint32_t strata_score_blocks_shared = sizeof(ScoreMany::Shared);
extern "C" __global__ void __launch_bounds__(ScoreMany::THREADS, 3)
    strata_score_blocks(const __grid_constant__ IndexerParams p) {
    ScoreMany::run(p);
}

#define STRATA_CHOOSE(T, NAME)                                                       \
    extern "C" __global__ void __launch_bounds__(MOST_SELECTORS)                     \
        strata_choose_blocks_##NAME##_128(const __grid_constant__ IndexerParams p) { \
        pass();                                                                      \
        ready();                                                                     \
        choose<T, 4>(p);                                                             \
    }                                                                                \
    extern "C" __global__ void __launch_bounds__(MOST_SELECTORS)                     \
        strata_choose_blocks_##NAME##_256(const __grid_constant__ IndexerParams p) { \
        pass();                                                                      \
        ready();                                                                     \
        choose<T, 8>(p);                                                             \
    }
STRATA_CHOOSE(float, f32)
STRATA_CHOOSE(uint16_t, f16)

}  // namespace strata
