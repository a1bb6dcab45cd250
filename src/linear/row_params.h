// What a launch of the row kernels takes.
#pragma once

#include <cstdint>

#include "linear/weight_operand.h"
#include "nybble/linear.h"

namespace nybble::row {

// Threads of a CTA: what 64 Ki registers allow.
constexpr int threads(int tokens) { return tokens <= 4 ? 512 : 384; }
constexpr int kRows = 4;             // of W that a warp works on at a time
constexpr int kCodes = 32;           // of a row that a lane owns in the forward: 16 bytes
constexpr int kSlice = 32 * kCodes;  // columns of a warp in the forward

// Columns of grad_x that a lane owns: it keeps tokens x columns sums in registers.
constexpr int grad_codes(int tokens) { return tokens <= 2 ? 32 : 32 * 2 / tokens; }

struct Params : WeightOperand {
  const void* x;     // [m][reduction], 16 bit, rows x_stride elements apart
  const void* bias;  // [n] or null, 16 bit
  void* out;         // [m][columns], 16 bit
  float* partials;   // [split][m][columns] fp32; null: split is 1 and the kernel writes `out`
  int64_t x_stride;
  int m, n, k;
  int rows;    // of W in a CTA
  int ranges;  // of rows
  int slices;  // forward: of kSlice columns in a CTA, grad input: in all
  int split;   // forward: chunks of `slices` slices, grad input: ranges
};

// Bytes of shared memory behind the pair table and 256 nested code values: x, and the sums of the warps.
constexpr int64_t forward_bytes(int tokens, int slices, int rows) {
  return int64_t{2} * tokens * slices * kSlice + int64_t{4} * tokens * slices * rows;
}
constexpr int64_t grad_bytes(int tokens, int rows) { return int64_t{4} * tokens * rows; }
constexpr int kFixedBytes = 2048 + 256 * 32 * 8 + 1024 + 128;  // the first term lets the pair table lie at a fixed address
constexpr int kSharedLimit = 99 * 1024;

Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args);
int64_t shared_bytes(const LinearPlan& plan, const LinearProblem& problem);

}  // namespace nybble::row
