// What a launch of the portable kernel takes. Read by device code too.
#pragma once

#include <cstdint>

#include "linear/weight_operand.h"
#include "nybble/linear.h"

namespace nybble::portable {

// Shared memory of a CTA: two stages of 64 of x and of decoded W, 256 nested code values, 16 values, the schedule (portable_schedule.cuh).
constexpr int shared_bytes(int tokens, int columns) { return 2 * 128 * (tokens + columns) + 1024 + 64 + 56; }

struct Params : WeightOperand {
  const void* x;     // [m][reduction], 16 bit, rows x_stride elements apart
  const void* bias;  // [n] or null, 16 bit
  void* out;         // [m][columns], 16 bit
  float* partials;   // [grid][tile] fp32, cut reductions only
  int* flags;        // [grid], zero, cut reductions only
  int64_t x_stride;
  int m, n, k;
  int x_alignment;  // of every row, bytes: 16, 4 or 2; general kernel
  int token_tiles, column_tiles;
  int stages;       // of 64 along the reduction
  int group;        // token tiles in a rasterisation group
  int split_tiles;  // tiles whose reduction is cut
};

// Params of a plan made by plan_portable. Throws kValue where the plan needs a workspace and there is none.
Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args);

}  // namespace nybble::portable
