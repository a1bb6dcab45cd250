// The product has no fault switches: every fault is the constant false and a delay is nothing (device/fault.h).
#include "device/fault.h"

#include <gtest/gtest.h>

#ifdef NYBBLE_FAULT_SWITCHES
#  error "Tests of the product, built with fault switches"
#endif

namespace {

static_assert(!NYBBLE_FAULT(kNoProxyFence) && !NYBBLE_FAULT(kAnyOtherName), "a fault that can be on");

constexpr int after_a_delay() {
  NYBBLE_DELAY(1);
  return 7;
}
static_assert(after_a_delay() == 7, "a delay that is not a constant expression does something");

TEST(Fault, TheProductHasNoSwitches) { EXPECT_FALSE(NYBBLE_FAULT(kWrongParity)); }

}  // namespace
