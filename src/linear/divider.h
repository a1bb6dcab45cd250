// Division on the device by numbers that the host knows.
#pragma once

#include <cstdint>

namespace nybble {

// Division by what a launch knows: a product and a shift instead of a chain of some hundred clocks before a CTA's first load.
struct Divider {
  uint32_t divisor = 1, factor = 0x80000001u;
  int shift = 31;

  constexpr Divider() = default;
  constexpr explicit Divider(int d) : divisor(static_cast<uint32_t>(d)) {  // 1 to 2^30
    while (uint64_t{1} << (shift - 31) < divisor) shift++;
    factor = static_cast<uint32_t>((uint64_t{1} << shift) / divisor + 1);
  }
  // Of 0 to 2^31 - 1: the factor is above 2^shift / divisor by at most 1, and 2^(shift - 31) is at least the divisor.
  constexpr int quotient(int n) const { return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift); }
  constexpr int remainder(int n) const { return n - quotient(n) * static_cast<int>(divisor); }
};

}  // namespace nybble
