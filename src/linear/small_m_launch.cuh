// The kernel of the small-M path and its launch, a template over the activation type. Included by one file per type, so that they compile
// side by side.
#pragma once

#include <algorithm>

#include "linear/kernel_shared_memory.h"
#include "linear/overlapping_launch.h"
#include "linear/small_m_copy.cuh"
#include "linear/small_m_forward.cuh"
#include "linear/small_m_grad.cuh"
#include "linear/small_m_launch.h"
#include "linear/small_m_sum.cuh"
#include "linear/weight_operand.h"

namespace nybble::small_m {

template <typename T, Direction DIRECTION, int GROUPS>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Params p) {
  using L = Layout<GROUPS, DIRECTION>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Smem<L> s(smem_address(shared));
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int cta = static_cast<int>(blockIdx.x), first = first_unit(p.work, cta), end = first_unit(p.work, cta + 1);
  allow_next_grid();
  if (warp == kCopyWarp) {
    if (lane == 0) {
      prefetch_tensor_map(&p.packed);
      prefetch_tensor_map(&p.scales);
      prefetch_tensor_map(&p.activation);
      s.init_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cta.arrive %0, %1;" ::"n"(kAllBarrier), "n"(kThreads) : "memory");  // the others do not hold the copies up
    lower_register_limit<kProducerRegisters>();
    if (lane == 0) Copier<L>(p, s, first, end).run();
    return;
  }
  if (warp > kCopyWarp) {
    lower_register_limit<kProducerRegisters>();
    named_barrier(kAllBarrier, kThreads);
    if constexpr (L::PERMUTE_HERE) permute_x(s, end - first, warp - kCopyWarp - 1, lane);
    return;
  }
  fill_byte_table(s.table, p.values, thread);
  const ScaleReader<L> scales(p, s, thread);
  named_barrier(kAllBarrier, kThreads);
  raise_register_limit<kConsumerRegisters>();
  if constexpr (L::FORWARD) {
    ForwardConsumer<T, L>(p, s, scales, warp, lane).run(cta, first, end);
  } else {
    GradConsumer<T, L>(p, s, scales, warp, lane).run(cta, first, end);
  }
}

// How partial sums are added.
constexpr unsigned kManyCtas = 128;      // of the multiply, of 132 SMs: with more, blocks of sums wait beside them
constexpr unsigned kMostHalfRounds = 7;  // of those blocks: 3.5 rounds
constexpr int kManyPiecesFrom = 5;       // of a tile

// Boxes of the activation: 64 of the reduction by all tokens, or (Layout::PERMUTE_HERE) 16 of each of 4 blocks of 64.
template <typename T>
CUtensorMap activation_map(const LinearProblem& q, const void* x, int64_t row_bytes, int groups, bool permute_here) {
  const cuuint64_t rows = static_cast<cuuint64_t>(q.m), stride = static_cast<cuuint64_t>(row_bytes);
  const cuuint64_t columns = static_cast<cuuint64_t>(q.direction == Direction::kForward ? q.k : q.n);
  const cuuint32_t tokens = static_cast<cuuint32_t>(groups * 8);
  if (permute_here)
    return tensor_map({kMapType<T>, x, 3, {64, columns / 64, rows}, {128, stride}, {16, 4, tokens}, CU_TENSOR_MAP_SWIZZLE_32B});
  return tensor_map({kMapType<T>, x, 2, {columns, rows}, {stride}, {64, tokens}, CU_TENSOR_MAP_SWIZZLE_128B});
}

template <typename T>
Params make_params(const Launch& l, int groups, bool permute_here, bool permuted_before) {
  const LinearProblem& q = l.problem;
  const SmallMWorkspace layout = small_m_workspace(q, l.plan);
  uint8_t* workspace = static_cast<uint8_t*>(l.args.workspace);
  const WeightOperand w = weight_operand(l.args.weight);
  const cuuint64_t n = static_cast<cuuint64_t>(q.n), k = static_cast<cuuint64_t>(q.k);
  Params p{};
  p.packed = tensor_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, w.packed, 2, {k / 2, n}, {k / 2}, {128, 256}, CU_TENSOR_MAP_SWIZZLE_128B});
  const int64_t reduction = q.direction == Direction::kForward ? q.k : q.n;
  const int64_t stride = q.m == 1 || l.args.in_row_stride == 0 ? reduction : l.args.in_row_stride;
  p.activation = permuted_before ? activation_map<T>(q, workspace, q.k * 2, groups, false)
                                 : activation_map<T>(q, l.args.in, stride * 2, groups, permute_here);
  p.nested = l.args.weight.scales.nested();
  p.scales = p.nested
                 ? tensor_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, w.codes, 2, {k / 64, n}, {k / 64}, {16, 256}, CU_TENSOR_MAP_SWIZZLE_NONE})
                 : tensor_map({CU_TENSOR_MAP_DATA_TYPE_FLOAT32, w.scales, 2, {k / 64, n}, {k / 16}, {4, 256}, CU_TENSOR_MAP_SWIZZLE_NONE});
  std::copy(std::begin(w.values), std::end(w.values), p.values);
  p.work = small_m_work(q, l.plan);
  p.m = static_cast<int>(q.m);
  p.n = static_cast<int>(q.n);
  p.k = static_cast<int>(q.k);
  p.nested_absmax = w.scales;
  p.nested_code = w.code_values;
  p.offset = w.offset;
  p.bias = l.args.bias;
  p.partials = reinterpret_cast<float*>(workspace + layout.partials);
  p.out = l.args.out;
  return p;
}

// Where the multiply takes (nearly) all SMs and a few rounds do, no more blocks than fit beside its CTAs, one an SM: all of them are there
// when it ends, and the next launch's CTAs need not wait until they have gone. Elsewhere many pieces are loaded side by side; few are not,
// as what is loaded beyond them costs more.
template <typename T, typename L>
void enqueue_sum(const Launch& l, const Params& p) {
  const unsigned groups = static_cast<unsigned>(p.m + 7) / 8, ctas = static_cast<unsigned>(p.work.ctas);
  const auto blocks = [&](int at_once) { return static_cast<unsigned>(p.work.tiles * kConsumerWarps * 32 / sum_threads(at_once)); };
  const unsigned few = blocks(kFewPieces);
  const bool fit_beside = ctas > kManyCtas && 2 * few * groups <= kMostHalfRounds * ctas;
  if (!fit_beside && l.plan.split >= kManyPiecesFrom) {
    const LaunchShape shape{blocks(kManyPieces), groups, sum_threads(kManyPieces), 0};
    return launch_overlapping(l.overlap, l.stream, shape, sum_partials<T, L, kManyPieces>, p);
  }
  const unsigned taken = fit_beside ? std::min(few, std::max(1u, ctas / groups)) : few;
  launch_overlapping(l.overlap, l.stream, {taken, groups, sum_threads(kFewPieces), 0}, sum_partials<T, L, kFewPieces>, p);
}

// In order: permute x, for more than 32 tokens forward; multiply; add the partial sums.
template <typename T, Direction DIRECTION, int GROUPS>
void launch_sized(const Launch& l) {
  using L = Layout<GROUPS, DIRECTION>;
  static SharedMemoryAllowance allowance;
  const auto kernel = multiply<T, DIRECTION, GROUPS>;
  allowance.allow(reinterpret_cast<const void*>(kernel), L::SHARED_BYTES);
  const Params p = make_params<T>(l, GROUPS, L::PERMUTE_HERE, L::PERMUTED_BEFORE);
  if constexpr (L::PERMUTED_BEFORE) {
    const int vectors = p.k / 8, count = p.m * vectors;  // 16 bytes each
    const int64_t stride = l.problem.m == 1 || l.args.in_row_stride == 0 ? p.k : l.args.in_row_stride;
    const LaunchShape shape{static_cast<unsigned>((count + kPermuteThreads - 1) / kPermuteThreads), 1, kPermuteThreads, 0};
    launch_overlapping(l.overlap, l.stream, shape, permute_rows, static_cast<const uint4*>(l.args.in), stride / 8, vectors,
                       static_cast<uint32_t*>(l.args.workspace), count);
  }
  launch_overlapping(l.overlap, l.stream, {static_cast<unsigned>(p.work.ctas), 1, kThreads, L::SHARED_BYTES}, kernel, p);
  enqueue_sum<T, L>(l, p);
}

template <typename T, Direction DIRECTION>
void launch_tokens(const Launch& l) {
  switch (small_m_tokens(l.plan.variant)) {
    case 8:
      return launch_sized<T, DIRECTION, 1>(l);
    case 16:
      return launch_sized<T, DIRECTION, 2>(l);
    case 32:
      return launch_sized<T, DIRECTION, 4>(l);
    case 64:
      return launch_sized<T, DIRECTION, 8>(l);
    default:
      return launch_sized<T, DIRECTION, 16>(l);
  }
}

template <typename T>
void launch_direction(const Launch& l) {
  l.problem.direction == Direction::kForward ? launch_tokens<T, Direction::kForward>(l) : launch_tokens<T, Direction::kGradInput>(l);
}

}  // namespace nybble::small_m
