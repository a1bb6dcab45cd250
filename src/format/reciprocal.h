// 1/x as the GPU's quantisation sees it.
#pragma once

#include <memory>
#include <vector>

#include "nybble/format.h"

namespace nybble::format {

// rcp.approx.ftz.f32 (kTable) or the correctly rounded 1/x with the same flushing (kIeee): subnormal x gives infinity, a subnormal
// result gives zero. Holds the table that was set when it was made; that constructor throws kValue when none was.
class Inverse {
 public:
  explicit Inverse(Reciprocal kind);
  float operator()(float x) const;

 private:
  std::shared_ptr<const std::vector<uint8_t>> table_;  // null for kIeee
};

}  // namespace nybble::format
