// Instantiates the row kernels for one element type.
#pragma once

#include "core/cuda_check.h"
#include "linear/kernel_shared_memory.h"
#include "linear/row.cuh"
#include "linear/row.h"

namespace nybble::row {

template <typename T, int TOKENS>
void launch_tokens(Direction direction, const Params& params, int grid, int64_t shared_bytes, cudaStream_t stream) {
  static SharedMemoryAllowance allowance[2];
  const bool forward = direction == Direction::kForward;
  const auto kernel = forward ? row_forward<T, TOKENS> : row_grad<T, TOKENS>;
  allowance[forward ? 0 : 1].allow(reinterpret_cast<const void*>(kernel), kSharedLimit);
  kernel<<<grid, threads(TOKENS), shared_bytes, stream>>>(params);
  check_launch();
  if (!params.partials) return;
  const int columns = forward ? params.n : params.k;
  const int64_t total = static_cast<int64_t>(params.m) * columns;
  row_sum<T><<<static_cast<unsigned>((total + 255) / 256), 256, 0, stream>>>(params, columns);
  check_launch();
}

template <typename T>
void launch_typed(Direction direction, int tokens, const Params& params, int grid, int64_t shared_bytes, cudaStream_t stream) {
  switch (tokens) {
    case 1:
      return launch_tokens<T, 1>(direction, params, grid, shared_bytes, stream);
    case 2:
      return launch_tokens<T, 2>(direction, params, grid, shared_bytes, stream);
    case 4:
      return launch_tokens<T, 4>(direction, params, grid, shared_bytes, stream);
    case 8:
      return launch_tokens<T, 8>(direction, params, grid, shared_bytes, stream);
  }
  fail(ErrorKind::kValue, "row variant ", tokens, ", expected 1, 2, 4 or 8");
}

}  // namespace nybble::row
