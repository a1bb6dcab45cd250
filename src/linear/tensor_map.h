// Tensor maps for TMA.
#pragma once

#include <cuda.h>

namespace nybble {

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
