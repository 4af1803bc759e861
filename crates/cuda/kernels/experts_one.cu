// The routed experts of one row: gate, up and SwiGLU; then down, the sum over experts, and the shared expert. An
// expert's address comes from the residency table.
#include "choose.cuh"
#include "desk.cuh"
#include "one.cuh"

namespace strata {

/// Who the experts are, and their shares: `[used]` each, by id. The first kernel chooses, each block of threads for
/// itself: every multiprocessor then has the instructions for it, which one alone would fetch from far, in every layer.
struct Routed {
    /// `[all]`
    const float* logits;
    uint32_t* experts;
    float* shares;
    /// Whether both have been written: 1 from the first kernel's choice until the second's end.
    uint32_t* made;
    uint32_t all, used;
};

/// Twins of all parameters: `src/ops/experts_one.rs`.
struct HiddenParams {
    /// Per expert the address of its slot, which starts with the gate's rows; where those of up start.
    const uint64_t* slots;
    uint64_t up;
    Routed routed;
    Columns x;
    /// Per expert what its products are multiplied with, or null.
    const float* gate_scales;
    const float* up_scales;
    /// `[used][width]`, quantised.
    Target hidden;
    /// Who computes experts that are in host memory; and the row as it was.
    Desk desk;
    const float* u;
    uint32_t width, k;
    Split split;
};

/// Hidden values of a block of threads: as many as are quantised together.
constexpr int HIDDEN = 32;
/// Threads of a block, at most: registers allow two blocks at once. Twin: in `ops/experts_one.rs`.
template <class F>
constexpr int HIDDEN_THREADS = F::SHARE == 1 ? 480 : ONE_THREADS;

/// Grid: hidden values, experts.
template <class F>
__device__ void hidden(const HiddenParams& p) {
    using Rows = One<F>;
    extern __shared__ __align__(LINE) uint8_t room[];
    __shared__ Arrival arrivals[2], book;
    __shared__ float products[2 * HIDDEN];
    const int units = p.k / 32, rows = 2 * HIDDEN;
    const uint32_t first = blockIdx.x * HIDDEN, row_bytes = units / Rows::PER_BLOCK * F::BYTES;
    const uint32_t piece = brought(HIDDEN * row_bytes);
    const Routed& routed = p.routed;
    // The choice takes place where the rows will be, and maybe the terms.
    uint8_t* terms = room + max(2 * piece, choice_room(routed.all));
    if (threadIdx.x == 0) {
        arrivals[0].init(1), arrivals[1].init(1), book.init(1);
    }
    const uint32_t* grid = nullptr;
    if constexpr (F::GRID > 0) {
        const Rows last(terms, rows, units, 1, nullptr);
        uint8_t* at = reinterpret_cast<uint8_t*>(last.first);
        grid = reinterpret_cast<const uint32_t*>(book.bring<16>(at, F::codebook(), F::GRID * 4));
    }
    const Rows one(terms, rows, units, 0, grid);
    ready();
    __shared__ uint32_t experts[WARP], helped;
    const bool first_block = blockIdx.x == 0 && blockIdx.y == 0, asks = p.desk.words != nullptr;
    if (first_block || !asks) {
        const Choice choice = choose(routed.logits, routed.all, routed.used, room);
        if (threadIdx.x < WARP) {
            const bool chosen = threadIdx.x < routed.used;
            const uint32_t which = asks ? p.desk.split(chosen ? p.slots[choice.expert] : 0, chosen, threadIdx.x) : 0;
            if (chosen) {
                experts[threadIdx.x] = choice.expert;
            }
            if (threadIdx.x == 0) {
                helped = which;
            }
            if (first_block) {
                if (chosen) {
                    routed.experts[threadIdx.x] = choice.expert, routed.shares[threadIdx.x] = choice.share;
                }
                if (threadIdx.x == 0 && asks) {
                    *p.desk.helped = which;
                }
                __threadfence();
            }
        }
        __syncthreads();
        if (first_block && asks) {
            p.desk.ask(helped, experts, routed.used, p.u, p.k);
        }
        if (first_block && threadIdx.x == 0) {
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(routed.made), "r"(1) : "memory");
        }
    } else {
        // Not a byte is read over the link before the host has been asked: what is written meanwhile gets there behind it all.
        if (threadIdx.x == 0) {
            uint32_t made = 0;
            while (made == 0) {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(routed.made) : "memory");
            }
            helped = __ldcg(p.desk.helped);
        }
        __syncthreads();
        if (threadIdx.x < routed.used) {
            experts[threadIdx.x] = __ldcg(routed.experts + threadIdx.x);
        }
        __syncthreads();
    }
    // Not before: the kernel behind wants to know the experts.
    pass();
    if ((helped >> blockIdx.y & 1) != 0) {
        // Nothing may still be on its way to a block that has ended.
        if (F::GRID > 0) {
            book.wait(0, 0);
        }
        return;
    }
    const uint32_t expert = experts[blockIdx.y];
    const uint8_t* from = reinterpret_cast<const uint8_t*>(p.slots[expert]) + size_t(first) * row_bytes;
    Arrival::over_written();
    const uint8_t* gate = arrivals[0].bring(room, from, HIDDEN * row_bytes);
    end_copies();
    const uint8_t* up = arrivals[1].bring(room + piece, from + p.up, HIDDEN * row_bytes);
    end_copies();
    const int groups = units / Rows::SHARE, lanes = int(p.split.lanes), across = int(p.split.across);
    const int mine = p.split.group(), slot = p.split.slot();
    typename Rows::Column column;
    if (slot < across) {
        column.load(p.x, mine);
    }
    __syncthreads();
    if (F::GRID > 0) {
        book.wait(0, 1);
    }
    // The gate's rows while those of up still come; each thread goes on with its next row.
    int row = slot;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        arrivals[part].wait(0, 1 - part);
        const int end = (part + 1) * HIDDEN;
        const uint8_t* at = part == 0 ? gate : up - HIDDEN * row_bytes;
        if (slot < across) {
            for (int group = mine; group < groups; group += lanes) {
                if (group != mine || (part > 0 && groups > lanes)) {
                    column.load(p.x, group);
                }
                one.put_rows(row, across, end, group, column, [&](int r) { return at + r * row_bytes; });
            }
        }
        row += (end - row + across - 1) / across * across;
    }
    __syncthreads();
    one.add_up(p.split, rows, [&](int r, float sum) {
        const float* scales = r < HIDDEN ? p.gate_scales : p.up_scales;
        products[r] = scales == nullptr ? sum : sum * scales[expert];
    });
    __syncthreads();
    if (threadIdx.x < HIDDEN) {
        const float value = swiglu(products[threadIdx.x], products[HIDDEN + threadIdx.x]);
        p.hidden.put(value, size_t(blockIdx.y) * p.width + first + threadIdx.x);
    }
}

/// What the host's answers wait with.
struct AnswersParams {
    Desk desk;
    const uint32_t* made;
    uint32_t width;
};

/// Threads that bring answers, and pieces of 16 bytes that each has under way at once: the link is far.
constexpr uint32_t BRINGERS = 1024, UNDER_WAY = 7;

/// Waits for the host, if it was asked, and brings its outputs. One block of threads.
extern "C" __global__ void __launch_bounds__(BRINGERS) strata_answers(const __grid_constant__ AnswersParams p) {
    __shared__ uint32_t which;
    pass();
    if (threadIdx.x == 0) {
        uint32_t made;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(p.made) : "memory");
        if (made == 0) {
            ready();
        }
        which = __ldcg(p.desk.helped);
        while (which != 0 && Desk::hear(p.desk.words + ANSWERED) == 0) {
            __nanosleep(100);
        }
    }
    __syncthreads();
    const uint32_t width = p.width / 4, all = __popc(which) * width;
    const float4* answers = reinterpret_cast<const float4*>(p.desk.answers);
    for (uint32_t first = threadIdx.x; first < all; first += BRINGERS * UNDER_WAY) {
        float4 pieces[UNDER_WAY];
#pragma unroll
        for (uint32_t i = 0; i < UNDER_WAY; i++) {
            const uint32_t from = first + i * BRINGERS;
            pieces[i] = from < all ? __ldcv(answers + from) : float4{};
        }
#pragma unroll
        for (uint32_t i = 0; i < UNDER_WAY; i++) {
            const uint32_t from = first + i * BRINGERS;
            if (from < all) {
                // The place of the expert whose answer it is: the bit of that number among those set.
                const uint32_t place = __fns(which, 0, int(from / width) + 1);
                reinterpret_cast<float4*>(p.desk.outputs + place * p.width)[from % width] = pieces[i];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && which != 0) {
        Desk::say(p.desk.words + ANSWERED, 0);
    }
    ready();
}

struct DownParams {
    const uint64_t* slots;
    /// Where the rows of down start in a slot.
    uint64_t offset;
    Routed routed;
    /// `[used][k]`
    Columns hidden;
    const float* scales;
    /// `[rows]`: the shared expert's product, and the scalar of its gate, before the sigmoid.
    const float* shared;
    const float* scalar;
    /// `[rows]`
    float* y;
    /// Null, or a bit for each expert whose output is in `outputs`, `[used][rows]`.
    const uint32_t* helped;
    const float* outputs;
    /// Rows, and those of a block of threads.
    uint32_t rows, share, k;
    Split split;
};

/// Threads of a block, at most: registers allow three blocks at once. Twin: `ops/experts_one.rs`.
constexpr int DOWN_THREADS = 256;

/// `y = sum over experts, ascending id, of p_e * product_e + sigmoid(scalar) * shared`. A block of threads has the same
/// rows of all experts.
template <class F>
__device__ void down(const DownParams& p) {
    using Rows = One<F>;
    extern __shared__ __align__(LINE) uint8_t room[];
    __shared__ Arrival arrival;
    pass();
    const Routed& routed = p.routed;
    const uint32_t used = routed.used;
    const int units = p.k / 32;
    const uint32_t first = blockIdx.x * p.share, rows = min(p.share, p.rows - first);
    const uint32_t row_bytes = units / Rows::PER_BLOCK * F::BYTES, piece = brought(p.share * row_bytes);
    float* products = reinterpret_cast<float*>(room);
    uint8_t* raw = room + (used * p.share * 4 + LINE - 1) / LINE * LINE;
    uint8_t* terms = raw + used * piece;
    const int all = int(used * p.share);
    if (threadIdx.x == 0) {
        arrival.init(int(used) + (F::GRID > 0 ? 1 : 0));
    }
    const uint32_t* grid = nullptr;
    if constexpr (F::GRID > 0) {
        const Rows last(terms, all, units, 1, nullptr);
        uint8_t* at = reinterpret_cast<uint8_t*>(last.first);
        grid = reinterpret_cast<const uint32_t*>(arrival.bring<16>(at, F::codebook(), F::GRID * 4));
    }
    const Rows one(terms, all, units, 0, grid);
    // The kernel in front lets this one start when it has chosen: weights need not wait for more. The choice is read past
    // the first-level cache, where another layer's may lie.
    __shared__ const uint8_t* rows_of[WARP];
    __shared__ float shares[WARP];
    __shared__ uint32_t helped;
    if (threadIdx.x < used) {
        uint32_t made;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(routed.made) : "memory");
        if (made == 0) {
            ready();
        }
        shares[threadIdx.x] = __ldcg(routed.shares + threadIdx.x);
        const uint64_t slot = __ldcg(p.slots + __ldcg(routed.experts + threadIdx.x));
        rows_of[threadIdx.x] = reinterpret_cast<const uint8_t*>(slot + p.offset) + size_t(first) * row_bytes;
        if (threadIdx.x == 0) {
            helped = p.helped == nullptr ? 0 : __ldcg(p.helped);
        }
    }
    __syncthreads();
    const uint32_t elsewhere = helped;
    for (uint32_t i = 0; i < used; i++) {
        if ((elsewhere >> i & 1) != 0) {
            arrival.bring_none();
        } else {
            arrival.bring(raw + i * piece, rows_of[i], rows * row_bytes);
        }
    }
    const int groups = units / Rows::SHARE, lanes = int(p.split.lanes), across = int(p.split.across);
    const int mine = p.split.group(), slot = p.split.slot();
    ready();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *routed.made = 0;
    }
    // Loads that are used last start first.
    const bool ends = threadIdx.x < rows;
    const float shared = ends ? p.shared[first + threadIdx.x] : 0.0f, scalar = ends ? *p.scalar : 0.0f;
    arrival.wait(0, 0);
    for (uint32_t i = slot; i < used && slot < across; i += across) {
        if ((elsewhere >> i & 1) != 0) {
            continue;
        }
        const uint8_t* at = raw + i * piece + in_line(rows_of[i]);
        for (int group = mine; group < groups; group += lanes) {
            typename Rows::Column column;
            column.load(p.hidden.from(i, p.k), group);
            const int place = int(i * rows);
            one.put_rows(place, 1, place + int(rows), group, column,
                         [&](int r) { return at + (r - place) * row_bytes; });
        }
    }
    __syncthreads();
    one.add_up(p.split, int(used * rows), [&](int r, float sum) {
        products[r] = p.scales == nullptr ? sum : sum * p.scales[routed.experts[r / rows]];
    });
    __syncthreads();
    if (ends) {
        float y = 0.0f;
#pragma unroll 4
        for (uint32_t i = 0; i < used; i++) {
            const bool here = (elsewhere >> i & 1) == 0;
            const float product = here ? products[i * rows + threadIdx.x] : __ldcg(p.outputs + i * p.rows + first + threadIdx.x);
            y = fma(shares[i], product, y);
        }
        p.y[first + threadIdx.x] = fma(sigmoid(scalar), shared, y);
    }
}

#define STRATA_KERNELS(F, NAME)                                                                     \
    extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS<F>, 2) strata_hidden_one_##NAME(    \
        const __grid_constant__ HiddenParams p) {                                                   \
        hidden<F>(p);                                                                               \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(DOWN_THREADS, F::SHARE > 1 ? 2 : 3)                \
        strata_down_one_##NAME(const __grid_constant__ DownParams p) {                              \
        down<F>(p);                                                                                 \
    }
STRATA_BLOCK_FORMATS(STRATA_KERNELS)

}  // namespace strata
