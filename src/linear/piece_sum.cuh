// The sum of partial sums in their order, with as many loads under way as registers allow: one after the other each costs the latency of
// memory.
#pragma once

#include "device/ptx.cuh"

namespace nybble::small_m {

// piece(i): address of the i-th of `pieces`, as other CTAs have written it; beyond the last one it is loaded again. Behind predicates, or
// where launch bounds ask for few registers, the compiler puts an addition between any two loads.
template <int AT_ONCE, typename Piece>
__device__ __forceinline__ float4 sum_pieces(int pieces, const Piece& piece) {
  float4 sum{0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < pieces; first += AT_ONCE) {
    float4 next[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) next[i] = __ldcg(piece(min(first + i, pieces - 1)));
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i < pieces) sum.x += next[i].x, sum.y += next[i].y, sum.z += next[i].z, sum.w += next[i].w;
    }
  }
  return sum;
}

}  // namespace nybble::small_m
