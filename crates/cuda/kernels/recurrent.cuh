// Recurrent state in two versions, and causal convolutions over a history that is part of it: what GDN and the n-gram
// block share.
#pragma once

#include "window.cuh"

namespace strata {

/// Where a layer keeps its recurrent state. Twins: `src/ops/recurrent.rs`.
struct Recurrent {
    /// `[sequences][version][floats]`
    float* data;
    /// `[sequences]`: the committed versions.
    const uint32_t* committed;
    uint64_t floats;

    /// The version that a portion starts from, and the one that it writes.
    __device__ const float* from(const Portion& portion) const {
        return version(portion.slot, committed[portion.slot] ^ portion.goes_on);
    }
    __device__ float* to(const Portion& portion) const { return version(portion.slot, committed[portion.slot] ^ 1); }

   private:
    __device__ float* version(uint32_t slot, uint32_t which) const {
        return data + (uint64_t(slot) * 2 + which) * floats;
    }
};

/// The rows that a causal depthwise convolution looks back at.
struct ConvParams {
    Recurrent state;
    const Portion* portions;
    /// `[rows][channels]`
    const float* rows;
    /// `[channels][kernel]`
    const float* taps;
    float* out;
    /// Where the history starts in a version.
    uint64_t history;
    uint32_t channels, kernel, dilation;
};

}  // namespace strata
