// Loads and stores at any address: a view of a weight may start at an odd byte. An aligned address costs one test more than a plain access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/global.cuh"
#include "nybble/format.h"

namespace nybble::format {

__device__ __forceinline__ bool is_aligned(const void* pointer, uint32_t bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) & (bytes - 1)) == 0;
}

// Little-endian word of 2 or 4 bytes.
template <int BYTES>
__device__ __forceinline__ uint32_t load_bytes(const void* pointer) {
  uint32_t value = 0;
#pragma unroll
  for (int i = 0; i < BYTES; i++) value |= device::load_global_u8(static_cast<const uint8_t*>(pointer) + i) << (8 * i);
  return value;
}

__device__ __forceinline__ float load_f32(const float* base, int64_t index) {
  const float* pointer = base + index;
  return is_aligned(pointer, 4) ? device::load_global_f32(pointer) : __uint_as_float(load_bytes<4>(pointer));
}

__device__ __forceinline__ uint32_t load_u16(const void* pointer) {
  return is_aligned(pointer, 2) ? device::load_global_u16(pointer) : load_bytes<2>(pointer);
}

// Low BYTES bytes of value, one by one.
template <int BYTES>
__device__ __forceinline__ void store_bytes(void* pointer, uint32_t value) {
#pragma unroll
  for (int i = 0; i < BYTES; i++) static_cast<uint8_t*>(pointer)[i] = static_cast<uint8_t>(value >> (8 * i));
}

__device__ __forceinline__ void store_u32(void* pointer, uint32_t value) {
  if (is_aligned(pointer, 4)) {
    *static_cast<uint32_t*>(pointer) = value;
  } else {
    store_bytes<4>(pointer, value);
  }
}

__device__ __forceinline__ void store_u16(void* pointer, uint32_t value) {
  if (is_aligned(pointer, 2)) {
    *static_cast<uint16_t*>(pointer) = static_cast<uint16_t>(value);
  } else {
    store_bytes<2>(pointer, value);
  }
}

__device__ __forceinline__ void store_f32(float* base, int64_t index, float value) { store_u32(base + index, __float_as_uint(value)); }

}  // namespace nybble::format
