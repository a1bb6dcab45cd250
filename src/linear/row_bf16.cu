#include "linear/row_launch.cuh"

namespace nybble::row {

void launch_bf16(Direction direction, int tokens, const Params& params, int grid, int64_t shared_bytes, cudaStream_t stream) {
  launch_typed<__nv_bfloat16>(direction, tokens, params, grid, shared_bytes, stream);
}

}  // namespace nybble::row
