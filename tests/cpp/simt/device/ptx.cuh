// The CPU's twin of src/device/ptx.cuh.
#pragma once

#include "simt/simt.h"

namespace nybble::device {

inline uint32_t smem_address(const void* pointer) { return simt::shared_offset(pointer); }

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;  // replicates the sign
    result |= byte << (8 * i);
  }
  return result;
}

inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }

inline float flushed(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.f, v) : v; }
inline float multiply_flushed(float a, float b) { return flushed(flushed(a) * flushed(b)); }

template <typename T>
uint32_t pack_pair(float low, float high) {
  return static_cast<uint32_t>(T(high).bits) << 16 | T(low).bits;
}

template <typename V>
V load_shared(uint32_t address) {
  V v;
  std::memcpy(&v, simt::at_shared(address, sizeof(V), sizeof(V)), sizeof(V));
  return v;
}
inline uint32_t load_shared_u32(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint32_t load_shared_u8(uint32_t address) { return load_shared<uint8_t>(address); }
inline float load_shared_f32(uint32_t address) { return load_shared<float>(address); }
inline uint2 load_shared_u64(uint32_t address) { return load_shared<uint2>(address); }
template <int OFFSET>
uint2 load_shared_u64_at(uint32_t address) {
  return load_shared<uint2>(address + OFFSET);
}
inline uint4 load_shared_u128(uint32_t address) { return load_shared<uint4>(address); }
inline void store_shared_u64(uint32_t address, uint32_t x, uint32_t y) {
  const uint2 v{x, y};
  std::memcpy(simt::at_shared(address, 8, 8), &v, 8);
}
inline void store_shared_u128(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint4 v{x, y, z, w};
  std::memcpy(simt::at_shared(address, 16, 16), &v, 16);
}

template <typename V>
V kept(V value) {
  return value;
}

inline void store_release(int* flag, int value) {
  simt::check_access(flag, 4, true);
  *flag = value;
}
// CTAs run one after another, so a flag that is not set yet never will be.
inline int load_acquire(const int* flag) {
  simt::check_access(flag, 4, false);
  if (*flag == 0) simt::fail("a CTA waits for one that runs after it");
  return *flag;
}

}  // namespace nybble::device
