// fp32 instructions whose rounding and flushing are part of the format. As PTX, so that no compiler flag changes a bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/ptx.cuh"
#include "nybble/format.h"

namespace nybble::format {

__device__ __forceinline__ float add(float a, float b) {
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float add_flushed(float a, float b) {
  float result;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
// MUFU: within one ulp of 1/x; subnormal x gives infinity, a subnormal result zero.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// max(largest, |x|) with subnormals flushed; NaN never wins.
__device__ __forceinline__ float max_magnitude(float largest, float x) {
  float result;
  asm("{.reg .f32 m;\nabs.ftz.f32 m, %2;\nmax.ftz.f32 %0, %1, m;}" : "=f"(result) : "f"(largest), "f"(x));
  return result;
}
__device__ __forceinline__ float flush(float x) { return device::multiply_flushed(x, 1.0f); }

// As device::pack_pair, on cards below compute capability 8.0 too, which have no instruction for it.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  const auto bits = [](float x) -> uint32_t {
    if constexpr (__is_same(T, __half))
      return __half_as_ushort(__float2half_rn(x));
    else
      return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  };
  return bits(high) << 16 | bits(low);
#else
  return device::pack_pair<T>(low, high);
#endif
}

// x rounded to the dtype in which bitsandbytes keeps de-nested scales.
__device__ __forceinline__ float round_to(DType dtype, float x) {
  if (dtype == DType::kFloat16) return __half2float(__float2half_rn(x));
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(x));
  return x;
}

}  // namespace nybble::format
