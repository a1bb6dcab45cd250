// The ways in which linear_cpu multiplies, once its arguments are known to be sound. All of them use W rounded to the compute dtype, as
// dequantize_4bit gives it, and fp32 sums in an order that depends on the reduction alone: never on m, threads or the panel cut.
#pragma once

#include "nybble/linear.h"

namespace nybble::cpu {

// The panel order, both directions: chains of at most kChain consecutive products, one fused multiply-add each, ascending; the chains' sums
// added in ascending order; then the bias; then one rounding to the output's dtype. CPUs without FMA round the products too.
constexpr int64_t kChain = 256;

// The order of few rows, forward only: 32 sums, each over the products whose places in runs of 64 agree in bits 0 to 3 and 5, ascending,
// one fused multiply-add each; then a fixed tree. Another order than the panels', so a row computed among few may differ in its last bits
// from the same row among many: linear_cpu takes the panels when batch_invariant is set.
constexpr int64_t kFewRows = 4;
inline bool takes_few_rows(const LinearProblem& problem) {
  if (problem.direction == Direction::kGradInput) return problem.m == 1;
  return problem.m <= kFewRows && !problem.batch_invariant;
}
// At most kFewRows rows of y, or one row of grad_x, the latter in the panel order.
void multiply_rows(const LinearProblem& problem, const LinearArgs& args);
// Any number of rows.
void multiply_panels(const LinearProblem& problem, const LinearArgs& args);

// Highway targets (HWY_AVX2, ...) built in and supported by this CPU; tests force each in turn. force_target(0) restores the best.
int64_t supported_targets();
void force_target(int64_t target);
const char* target_name();

}  // namespace nybble::cpu
