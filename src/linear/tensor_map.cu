// Tensor maps: the driver function is looked up once.
#include <cudaTypedefs.h>

#include "core/cuda_check.h"
#include "linear/tensor_map.h"

namespace nybble {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) {
      fail(ErrorKind::kUnsupported, "the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer is needed");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return function;
}

}  // namespace

CUtensorMap tensor_map(const TensorBox& b) {
  CUtensorMap map;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encoder()(&map, b.type, static_cast<cuuint32_t>(b.dimensions), const_cast<void*>(b.data), b.extents, b.strides, b.box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fail(ErrorKind::kCuda, "cuTensorMapEncodeTiled gave ", static_cast<int>(status), " for a tensor of ", b.extents[0], " x ", b.extents[1],
         " with rows of ", b.strides[b.dimensions - 2], " bytes at ", b.data, ", expected an address and strides that are multiples of 16");
  }
  return map;
}

}  // namespace nybble
