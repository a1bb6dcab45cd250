#include "linear/portable_launch.cuh"

namespace nybble::portable {

void launch_fp16(Direction direction, int variant, const Params& params, int grid, cudaStream_t stream) {
  launch_typed<__half>(direction, variant, params, grid, stream);
}

}  // namespace nybble::portable
