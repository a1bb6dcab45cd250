// Which part of which output tile a CTA of the portable kernel computes next, and how the pieces of a cut reduction are put together.
//
// Tiles [0, split_tiles) are laid end to end along their stages and dealt out in equal runs, one a CTA (stream-K); the rest are whole, tile
// split_tiles + rank, + grid, ... A CTA's run is   [tail of a tile] [whole tiles] [head of a tile]:   it stores the tail's partial sums
// first, and adds the partials of the CTAs that follow to its head last, in ascending order. The order of every sum is thus fixed by the
// grid.
#pragma once

#include <cstdint>

#include "device/fault.h"
#include "device/ptx.cuh"
#include "linear/portable_params.h"

namespace nybble::portable {

// Stages [begin, end) of the output tile (token_tile, column_tile). begin < 0: no more work.
struct Segment {
  int token_tile, column_tile, begin, end, tile;
};

// Lives in shared memory and is advanced by thread 0: in registers it would cost the main loop 15 of them.
struct Schedule {
  int run, run_end;  // stream-K stages of this CTA that are still to do
  int whole;         // next whole tile
  float offset;      // of the nested scales; -0 when they are plain
  Segment segments[2];
};

// Ranks run against blockIdx: a CTA waits for higher ranks only, and those were launched before it, so a grid need not be resident at once.
__device__ __forceinline__ int rank() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

__device__ __forceinline__ int run_start(const Params& p, int rank) {
  return static_cast<int>(static_cast<uint64_t>(rank) * (static_cast<uint64_t>(p.split_tiles) * p.stages) / gridDim.x);
}

// Groups of p.group token tiles, token tile fastest: CTAs that run together share W columns and the x of the group stays in L2.
__device__ __forceinline__ void place_tile(const Params& p, Segment& s) {
  const int per_group = p.group * p.column_tiles;
  const int group = s.tile / per_group, in_group = s.tile - group * per_group;
  const int width = min(p.group, p.token_tiles - group * p.group);
  s.column_tile = in_group / width;
  s.token_tile = group * p.group + in_group - s.column_tile * width;
}

__device__ __forceinline__ void next_segment(const Params& p, Schedule& schedule, int slot) {
  Segment s;
  if (schedule.run < schedule.run_end) {
    s.tile = schedule.run / p.stages;
    s.begin = schedule.run - s.tile * p.stages;
    s.end = min(p.stages, s.begin + schedule.run_end - schedule.run);
    schedule.run += s.end - s.begin;
  } else if (schedule.whole < p.token_tiles * p.column_tiles) {
    s.tile = schedule.whole;
    s.begin = 0;
    s.end = p.stages;
    schedule.whole += gridDim.x;
  } else {
    s.tile = 0;
    s.begin = -1;
    s.end = 0;
  }
  place_tile(p, s);
  schedule.segments[slot] = s;
}

__device__ __forceinline__ void start_schedule(const Params& p, Schedule& schedule) {
  schedule.run = run_start(p, rank());
  schedule.run_end = run_start(p, rank() + 1);
  schedule.whole = p.split_tiles + rank();
  next_segment(p, schedule, 0);
}

// Ends a segment of a cut tile. True: its partial sums have been stored, another CTA finishes the tile. False: `sums` are the tile's.
// Every thread owns the same elements of a tile in every CTA, so partials are exchanged in register order, 16 bytes a thread.
template <class C>
__device__ __forceinline__ bool hand_over(const Params& p, const Segment& s, float (&sums)[C::kTilesM][C::kTilesN][4], int thread) {
  constexpr int kTile = C::kBlockM * C::kBlockN;
  if (s.begin > 0) {
    NYBBLE_DELAY(11);
    float4* mine = reinterpret_cast<float4*>(p.partials + static_cast<size_t>(rank()) * kTile) + thread;
#pragma unroll
    for (int i = 0; i < C::kTilesM; i++) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; j++) {
        __stcg(mine + (i * C::kTilesN + j) * C::kThreads, make_float4(sums[i][j][0], sums[i][j][1], sums[i][j][2], sums[i][j][3]));
      }
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) device::store_release(p.flags + rank(), 1);
    return true;
  }
  if (s.end == p.stages) return false;
  // run_start(r) < E  <=>  r < E * grid / stages in all
  const uint64_t split_stages = static_cast<uint64_t>(p.split_tiles) * p.stages, tile_end = static_cast<uint64_t>(s.tile + 1) * p.stages;
  const int last = min(static_cast<int>(gridDim.x), static_cast<int>((tile_end * gridDim.x + split_stages - 1) / split_stages)) - 1;
  for (int other = rank() + 1 + thread; other <= last; other += C::kThreads) {
    while (device::load_acquire(p.flags + other) == 0) {
    }
  }
  __syncthreads();
  for (int other = rank() + 1; other <= last; other++) {
    const float4* theirs = reinterpret_cast<const float4*>(p.partials + static_cast<size_t>(other) * kTile) + thread;
#pragma unroll
    for (int i = 0; i < C::kTilesM; i++) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; j++) {
        const float4 v = __ldcg(theirs + (i * C::kTilesN + j) * C::kThreads);
        sums[i][j][0] += v.x;
        sums[i][j][1] += v.y;
        sums[i][j][2] += v.z;
        sums[i][j][3] += v.w;
      }
    }
  }
  return false;
}

}  // namespace nybble::portable
