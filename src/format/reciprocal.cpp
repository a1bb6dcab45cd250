#include "format/reciprocal.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "format/rounding.h"
#include "nybble/error.h"

namespace nybble {
namespace {

constexpr size_t kTableBytes = (size_t{1} << 23) / 4;

// Replaced as a whole, so that readers on other threads see one table or the other.
std::atomic<std::shared_ptr<const std::vector<uint8_t>>> reciprocal_table;

}  // namespace

void set_reciprocal_table(std::span<const uint8_t> deltas) {
  if (deltas.size() != kTableBytes) {
    fail(ErrorKind::kValue, "reciprocal table of ", deltas.size(), " bytes, expected ", kTableBytes, " (2^23 mantissas, 4 to a byte)");
  }
  reciprocal_table.store(std::make_shared<const std::vector<uint8_t>>(deltas.begin(), deltas.end()));
}

float format::reciprocal(float x, Reciprocal kind) {
  const float rounded = flush(1.0f / flush(x));
  if (kind == Reciprocal::kIeee || !std::isnormal(rounded)) return rounded;
  const auto table = reciprocal_table.load();
  if (!table) {
    fail(ErrorKind::kValue, "Reciprocal::kTable without a table: call set_reciprocal_table() first, or use Reciprocal::kIeee");
  }
  const uint32_t mantissa = std::bit_cast<uint32_t>(x) & 0x7FFFFFu;
  const uint32_t delta = ((*table)[mantissa >> 2] >> (2 * (mantissa & 3u))) & 3u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) + delta - 1u);
}

}  // namespace nybble
