// Entry of the small-M path: the choice of the kernel and the type. The kernel: small_m_kernel.cuh, its roles in small_m_copy.cuh,
// small_m_forward.cuh and small_m_grad.cuh, its sums in small_m_sum.cuh.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_check.h"
#include "linear/small_m_launch.h"
#include "linear/strip.h"

namespace nybble {

void launch_small_m(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream,
                    const SmallMLaunchOptions& options) {
  if (plan.variant == kSmallMStrip) {
    count_launch(LinearPath::kSmallM, problem.direction);
    const auto strips = problem.dtype == DType::kFloat16 ? small_m::strip::launch<__half> : small_m::strip::launch<__nv_bfloat16>;
    return strips(plan, problem, args, options.overlap, static_cast<cudaStream_t>(stream));
  }
  const small_m::Launch launch{plan, problem, args, options.overlap, static_cast<cudaStream_t>(stream)};
  count_launch(LinearPath::kSmallM, problem.direction);
  problem.dtype == DType::kFloat16 ? small_m::launch_direction<__half>(launch) : small_m::launch_direction<__nv_bfloat16>(launch);
}

}  // namespace nybble
