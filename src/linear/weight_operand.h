// A 4-bit weight as device code reads it. Plain scales look like nested ones with code value 1 and offset -0 (x * 1 + -0 is x), so that
// kernels have one path for both.
#pragma once

#include <cstdint>

#include "nybble/format.h"

namespace nybble {

struct WeightOperand {
  const uint8_t* packed;     // [n * k / 2]
  const uint8_t* codes;      // nested: absmax codes [blocks]; plain: any readable bytes, their values do not matter
  const float* scales;       // nested: nested absmax [blocks >> 8]; plain: absmax [blocks]
  const float* code_values;  // nested: [256]; plain: null, read as ones
  const float* offset;       // nested: [1]; plain: null, read as -0
  int block_shift;           // log2(block size)
  int scale_shift;           // log2 of the blocks that share an entry of `scales`: 8 or 0
  float values[16];          // of the codes, FP4's code 8 as -0; in constant memory a product reads them at no cost
};

WeightOperand weight_operand(const Nf4Weight& weight);

}  // namespace nybble
