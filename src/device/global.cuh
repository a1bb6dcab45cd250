// Loads of global memory that nobody writes during the launch, and two ways to steer the compiler's registers.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"

namespace nybble::device {

__device__ __forceinline__ uint4 load_global_u128(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}
// Into v when `wanted`, by a predicate inside the instruction: behind a branch the loads would be waited for where it joins.
__device__ __forceinline__ void load_global_u128_if(bool wanted, const void* pointer, uint4& v) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(pointer), "r"(static_cast<uint32_t>(wanted)));
}
__device__ __forceinline__ void load_global_f32_if(bool wanted, const void* pointer, float& v) {
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.nc.f32 %0, [%1];}"
               : "+f"(v)
               : "l"(pointer), "r"(static_cast<uint32_t>(wanted)));
}
__device__ __forceinline__ uint2 load_global_u64(const void* pointer) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
  return v;
}
__device__ __forceinline__ uint32_t load_global_u32(const void* pointer) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}
// A hint: the line of `pointer` will be wanted.
__device__ __forceinline__ void prefetch_l1(const void* pointer) { asm volatile("prefetch.global.L1 [%0];" ::"l"(pointer)); }
__device__ __forceinline__ uint32_t load_global_u8(const void* pointer) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}
__device__ __forceinline__ uint32_t load_global_u16(const void* pointer) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(pointer));
  return v;
}
__device__ __forceinline__ float load_global_f32(const void* pointer) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(pointer));
  return v;
}

// The word at `pointer` where `valid`, else 0: a predicate, not a branch, so that several loads stay in flight.
__device__ __forceinline__ uint32_t load_global_u32_if(const void* pointer, bool valid) {
  uint32_t v;
  asm volatile("{.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];}"
               : "=r"(v)
               : "l"(pointer), "r"(static_cast<int>(valid)));
  return v;
}

// threadIdx.x, read again: nothing derived from it stays live across a main loop.
__device__ __forceinline__ int reread_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Hides where a pointer comes from, so that it keeps a register of its own instead of being derived again and again.
__device__ __forceinline__ void pin(const char*& pointer) { asm volatile("" : "+l"(pointer)); }

// pointer += BYTES at this place in the instruction stream and nowhere else.
template <int BYTES>
__device__ __forceinline__ void advance(const char*& pointer) {
  asm volatile("add.s64 %0, %0, %1;" : "+l"(pointer) : "n"(BYTES));
}

}  // namespace nybble::device
