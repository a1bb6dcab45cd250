// Random multiplies for the stress test: which problem, which plan, and where its operands lie in the pools. Host-only and pure.
#pragma once

#include <cstdint>
#include <string>

#include "nybble/linear.h"

namespace nybble::stress {

// splitmix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t in(int64_t low, int64_t high) { return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1)); }
  bool one_in(int count) { return next() % static_cast<uint64_t>(count) == 0; }
  int64_t log_in(int64_t low, int64_t high);  // as many small as large numbers

 private:
  uint64_t state_;
};

// What every pool holds at least; a case never reaches beyond.
constexpr int64_t kMaxWeights = 12 << 20;     // n * k
constexpr int64_t kMaxActivations = 3 << 20;  // rows with their stride
constexpr int64_t kMaxOutputs = 1 << 20;
constexpr int64_t kMaxProducts = 600 << 20;  // m * n * k
constexpr int64_t kPoolSlack = 1 << 20;      // elements or bytes before an operand, by its random offset

// Families of kernels, each with faults of its own. Hopper: tiles of tokens; HopperRows: of row pairs. SmallM: tiles. HopperRows96And160:
// only those tiles of HopperRows, for faults that the other tiles might be caught by.
enum class Kernels { kHopper, kHopperRows, kSmallM, kStrips, kPortable, kRow, kHopperRows96And160 };
constexpr Kernels kAllKernels[] = {Kernels::kHopper, Kernels::kHopperRows, Kernels::kSmallM,
                                   Kernels::kStrips, Kernels::kPortable,   Kernels::kRow};
const char* name(Kernels kernels);
Kernels kernels_named(const std::string& text);

struct Case {
  uint64_t seed = 0;
  LinearProblem problem;
  LinearPlan plan;
  int64_t in_row_stride = 0;
  // Byte offsets from 256-byte aligned pools; problem.*_alignment say the same.
  int64_t in_offset = 0, packed_offset = 0, codes_offset = 0, scales_offset = 0, bias_offset = 0, out_offset = 0;

  int64_t columns() const { return problem.direction == Direction::kForward ? problem.n : problem.k; }
  int64_t reduction() const { return problem.direction == Direction::kForward ? problem.k : problem.n; }
};

// A problem that `kernels` take on this device or on one with fewer multiprocessors, with one of the plans that they have for it: every
// variant and schedule comes up.
// size: fraction of the limits above, 1 for all. Throws when they take none of 1,000.
Case draw_case(uint64_t seed, Kernels kernels, const DeviceModel& device, double size);

std::string to_string(const Case& c);

}  // namespace nybble::stress
