// A window on the device: twins of `src/inputs.rs`.
#pragma once

#include <cstdint>

namespace strata {

struct Row {
    uint32_t slot, position;
};

struct Portion {
    uint32_t slot, row, rows, goes_on;
};

}  // namespace strata
