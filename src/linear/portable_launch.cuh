// Instantiates the portable kernel for one element type: one source file a type, so that they compile side by side.
#pragma once

#include "core/cuda_check.h"
#include "linear/kernel_shared_memory.h"
#include "linear/portable.h"
#include "linear/portable_general.cuh"

namespace nybble::portable {

template <class C, template <class> class X = Activations, template <class> class W = PackedWeights>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static SharedMemoryAllowance allowance;
  const auto kernel = portable_kernel<C, X, W>;
  // Beside 28 KiB of L1 the packed bytes and codes of 128 rows of W push each other out: with slowed tensor cores and k = 14336 2% more
  // time (benchmarks/records/h200-portable.md), and a third more with 16 tokens.
  allowance.allow(reinterpret_cast<const void*>(kernel), C::kSharedBytes, C::kCtasPerSm);
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(params);
  check_launch();
}

template <Direction DIRECTION, typename T>
void launch_variant(int variant, const Params& params, int grid, cudaStream_t stream) {
  switch (variant) {
    case kPortable256x128:
      return launch<Traits<DIRECTION, T, 256, 128, 64, 64, 1>>(params, grid, stream);
    case kPortable128x128:
      return launch<Traits<DIRECTION, T, 128, 128, 64, 32, 1>>(params, grid, stream);
    case kPortable64x128:
      return launch<Traits<DIRECTION, T, 64, 128, 32, 32, 2>>(params, grid, stream);
    case kPortable16x128:
      return launch<Traits<DIRECTION, T, 16, 128, 16, 32, 4>>(params, grid, stream);
  }
  if (variant == kPortableGeneral) {
    return launch<Traits<DIRECTION, T, 128, 128, 64, 32, 1>, GeneralActivations, GeneralWeights>(params, grid, stream);
  }
  fail(ErrorKind::kValue, "portable variant ", variant, ", expected 0 to 4");
}

template <typename T>
void launch_typed(Direction direction, int variant, const Params& params, int grid, cudaStream_t stream) {
  if (direction == Direction::kForward) return launch_variant<Direction::kForward, T>(variant, params, grid, stream);
  launch_variant<Direction::kGradInput, T>(variant, params, grid, stream);
}

}  // namespace nybble::portable
