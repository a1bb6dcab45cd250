// The strip kernels of the small-M path: y = x W^T (+ bias) of up to 8 and grad_x = grad_y W of up to 4 tokens, bf16 and fp16, on sm_90.
// Host-only interface; the design and what bounds it: strip.cuh, strip_grad.cuh.
#pragma once

#include <string>

#include "linear/strip_params.h"
#include "nybble/cuda.h"
#include "nybble/linear.h"

struct CUstream_st;

namespace nybble {

// Empty when the kernels take the problem, otherwise the reason in words a user understands.
std::string supports_strip(const LinearProblem& problem, const DeviceModel& device);

// Pure. grid: CTAs of the multiply. split: pieces of a band (grad_x); above 1 a second kernel adds their sums. A row's bits do not depend
// on m.
LinearPlan plan_strip(const LinearProblem& problem, const DeviceModel& device);

namespace small_m::strip {

Work work_of(const LinearProblem& problem, const LinearPlan& plan);
Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args);

// in, packed: 16-byte aligned. overlap: set each kernel up while the one before it runs (programmatic dependent launch).
template <typename T>
void launch(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, bool overlap, CUstream_st* stream);

}  // namespace small_m::strip
}  // namespace nybble
