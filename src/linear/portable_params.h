// What a launch of the portable kernel takes. Read by device code too.
#pragma once

#include <cstdint>

#include "nybble/linear.h"

namespace nybble::portable {

// Shared memory of a CTA: two stages of 64 of x and of decoded W, the nested code values, the schedule (portable_schedule.cuh).
constexpr int shared_bytes(int tokens, int columns) { return 2 * 128 * (tokens + columns) + 1024 + 56; }

struct Params {
  const void* x;             // [m][reduction], 16 bit, rows x_stride elements apart
  const uint8_t* packed;     // [n * k / 2]
  const uint8_t* codes;      // nested: absmax codes [blocks]; plain: any readable bytes, their values do not matter
  const float* scales;       // nested: nested absmax [blocks >> 8]; plain: absmax [blocks]
  const float* code_values;  // nested: [256]; plain: null, read as ones
  const float* offset;       // nested: [1]; plain: null, read as -0
  const void* bias;          // [n] or null, 16 bit
  void* out;                 // [m][columns], 16 bit
  float* partials;           // [grid][tile] fp32, stream-K only
  int* flags;                // [grid], zero, stream-K only
  int64_t x_stride;
  int m, n, k;
  int block_shift;  // log2(block size)
  int scale_shift;  // blocks that share an entry of `scales`, as a power of two: 8 or 0
  int x_alignment;  // bytes, of every row of x: 16, 4 or 2 (general kernel)
  int token_tiles, column_tiles;
  int stages;        // of 64 along the reduction
  int group;         // token tiles in a rasterisation group
  int split_tiles;   // tiles whose reduction is cut
  float values[16];  // of the codes; in constant memory a product reads them at no cost
};

// Params of a plan made by plan_portable. Throws kValue where the plan needs a workspace and there is none.
Params make_params(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args);

}  // namespace nybble::portable
