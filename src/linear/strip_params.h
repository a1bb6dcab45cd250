// What a launch of the strip kernel takes.
#pragma once

#include <cstdint>

#include "linear/sm90.h"
#include "linear/strip_work.h"
#include "linear/weight_operand.h"

namespace nybble::small_m::strip {

constexpr int64_t kMaxTokens = 8, kMaxGradTokens = 4;

// Where the groups' data begin in shared memory: pair table, code values and rings come before (strip.cuh).
constexpr int kGroupsAt = 2048 + 65536 + 1024 + 128 + kWarps * kStages * kItemBytes;
constexpr int kSharedStart = 1024;  // address where a CTA's dynamic shared memory starts on sm_90
constexpr int64_t forward_shared_bytes(int group, const Work& w) { return kGroupsAt - kSharedStart + group_bytes(group, w); }

struct Params : WeightOperand {
  const void* x;     // [m][k], grad_x: [m][n]; rows x_stride elements apart
  const void* bias;  // [n] or null
  void* out;         // [m][n], grad_x: [m][k]
  float* partials;   // forward: [ranges][m][n]; grad_x: [CTA + band][m][256], of CTAs that share a band
  int64_t x_stride;
  int m, n, k;
  Work work;
};

}  // namespace nybble::small_m::strip
