// Copies from device memory to shared memory that run beside the threads that started them.
#pragma once

#include <cstdint>

namespace strata {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// Starts a copy of 16 bytes to shared memory.
__device__ inline void copy16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
#else
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

/// Starts a copy of 4 bytes.
__device__ inline void copy4(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from));
#else
    *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
#endif
}

/// Waits for this thread's copies.
__device__ inline void copies_done() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// Waits for this thread's copies but those behind the last `copies_so_far`.
__device__ inline void copies_before_done() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

/// Ends a group of copies.
__device__ inline void copies_so_far() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Bytes of shared memory that `bring` takes. Twin: `ops/one.rs`.
__device__ constexpr uint32_t brought(uint32_t bytes) { return (bytes + 15 + 15) / 16 * 16; }

/// Starts copying `bytes` bytes by all threads; returns where the first will lie. They are copied with the whole 16 bytes that the first and
/// the last lie in, which are the same allocation's: those start and end at multiples of 16.
template <int THREADS>
__device__ inline const uint8_t* bring(uint8_t* room, const void* from, uint32_t bytes) {
    const uint32_t off = uint32_t(reinterpret_cast<uintptr_t>(from)) & 15;
    const uint8_t* first = static_cast<const uint8_t*>(from) - off;
    for (uint32_t i = threadIdx.x; i < (off + bytes + 15) / 16; i += THREADS) {
        copy16(room + 16 * i, first + 16 * i);
    }
    return room + off;
}

}  // namespace strata
