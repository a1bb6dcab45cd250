// The random problems of the stress test: legal, repeatable, and wide enough that every variant of every path comes up.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "linear/hopper.h"
#include "linear/portable.h"
#include "linear/row.h"
#include "linear/small_m.h"
#include "linear/strip.h"
#include "nybble/error.h"
#include "stress/shapes.h"

namespace nybble::stress {
namespace {

DeviceModel h200() { return {"NVIDIA H200", 90, 132, int64_t{50} << 20, 232448}; }

LinearPath path_of(Kernels kernels) {
  switch (kernels) {
    case Kernels::kHopper:
    case Kernels::kHopperRows:
    case Kernels::kHopperRows96And160:
      return LinearPath::kHopper;
    case Kernels::kSmallM:
    case Kernels::kStrips:
      return LinearPath::kSmallM;
    case Kernels::kPortable:
      return LinearPath::kPortable;
    case Kernels::kRow:
      return LinearPath::kRow;
  }
  return LinearPath::kNone;
}

std::string refusal(const Case& c) {
  switch (c.plan.path) {
    case LinearPath::kHopper:
      return supports_hopper(c.problem, h200());
    case LinearPath::kSmallM:
      return c.plan.variant == kSmallMStrip ? supports_strip(c.problem, h200()) : supports_small_m_tiles(c.problem, h200());
    case LinearPath::kPortable:
      return supports_portable(c.problem, h200());
    default:
      return supports_row(c.problem, h200());
  }
}

TEST(StressShapes, EveryCaseIsTakenByItsKernelsAndStaysInsideThePools) {
  for (const Kernels kernels : kAllKernels) {
    for (uint64_t seed = 0; seed < 500; seed++) {
      const Case c = draw_case(seed, kernels, h200(), 1.0);
      ASSERT_EQ(c.plan.path, path_of(kernels)) << to_string(c);
      ASSERT_EQ(refusal(c), "") << to_string(c);
      ASSERT_LE(c.problem.n * c.problem.k, kMaxWeights) << to_string(c);
      ASSERT_LE(c.problem.m * std::max(c.in_row_stride, c.reduction()), kMaxActivations) << to_string(c);
      ASSERT_LE(c.problem.m * c.columns(), kMaxOutputs) << to_string(c);
      for (const int64_t offset : {c.in_offset, c.packed_offset, c.codes_offset, c.scales_offset, c.bias_offset}) {
        ASSERT_LT(offset, kPoolSlack) << to_string(c);
      }
      ASSERT_EQ(c.packed_offset % c.problem.packed_alignment, 0);
      ASSERT_EQ(c.in_offset % c.problem.x_alignment, 0);
      ASSERT_EQ(c.in_row_stride, c.problem.x_row_stride);
    }
  }
}

TEST(StressShapes, OneSeedGivesOneCase) {
  std::set<std::string> texts;
  for (uint64_t seed = 0; seed < 100; seed++) {
    const std::string text = to_string(draw_case(seed, Kernels::kPortable, h200(), 1.0));
    EXPECT_EQ(text, to_string(draw_case(seed, Kernels::kPortable, h200(), 1.0)));
    texts.insert(text);
  }
  EXPECT_EQ(texts.size(), 100u);
}

TEST(StressShapes, EveryVariantComesUpInBothDirections) {
  const struct {
    Kernels kernels;
    int variants, cases;
  } rows[] = {{Kernels::kHopper, (kHopperTiles - kHopperRowTiles) * kHopperSchedules * kHopperScales, 3000},
              {Kernels::kHopperRows, kHopperRowTiles * kHopperSchedules, 2000},  // one way of the scales
              {Kernels::kHopperRows96And160, 2 * kHopperSchedules, 1000},
              {Kernels::kSmallM, kSmallMSizes, 500},
              {Kernels::kStrips, 1, 100},
              {Kernels::kPortable, 5, 500},
              {Kernels::kRow, 4, 500}};
  for (const auto& row : rows) {
    std::set<std::pair<int, Direction>> seen;
    bool partial_sums = false;
    for (int seed = 0; seed < row.cases; seed++) {
      const Case c = draw_case(static_cast<uint64_t>(seed), row.kernels, h200(), 1.0);
      seen.insert({c.plan.variant, c.problem.direction});
      partial_sums = partial_sums || c.plan.workspace_bytes > 0;
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(2 * row.variants)) << name(row.kernels);
    EXPECT_TRUE(partial_sums) << name(row.kernels);
  }
}

// Which of their ways row pairs fetch plain scales by depends on where these lie.
TEST(StressShapes, PlainScalesOfRowPairsLieAtMultiplesOfSixteenBytesAndElsewhere) {
  std::set<std::pair<bool, Direction>> seen;
  for (uint64_t seed = 0; seed < 500; seed++) {
    const LinearProblem p = draw_case(seed, Kernels::kHopperRows, h200(), 1.0).problem;
    if (!p.nested && p.block_size == 64 && p.k % 256 == 0) seen.insert({suits_row_pairs(p), p.direction});
  }
  EXPECT_EQ(seen.size(), 4u);
}

TEST(StressShapes, KernelsThatTheCardLacksAreAnErrorWithTheReason) {
  DeviceModel ampere{"A card", 86, 28, 4 << 20, 101376};
  EXPECT_THROW(
      {
        try {
          draw_case(1, Kernels::kHopper, ampere, 1.0);
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("compute capability 9.0"), std::string::npos);
          throw;
        }
      },
      Error);
}

}  // namespace
}  // namespace nybble::stress
