#include "core/cuda_check.h"
#include "device/fault.h"
#include "linear/portable.h"
#include "linear/portable_params.h"

namespace nybble {

void launch_portable(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const portable::Params params = portable::make_params(plan, problem, args);
  if (plan.split_tiles > 0 && !NYBBLE_FAULT(kFlagNotReset))
    check(cudaMemsetAsync(params.flags, 0, static_cast<size_t>(plan.grid) * sizeof(int), stream));
  const auto launch = problem.dtype == DType::kBFloat16 ? portable::launch_bf16 : portable::launch_fp16;
  launch(problem.direction, plan.variant, params, plan.grid, stream);
  count_launch(LinearPath::kPortable, problem.direction);
}

}  // namespace nybble
