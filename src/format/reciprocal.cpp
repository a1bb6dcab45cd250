#include "format/reciprocal.h"

#include <cmath>
#include <mutex>

#include "format/rounding.h"
#include "nybble/error.h"

namespace nybble {
namespace {

constexpr size_t kTableBytes = (size_t{1} << 23) / 4;

std::mutex table_mutex;
std::shared_ptr<const std::vector<uint8_t>> current_table;

}  // namespace

void set_reciprocal_table(std::span<const uint8_t> deltas) {
  if (!deltas.empty() && deltas.size() != kTableBytes) {
    fail(ErrorKind::kValue, "reciprocal table of ", deltas.size(), " bytes, expected ", kTableBytes, " (2^23 mantissas, 4 to a byte)");
  }
  std::shared_ptr<const std::vector<uint8_t>> table;
  if (!deltas.empty()) table = std::make_shared<const std::vector<uint8_t>>(deltas.begin(), deltas.end());
  const std::lock_guard lock(table_mutex);
  current_table = std::move(table);
}

format::Inverse::Inverse(Reciprocal kind) {
  if (kind == Reciprocal::kIeee) return;
  const std::lock_guard lock(table_mutex);
  if (!current_table) {
    fail(ErrorKind::kValue, "Reciprocal::kTable without a table: call set_reciprocal_table() first, or use Reciprocal::kIeee");
  }
  table_ = current_table;
}

float format::Inverse::operator()(float x) const {
  const float rounded = flush(1.0f / flush(x));
  if (!table_ || !std::isnormal(rounded)) return rounded;
  const uint32_t mantissa = std::bit_cast<uint32_t>(x) & 0x7FFFFFu;
  const uint32_t delta = ((*table_)[mantissa >> 2] >> (2 * (mantissa & 3u))) & 3u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) + delta - 1u);
}

}  // namespace nybble
