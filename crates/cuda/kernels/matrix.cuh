// Hopper's matrix instructions of four warps, barriers that copies tell, and pairs of f16.
#pragma once

#include "shared.cuh"
#include "terms.cuh"

namespace strata {

/// Lanes of a warp that tell. One does for all that it met at the warp's barrier; `racecheck` doesn't know that, and has all of them tell
/// (docs/performance.md).
#ifdef STRATA_ALL_LANES_TELL
constexpr int TELLING = WARP;
#else
constexpr int TELLING = 1;
#endif

/// A counter that threads tell and wait on.
struct Barrier {
    uint64_t state;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __device__ void init(int times) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(&state)), "r"(times) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    /// What the warp did before is done.
    __device__ void tell(int lane) { tell_at(shared_at(&state), lane); }
    /// Tells, and that `bytes` bytes are to come by `bring_bulk`.
    __device__ void expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(&state)), "r"(bytes)
                     : "memory");
    }
    /// Starts a copy of a multiple of 16 bytes; the barrier is told of each byte that has come.
    __device__ void bring_bulk(void* to, const void* from, uint32_t bytes) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_at(to)),
            "l"(from), "r"(bytes), "r"(shared_at(&state))
            : "memory");
    }
    /// By its address.
    __device__ static void tell_at(SharedAddress at, int lane) {
        __syncwarp();
        if (lane < TELLING) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
        }
    }
    __device__ void wait(uint32_t phase) {
        asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(
                         shared_at(&state)),
                     "r"(phase)
                     : "memory");
    }
#endif
};

/// Pairs of f16.
__device__ inline uint32_t add_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
__device__ inline uint32_t negate_pair(uint32_t a) {
    uint32_t out;
    asm("neg.f16x2 %0, %1;" : "=r"(out) : "r"(a));
    return out;
}
/// A pair of integers in -512..512, as f16.
__device__ inline uint32_t integer_pair(int low, int high) {
    return add_pair(0x66006600u + low + (uint32_t(high) << 16), 0xe600e600u);
}
/// Two bytes from 0 to 255 as f16 of 1024 more.
__device__ inline uint32_t low_pair(uint32_t bytes) { return __byte_perm(bytes, 0x64646464u, 0x4140); }
__device__ inline uint32_t high_pair(uint32_t bytes) { return __byte_perm(bytes, 0x64646464u, 0x4342); }
/// -1024 and -1152, in pairs.
constexpr uint32_t LESS_1024 = 0xe400e400u, LESS_1152 = 0xe480e480u;

/// Half of 16 values of a column as f16, in the order that the matrix instruction meets them: a lane has four
/// consecutive weights, and takes the first two for its values 2 l, 2 l + 1, and the others for 2 l + 8, 2 l + 9 of 16.
__device__ inline uint4 widen(const uint4& q, bool others) {
    const uint32_t words[4] = {q.x ^ 0x80808080u, q.y ^ 0x80808080u, q.z ^ 0x80808080u, q.w ^ 0x80808080u};
    uint32_t out[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out[k] = add_pair(others ? high_pair(words[k]) : low_pair(words[k]), LESS_1152);
    }
    return {out[0], out[1], out[2], out[3]};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// `c = a * b`, or `c += a * b`, by four warps: `a` 64 rows of 16 values in registers, `b` columns of 16 values in
// shared memory. Not done before `multiplied`.

/// 32 columns.
__device__ inline void multiply(float (&c)[16], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 64 columns.
__device__ inline void multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 96 columns.
__device__ inline void multiply(float (&c)[48], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %53, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "{%48, %49, %50, %51}, %52, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
          "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
          "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// 128 columns.
__device__ inline void multiply(float (&c)[64], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
          "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
          "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
          "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
          "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ inline void before_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until all products but those of the last `LEFT` commits are done.
template <int LEFT, int N>
__device__ inline void multiplied(float (&c)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(c[i])::"memory");
    }
}

#endif

}  // namespace strata
