// The scale of a block as dequantize_4bit has it, and what may run before the Hopper kernel: all scales as fp32 [k / block][n].
#pragma once

#include "device/async.cuh"
#include "device/scales.cuh"
#include "nybble/format.h"

namespace nybble::hopper {

constexpr int kScaleRows = 32;    // of W, a CTA
constexpr int kScaleBlocks = 64;  // along k, a CTA
constexpr int kScaleThreads = 256;

struct ScaleExpansion {
  Scales scales;  // device pointers
  int n, blocks;  // rows of W, blocks of a row
  float* out;     // [blocks][n]
};

// offset: rounded through the nested dtype.
__device__ __forceinline__ float scale_of(const Scales& s, int64_t block, float offset) {
  if (!s.nested()) return s.absmax[block];
  return device::nested_scale(s.nested_code[s.absmax_codes[block]], s.nested_absmax[block / kNestedBlockSize], offset, s.nested_dtype);
}

// Launched without overlap: the multiply before may still read the same workspace. Its own dependent waits before it uses `out`.
// Grid: (n / kScaleRows, blocks / kScaleBlocks), rounded up. Reads rows of W along k, writes along n, transposing in shared memory.
static __global__ void __launch_bounds__(kScaleThreads) expand_scales(const ScaleExpansion e) {
  constexpr int kWarps = kScaleThreads / 32;
  __shared__ float tile[kScaleBlocks][kScaleRows + 1];
  device::allow_next_grid();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int row0 = static_cast<int>(blockIdx.x) * kScaleRows, block0 = static_cast<int>(blockIdx.y) * kScaleBlocks;
  const float offset = e.scales.nested() ? device::round_through(*e.scales.offset, e.scales.nested_dtype) : 0.0f;
#pragma unroll
  for (int i = 0; i < kScaleRows * kScaleBlocks / kScaleThreads; i++) {
    const int row = i / 2 * kWarps + warp, block = i % 2 * 32 + lane;
    if (row0 + row < e.n && block0 + block < e.blocks) {
      tile[block][row] = scale_of(e.scales, static_cast<int64_t>(row0 + row) * e.blocks + block0 + block, offset);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kScaleBlocks / kWarps; i++) {
    const int block = i * kWarps + warp;
    if (row0 + lane < e.n && block0 + block < e.blocks) e.out[static_cast<int64_t>(block0 + block) * e.n + row0 + lane] = tile[block][lane];
  }
}

}  // namespace nybble::hopper
