// The CPU's twin of src/device/async.cuh, as far as kernels without TMA need it: CTAs run one after another, launches too.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

inline void wait_for_previous_grids() {}
inline void allow_next_grid() {}

}  // namespace nybble::device
