#include "linear/portable_params.h"

#include "linear/portable.h"
#include "nybble/error.h"

namespace nybble::portable {
namespace {

int ceil_div(int64_t a, int b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args) {
  const bool forward = problem.direction == Direction::kForward;
  const int64_t reduction = forward ? problem.k : problem.n, columns = forward ? problem.n : problem.k;
  const PortableTile& tile = portable_tiles()[plan.variant];
  Params p{};
  static_cast<WeightOperand&>(p) = weight_operand(args.weight);
  p.x = args.in;
  p.x_stride = args.in_row_stride ? args.in_row_stride : reduction;
  const int64_t row_bits = reinterpret_cast<intptr_t>(args.in) | (problem.m > 1 ? p.x_stride * 2 : 0);
  p.x_alignment = row_bits % 16 == 0 ? 16 : row_bits % 4 == 0 ? 4 : 2;
  p.bias = forward ? args.bias : nullptr;
  p.out = args.out;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.k = static_cast<int>(problem.k);
  p.token_tiles = ceil_div(problem.m, tile.tokens);
  p.column_tiles = ceil_div(columns, tile.columns);
  p.stages = ceil_div(reduction, 64);
  p.group = plan.group;
  p.split_tiles = static_cast<int>(plan.split_tiles);
  if (plan.split_tiles > 0) {
    if (!args.workspace) fail(ErrorKind::kValue, "no workspace, expected ", plan.workspace_bytes, " bytes as the plan says");
    p.flags = static_cast<int*>(args.workspace);
    p.partials = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + static_cast<size_t>(ceil_div(plan.grid * 4, 256)) * 256);
  }
  return p;
}

}  // namespace nybble::portable
