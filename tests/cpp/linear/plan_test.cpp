#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "nybble/error.h"
#include "nybble/linear.h"
#include "nybble/tune.h"

namespace nybble {
namespace {

const DeviceModel kCpuDevice{"cpu", 0, 0, 0, 0};
const DeviceModel kH200{"NVIDIA H200", 90, 132, 60 << 20, 232448};
const DeviceModel kRtx4090{"NVIDIA GeForce RTX 4090", 89, 128, 72 << 20, 101376};
const DeviceModel kA100{"NVIDIA A100-SXM4-80GB", 80, 108, 40 << 20, 166912};
const DeviceModel kTuring{"NVIDIA T4", 75, 40, 4 << 20, 65536};

LinearProblem problem(int64_t m, int64_t n, int64_t k, Direction direction = Direction::kForward) {
  LinearProblem p;
  p.m = m, p.n = n, p.k = k, p.direction = direction;
  return p;
}

LinearProblem with_mode(LinearProblem p, LinearMode mode) {
  p.mode = mode;
  return p;
}

LinearProblem with_block(LinearProblem p, int32_t block_size) {
  p.block_size = block_size;
  return p;
}

struct PathCase {
  const char* title;
  LinearProblem problem;
  DeviceModel device;
  LinearPath path;
};

class PlanPath : public ::testing::TestWithParam<PathCase> {};

TEST_P(PlanPath, IsTheExpectedOneAndSaysWhy) {
  const PathCase& c = GetParam();
  const LinearPlan plan = plan_linear(c.problem, c.device);
  EXPECT_EQ(plan.path, c.path) << to_string(plan);
  EXPECT_LE(plan.workspace_bytes, 32 << 20);
  if (plan.path == LinearPath::kDequant) EXPECT_FALSE(plan.reason.empty());
  EXPECT_EQ(to_string(plan), to_string(plan_linear(c.problem, c.device)));
}

LinearProblem plain(LinearProblem p) {
  p.nested = false;
  return p;
}

LinearProblem fp32(LinearProblem p) {
  p.dtype = DType::kFloat32;
  return p;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PlanPath,
    ::testing::Values(
        PathCase{"CpuAuto", problem(4, 64, 64), kCpuDevice, LinearPath::kCpu},
        PathCase{"CpuFused", with_mode(problem(4, 64, 64), LinearMode::kFused), kCpuDevice, LinearPath::kCpu},
        PathCase{"CpuDequant", with_mode(problem(4, 64, 64), LinearMode::kDequant), kCpuDevice, LinearPath::kDequant},
        PathCase{"CpuGradOdd", problem(1, 77, 33, Direction::kGradInput), kCpuDevice, LinearPath::kCpu},
        PathCase{"CpuFp32", fp32(problem(3, 7, 5)), kCpuDevice, LinearPath::kCpu},
        PathCase{"NoRows", problem(0, 64, 64), kH200, LinearPath::kNone},
        PathCase{"NoColumns", problem(4, 0, 64), kCpuDevice, LinearPath::kNone},
        PathCase{"GpuDequant", with_mode(problem(4, 64, 64), LinearMode::kDequant), kH200, LinearPath::kDequant},
        PathCase{"HopperMany", problem(2048, 14336, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200OneTokenGrad", problem(1, 4096, 4096, Direction::kGradInput), kH200, LinearPath::kSmallM},
        PathCase{"H200OneTokenPlain", plain(problem(1, 4096, 4096)), kH200, LinearPath::kSmallM},
        PathCase{"H200OneTokenPlainRagged", plain(problem(1, 4000, 4096)), kH200, LinearPath::kRow},
        PathCase{"HopperOddN", problem(2048, 1001, 4096), kH200, LinearPath::kDequant},
        PathCase{"GpuFp32", fp32(problem(3, 64, 64)), kH200, LinearPath::kDequant},
        PathCase{"H200OneToken", problem(1, 14336, 4096), kH200, LinearPath::kSmallM},
        PathCase{"H200EightTokens", problem(8, 4096, 4096), kH200, LinearPath::kSmallM},
        PathCase{"H200EightTokensRaggedGrad", problem(8, 4000, 4096, Direction::kGradInput), kH200, LinearPath::kPortable},
        PathCase{"H200SixteenTokensRagged", problem(16, 4000, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200SixteenTokensGrad", problem(16, 4096, 4096, Direction::kGradInput), kH200, LinearPath::kSmallM},
        PathCase{"H200SeventeenTokensRaggedGrad", problem(17, 4000, 4096, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokens", problem(64, 14336, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokensPlainScales", plain(problem(64, 14336, 4096)), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokensGrad", problem(33, 4096, 14336, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokensLarger", problem(64, 27648, 5120), kH200, LinearPath::kSmallM},
        PathCase{"H200ThirtyTwoTokens", problem(32, 14336, 4096), kH200, LinearPath::kSmallM},
        PathCase{"H200NinetyTokens", problem(96, 14336, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200NinetyTokensGrad", problem(96, 14336, 4096, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200MoreTokens", problem(128, 14336, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200MoreTokensPlainScales", plain(problem(128, 14336, 4096)), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokensOfASmallWeightPlainScales", plain(problem(64, 4096, 4096)), kH200, LinearPath::kHopper},
        PathCase{"H200MoreTokensOfTheLargestWeight", problem(128, 28672, 8192), kH200, LinearPath::kSmallM},
        PathCase{"H200SomeTokensOfASmallWeight", problem(64, 4096, 4096), kH200, LinearPath::kHopper},
        PathCase{"H200SomeTokensOfTheSmallestWeight", problem(64, 1024, 4096), kH200, LinearPath::kSmallM},
        PathCase{"H200SomeTokensOfTheSmallestWeightGrad", problem(64, 1024, 4096, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200SixteenTokensOfTheSmallestWeightGrad", problem(16, 1024, 4096, Direction::kGradInput), kH200, LinearPath::kSmallM},
        PathCase{"H200SeventeenTokensOfTheSmallestWeightGrad", problem(17, 1024, 4096, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200SeventeenTokensOfASmallWeightGrad", problem(17, 4096, 4096, Direction::kGradInput), kH200, LinearPath::kSmallM},
        PathCase{"H200ThirtyTwoTokensOfASmallWeightGrad", problem(32, 4096, 4096, Direction::kGradInput), kH200, LinearPath::kHopper},
        PathCase{"H200OneTokenOfRowsThatStripsDoNotTake", problem(1, 4096, 3072), kH200, LinearPath::kSmallM},
        PathCase{"H200MoreTokensOfASmallWeight", problem(128, 4096, 4096), kH200, LinearPath::kHopper},
        PathCase{"GeForceManyTokens", problem(8192, 14336, 4096), kRtx4090, LinearPath::kPortable},
        PathCase{"A100ManyTokens", problem(8192, 14336, 4096), kA100, LinearPath::kDequant},
        PathCase{"OddColumns", problem(64, 256, 100), kRtx4090, LinearPath::kPortable},
        PathCase{"OddColumnsManyTokens", problem(512, 256, 100), kRtx4090, LinearPath::kDequant},
        PathCase{"OddColumnsFused", with_mode(problem(512, 256, 100), LinearMode::kFused), kRtx4090, LinearPath::kPortable},
        PathCase{"Block32ManyTokens", with_block(problem(129, 256, 128), 32), kRtx4090, LinearPath::kDequant},
        PathCase{"Block32OneToken", with_block(problem(1, 256, 128), 32), kRtx4090, LinearPath::kRow},
        PathCase{"OldCard", problem(4, 64, 64), kTuring, LinearPath::kDequant}),
    [](const auto& info) { return info.param.title; });

struct BadCase {
  const char* title;
  std::function<void(LinearProblem&)> spoil;
  const char* word;  // that the message must contain
};

class PlanRefuses : public ::testing::TestWithParam<BadCase> {};

TEST_P(PlanRefuses, AndNamesTheValue) {
  LinearProblem p = problem(8, 256, 128);
  EXPECT_NO_THROW(plan_linear(p, kH200)) << "the unspoilt twin is accepted";
  GetParam().spoil(p);
  for (const DeviceModel& device : {kCpuDevice, kH200}) {
    try {
      plan_linear(p, device);
      ADD_FAILURE() << "accepted on " << device.name;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kValue);
      EXPECT_NE(std::string(error.what()).find(GetParam().word), std::string::npos) << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Values, PlanRefuses,
    ::testing::Values(BadCase{"NegativeM", [](auto& p) { p.m = -1; }, "-1"}, BadCase{"NegativeN", [](auto& p) { p.n = -7; }, "-7"},
                      BadCase{"BlockSize63", [](auto& p) { p.block_size = 63; }, "63"},
                      BadCase{"BlockSize0", [](auto& p) { p.block_size = 0; }, "block size 0"},
                      BadCase{"BlockSize8192", [](auto& p) { p.block_size = 8192; }, "8192"},
                      BadCase{"Overflow", [](auto& p) { p.n = p.k = int64_t{1} << 33; }, "8589934592"},
                      BadCase{"ShortStride", [](auto& p) { p.x_row_stride = 127; }, "127"},
                      BadCase{"Alignment3", [](auto& p) { p.x_alignment = 3; }, "alignment 3"},
                      BadCase{"Alignment512", [](auto& p) { p.packed_alignment = 512; }, "512"},
                      BadCase{"BiasInGrad", [](auto& p) { p.bias = true, p.direction = Direction::kGradInput; }, "bias"}),
    [](const auto& info) { return info.param.title; });

TEST(Plan, WorkspaceAndGridStayInBounds) {
  for (const DeviceModel& device : {kH200, kRtx4090, kA100}) {
    for (const int64_t m : {1, 2, 3, 4, 8, 9, 16, 17, 64, 65, 128, 129, 256, 300, 512, 2048, 65536}) {
      for (const auto& [n, k] :
           {std::pair<int64_t, int64_t>{14336, 4096}, {4096, 14336}, {1024, 4096}, {128256, 8192}, {8, 64}, {27648, 5120}}) {
        for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
          const LinearPlan plan = plan_linear(problem(m, n, k, direction), device);
          EXPECT_LE(plan.workspace_bytes, (int64_t{32} << 20) + n * k * 2 / 32) << m << " " << n << " " << k << ": " << to_string(plan);
          if (plan.path != LinearPath::kDequant) EXPECT_GE(plan.grid, 1) << to_string(plan);
          if (plan.path != LinearPath::kPortable || plan.split_tiles == 0) continue;
          const int64_t stages = ((direction == Direction::kForward ? k : n) + 63) / 64;
          EXPECT_GE(plan.split_tiles * stages, plan.grid) << "a CTA without a stage would be waited for: " << to_string(plan);
        }
      }
    }
  }
}

TEST(Plan, BatchInvariantPlansAreOfOneOrderWhateverM) {
  for (const DeviceModel& device : {kRtx4090, kA100}) {
    for (const int64_t m : {1, 8, 16, 100, 256, 1000, 9000}) {
      LinearProblem p = problem(m, 4096, 4096);
      p.batch_invariant = true;
      const LinearPlan plan = plan_linear(p, device);
      EXPECT_EQ(plan.path, LinearPath::kPortable) << to_string(plan);
      EXPECT_TRUE(plan.batch_invariant && plan.split == 1 && plan.split_tiles == 0) << to_string(plan);
    }
  }
  EXPECT_FALSE(plan_linear(problem(1, 4096, 4096), kRtx4090).batch_invariant) << "the control: the row kernel's order depends on m";
}

TEST(Plan, FusedModeWithoutAFusedPathIsAnErrorWithTheReason) {
  const LinearProblem p = fp32(with_mode(problem(8, 256, 128), LinearMode::kFused));
  ASSERT_FALSE(supports_fused(p, kH200).empty());
  try {
    plan_linear(p, kH200);
    FAIL() << "fell back silently";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(supports_fused(p, kH200)), std::string::npos) << error.what();
  }
}

TuneEntry entry(int64_t m_min, int64_t m_max, LinearPath path) {
  TuneEntry e;
  e.device = kH200.name, e.n = 256, e.k = 128, e.m_min = m_min, e.m_max = m_max, e.path = path;
  return e;
}

TEST(Tune, HashIsStableAndIndependentOfTheOrderOfEntries) {
  TuneTable a, b;
  EXPECT_EQ(a.hash(), 0u);
  a.add(entry(1, 8, LinearPath::kDequant)), a.add(entry(9, 64, LinearPath::kPortable));
  b.add(entry(9, 64, LinearPath::kPortable)), b.add(entry(1, 8, LinearPath::kDequant));
  EXPECT_EQ(a.hash(), b.hash());
  TuneTable c;
  c.add(entry(1, 8, LinearPath::kDequant)), c.add(entry(9, 65, LinearPath::kPortable));
  EXPECT_NE(a.hash(), c.hash());
  TuneTable one;
  one.add(entry(1, 8, LinearPath::kDequant));
  EXPECT_EQ(one.hash(), 0xd95eea2baa1d8157u) << std::hex << one.hash() << ": a changed hash makes users' recorded plans unreadable";
}

TEST(Tune, DecidesOnItsOwnDeviceAndShapeOnlyAndIsPrinted) {
  TuneTable table;
  table.add(entry(5, 8, LinearPath::kDequant));
  const LinearPlan tuned = plan_linear(problem(8, 256, 128), kH200, &table);
  EXPECT_EQ(tuned.path, LinearPath::kDequant);
  EXPECT_EQ(tuned.reason, "tune table");
  EXPECT_TRUE(tuned.measured);
  EXPECT_EQ(tuned.tune_hash, table.hash());
  for (const LinearProblem& other : {problem(9, 256, 128), problem(8, 128, 256), problem(8, 256, 128, Direction::kGradInput)}) {
    EXPECT_NE(plan_linear(other, kH200, &table).reason, "tune table");
  }
  DeviceModel card = kH200;
  card.name = "another card";
  EXPECT_NE(plan_linear(problem(8, 256, 128), card, &table).reason, "tune table");
}

TEST(Tune, RefusesOverlapsAndEmptyRanges) {
  TuneTable table;
  table.add(entry(5, 8, LinearPath::kDequant));
  EXPECT_NO_THROW(table.add(entry(9, 12, LinearPath::kRow)));
  EXPECT_THROW(table.add(entry(8, 9, LinearPath::kPortable)), Error);
  EXPECT_THROW(table.add(entry(14, 13, LinearPath::kPortable)), Error);
  EXPECT_THROW(table.add(entry(20, 30, LinearPath::kCpu)), Error);
  EXPECT_EQ(table.entries().size(), 2u);
}

}  // namespace
}  // namespace nybble
