// cp.async: global to shared memory without registers (sm_80 and later). Sources of 16-byte copies are 16-byte aligned.
#pragma once

#include <cstdint>

#include "device/fault.h"
#include "device/ptx.cuh"

namespace nybble::device {

// 16 bytes, if index < count. The test is a predicate inside the instruction: no branch enters the caller's stream of mma.
__device__ __forceinline__ void copy_async_if(uint32_t destination, const void* source, int index, int count) {
  asm volatile("{.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(destination),
               "l"(source), "r"(index), "r"(count)
               : "memory");
}

// The same, `bytes` from the source and zeros for the rest.
__device__ __forceinline__ void copy_async_fill_if(uint32_t destination, const void* source, uint32_t bytes, int index, int count) {
  asm volatile("{.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %4;}" ::"r"(destination),
               "l"(source), "r"(index), "r"(count), "r"(bytes)
               : "memory");
}

// 16 or 4 bytes, of which `bytes` from the source and zeros for the rest.
__device__ __forceinline__ void copy_async_fill_16b(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_fill_4b(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  if (!NYBBLE_FAULT(kCopyNotAwaited)) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace nybble::device
