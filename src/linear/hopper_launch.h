// Between hopper.cu and the files that instantiate the kernel, one per activation type.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "linear/hopper.h"

namespace nybble::hopper {

// A row-major matrix and the box that one copy takes of it.
struct Matrix {
  CUtensorMapDataType type;
  const void* data;
  int64_t columns, rows, row_bytes;
  int box_columns, box_rows;
  CUtensorMapSwizzle swizzle;
};

CUtensorMap tensor_map(const Matrix& matrix);

// Never twice the same in a process, never 0; starts at a random value, so that memory that other programs left holds none to come.
uint64_t next_nonce();

// One launch of the multiply: tokens [first, first + count).
struct Launch {
  const LinearPlan& plan;
  const LinearProblem& problem;
  const LinearArgs& args;
  int64_t first, count;
  bool overlap;
  cudaStream_t stream;
};

template <typename T>
void launch_direction(const Launch& launch);
template <Direction DIRECTION, typename T>
void launch_rows(const Launch& launch);

}  // namespace nybble::hopper
