// Copies from global to shared memory that run while their warp goes on; where a GPU has none, they are done at once.
#pragma once

#include <cstdint>

namespace strata {

/// Starts a copy of `BYTES`, 4 or 16.
template <int BYTES>
__device__ inline void start_copy(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    const uint32_t shared = uint32_t(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES) : "memory");
    }
#else
    if constexpr (BYTES == 16) {
        *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    } else {
        *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
    }
#endif
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

}  // namespace strata
