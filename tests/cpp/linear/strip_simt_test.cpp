// The strip kernel on the CPU (tests/cpp/simt): slices that divide evenly among the warps and that do not, groups of strips, tails of
// tokens.
#include <gtest/gtest.h>

#include <string>

#include "linear/simt_case.h"
#include "linear/strip.h"
#include "linear/strip_grad.cuh"

namespace nybble::small_m::strip {
alignas(128) uint8_t shared[kSharedStart + kSm90SharedBytes];
}

namespace nybble {
namespace strip = small_m::strip;
namespace {

template <typename T>
void run_forward(const LinearPlan& plan, const strip::Params& p, uint64_t seed) {
  const size_t bytes = strip::kSharedStart + strip::forward_shared_bytes(p.work.group, p.work);
  simt::launch(plan.grid, strip::kThreads, strip::shared, bytes, seed, [&] { strip::multiply<T>(p); });
  if (p.work.ranges == 1) return;
  const int64_t vectors = int64_t{p.m} * p.n / 4;
  simt::launch(static_cast<int>((vectors + strip::kSumThreads - 1) / strip::kSumThreads), strip::kSumThreads, strip::shared, 0, seed,
               [&] { strip::add_ranges<T>(p); });
}

template <typename T>
void run_grad(const LinearPlan& plan, const strip::Params& p, uint64_t seed) {
  simt::launch(plan.grid, strip::kThreads, strip::shared, strip::kGradSharedBytes, seed, [&] { strip::multiply_grad<T>(p); });
  if (plan.split == 1) return;
  const int vectors = p.work.bands * p.m * 64;
  simt::launch((vectors + strip::kSumThreads - 1) / strip::kSumThreads, strip::kSumThreads, strip::shared, 0, seed,
               [&] { strip::add_partials<T>(p); });
}

template <typename T>
void run_kernels(const SimtCase& c, const LinearPlan& plan, const strip::Params& p, uint64_t seed) {
  if (c.forward()) return run_forward<T>(plan, p, seed);
  run_grad<T>(plan, p, seed);
}

std::vector<uint16_t> run(const SimtCase& c, SimtOperands& o, int sm_count, uint64_t seed) {
  const DeviceModel device{"simulated", 90, sm_count, 0, 232448};
  const LinearProblem problem = c.problem();
  EXPECT_EQ(supports_strip(problem, device), "");
  const LinearPlan plan = plan_strip(problem, device);
  SimtLaunch launch(c, o, plan.workspace_bytes);
  const strip::Params p = strip::make_params(plan, problem, launch.args());
  c.half ? run_kernels<__half>(c, plan, p, seed) : run_kernels<__nv_bfloat16>(c, plan, p, seed);
  return launch.take_output();
}

struct StripCase {
  SimtCase base;
  int sm_count;
};

class StripSimt : public ::testing::TestWithParam<StripCase> {};

TEST_P(StripSimt, MatchesFloat64AndRepeatsUnderAnyThreadOrder) {
  const SimtCase& c = GetParam().base;
  SimtOperands o = make_operands(c);
  const std::vector<uint16_t> out = run(c, o, GetParam().sm_count, 1);
  EXPECT_EQ(count_wrong(c, o, out), 0);
  EXPECT_TRUE(out == run(c, o, GetParam().sm_count, 2)) << "another order of threads changed bits";
  o.packed[o.packed.size() / 2] ^= 0x40;  // control: one flipped bit of one nibble
  EXPECT_GT(count_wrong(c, o, run(c, o, GetParam().sm_count, 3)), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, StripSimt,
    ::testing::Values(
        StripCase{{.title = "OneTokenOneSlice", .m = 1, .n = 16, .k = 256, .bias = true}, 1},
        StripCase{{.title = "EightTokensManyGroups", .m = 8, .n = 320, .k = 512}, 1},
        StripCase{{.title = "FullRoundAndRest", .m = 5, .n = 112, .k = 5120, .half = true}, 2},
        StripCase{{.title = "ThreeRoundsFp4", .m = 3, .n = 48, .k = 8448, .quant_type = QuantType::kFp4}, 2},
        StripCase{{.title = "EightTokensBias", .m = 8, .n = 80, .k = 4096, .bias = true}, 1},
        StripCase{{.title = "SevenTokensUnevenStrips", .m = 7, .n = 208, .k = 768}, 3},
        StripCase{{.title = "GradOneUnit", .direction = Direction::kGradInput, .m = 1, .n = 16, .k = 256}, 1},
        StripCase{{.title = "GradCutBandsRaggedRows", .direction = Direction::kGradInput, .m = 4, .n = 1072, .k = 512}, 7},
        StripCase{{.title = "GradFewRowsManyCtas", .direction = Direction::kGradInput, .m = 3, .n = 96, .k = 256, .half = true}, 9},
        StripCase{{.title = "GradWholeBandsPerCta", .direction = Direction::kGradInput, .m = 4, .n = 256, .k = 1536}, 3},
        StripCase{{.title = "GradRunsAcrossBands", .direction = Direction::kGradInput, .m = 2, .n = 640, .k = 1280, .half = true}, 4},
        StripCase{
            {.title = "GradThreeTokensFp4", .direction = Direction::kGradInput, .m = 3, .n = 2080, .k = 256, .quant_type = QuantType::kFp4},
            2},
        StripCase{{.title = "SixTokensTwoGroupsRest", .m = 6, .n = 208, .k = 4608, .bias = true}, 1},
        StripCase{{.title = "EightTokensLongRows", .m = 8, .n = 32, .k = 14336}, 1},
        StripCase{{.title = "ThreeTokensTwoRanges", .m = 3, .n = 48, .k = 27648, .bias = true}, 4},
        StripCase{{.title = "SixTokensTwoRanges", .m = 6, .n = 80, .k = 15360, .half = true}, 4},
        StripCase{{.title = "FiveTokensWarpsWithoutWork", .m = 5, .n = 48, .k = 512}, 1},
        StripCase{{.title = "SixTokensRest", .m = 6, .n = 64, .k = 7168, .half = true}, 2}),
    [](const auto& info) { return info.param.base.title; });

TEST(StripWork, EveryStripOfEverySliceBelongsToOneWarpWhateverTheGroup) {
  for (const int slices : {1, 3, 4, 16, 20, 33, 56, 108}) {
    strip::Work w;
    w.slices = slices;
    w = strip::with_dividers(w);
    const int strips = 7;
    std::vector<int> owner(slices * strips, -1);
    for (const int group : {7, 1, 2, 3, 5}) {
      std::vector<int> taken(slices * strips, 0);
      for (int warp = 0; warp < strip::kWarps; warp++) {
        for (int round = 0; round < strip::rounds(w); round++) {
          for (int low = 0; low < strips; low += group) {
            const strip::Part part = strip::part_of(w, warp, round, low, std::min(strips, low + group));
            for (int s = part.low; s < part.high; s += part.step) {
              const int item = part.slice * strips + s;
              taken[item]++;
              if (owner[item] < 0) owner[item] = warp;
              EXPECT_EQ(owner[item], warp) << slices << " slices, groups of " << group;
            }
          }
        }
      }
      for (const int count : taken) EXPECT_EQ(count, 1) << slices << " slices, groups of " << group;
    }
  }
}

TEST(StripWork, ADividerDividesExactly) {
  for (const int divisor : {1, 2, 3, 5, 7, 16, 20, 56, 112, 131, 132, 1 << 15, (1 << 20) + 1, 1 << 30}) {
    const Divider by(divisor);
    for (const int64_t near : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1} << 20, (int64_t{1} << 31) - 1}) {
      for (int64_t n = near - near % divisor - 2; n <= near - near % divisor + 2; n++) {
        if (n < 0 || n >= int64_t{1} << 31) continue;
        EXPECT_EQ(by.quotient(static_cast<int>(n)), n / divisor) << n << " / " << divisor;
        EXPECT_EQ(by.remainder(static_cast<int>(n)), n % divisor) << n << " % " << divisor;
      }
    }
  }
}

TEST(StripWork, EveryUnitBelongsToItsCta) {
  for (const int ctas : {1, 2, 5, 21}) {
    strip::Work w;
    w.bands = 3, w.units = 7, w.ctas = ctas;
    w = strip::with_dividers(w);
    for (int cta = 0; cta < ctas; cta++) {
      for (int unit = strip::first_unit(w, cta); unit < strip::first_unit(w, cta + 1); unit++) EXPECT_EQ(strip::cta_of_unit(w, unit), cta);
    }
    EXPECT_EQ(strip::first_unit(w, ctas), 21);
  }
}

TEST(StripWork, ARowsBitsDoNotDependOnTheNumberOfTokens) {
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    SimtCase many{.title = "", .direction = direction, .m = direction == Direction::kForward ? 8 : 4, .n = 112, .k = 5120}, few = many;
    few.m = 3;
    SimtOperands o = make_operands(many);
    const std::vector<uint16_t> all = run(many, o, 1, 1);
    SimtOperands first = make_operands(many);
    first.x = first.x.first(few.m * few.reduction());
    const std::vector<uint16_t> some = run(few, first, 1, 1);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
  }
}

}  // namespace
}  // namespace nybble
