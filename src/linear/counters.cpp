// Which path ran how often: counted beside each launch, read by tests and by nybble.path_counters().
#include <array>
#include <atomic>

#include "nybble/error.h"
#include "nybble/linear.h"

namespace nybble {
namespace {

constexpr int kPaths = static_cast<int>(LinearPath::kHopper) + 1;
constexpr int kDirections = 2;
std::array<std::atomic<int64_t>, kPaths * kDirections> counts;

std::atomic<int64_t>& count_of(LinearPath path, Direction direction) {
  const int row = static_cast<int>(path);
  const int column = static_cast<int>(direction);
  if (row >= kPaths || column >= kDirections) {
    fail(ErrorKind::kValue, "launch counter (path ", row, ", direction ", column, "), expected path below ", kPaths,
         " and direction 0 or 1");
  }
  return counts[row * kDirections + column];
}

}  // namespace

void count_launch(LinearPath path, Direction direction) { count_of(path, direction).fetch_add(1, std::memory_order_relaxed); }
int64_t launches(LinearPath path, Direction direction) { return count_of(path, direction).load(std::memory_order_relaxed); }
void reset_launches() {
  for (auto& count : counts) count.store(0, std::memory_order_relaxed);
}

}  // namespace nybble
