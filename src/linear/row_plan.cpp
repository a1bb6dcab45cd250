#include <algorithm>
#include <limits>
#include <sstream>

#include "linear/row.h"
#include "linear/row_params.h"
#include "nybble/error.h"

namespace nybble {
namespace {

constexpr int64_t kMaxWorkspace = 32 << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int tokens_for(int64_t m) { return m <= 1 ? 1 : m <= 2 ? 2 : m <= 4 ? 4 : 8; }

struct Cut {
  int64_t split, slices, rows, ranges;
};

// Rows of W for a CTA, so that `pieces` CTAs a range of rows fill the SMs once, or as few whole times as most_rows allows.
int64_t rows_of_cta(int64_t n, int64_t most_rows, int64_t sms, int64_t pieces) {
  int64_t rows = 0;
  for (int64_t waves = 1;; waves++) {
    rows = ceil_div(ceil_div(n, std::max<int64_t>(1, waves * sms / pieces)), row::kRows) * row::kRows;
    if (rows <= most_rows || rows <= row::kRows) return rows;
  }
}

// Chunks of k so that x fits into shared memory; ranges of n so that every SM has one CTA.
Cut cut_forward(int tokens, int64_t n, int64_t k, int64_t sms) {
  const int64_t budget = row::kSharedLimit - row::kFixedBytes;
  const int64_t all_slices = ceil_div(k, row::kSlice);
  const int64_t most_slices = std::max<int64_t>(1, budget * 5 / 6 / (int64_t{2} * tokens * row::kSlice));
  Cut cut;
  cut.split = ceil_div(all_slices, most_slices);
  cut.slices = ceil_div(all_slices, cut.split);
  cut.split = ceil_div(all_slices, cut.slices);
  const int64_t most_rows = (budget - row::forward_bytes(tokens, cut.slices, 0)) / (int64_t{4} * tokens * cut.slices);
  cut.rows = rows_of_cta(n, most_rows, sms, cut.split);
  cut.ranges = ceil_div(n, cut.rows);
  return cut;
}

Cut cut_grad(int tokens, int64_t n, int64_t k, int64_t sms) {
  Cut cut;
  cut.slices = ceil_div(k, int64_t{32} * row::grad_codes(tokens));
  const int64_t most_rows = (row::kSharedLimit - row::kFixedBytes) / row::grad_bytes(tokens, 1);
  cut.rows = rows_of_cta(n, most_rows, sms, cut.slices);
  cut.ranges = ceil_div(n, cut.rows);
  cut.split = cut.ranges;
  return cut;
}

Cut cut_for(const LinearProblem& p, int tokens, int64_t sms) {
  return p.direction == Direction::kForward ? cut_forward(tokens, p.n, p.k, sms) : cut_grad(tokens, p.n, p.k, sms);
}

int64_t workspace_bytes(const LinearProblem& p, const Cut& cut) {
  return cut.split > 1 ? cut.split * p.m * (p.direction == Direction::kForward ? p.n : p.k) * 4 : 0;
}

}  // namespace

std::string supports_row(const LinearProblem& p, const DeviceModel& device) {
  std::ostringstream why;
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max() - 4096;
  if (device.sm < 80) {
    why << "compute capability " << device.sm << ", needs 80 or later";
  } else if (p.dtype == DType::kFloat32) {
    why << "float32 activations, needs bfloat16 or float16";
  } else if (p.m > kRowMaxTokens) {
    why << p.m << " tokens, at most " << kRowMaxTokens;
  } else if (p.batch_invariant) {
    why << "sums that depend on the number of tokens, and batch_invariant is asked for";
  } else if (p.nested && p.nested_dtype != DType::kFloat32) {
    why << "nested scales kept in " << name(p.nested_dtype) << ", needs float32";
  } else if (p.k == 0 || p.n == 0 || p.k % row::kCodes != 0) {
    why << "in_features " << p.k << ", needs a multiple of " << row::kCodes;
  } else if (p.packed_alignment < 16) {
    why << "packed weights at an address that is a multiple of " << p.packed_alignment << " only, needs 16";
  } else if (p.n > kMaxInt || p.k > kMaxInt) {
    why << "a shape beyond 32-bit counts";
  } else if (const int64_t bytes = workspace_bytes(p, cut_for(p, tokens_for(p.m), std::max(1, device.sm_count))); bytes > kMaxWorkspace) {
    why << bytes << " bytes of partial sums, at most " << kMaxWorkspace;
  }
  return why.str();
}

LinearPlan plan_row(const LinearProblem& p, const DeviceModel& device) {
  const int tokens = tokens_for(p.m);
  const Cut cut = cut_for(p, tokens, std::max(1, device.sm_count));
  const int64_t grid = p.direction == Direction::kForward ? cut.split * cut.ranges : cut.slices * cut.ranges;
  if (grid > std::numeric_limits<int32_t>::max())
    fail(ErrorKind::kUnsupported, "n ", p.n, " and k ", p.k, " need ", grid, " CTAs, at most 2^31 - 1");
  LinearPlan plan;
  plan.path = LinearPath::kRow;
  plan.variant = tokens;
  plan.grid = static_cast<int>(grid);
  plan.split = static_cast<int>(cut.split);
  plan.group = static_cast<int>(cut.rows);
  plan.workspace_bytes = workspace_bytes(p, cut);
  return plan;
}

namespace row {

Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args) {
  const bool forward = problem.direction == Direction::kForward;
  Params p{};
  static_cast<WeightOperand&>(p) = weight_operand(args.weight);
  p.x = args.in;
  p.x_stride = args.in_row_stride ? args.in_row_stride : forward ? problem.k : problem.n;
  p.bias = forward ? args.bias : nullptr;
  p.out = args.out;
  if (plan.split > 1) {
    if (!args.workspace) fail(ErrorKind::kValue, "no workspace, expected ", plan.workspace_bytes, " bytes as the plan says");
    p.partials = static_cast<float*>(args.workspace);
  }
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.k = static_cast<int>(problem.k);
  p.rows = plan.group;
  p.ranges = static_cast<int>(ceil_div(problem.n, plan.group));
  p.split = plan.split;
  p.slices = static_cast<int>(forward ? ceil_div(ceil_div(problem.k, kSlice), plan.split)
                                      : ceil_div(problem.k, int64_t{32} * grad_codes(plan.variant)));
  return p;
}

int64_t shared_bytes(const LinearPlan& plan, const LinearProblem& problem) {
  if (problem.direction == Direction::kGradInput) return kFixedBytes + grad_bytes(plan.variant, plan.group);
  const int64_t slices = ceil_div(ceil_div(problem.k, kSlice), plan.split);
  return kFixedBytes + forward_bytes(plan.variant, static_cast<int>(slices), plan.group);
}

}  // namespace row
}  // namespace nybble
