// Which Highway targets the CPU multiply is compiled for: included before highway.h.
#pragma once

// SSSE3 and AVX3_DL cost compile time and bring no speed; SVE's types cannot be held in arrays (such CPUs run the NEON code). With
// sanitizers, whose compile times are a hundredfold, one vector target is left.
#define NYBBLE_UNUSED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#if defined(__SANITIZE_ADDRESS__)
#  define HWY_DISABLED_TARGETS (NYBBLE_UNUSED_TARGETS | HWY_AVX3 | HWY_SSE4)
#else
#  define HWY_DISABLED_TARGETS NYBBLE_UNUSED_TARGETS
#endif

// Before a loop of few, constant steps over an array of vectors: the array then lives in registers.
#if defined(__clang__)
#  define NYBBLE_UNROLL _Pragma("clang loop unroll(full)")
#else
#  define NYBBLE_UNROLL _Pragma("GCC unroll 16")
#endif
