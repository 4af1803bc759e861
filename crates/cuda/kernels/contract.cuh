// The arithmetic contract's functions on the device: docs/arithmetic.md. Each line repeats `strata_quant::math` and
// `strata_quant::lanes`, operation for operation; nothing is contracted (the build passes -fmad=false) and no library
// function is called, so that bits agree with every other backend.
#pragma once

#include <cstdint>

namespace strata {

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;
/// Blocks that accumulate in one go, from zero.
constexpr int SEGMENT = 64;

__device__ inline float from_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline uint32_t to_bits(float x) { return __float_as_uint(x); }
__device__ inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/// Adding and subtracting it rounds a float of magnitude below 2^22 to an integer, ties to even; and its bits.
constexpr float ROUND = 1.5f * (1 << 23);
constexpr uint32_t ROUND_BITS = 0x4b400000u;

struct Exp {
    float p, lost, a, b;
};

/// 2^n; n in -126..=127.
__device__ inline float power_of_two(int n) { return from_bits(uint32_t(n + 127) << 23); }

__device__ inline Exp exp_parts(float x) {
    x = x < -110.0f ? -110.0f : x;
    x = x > 100.0f ? 100.0f : x;
    const float shifted = fma(x, from_bits(0x3fb8aa3bu), ROUND);
    const float k = shifted - ROUND;
    const int n = int(to_bits(shifted)) - int(ROUND_BITS);
    float r = fma(k, -from_bits(0x3f317218u), x);
    r = fma(k, -from_bits(0xb102e308u), r);
    float p = from_bits(0x3ab5289au);
    p = fma(p, r, from_bits(0x3c091cbeu));
    p = fma(p, r, from_bits(0x3d2aac56u));
    p = fma(p, r, from_bits(0x3e2aaa49u));
    p = fma(p, r, from_bits(0x3efffffeu));
    const float slope = fma(p, r, 1.0f);
    p = fma(slope, r, 1.0f);
    const float lost = fma(slope, r, 1.0f - p);
    const int a = n >> 1;
    return {p, lost, power_of_two(a), power_of_two(n - a)};
}

/// e^x.
__device__ inline float exp(float x) {
    const Exp e = exp_parts(x);
    return e.p * e.a * e.b;
}

/// `(n + n_lost) / (1 + e + e_lost)` for e in 0..=1.
__device__ inline float over_one_plus(float n, float n_lost, float e, float e_lost) {
    const float denominator = 1.0f + e;
    const float quotient = __fdiv_rn(n, denominator);
    const float lost = (e - (denominator - 1.0f)) + e_lost;
    const float corrected = fma(fma(-quotient, lost, n_lost), fma(e, -0.5f, 1.0f), quotient);
    return quotient == from_bits(0x7f800000u) ? quotient : corrected;
}

/// `1 / (1 + e^-x)`.
__device__ inline float sigmoid(float x) {
    const Exp x_exp = exp_parts(-fabsf(x));
    const float e = x_exp.p * x_exp.a * x_exp.b, e_lost = x_exp.lost * x_exp.a * x_exp.b;
    return x >= 0.0f ? over_one_plus(1.0f, 0.0f, e, e_lost) : over_one_plus(e, e_lost, e, e_lost);
}

/// `x * sigmoid(x)`, as one quotient; 0 at -infinity.
__device__ inline float silu(float x) {
    const Exp e = exp_parts(-fabsf(x));
    const float bounded = x < -200.0f ? -200.0f : x;
    const float product = bounded * e.p;
    const float product_lost = fma(bounded, e.lost, fma(bounded, e.p, -product));
    const float n = x >= 0.0f ? x : product * e.a * e.b;
    const float n_lost = x >= 0.0f ? 0.0f : product_lost * e.a * e.b;
    return over_one_plus(n, n_lost, e.p * e.a * e.b, e.lost * e.a * e.b);
}

/// The SwiGLU of one element.
__device__ inline float swiglu(float gate, float up) { return silu(gate) * up; }

/// `k ln 2 + log(1 + f)`.
__device__ inline float log_sum(float f, float k) {
    float q = from_bits(0xbd9c64fdu);
    q = fma(q, f, from_bits(0x3e02b9d9u));
    q = fma(q, f, from_bits(0xbe06c5fdu));
    q = fma(q, f, from_bits(0x3e116b88u));
    q = fma(q, f, from_bits(0xbe2a38b2u));
    q = fma(q, f, from_bits(0x3e4cd014u));
    q = fma(q, f, from_bits(0xbe800115u));
    q = fma(q, f, from_bits(0x3eaaaaaau));
    const float tail = fma(f * f, fma(f, q, -0.5f), k * from_bits(0xb102e308u));
    return fma(k, from_bits(0x3f317218u), tail + f);
}

/// `log(1 + e^x)`.
__device__ inline float softplus(float x) {
    const float e = exp(-fabsf(x));
    const float u = 1.0f + e;
    const int k = (int(to_bits(u)) - 0x3f3504f3) >> 23;
    const float scale = from_bits(uint32_t(0x3f800000 - k * (1 << 23)));
    const float f = fma(e, scale, fma(1.0f, scale, -1.0f));
    const float positive = x > 0.0f ? x : 0.0f;
    return positive + log_sum(f, float(k));
}

/// `1 / sqrt(x)`: an IEEE square root, then an IEEE division.
__device__ inline float rsqrt(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }

/// The f32 of an f16's bits; exact.
__device__ inline float half_to_float(uint16_t h) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(h));
    return out;
}

/// The bits of the f16 nearest to `x`, ties to even.
__device__ inline uint16_t float_to_half(float x) {
    uint16_t out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

/// A warp's lanes folded 16, 8, 4, 2, 1 as the contract folds them; every lane gets the sum of lane 0.
__device__ inline float fold(float lane) {
    for (int width = WARP / 2; width > 0; width /= 2) {
        lane += __shfl_down_sync(ALL, lane, width);
    }
    return __shfl_sync(ALL, lane, 0);
}

/// The largest of a warp's values, and their sum, for every lane.
__device__ inline uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    for (int width = WARP / 2; width > 0; width /= 2) {
        x = max(x, __shfl_xor_sync(ALL, x, width));
    }
    return x;
#endif
}
__device__ inline int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL, x);
#else
    for (int width = WARP / 2; width > 0; width /= 2) {
        x += __shfl_xor_sync(ALL, x, width);
    }
    return x;
#endif
}

/// One block of 32 activations, quantised by a warp: `x` is the lane's. Sums are of 16 lanes each, the low half in bits
/// 0..16.
struct Quantised {
    int q;
    float d;
    uint32_t sums;
};

__device__ inline Quantised quantise(float x) {
    const uint32_t largest = warp_max(to_bits(x) & 0x7fffffffu);
    const float amax = from_bits(largest);
    if (largest >= 0x7f800000u) {
        return {0, from_bits(0x7fc00000u), 0};
    }
    if (amax < from_bits((127u - 100u) << 23)) {
        return {0, 0.0f, 0};
    }
    const float factor = __fdiv_rn(127.0f, amax);
    float scaled = x * factor;
    scaled = scaled < -127.0f ? -127.0f : scaled;
    scaled = scaled > 127.0f ? 127.0f : scaled;
    const int q = int(to_bits(scaled + ROUND)) - int(ROUND_BITS);
    const bool upper = threadIdx.x & 16;
    const int low = warp_sum(upper ? 0 : q), high = warp_sum(upper ? q : 0);
    return {q, __fdiv_rn(amax, 127.0f), (uint32_t(low) & 0xffffu) | uint32_t(high) << 16};
}

/// The same for 32 consecutive values in the hands of `32 / N` threads, `N` each, two or four: with fewer exchanges.
/// `q` has the thread's own, the lowest byte first; `d` and `sums` are right in all of them.
struct QuantisedSeveral {
    uint32_t q;
    float d;
    uint32_t sums;
};

template <int N>
__device__ inline QuantisedSeveral quantise_several(const float (&x)[N]) {
    constexpr int THREADS = 32 / N;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        largest = max(largest, to_bits(x[i]) & 0x7fffffffu);
    }
    for (int width = THREADS / 2; width > 0; width /= 2) {
        largest = max(largest, __shfl_xor_sync(ALL, largest, width));
    }
    const bool broken = largest >= 0x7f800000u, small = largest < (127u - 100u) << 23;
    const float amax = from_bits(broken || small ? 0x3f800000u : largest), factor = __fdiv_rn(127.0f, amax);
    uint32_t q = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float scaled = x[i] * factor;
        scaled = scaled < -127.0f ? -127.0f : scaled;
        scaled = scaled > 127.0f ? 127.0f : scaled;
        const int value = broken || small ? 0 : int(to_bits(scaled + ROUND)) - int(ROUND_BITS);
        q |= (uint32_t(value) & 255u) << (8 * i);
        sum += value;
    }
    for (int width = 1; width < THREADS / 2; width *= 2) {
        sum += __shfl_xor_sync(ALL, sum, width);
    }
    const int other = __shfl_xor_sync(ALL, sum, THREADS / 2);
    const bool upper = threadIdx.x & (THREADS / 2);
    const uint32_t low = uint32_t(upper ? other : sum), high = uint32_t(upper ? sum : other);
    const float d = broken ? from_bits(0x7fc00000u) : small ? 0.0f : __fdiv_rn(amax, 127.0f);
    return {q, d, (low & 0xffffu) | high << 16};
}

/// Where a kernel leaves its results quantised too, if somebody wants them; null otherwise. Twin: `ops::input::Target`.
struct Target {
    int8_t* q;
    float* d;
    uint32_t* sums;

    /// Quantises a warp's 32 consecutive values, of which the lane's is number `at`.
    __device__ void put(float x, size_t at) const {
        if (q == nullptr) {
            return;
        }
        const Quantised block = quantise(x);
        q[at] = int8_t(block.q);
        if (at % 32 == 0) {
            d[at / 32] = block.d;
            sums[at / 32] = block.sums;
        }
    }

    /// The same for a warp whose threads have `N` values each, the thread's from number `at` on. Those beyond the end
    /// are not `there`.
    template <int N>
    __device__ void put_several(const float (&x)[N], size_t at, bool there = true) const {
        static_assert(N == 2 || N == 4, "");
        if (q == nullptr) {
            return;
        }
        const QuantisedSeveral block = quantise_several(x);
        if (there) {
            if constexpr (N == 4) {
                *reinterpret_cast<uint32_t*>(q + at) = block.q;
            } else {
                *reinterpret_cast<uint16_t*>(q + at) = uint16_t(block.q);
            }
            if (at % 32 == 0) {
                d[at / 32] = block.d;
                sums[at / 32] = block.sums;
            }
        }
    }
};

/// Waits for the kernel in front, of which nothing may be read before: an early kernel starts while that one still
/// runs.
__device__ inline void ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the kernel behind start, as soon as there is room for it.
__device__ inline void pass() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace strata
