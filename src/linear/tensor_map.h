// Tensor maps for TMA.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

namespace nybble {

// Of activations.
template <typename T>
constexpr CUtensorMapDataType kMapType = __is_same(T, __half) ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// What one copy takes of a tensor; innermost dimension first. strides: bytes, of dimensions 1 and up.
struct TensorBox {
  CUtensorMapDataType type;
  const void* data;
  int dimensions;
  cuuint64_t extents[3];
  cuuint64_t strides[2];
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
};
CUtensorMap tensor_map(const TensorBox& box);

}  // namespace nybble
