// The launch of a kernel that may be set up while the kernel before it runs (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "core/cuda_check.h"

namespace nybble {

struct LaunchShape {
  unsigned blocks_x, blocks_y;
  int threads;
  uint32_t shared_bytes;  // dynamic
};

// overlap: blocks may start once all blocks of the kernel before allow it or have ended; they wait for its results with
// wait_for_previous_grids().
template <typename... Parameters, typename... Arguments>
void launch_overlapping(bool overlap, cudaStream_t stream, const LaunchShape& shape, void (*kernel)(Parameters...),
                        Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks_x, shape.blocks_y);
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace nybble
