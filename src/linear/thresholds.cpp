#include "linear/thresholds.h"

#include "linear/row.h"

namespace nybble {
namespace {

// Columns: path, compute capabilities, tokens, forward, input gradient, record.
constexpr Threshold kThresholds[] = {
    // Few tokens are bound by memory and decoding on every card. A count of instructions.
    {LinearPath::kRow, 80, 999, 1, kRowMaxTokens, true, true, ""},
    // Cards with a slow tensor core (GeForce, workstation): decoding costs 0-4% of the multiply, a separate pass more. A model.
    {LinearPath::kPortable, 86, 89, 1, kAnyCount, true, true, ""},
    {LinearPath::kPortable, 120, 129, 1, kAnyCount, true, true, ""},
    // A100: the shared-memory pipe is the limit from a few thousand tokens. A model.
    {LinearPath::kPortable, 80, 80, 1, 4096, true, true, ""},
    // Measured at M = 64 to 8192 on one H200: 0.45 to 0.98 of dequantise + dense. Below 64 the same time as at 64.
    {LinearPath::kHopper, 90, 90, 1, kAnyCount, true, true, ""},
    // Where wgmma or tcgen05 makes the dense multiply much faster than mma.sync. A trial on one H200.
    {LinearPath::kPortable, 90, 119, 1, 256, true, true, ""},
    {LinearPath::kDequant, 0, 999, 1, kAnyCount, true, true, ""},
};

}  // namespace

std::span<const Threshold> thresholds() { return kThresholds; }

}  // namespace nybble
