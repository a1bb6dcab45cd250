// The CPU multiply: checks its arguments, then works through the weight panel by panel.
#include "linear/cpu_paths.h"
#include "nybble/error.h"
#include "nybble/linear.h"

namespace nybble {
namespace {

void check_weight(const LinearProblem& problem, const Nf4Weight& weight) {
  if (weight.n != problem.n || weight.k != problem.k) {
    fail(ErrorKind::kValue, "weight of shape [", weight.n, ", ", weight.k, "] for a problem of [", problem.n, ", ", problem.k, "]");
  }
  if (!is_block_size(weight.block_size) || weight.block_size != problem.block_size) {
    fail(ErrorKind::kValue, "block size ", weight.block_size, " of the weight, ", problem.block_size,
         " of the problem, expected the same of 32, 64, 128, 256, 512, 1024, 2048, 4096");
  }
  const bool empty = weight.n == 0 || weight.k == 0;  // an empty tensor may have a null pointer
  if (weight.quant_type != problem.quant_type || (weight.scales.nested() != problem.nested && !empty)) {
    fail(ErrorKind::kValue, "weight of type ", name(weight.quant_type), weight.scales.nested() ? ", nested" : ", plain",
         " for a problem of type ", name(problem.quant_type), problem.nested ? ", nested" : ", plain");
  }
}

void check_pointers(const LinearProblem& problem, const LinearArgs& args) {
  const Scales& scales = args.weight.scales;
  const bool has_scales = scales.nested() ? scales.nested_absmax && scales.nested_code && scales.offset : scales.absmax != nullptr;
  if (problem.m == 0 || (problem.direction == Direction::kForward ? problem.n : problem.k) == 0) return;
  const char* missing = !args.out ? "out" : nullptr;
  if (problem.n > 0 && problem.k > 0) {
    if (!args.in) missing = "in";
    if (!args.weight.packed) missing = "packed";
    if (!has_scales) missing = "scales";
  }
  if (problem.bias && !args.bias) missing = "bias";
  if (missing) fail(ErrorKind::kValue, "no ", missing, " in the arguments of linear_cpu, expected a pointer");
}

void check(const LinearProblem& problem, const LinearArgs& args) {
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    fail(ErrorKind::kValue, "shape m ", problem.m, ", n ", problem.n, ", k ", problem.k, ", expected none below 0");
  }
  if (problem.bias && problem.direction == Direction::kGradInput) fail(ErrorKind::kValue, "a bias in the input gradient, expected none");
  check_weight(problem, args.weight);
  const int64_t columns = problem.direction == Direction::kForward ? problem.k : problem.n;
  if (problem.m > 1 && args.in_row_stride != 0 && args.in_row_stride < columns) {
    fail(ErrorKind::kValue, "row stride ", args.in_row_stride, " of the activation, expected at least its ", columns,
         " columns (0: contiguous)");
  }
  check_pointers(problem, args);
}

}  // namespace

void linear_cpu(const LinearProblem& problem, const LinearArgs& given) {
  check(problem, given);
  const bool forward = problem.direction == Direction::kForward;
  LinearArgs args = given;
  if (args.in_row_stride == 0) args.in_row_stride = forward ? problem.k : problem.n;
  if (problem.m == 0 || (forward ? problem.n : problem.k) == 0) return;
  count_launch(LinearPath::kCpu, problem.direction);
  if (cpu::takes_few_rows(problem)) {
    cpu::multiply_rows(problem, args);
  } else {
    cpu::multiply_panels(problem, args);
  }
}

}  // namespace nybble
