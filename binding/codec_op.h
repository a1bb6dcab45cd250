// Boxed kernels of the codec, see ops.cpp for their schemas.
#pragma once

#include "tensors.h"

namespace nybble::binding {

void dequantize_4bit_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void quantize_4bit_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void quantize_scales_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void absmax_mean_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace nybble::binding
