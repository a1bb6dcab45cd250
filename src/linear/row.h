// Few tokens without tensor cores: y = x W^T and grad_x = grad_y W for m <= 8 at the speed of memory. Host-only.
#pragma once

#include <string>

#include "nybble/cuda.h"
#include "nybble/linear.h"

struct CUstream_st;

namespace nybble {

constexpr int64_t kRowMaxTokens = 8;

// Why the kernel does not take the problem, empty when it does.
std::string supports_row(const LinearProblem& problem, const DeviceModel& device);

// variant: tokens that the code is compiled for (1, 2, 4, 8). split: forward chunks of k, grad input ranges of n; above 1 a second launch
// adds them in ascending order. The order of sums depends on m through the variant.
LinearPlan plan_row(const LinearProblem& problem, const DeviceModel& device);

// Workspace: [split][m][columns] fp32. Counts the launch.
void launch_row(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream);

namespace row {

struct Params;

void launch_bf16(Direction direction, int tokens, const Params& params, int grid, int64_t shared_bytes, CUstream_st* stream);
void launch_fp16(Direction direction, int tokens, const Params& params, int grid, int64_t shared_bytes, CUstream_st* stream);

}  // namespace row
}  // namespace nybble
