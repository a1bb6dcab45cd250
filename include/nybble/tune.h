// Choices that a user measured on one card and that plan_linear() follows. A table is data: it is printed, hashed into every plan, and
// never changes which bits a path gives, only which path is taken.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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

// The text of a table, docs/tune.md: entries one a line, sorted, so that equal tables have equal texts. Measured times travel beside the
// table, not in it.
std::string to_json(const TuneTable& table);
// Throws kFormat with `source` and the number of the entry for anything that is not such a text: bad JSON, another version, an unknown key
// or path, an overlap.
TuneTable tune_table_from_json(std::string_view text, const std::string& source);

// The table that plans of this process follow: what was set last, or the file that the environment variable NYBBLE_TUNE names, or null.
// That file is read once; one that is missing or wrong is an error at every plan, never a plan without it. A table once returned lives as
// long as the process. Thread safe.
const TuneTable* active_tune_table();
void set_active_tune_table(const TuneTable& table);  // an empty table: none, whatever NYBBLE_TUNE says

}  // namespace nybble
