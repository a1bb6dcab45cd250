// Turns a refused CUDA call into nybble::Error(kCuda).
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include "nybble/error.h"

namespace nybble {

inline void check(cudaError_t status, const std::source_location& where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a refused launch is not left behind for the next caller to find
  const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::kOutOfMemory : ErrorKind::kCuda;
  fail(kind, cudaGetErrorName(status), ": ", cudaGetErrorString(status), " (", where.function_name(), ")");
}

// After <<<>>>: a refused launch becomes an error where it was made.
inline void check_launch(const std::source_location& where = std::source_location::current()) { check(cudaGetLastError(), where); }

}  // namespace nybble
