// The scale of a block from bitsandbytes' nested form, bit-identical with dequantize_4bit.
#pragma once

#include "device/ptx.cuh"
#include "nybble/format.h"

namespace nybble::device {

__device__ __forceinline__ float round_through(float value, DType dtype) {
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(value));
  if (dtype == DType::kFloat16) return __half2float(__float2half_rn(value));
  return value;
}

// Two roundings, each also through the nested dtype when that is 16-bit. code_value: the entry of nested_code; offset: rounded through
// dtype.
__device__ __forceinline__ float nested_scale(float code_value, float nested_absmax, float offset, DType dtype) {
  const float product = multiply_flushed(code_value, nested_absmax);
  if (dtype == DType::kFloat32) return __fadd_rn(product, offset);
  return round_through(__fadd_rn(round_through(product, dtype), offset), dtype);
}

}  // namespace nybble::device
