// Adding the partial sums of a tile, and the small kernels around the multiply.
#pragma once

#include "linear/piece_sum.cuh"
#include "linear/small_m_kernel.cuh"

namespace nybble::small_m {

constexpr int kPermuteThreads = 128;

// Loads of partial sums under way at once, and threads of a block: 4096 registers a block either way, what is left beside the multiply.
constexpr int kManyPieces = 8, kFewPieces = 1;
constexpr int sum_threads(int at_once) { return at_once == kManyPieces ? 64 : 128; }

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

// What a warp adds: sixteen rows of a tile (part of 16: what one warp of the multiply summed), one token group, in ascending order of the
// CTAs.
template <typename T, typename L, int AT_ONCE>
struct PartSum {
  static constexpr uint32_t kSlot = kConsumerWarps * L::GROUPS * 32;  // float4
  int tile, part, pieces;
  const float4* from;

  __device__ __forceinline__ PartSum(const Params& p, int index, int group, int lane)
      : tile(index / kConsumerWarps), part(index % kConsumerWarps) {
    const int begin = first_cta(p.work, tile);
    pieces = last_cta(p.work, tile) - begin + 1;
    from = reinterpret_cast<const float4*>(p.partials) + static_cast<size_t>(slot_of_piece(begin, tile)) * kSlot +
           (part * L::GROUPS + group) * 32 + lane;
  }
  __device__ __forceinline__ void store(const Params& p, int group, int lane) const {
    const int start = NYBBLE_ANY_OF(pieces);
    const auto piece = [&](int i) { return from + (NYBBLE_FAULT(kArrivalOrder) ? (start + i) % pieces : i) * kSlot; };
    const float4 sum = sum_pieces<AT_ONCE>(pieces, piece);
    const int g = lane >> 2, token = group * 8 + 2 * (lane & 3);
    if constexpr (L::FORWARD) {
      store_y<T>(p, tile * kUnit + part * 16 + g, token, sum);
    } else {
      store_grad<T>(p, tile * kUnit + (part / L::TOGETHER * 8 * L::TOGETHER + g * L::TOGETHER + part % L::TOGETHER) * 2, token, sum);
    }
  }
};

// Behind the multiply; blockIdx.y: token group. Addresses are made while the multiply runs.
template <typename T, typename L, int AT_ONCE>
__global__ void __launch_bounds__(sum_threads(AT_ONCE), 16) sum_partials(const __grid_constant__ Params p) {
  allow_next_grid();
  constexpr int kWarps = sum_threads(AT_ONCE) / 32;
  const int lane = static_cast<int>(threadIdx.x & 31), group = static_cast<int>(blockIdx.y);
  const int count = p.work.tiles * kConsumerWarps, step = static_cast<int>(gridDim.x) * kWarps;
  int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
  PartSum<T, L, AT_ONCE> sum(p, min(index, count - 1), group, lane);
  wait_for_previous_grids();
  while (index < count) {
    sum.store(p, group, lane);
    index += step;
    if (index < count) sum = PartSum<T, L, AT_ONCE>(p, index, group, lane);
  }
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
