// Between small_m.cu and the files that instantiate the kernel, one per activation type.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/small_m.h"
#include "linear/tensor_map.h"

namespace nybble::small_m {

struct Launch {
  const LinearPlan& plan;
  const LinearProblem& problem;
  const LinearArgs& args;
  bool overlap;
  cudaStream_t stream;
};

template <typename T>
void launch_direction(const Launch& launch);

}  // namespace nybble::small_m
