// Entry of the large-M path: the kernel before the multiply, one launch per range of tokens. The kernel: hopper_kernel.cuh,
// its two roles in hopper_decode.cuh and hopper_consumer.cuh.
#include <algorithm>
#include <atomic>
#include <random>

#include "core/cuda_check.h"
#include "linear/hopper_launch.h"
#include "linear/hopper_scales.cuh"
#include "linear/tensor_map.h"

namespace nybble {
namespace hopper {

CUtensorMap tensor_map(const Matrix& m) {
  const cuuint64_t columns = static_cast<cuuint64_t>(m.columns), rows = static_cast<cuuint64_t>(m.rows);
  const cuuint32_t box_columns = static_cast<cuuint32_t>(m.box_columns), box_rows = static_cast<cuuint32_t>(m.box_rows);
  return nybble::tensor_map(
      {m.type, m.data, 2, {columns, rows}, {static_cast<cuuint64_t>(m.row_bytes)}, {box_columns, box_rows}, m.swizzle});
}

uint64_t next_nonce() {
  if (NYBBLE_FAULT(kFlagNotReset)) return 1;
  static std::atomic<uint64_t> next{[] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }()};
  const uint64_t nonce = next.fetch_add(1, std::memory_order_relaxed);
  return nonce != 0 ? nonce : next_nonce();
}

}  // namespace hopper

namespace {

using namespace hopper;

void launch_expansion(const HopperWorkspace& layout, const LinearProblem& problem, const LinearArgs& args, cudaStream_t stream) {
  uint8_t* workspace = static_cast<uint8_t*>(args.workspace);
  ScaleExpansion e;
  e.scales = args.weight.scales;
  e.n = static_cast<int>(problem.n);
  e.blocks = static_cast<int>(problem.k / problem.block_size);
  e.out = reinterpret_cast<float*>(workspace + layout.scales);
  const dim3 grid((e.n + kScaleRows - 1) / kScaleRows, (e.blocks + kScaleBlocks - 1) / kScaleBlocks);
  expand_scales<<<grid, kScaleThreads, 0, stream>>>(e);
  check_launch();
}

}  // namespace

void launch_hopper(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream,
                   const HopperLaunchOptions& options) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t per_launch = hopper_tokens_per_launch(problem, plan);
  if (problem.m > per_launch && hopper_schedule(plan.variant) != HopperSchedule::kWhole) {
    fail(ErrorKind::kValue, "a plan with partial sums for ", problem.m, " tokens, expected at most ", per_launch, "; use plan_hopper()");
  }
  const HopperWorkspace layout = hopper_workspace(problem, plan);
  const bool in_kernel = hopper_scales(plan.variant) == HopperScales::kInKernel;
  if (options.prepare && !in_kernel) launch_expansion(layout, problem, args, s);
  count_launch(LinearPath::kHopper, problem.direction);
  for (int64_t first = 0; first < problem.m; first += per_launch) {
    const bool overlap = options.overlap && (in_kernel || (options.prepare && first == 0));
    const Launch launch{plan, problem, args, first, std::min(per_launch, problem.m - first), overlap, s};
    problem.dtype == DType::kFloat16 ? launch_direction<__half>(launch) : launch_direction<__nv_bfloat16>(launch);
  }
}

}  // namespace nybble
