// Which path is the fastest, as data: the first row that matches a problem and whose path supports it is taken. Rows without a record are a
// guess from a model, and plans made from them say "unmeasured".
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "nybble/linear.h"

namespace nybble {

constexpr int64_t kAnyCount = std::numeric_limits<int64_t>::max();

struct Threshold {
  LinearPath path;
  int sm_min, sm_max;      // inclusive
  int64_t m_min, m_max;    // inclusive
  bool forward, backward;  // directions of the row
  int64_t weights_min;     // n * k, inclusive
  const char* record;      // file under benchmarks/records, empty: unmeasured
};

std::span<const Threshold> thresholds();

}  // namespace nybble
