// What the host is asked for in the middle of a step: experts of one row that it computes, or others that it brings. Asked and answered in host memory that
// both see.
#pragma once

#include "contract.cuh"
#include "shared.cuh"

namespace strata {

/// What is said of a layer, in words: whether something is asked (`NOTHING` once a layer asks for none), whether it has been answered, how
/// many experts, and which. Twin: `src/tiers/desk.rs`.
constexpr uint32_t ASKED = 0, ANSWERED = 1, COUNT = 2, EXPERTS = 3;
constexpr uint32_t NOTHING = 2;

/// Twin: `src/tiers/desk.rs`. All null where the host computes none.
struct Desk {
    uint32_t* words;
    /// The row, `[D]`, and the outputs, `[used][D]`: in host memory.
    float* row;
    const float* answers;
    /// Addresses of the device's own memory.
    uint64_t first, end;
    /// How many the host gets, by how many of the row's experts are not there.
    const uint8_t* table;
    /// A bit for each of the row's experts that the host computes, and their outputs here, `[used][D]`.
    uint32_t* helped;
    float* outputs;

    /// By the first warp of a block of threads: which experts the host computes.
    __device__ uint32_t split(uint64_t at, bool chosen, uint32_t lane) const {
        // Those at zero it alone can read.
        const bool missing = chosen && (at < first || at >= end), alone = missing && at == 0;
        const uint32_t all = __ballot_sync(ALL, missing && !alone), most = table[__popc(all)];
        return __ballot_sync(ALL, alone || (missing && uint32_t(__popc(all & ((1u << lane) - 1))) < most));
    }

    /// By all threads of one block: asks the host.
    __device__ void ask(uint32_t which, const uint32_t* experts, uint32_t used, const float* u, uint32_t width) const {
        if (which == 0) {
            if (threadIdx.x == 0) {
                say(words + ASKED, NOTHING);
            }
            return;
        }
        for (uint32_t i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
            *reinterpret_cast<float4*>(row + i) = *reinterpret_cast<const float4*>(u + i);
        }
        if (threadIdx.x < used && (which >> threadIdx.x & 1) != 0) {
            words[EXPERTS + __popc(which & ((1u << threadIdx.x) - 1))] = experts[threadIdx.x];
        }
        if (threadIdx.x == 0) {
            words[COUNT] = __popc(which);
        }
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) {
            say(words + ASKED, 1);
            __threadfence_system();
        }
    }

    __device__ static void say(uint32_t* to, uint32_t word) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
    }
    __device__ static uint32_t hear(const uint32_t* from) {
        uint32_t word;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
        return word;
    }
};

}  // namespace strata
