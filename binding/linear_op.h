// Boxed kernels of the multiply, see ops.cpp for their schemas.
#pragma once

#include "tensors.h"

namespace nybble::binding {

void linear_4bit(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void linear_4bit_grad_input(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace nybble::binding
