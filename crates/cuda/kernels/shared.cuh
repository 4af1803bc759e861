// Shared memory: addresses as its instructions take them, loads, and copies from global memory that run while their
// warp goes on; where a GPU has none of these, they are done at once.
#pragma once

#include <cstdint>

namespace strata {

/// An address in shared memory as its instructions take it. To make one of a pointer costs a slow look at where the
/// block's memory is: loops keep it.
using SharedAddress = uint32_t;
__device__ inline SharedAddress shared_at(const void* p) { return SharedAddress(__cvta_generic_to_shared(p)); }

__device__ inline void load_shared(float& to, SharedAddress from) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to) : "r"(from));
}
__device__ inline void load_shared(uint16_t& to, SharedAddress from) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(to) : "r"(from));
}

__device__ inline void load_shared(float4& to, SharedAddress from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
                 : "r"(from));
}
/// An address that the compiler shall not find anew.
__device__ inline SharedAddress kept(SharedAddress at) {
    asm volatile("" : "+r"(at));
    return at;
}

/// Four matrices of eight rows of 16 bytes; lane `i` says where row `i % 8` of matrix `i / 8` is.
__device__ inline void load_matrices(uint32_t (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) { load_matrices(to, shared_at(row)); }

/// Starts a copy of `BYTES`, 4 or 16.
template <int BYTES>
__device__ inline void start_copy(SharedAddress to, const void* from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
#else
    if constexpr (BYTES == 16) {
        const uint4 value = *static_cast<const uint4*>(from);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                     "r"(value.w)
                     : "memory");
    } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(*static_cast<const uint32_t*>(from)) : "memory");
    }
#endif
}
template <int BYTES>
__device__ inline void start_copy(void* to, const void* from) {
    start_copy<BYTES>(shared_at(to), from);
}

/// Ends a group: the copies that this thread started since the last one.
__device__ inline void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits for all of this thread's groups but the latest `LEFT`.
template <int LEFT>
__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

/// Waits for all of this thread's copies.
__device__ inline void await_all_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// What memory is moved by. A copy whose source and target lie differently in their lines reads host memory at less than half the link's rate
/// (docs/experiments.md).
constexpr uint32_t LINE = 128;

/// Bytes of shared memory that `Arrival::bring` takes, from a multiple of `LINE` on. Twin: `ops/one.rs`.
__device__ constexpr uint32_t brought(uint32_t bytes) { return (bytes + LINE - 1 + LINE - 1) / LINE * LINE; }

/// Where in its line an address is.
__device__ inline uint32_t in_line(const void* at) { return uint32_t(reinterpret_cast<uintptr_t>(at)) % LINE; }

/// Pieces of global memory on their way to shared memory. Threads that wait for them see all of them. Of a whole block
/// of threads.
struct Arrival {
    uint64_t state;

    /// By one thread, before the first piece; the others pass a barrier of the block before they wait. So many pieces
    /// come in each round.
    __device__ void init(int pieces) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(&state)), "r"(pieces) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    /// By the thread that brings, behind a barrier: pieces may come to where other threads have written.
    __device__ static void over_written() {
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    /// Starts copying `bytes` bytes, and returns where the first will lie. All threads call it; on GPUs with a copy
    /// engine in each multiprocessor the first has it do the work. Copied are the whole lines that the first and the
    /// last lie in, which are the same allocation's: those start and end with lines. Smaller ones can be asked for.
    template <uint32_t OF = LINE>
    __device__ const uint8_t* bring(uint8_t* room, const void* from, uint32_t bytes) {
        const uint32_t off = in_line(from) % OF;
        const uint8_t* first = static_cast<const uint8_t*>(from) - off;
        const uint32_t whole = (off + bytes + OF - 1) / OF * OF;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(&state)), "r"(whole)
                         : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             shared_at(room)),
                         "l"(first), "r"(whole), "r"(shared_at(&state))
                         : "memory");
        }
#else
        for (uint32_t i = threadIdx.x * 16; i < whole; i += blockDim.x * 16) {
            start_copy<16>(room + i, first + i);
        }
#endif
        return room + off;
    }

    /// In place of a piece that doesn't come.
    __device__ void bring_none() {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_at(&state)) : "memory");
        }
#endif
    }

    /// Waits for the pieces of round number `round`; `newer` says how many groups of copies were started later, for
    /// others. All threads call it, though not all may `need` them.
    __device__ void wait(uint32_t round, int newer, bool need = true) {
#if __CUDA_ARCH__ >= 900
        if (need) {
            asm volatile(
                "{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(
                    shared_at(&state)),
                "r"(round & 1)
                : "memory");
        }
#else
        if (newer == 0) {
            // Also for those that no group was ended for.
            await_all_copies();
        } else if (newer == 1) {
            await_copies<1>();
        } else if (newer == 2) {
            await_copies<2>();
        } else {
            await_copies<3>();
        }
        __syncthreads();
#endif
    }
};

}  // namespace strata
