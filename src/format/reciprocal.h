// 1/x as the GPU's quantisation sees it.
#pragma once

#include "nybble/format.h"

namespace nybble::format {

// rcp.approx.ftz.f32 (kTable) or the correctly rounded 1/x with the same flushing (kIeee): subnormal x gives infinity, a subnormal
// result gives zero. Throws kValue for kTable without a table.
float reciprocal(float x, Reciprocal kind);

}  // namespace nybble::format
