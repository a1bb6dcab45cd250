#include "linear/row.h"
#include "linear/row_params.h"

namespace nybble {

void launch_row(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream) {
  const row::Params params = row::make_params(plan, problem, args);
  const auto launch = problem.dtype == DType::kBFloat16 ? row::launch_bf16 : row::launch_fp16;
  launch(problem.direction, plan.variant, params, plan.grid, row::shared_bytes(plan, problem), static_cast<CUstream_st*>(stream));
  count_launch(LinearPath::kRow, problem.direction);
}

}  // namespace nybble
