// The CPU's twin of src/device/global.cuh.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

template <typename V>
V load_global(const void* pointer) {
  simt::check_access(pointer, sizeof(V), false);
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(V)) simt::fail("a misaligned load of global memory");
  V v;
  std::memcpy(&v, pointer, sizeof(V));
  return v;
}
inline uint4 load_global_u128(const void* pointer) { return load_global<uint4>(pointer); }
inline uint2 load_global_u64(const void* pointer) { return load_global<uint2>(pointer); }
inline uint32_t load_global_u32(const void* pointer) { return load_global<uint32_t>(pointer); }
inline uint32_t load_global_u8(const void* pointer) { return load_global<uint8_t>(pointer); }
inline uint32_t load_global_u16(const void* pointer) { return load_global<uint16_t>(pointer); }
inline float load_global_f32(const void* pointer) { return load_global<float>(pointer); }
inline uint32_t load_global_u32_if(const void* pointer, bool valid) { return valid ? load_global<uint32_t>(pointer) : 0; }
inline int reread_thread_index() { return static_cast<int>(threadIdx.x); }
inline void pin(const char*&) {}
template <int BYTES>
void advance(const char*& pointer) {
  pointer += BYTES;
}

}  // namespace nybble::device
