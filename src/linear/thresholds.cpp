#include "linear/thresholds.h"

namespace nybble {
namespace {

constexpr Threshold kThresholds[] = {
    {LinearPath::kDequant, 0, 999, 1, kAnyCount, true, true, ""},
};

}  // namespace

std::span<const Threshold> thresholds() {
  return kThresholds;
}

}  // namespace nybble
