#include "linear/thresholds.h"

#include "linear/row.h"

namespace nybble {
namespace {

// Columns: path, compute capabilities, tokens, forward, input gradient, record.
constexpr Threshold kThresholds[] = {
    // H200, 14336 x 4096, 4096 x 14336, 4096 x 4096: geometric means of each path at each of these M. Up to 16 tokens grad_x costs the row
    // kernel 1.4 and the Hopper kernel 1.05 to 1.15 of the portable one; forward they are within 5% at 8, and Hopper leads at 16.
    {LinearPath::kRow, 90, 90, 1, 4, true, true, "h200-linear.json"},
    {LinearPath::kRow, 90, 90, 5, kRowMaxTokens, true, false, "h200-linear.json"},
    {LinearPath::kPortable, 90, 90, 5, 16, false, true, "h200-linear.json"},
    {LinearPath::kHopper, 90, 90, 9, kAnyCount, true, true, "h200-linear.json"},
    // Few tokens are bound by memory and decoding on every card. A count of instructions.
    {LinearPath::kRow, 80, 999, 1, kRowMaxTokens, true, true, ""},
    // Cards with a slow tensor core (GeForce, workstation): decoding costs 0-4% of the multiply, a separate pass more. A model.
    {LinearPath::kPortable, 86, 89, 1, kAnyCount, true, true, ""},
    {LinearPath::kPortable, 120, 129, 1, kAnyCount, true, true, ""},
    // A100: the shared-memory pipe is the limit from a few thousand tokens. A model.
    {LinearPath::kPortable, 80, 80, 1, 4096, true, true, ""},
    // Where wgmma or tcgen05 makes the dense multiply much faster than mma.sync. A trial on one H200.
    {LinearPath::kPortable, 90, 119, 1, 256, true, true, ""},
    {LinearPath::kDequant, 0, 999, 1, kAnyCount, true, true, ""},
};

}  // namespace

std::span<const Threshold> thresholds() { return kThresholds; }

}  // namespace nybble
