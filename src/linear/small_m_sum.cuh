// Adding the partial sums of a tile, and the small kernels around the multiply.
#pragma once

#include "linear/small_m_kernel.cuh"

namespace nybble::small_m {

constexpr int kSumThreads = 128, kPermuteThreads = 128, kZeroThreads = 128;

template <typename T>
__device__ __forceinline__ T rounded(float v) {
  if constexpr (__is_same(T, __half)) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

// Two rows of y (8 apart) of two tokens. v: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1).
template <typename T>
__device__ __forceinline__ void store_y(const Params& p, int row, int token, float4 v) {
  T* to = static_cast<T*>(p.out) + static_cast<size_t>(token) * p.n + row;
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + row;
    const float upper = static_cast<float>(bias[0]), lower = static_cast<float>(bias[8]);
    v.x += upper, v.y += upper, v.z += lower, v.w += lower;
  }
  if (token < p.m) {
    to[0] = rounded<T>(v.x);
    to[8] = rounded<T>(v.z);
  }
  if (token + 1 < p.m) {
    to[p.n] = rounded<T>(v.y);
    to[p.n + 8] = rounded<T>(v.w);
  }
}

// The two columns of a packed byte, two tokens.
template <typename T>
__device__ __forceinline__ void store_grad(const Params& p, int column, int token, const float4& v) {
  uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + static_cast<size_t>(token) * p.k + column);
  if (token < p.m) to[0] = pack_pair<T>(v.x, v.z);
  if (token + 1 < p.m) to[p.k >> 1] = pack_pair<T>(v.y, v.w);
}

// Sixteen rows of a tile (part of 16: what one warp summed), token groups [first, first + COUNT), in ascending order of the CTAs.
template <typename T, typename L, int COUNT>
__device__ __forceinline__ void sum_part(const Params& p, int tile, int part, int first, int lane) {
  const int begin = first_cta(p.work, tile), end = last_cta(p.work, tile), groups = (p.m + 7) >> 3;
  constexpr uint32_t kSlot = kConsumerWarps * L::GROUPS * 32;  // float4
  const float4* from = reinterpret_cast<const float4*>(p.partials) + static_cast<size_t>(slot_of_piece(begin, tile)) * kSlot +
                       (part * L::GROUPS + first) * 32 + lane;
  [[maybe_unused]] const float4* const first_piece = from;
  if (NYBBLE_FAULT(kArrivalOrder)) from += NYBBLE_ANY_OF(end - begin + 1) * kSlot;
  float4 sum[COUNT];
#pragma unroll
  for (int e = 0; e < COUNT; e++) {
    if (first + e < groups) sum[e] = __ldcg(from + e * 32);
  }
#pragma unroll 4
  for (int cta = begin + 1; cta <= end; cta++) {
    from += kSlot;
    if (NYBBLE_FAULT(kArrivalOrder) && from - first_piece > (end - begin) * static_cast<int>(kSlot)) from -= (end - begin + 1) * kSlot;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
      if (first + e >= groups) continue;
      const float4 v = __ldcg(from + e * 32);
      sum[e].x += v.x, sum[e].y += v.y, sum[e].z += v.z, sum[e].w += v.w;
    }
  }
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int e = 0; e < COUNT; e++) {
    if (first + e >= groups) continue;
    const int token = (first + e) * 8 + 2 * t;
    if constexpr (L::FORWARD) {
      store_y<T>(p, tile * kUnit + part * 16 + g, token, sum[e]);
    } else {
      store_grad<T>(p, tile * kUnit + (part / L::TOGETHER * 8 * L::TOGETHER + g * L::TOGETHER + part % L::TOGETHER) * 2, token, sum[e]);
    }
  }
}

// By all consumers of a CTA once its pieces are stored: sums the tiles whose last piece that was.
template <typename T, typename L>
__device__ __forceinline__ void sum_finished_tiles(const Params& p, const Smem<L>& s, int first, int end, int thread) {
  __threadfence();
  named_barrier(kConsumerBarrier, kConsumers);
  const int first_tile = first / p.work.units, tiles = (end - 1) / p.work.units - first_tile + 1;
  const uint32_t elected = s.code_values();  // no longer needed
  if (thread < tiles) {                      // plan: at most 32
    const int others = last_cta(p.work, first_tile + thread) - first_cta(p.work, first_tile + thread);
    store_shared_u32(elected + thread * 4, atomicAdd(p.counters + first_tile + thread, 1) == others);
    __threadfence();
  }
  named_barrier(kConsumerBarrier, kConsumers);
  constexpr int kAtOnce = L::GROUPS < 4 ? L::GROUPS : 4;
  for (int i = 0; i < tiles; i++) {
    if (!load_shared_u32(elected + i * 4)) continue;
    for (int group = 0; group < (p.m + 7) >> 3; group += kAtOnce)
      sum_part<T, L, kAtOnce>(p, first_tile + i, thread >> 5, group, thread & 31);
  }
}

// Behind the multiply. A warp adds one part of a tile for one token group.
template <typename T, typename L>
__global__ void __launch_bounds__(kSumThreads, 16) sum_partials(const __grid_constant__ Params p) {
  allow_next_grid();
  const int groups = (p.m + 7) >> 3, warp = (static_cast<int>(blockIdx.x) * kSumThreads + static_cast<int>(threadIdx.x)) >> 5;
  const int part = warp / groups;
  wait_for_previous_grids();
  if (part >= p.work.tiles * kConsumerWarps) return;
  sum_part<T, L, 1>(p, part / kConsumerWarps, part % kConsumerWarps, warp - part * groups, static_cast<int>(threadIdx.x & 31));
}

// Waits before it lets the multiply start: that may rely on all earlier grids being complete.
static __global__ void __launch_bounds__(kZeroThreads) zero_counters(int* counters, int count) {
  wait_for_previous_grids();  // they may use the workspace
  allow_next_grid();
  if (NYBBLE_FAULT(kFlagNotReset)) return;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kZeroThreads) counters[i] = 0;
}

// x -> [m][k] in the order in which the k16 steps of ForwardConsumer take it: within 256, step j takes 2-element words h of blocks t,
// word 8 j + 4 h + t <- elements 64 t + 4 j + 2 h, + 1.
static __global__ void __launch_bounds__(kPermuteThreads)
    permute_rows(const uint4* x, int64_t row_vectors, int vectors, uint32_t* out, int count) {
  allow_next_grid();
  wait_for_previous_grids();
  for (int i = static_cast<int>(blockIdx.x * kPermuteThreads + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * kPermuteThreads) {
    const int row = i / vectors;
    const uint4 v = x[row * row_vectors + (i - row * vectors)];
    const int in_group = i & 31, block = in_group >> 3, step = (in_group & 7) * 2;
    uint32_t* to = out + (i >> 5) * 128 + step * 8 + block;
    to[0] = v.x;
    to[4] = v.y;
    to[8] = v.z;
    to[12] = v.w;
  }
}

}  // namespace nybble::small_m
