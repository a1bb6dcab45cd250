// What a device of compute capability 9.0 lends.
#pragma once

namespace nybble {

constexpr int kSm90SharedBytes = 232448;  // of a CTA, at most

}  // namespace nybble
