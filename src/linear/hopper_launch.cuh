// The kernel of the Hopper path and its launch, a template over the activation type. Included by one file per type, so that they compile
// side by side.
#pragma once

#include "linear/hopper_consumer.cuh"
#include "linear/hopper_decode.cuh"
#include "linear/hopper_params.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename T, typename TILE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(TILE::THREADS, 1) multiply(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  if (smem & 1023) __trap();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0u, thread >> 5, 0), warpgroup = __shfl_sync(~0u, thread >> 7, 0);
  const uint32_t rank = cluster_rank();
  const int cluster = static_cast<int>(gridDim.x / 2 - 1 - blockIdx.x / 2);
  allow_next_grid();  // its blocks set themselves up while the last of this one finish
  if (warpgroup < 2) {
    if (thread == 0) {
      prefetch_tensor_map(&p.activation);
      prefetch_tensor_map(&p.output);
      Barriers<TILE>{smem + TILE::BARRIER_OFFSET}.init(rank);
    }
    const int entry = thread - 32;
    if (entry >= 0 && entry < kHopperMaxSegments) SegmentList{smem + TILE::LIST_OFFSET}.write(p.work, cluster, entry);
    if constexpr (TILE::MOVE_REGISTERS) raise_register_limit<TILE::CONSUMER_REGISTERS>();
    __syncwarp();
    cluster_sync();
    Consumer<DIRECTION, T, TILE>(p, smem, rank, warpgroup, warp).run(cluster);
  } else {
    if constexpr (TILE::MOVE_REGISTERS) lower_register_limit<TILE::DECODE_REGISTERS>();
    Decoder<DIRECTION, T, TILE>(p, smem, rank, warp - 8).run(cluster);
  }
}

template <Direction DIRECTION, typename T>
void launch_tile(const Launch& l) {
  switch (hopper_tile(l.plan.variant)) {
    case HopperTile::kRows256:
    case HopperTile::kRows192:
    case HopperTile::kRows160:
    case HopperTile::kRows128:
    case HopperTile::kRows96:
    case HopperTile::kRows64:
      return launch_rows<DIRECTION, T>(l);
    case HopperTile::kTokens256:
      return launch_kernel<multiply<DIRECTION, T, Tile256>, T, Tile256>(l);
    case HopperTile::kTokens128:
      return launch_kernel<multiply<DIRECTION, T, Tile128>, T, Tile128>(l);
    case HopperTile::kTokens64:
      return launch_kernel<multiply<DIRECTION, T, Tile64>, T, Tile64>(l);
  }
  fail(ErrorKind::kValue, "plan variant ", l.plan.variant, ", expected 0 to ", kHopperVariants - 1);
}

template <typename T>
void launch_direction(const Launch& l) {
  l.problem.direction == Direction::kForward ? launch_tile<Direction::kForward, T>(l) : launch_tile<Direction::kGradInput, T>(l);
}

}  // namespace nybble::hopper
