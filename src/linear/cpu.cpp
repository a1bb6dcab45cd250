// The CPU multiply: checks its arguments, then works through the weight panel by panel.
#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "format/rounding.h"
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

void store(DType dtype, float value, void* out, int64_t index) {
  auto* bytes = static_cast<unsigned char*>(out) + index * size_of(dtype);
  const uint16_t half = dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value);
  std::memcpy(bytes, dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &half, static_cast<size_t>(size_of(dtype)));
}

// Weights [first, first + count) in the compute dtype, as fp32.
void load_weights(const LinearProblem& problem, const Nf4Weight& weight, int64_t first, int64_t count, std::vector<float>& out) {
  std::vector<unsigned char> rounded(static_cast<size_t>(count * size_of(problem.dtype)));
  dequantize_4bit(weight, problem.dtype, first, count, rounded.data());
  out.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) out[i] = format::load_as_float(rounded.data(), problem.dtype, i);
}

// One output feature: y[:, row].
void forward_row(const LinearProblem& problem, const LinearArgs& args, int64_t row) {
  std::vector<float> w;
  load_weights(problem, args.weight, row * problem.k, problem.k, w);
  for (int64_t m = 0; m < problem.m; m++) {
    float sum = 0;
    for (int64_t k = 0; k < problem.k; k++) sum += format::load_as_float(args.in, problem.dtype, m * args.in_row_stride + k) * w[k];
    if (problem.bias) sum += format::load_as_float(args.bias, problem.dtype, row);
    store(problem.dtype, sum, args.out, m * problem.n + row);
  }
}

// Columns [begin, end) of grad_x.
void grad_columns(const LinearProblem& problem, const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t width = end - begin;
  std::vector<float> w;
  std::vector<float> sums(static_cast<size_t>(problem.m * width));
  for (int64_t n = 0; n < problem.n; n++) {
    load_weights(problem, args.weight, n * problem.k + begin, width, w);
    for (int64_t m = 0; m < problem.m; m++) {
      const float g = format::load_as_float(args.in, problem.dtype, m * args.in_row_stride + n);
      for (int64_t k = 0; k < width; k++) sums[m * width + k] += g * w[k];
    }
  }
  for (int64_t m = 0; m < problem.m; m++) {
    for (int64_t k = 0; k < width; k++) store(problem.dtype, sums[m * width + k], args.out, m * problem.k + begin + k);
  }
}

}  // namespace

void linear_cpu(const LinearProblem& problem, const LinearArgs& given) {
  check(problem, given);
  const bool forward = problem.direction == Direction::kForward;
  LinearArgs args = given;
  if (args.in_row_stride == 0) args.in_row_stride = forward ? problem.k : problem.n;
  if (problem.m == 0 || (forward ? problem.n : problem.k) == 0) return;
  count_launch(LinearPath::kCpu, problem.direction);
  if (forward) {
    parallel_for(problem.n, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) forward_row(problem, args, row);
    });
  } else {
    parallel_for(problem.k, 256, [&](int64_t begin, int64_t end) { grad_columns(problem, args, begin, end); });
  }
}

}  // namespace nybble
