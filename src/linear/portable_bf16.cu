#include "linear/portable_launch.cuh"

namespace nybble::portable {

void launch_bf16(Direction direction, int variant, const Params& params, int grid, cudaStream_t stream) {
  launch_typed<__nv_bfloat16>(direction, variant, params, grid, stream);
}

}  // namespace nybble::portable
