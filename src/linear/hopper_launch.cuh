// The kernel of the Hopper path and its launch, a template over the activation type. Included by one file per type, so that they compile
// side by side.
#pragma once

#include <array>
#include <bit>
#include <mutex>

#include "core/cuda_check.h"
#include "format/tables.h"
#include "linear/hopper_consumer.cuh"
#include "linear/hopper_decode.cuh"
#include "linear/hopper_launch.h"

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
  if (thread == 0) {
    prefetch_tensor_map(&p.activation);
    prefetch_tensor_map(&p.packed);
    if (!p.source.in_kernel) prefetch_tensor_map(&p.scales);
    prefetch_tensor_map(&p.output);
    Barriers<TILE>{smem + TILE::BARRIER_OFFSET}.init(rank);
  }
  if (thread < kHopperMaxSegments) SegmentList{smem + TILE::LIST_OFFSET}.write(p.work, cluster, thread);
  __syncthreads();
  allow_next_grid();  // its blocks set themselves up while the last of this one finish
  cluster_sync();
  if (warpgroup < 2) {
    if constexpr (TILE::MOVE_REGISTERS) raise_register_limit<TILE::CONSUMER_REGISTERS>();
    Consumer<DIRECTION, T, TILE>(p, smem, rank, warpgroup, warp).run(cluster);
  } else {
    if constexpr (TILE::MOVE_REGISTERS) lower_register_limit<TILE::DECODE_REGISTERS>();
    Decoder<DIRECTION, T, TILE>(p, smem, rank, warp - 8).run();
  }
  __syncwarp();
  cluster_sync();  // the peer may still copy into this CTA
}

template <typename T>
constexpr CUtensorMapDataType kMapType = __is_same(T, __half) ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

inline ScaleSource make_source(const Launch& l) {
  const Scales& s = l.args.weight.scales;
  ScaleSource source{};
  source.in_kernel = hopper_scales(l.plan.variant) == HopperScales::kInKernel;
  source.nested = s.nested();
  source.nested_dtype = s.nested_dtype;
  source.n = static_cast<uint32_t>(l.problem.n);
  source.blocks = static_cast<uint32_t>(l.problem.k / l.problem.block_size);
  source.absmax = s.nested() ? static_cast<const void*>(s.absmax_codes) : s.absmax;
  source.nested_absmax = s.nested_absmax;
  source.nested_code = s.nested_code;
  source.offset = s.offset;
  return source;
}

template <typename T, typename TILE>
Params make_params(const Launch& l) {
  const LinearProblem& q = l.problem;
  const bool forward = q.direction == Direction::kForward;
  const int64_t rows = forward ? q.n : q.k, reduction = forward ? q.k : q.n;
  const int64_t stride = l.args.in_row_stride == 0 ? reduction : l.args.in_row_stride;
  const HopperWorkspace layout = hopper_workspace(q, l.plan);
  uint8_t* workspace = static_cast<uint8_t*>(l.args.workspace);
  Params p;
  p.activation = tensor_map({kMapType<T>, static_cast<const T*>(l.args.in) + l.first * stride, reduction, l.count, stride * 2, kStep,
                             TILE::TOKENS, CU_TENSOR_MAP_SWIZZLE_128B});
  p.packed = tensor_map(
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, l.args.weight.packed, q.k / 2, q.n, q.k / 2, 32, TILE::JOB_ROWS, CU_TENSOR_MAP_SWIZZLE_32B});
  p.source = make_source(l);
  if (!p.source.in_kernel) {
    p.scales = tensor_map({CU_TENSOR_MAP_DATA_TYPE_FLOAT32, workspace + layout.scales, q.n, q.k / q.block_size, q.n * 4, TILE::JOB_ROWS, 1,
                           CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  p.output = tensor_map(
      {kMapType<T>, static_cast<T*>(l.args.out) + l.first * rows, rows, l.count, rows * 2, 64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B});
  const auto& values = q.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  for (int i = 0; i < 16; i++) p.values[i] = values[i];
  p.work = hopper_work(q, l.plan, l.count);
  p.bias = l.args.bias;
  p.rows = static_cast<int>(rows);
  p.block_shift = std::countr_zero(static_cast<unsigned>(q.block_size)) - std::countr_zero(static_cast<unsigned>(kStep));
  p.partials = reinterpret_cast<float*>(workspace + layout.partials);
  p.flags = reinterpret_cast<uint64_t*>(workspace + layout.flags);
  p.nonce = next_nonce();
  return p;
}

template <Direction DIRECTION, typename T, typename TILE>
void launch_multiply(const Launch& l) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> prepared;
  const auto kernel = multiply<DIRECTION, T, TILE>;
  int device = 0;
  check(cudaGetDevice(&device));
  std::call_once(prepared[device % kMaxDevices],
                 [&] { check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, TILE::SHARED_BYTES)); });
  const Params params = make_params<T, TILE>(l);
  cudaLaunchAttribute attribute = overlap_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(2 * params.work.clusters));
  config.blockDim = dim3(TILE::THREADS);
  config.dynamicSmemBytes = TILE::SHARED_BYTES;
  config.stream = l.stream;
  config.attrs = &attribute;
  config.numAttrs = l.overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params));
}

template <Direction DIRECTION, typename T>
void launch_tile(const Launch& l) {
  switch (hopper_tile(l.plan.variant)) {
    case HopperTile::kTokens256:
      return launch_multiply<DIRECTION, T, Tile256>(l);
    case HopperTile::kTokens128:
      return launch_multiply<DIRECTION, T, Tile128>(l);
    case HopperTile::kTokens64:
      return launch_multiply<DIRECTION, T, Tile64>(l);
  }
  fail(ErrorKind::kValue, "plan variant ", l.plan.variant, ", expected 0 to ", kHopperVariants - 1);
}

template <typename T>
void launch_direction(const Launch& l) {
  l.problem.direction == Direction::kForward ? launch_tile<Direction::kForward, T>(l) : launch_tile<Direction::kGradInput, T>(l);
}

}  // namespace nybble::hopper
