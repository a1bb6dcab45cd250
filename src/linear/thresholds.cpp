#include "linear/thresholds.h"

#include "linear/row.h"

namespace nybble {
namespace {

constexpr int64_t kSmallestWeight = int64_t{8} << 20;   // between 1024 x 4096 and 4096 x 4096
constexpr int64_t kLargeWeight = int64_t{32} << 20;     // between 4096 x 4096 and 14336 x 4096
constexpr int64_t kLargerWeight = int64_t{64} << 20;    // between 4096 x 14336 and 27648 x 5120
constexpr int64_t kLargestWeight = int64_t{192} << 20;  // between 27648 x 5120 and 28672 x 8192

// Columns: path, compute capabilities, tokens, forward, input gradient, least number of weights, record.
constexpr Threshold kThresholds[] = {
    // H200: the small-M kernel leads up to 32 tokens (grad_x of smaller weights up to 24, of the smallest up to 16), on larger weights up
    // to 64 (forward of the largest also from 97 to 128), forward of the smallest up to 64. Above, the Hopper kernel with weights in
    // registers.
    {LinearPath::kSmallM, 90, 90, 1, 32, true, true, kLargeWeight, "h200-linear.json"},
    {LinearPath::kSmallM, 90, 90, 33, 64, true, true, kLargerWeight, "h200-linear.json"},
    {LinearPath::kSmallM, 90, 90, 97, 128, true, false, kLargestWeight, "h200-linear.json"},
    {LinearPath::kHopper, 90, 90, 33, 128, true, true, kLargeWeight, "h200-linear.json"},
    {LinearPath::kSmallM, 90, 90, 33, 128, true, true, kLargeWeight, "h200-linear.json"},
    {LinearPath::kHopper, 90, 90, 33, 64, true, true, kSmallestWeight, "h200-linear.json"},
    {LinearPath::kSmallM, 90, 90, 17, 24, false, true, kSmallestWeight, "h200-linear-few.json"},
    {LinearPath::kHopper, 90, 90, 17, 64, false, true, 0, "h200-linear-few.json"},
    {LinearPath::kSmallM, 90, 90, 1, 64, true, true, 0, "h200-linear.json"},
    // H200, 14336 x 4096, 4096 x 14336, 4096 x 4096: geometric means of each path at each of these M. Up to 16 tokens grad_x costs the row
    // kernel 1.4 and the Hopper kernel 1.05 to 1.15 of the portable one; forward they are within 5% at 8, and Hopper leads at 16.
    {LinearPath::kRow, 90, 90, 1, 4, true, true, 0, "h200-linear.json"},
    {LinearPath::kRow, 90, 90, 5, kRowMaxTokens, true, false, 0, "h200-linear.json"},
    {LinearPath::kPortable, 90, 90, 5, 16, false, true, 0, "h200-linear.json"},
    {LinearPath::kHopper, 90, 90, 9, kAnyCount, true, true, 0, "h200-linear.json"},
    // Few tokens are bound by memory and decoding on every card. A count of instructions.
    {LinearPath::kRow, 80, 999, 1, kRowMaxTokens, true, true, 0, ""},
    // Cards with a slow tensor core (GeForce, workstation): decoding costs 0-4% of the multiply, a separate pass more. A model.
    {LinearPath::kPortable, 86, 89, 1, kAnyCount, true, true, 0, ""},
    {LinearPath::kPortable, 120, 129, 1, kAnyCount, true, true, 0, ""},
    // A100: the shared-memory pipe is the limit from a few thousand tokens. A model.
    {LinearPath::kPortable, 80, 80, 1, 4096, true, true, 0, ""},
    // Where wgmma or tcgen05 makes the dense multiply much faster than mma.sync. A trial on one H200.
    {LinearPath::kPortable, 90, 119, 1, 256, true, true, 0, ""},
    {LinearPath::kDequant, 0, 999, 1, kAnyCount, true, true, 0, ""},
};

}  // namespace

std::span<const Threshold> thresholds() { return kThresholds; }

}  // namespace nybble
