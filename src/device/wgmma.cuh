// wgmma of one warpgroup, sm_90a: D[64][TOKENS] += A[64][16] * B[TOKENS][16]^T, fp32 accumulators, both operands 16-bit in shared memory
// with 128-byte swizzle.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptor of a tile whose rows are 128 bytes, swizzled in atoms of 8 rows (1024 bytes, the stride between atoms). K-major and
// MN-major tiles differ in nothing else while they are one atom wide.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// "%10,%11,...,%19," for tens = 1, and ten operands from d[first] on.
#define NYBBLE_NAMES_10(tens) \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens "8,%" #tens "9,"
#define NYBBLE_REGS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NYBBLE_REGS_32(i) NYBBLE_REGS_8(i), NYBBLE_REGS_8(i + 8), NYBBLE_REGS_8(i + 16), NYBBLE_REGS_8(i + 24)

#define NYBBLE_NAMES_32 NYBBLE_NAMES_10() NYBBLE_NAMES_10(1) NYBBLE_NAMES_10(2) "%30,%31"
#define NYBBLE_NAMES_64 \
  NYBBLE_NAMES_10() NYBBLE_NAMES_10(1) NYBBLE_NAMES_10(2) NYBBLE_NAMES_10(3) NYBBLE_NAMES_10(4) NYBBLE_NAMES_10(5) "%60,%61,%62,%63"
// A continued macro of macros does not come to rest under clang-format 14.
// clang-format off
#define NYBBLE_NAMES_128 \
  NYBBLE_NAMES_10() NYBBLE_NAMES_10(1) NYBBLE_NAMES_10(2) NYBBLE_NAMES_10(3) NYBBLE_NAMES_10(4) NYBBLE_NAMES_10(5) \
  NYBBLE_NAMES_10(6) NYBBLE_NAMES_10(7) NYBBLE_NAMES_10(8) NYBBLE_NAMES_10(9) NYBBLE_NAMES_10(10) NYBBLE_NAMES_10(11) \
  "%120,%121,%122,%123,%124,%125,%126,%127"
// clang-format on

// names: the accumulators; a, b, keep, trans: the names of the operands behind them. keep = 0 overwrites D.
#define NYBBLE_WGMMA(shape, type, names, a, b, keep, trans, ...)                                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names \
               "}, " a ", " b ", p, 1, 1, " trans ", 0;\n}\n"                                                                        \
               : __VA_ARGS__                                                                                                         \
               : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate), "n"(TRANSPOSE_A))

// T: __nv_bfloat16 or __half. TRANSPOSE_A: 0 when k runs along a row of A (K-major), 1 when m does. accumulate 0: D = A B^T.
template <typename T, int TRANSPOSE_A>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t descriptor_a, uint64_t descriptor_b, int accumulate) {
  if constexpr (__is_same(T, __half)) {
    NYBBLE_WGMMA("m64n256k16", "f16", NYBBLE_NAMES_128, "%128", "%129", "%130", "%131", NYBBLE_REGS_32(0), NYBBLE_REGS_32(32),
                 NYBBLE_REGS_32(64), NYBBLE_REGS_32(96));
  } else {
    NYBBLE_WGMMA("m64n256k16", "bf16", NYBBLE_NAMES_128, "%128", "%129", "%130", "%131", NYBBLE_REGS_32(0), NYBBLE_REGS_32(32),
                 NYBBLE_REGS_32(64), NYBBLE_REGS_32(96));
  }
}
template <typename T, int TRANSPOSE_A>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t descriptor_a, uint64_t descriptor_b, int accumulate) {
  if constexpr (__is_same(T, __half)) {
    NYBBLE_WGMMA("m64n128k16", "f16", NYBBLE_NAMES_64, "%64", "%65", "%66", "%67", NYBBLE_REGS_32(0), NYBBLE_REGS_32(32));
  } else {
    NYBBLE_WGMMA("m64n128k16", "bf16", NYBBLE_NAMES_64, "%64", "%65", "%66", "%67", NYBBLE_REGS_32(0), NYBBLE_REGS_32(32));
  }
}
template <typename T, int TRANSPOSE_A>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t descriptor_a, uint64_t descriptor_b, int accumulate) {
  if constexpr (__is_same(T, __half)) {
    NYBBLE_WGMMA("m64n64k16", "f16", NYBBLE_NAMES_32, "%32", "%33", "%34", "%35", NYBBLE_REGS_32(0));
  } else {
    NYBBLE_WGMMA("m64n64k16", "bf16", NYBBLE_NAMES_32, "%32", "%33", "%34", "%35", NYBBLE_REGS_32(0));
  }
}

#undef NYBBLE_WGMMA
#undef NYBBLE_NAMES_128
#undef NYBBLE_NAMES_64
#undef NYBBLE_NAMES_32
#undef NYBBLE_REGS_32
#undef NYBBLE_REGS_8
#undef NYBBLE_NAMES_10

}  // namespace nybble::device
