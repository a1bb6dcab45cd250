// Choices that a user measured on one card and that plan_linear() follows. A table is data: it is printed, hashed into every plan, and
// never changes which bits a path gives, only which path is taken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nybble/linear.h"

namespace nybble {

// One measured choice: problems of this shape with m_min <= m <= m_max on this device take `path`.
struct TuneEntry {
  std::string device;  // DeviceModel::name
  Direction direction = Direction::kForward;
  DType dtype = DType::kBFloat16;
  int64_t n = 0;
  int64_t k = 0;
  int64_t m_min = 0;
  int64_t m_max = 0;  // inclusive
  LinearPath path = LinearPath::kNone;
};

class TuneTable {
 public:
  // Throws kValue for an entry without a device, with an empty range of m, a path that a CUDA plan cannot take, or one that overlaps an
  // entry of another path.
  void add(const TuneEntry& entry);

  // The entry for this problem and device, or null. Ranges of one shape never overlap, so the order of add() does not matter.
  const TuneEntry* find(const LinearProblem& problem, const DeviceModel& device) const;

  const std::vector<TuneEntry>& entries() const { return entries_; }

  // FNV-1a (64 bit) of the sorted entries' text; equal for equal tables on every machine. 0 for the empty table.
  uint64_t hash() const;

 private:
  std::vector<TuneEntry> entries_;  // sorted
};

}  // namespace nybble
