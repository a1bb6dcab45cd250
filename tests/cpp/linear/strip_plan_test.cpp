#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "linear/small_m.h"
#include "linear/strip.h"

namespace nybble {
namespace strip = small_m::strip;
namespace {

const DeviceModel kH200{"NVIDIA H200", 90, 132, 60 << 20, 232448};
const std::pair<int64_t, int64_t> kShapes[] = {{14336, 4096}, {4096, 14336}, {4096, 4096}, {27648, 5120},
                                               {5120, 27648}, {256, 1024},   {4000, 768}};

LinearProblem problem(int64_t m, int64_t n, int64_t k, Direction direction = Direction::kForward) {
  LinearProblem p;
  p.m = m, p.n = n, p.k = k, p.direction = direction;
  return p;
}

struct Refusal {
  const char* word;  // of the reason; empty: supported
  std::function<void(LinearProblem&, DeviceModel&)> change;
};

TEST(StripSupports, TellsTheReason) {
  const Refusal refusals[] = {
      {"", [](auto&, auto&) {}},
      {"", [](auto& p, auto&) { p.dtype = DType::kFloat16, p.quant_type = QuantType::kFp4, p.m = 8; }},
      {"", [](auto& p, auto&) { p.n = 48, p.k = 256; }},
      {"", [](auto& p, auto&) { p.direction = Direction::kGradInput, p.n = 48, p.m = 4; }},
      {"9.0", [](auto&, auto& d) { d.sm = 100; }},
      {"shared memory", [](auto&, auto& d) { d.smem_per_block_bytes = 101376; }},
      {"float32", [](auto& p, auto&) { p.dtype = DType::kFloat32; }},
      {"batch_invariant", [](auto& p, auto&) { p.batch_invariant = true; }},
      {"multiples of 16", [](auto& p, auto&) { p.n = 24; }},
      {"m 9", [](auto& p, auto&) { p.m = 9; }},
      {"1 to 4", [](auto& p, auto&) { p.direction = Direction::kGradInput, p.m = 5; }},
      {"k 4224", [](auto& p, auto&) { p.k = 4224; }},
      {"block size 128", [](auto& p, auto&) { p.block_size = 128; }},
      {"not nested", [](auto& p, auto&) { p.nested = false; }},
      {"row stride 4100", [](auto& p, auto&) { p.x_row_stride = 4100; }},
      {"needs 16 and 4", [](auto& p, auto&) { p.packed_alignment = 8; }},
  };
  for (const Refusal& refusal : refusals) {
    LinearProblem p = problem(8, 14336, 4096);
    DeviceModel device = kH200;
    refusal.change(p, device);
    const std::string reason = supports_strip(p, device);
    if (refusal.word[0] == '\0') {
      EXPECT_EQ(reason, "");
    } else {
      EXPECT_NE(reason.find(refusal.word), std::string::npos) << "'" << reason << "' lacks '" << refusal.word << "'";
    }
  }
}

TEST(StripPlan, OneWaveOfCtasAndPartialSumsInTheWorkspace) {
  for (const auto& [n, k] : kShapes) {
    for (const int64_t m : {1, 4, 5, 8}) {
      const LinearPlan forward = plan_strip(problem(m, n, k), kH200);
      EXPECT_EQ(forward.variant, kSmallMStrip);
      EXPECT_LE(forward.grid, 132);
      EXPECT_EQ(forward.workspace_bytes, forward.split > 1 ? forward.split * m * n * 4 : 0);
      const strip::Work w = strip::work_of(problem(m, n, k), forward);
      EXPECT_EQ(w.slices * w.ranges, k / 256);
      EXPECT_GE(w.strips_of_cta * (forward.grid / w.ranges), w.strips);
      EXPECT_LT(w.strips_of_cta * (forward.grid / w.ranges - 1), w.strips);
      EXPECT_LE(strip::forward_shared_bytes(w.group, w), kSm90SharedBytes);
      if (m > 4) continue;
      const LinearPlan grad = plan_strip(problem(m, n, k, Direction::kGradInput), kH200);
      EXPECT_EQ(grad.variant, kSmallMStrip);
      EXPECT_LE(grad.grid, 132);
      EXPECT_EQ(grad.workspace_bytes, grad.split > 1 ? (grad.grid + k / 256) * m * 256 * 4 : 0);
    }
  }
}

TEST(StripPlan, ColumnsAreCutIntoRangesWhereStripsAloneLeaveSmsIdle) {
  EXPECT_EQ(plan_strip(problem(1, 5120, 27648), kH200).split, 2);  // 3 strips on 107 SMs, or 5 halves on 128
  EXPECT_EQ(plan_strip(problem(1, 14336, 4096), kH200).split, 1);
  EXPECT_EQ(plan_strip(problem(1, 1024, 4096), kH200).split, 1);
}

TEST(StripPlan, OneGroupWhereSharedMemoryHasRoomForAllStrips) {
  const LinearProblem p = problem(1, 14336, 4096);
  EXPECT_EQ(strip::work_of(p, plan_strip(p, kH200)).group, 7);  // 8 bytes are left
}

TEST(StripPlan, TheSumsDoNotDependOnTheNumberOfTokens) {
  for (const auto& [n, k] : kShapes) {
    const LinearPlan one = plan_strip(problem(1, n, k), kH200), many = plan_strip(problem(8, n, k), kH200);
    EXPECT_EQ(one.grid, many.grid);
    EXPECT_EQ(one.split, many.split);
  }
}

TEST(SmallMPlan, TakesStripsForFewTokensAndTilesForMore) {
  EXPECT_EQ(plan_small_m(problem(8, 14336, 4096), kH200).variant, kSmallMStrip);
  EXPECT_NE(plan_small_m(problem(9, 14336, 4096), kH200).variant, kSmallMStrip);
  EXPECT_EQ(plan_small_m(problem(4, 14336, 4096, Direction::kGradInput), kH200).variant, kSmallMStrip);
  EXPECT_NE(plan_small_m(problem(5, 14336, 4096, Direction::kGradInput), kH200).variant, kSmallMStrip);
  LinearProblem plain = problem(1, 14336, 4096);
  plain.nested = false;
  EXPECT_EQ(supports_small_m(plain, kH200), "");
  EXPECT_NE(plan_small_m(plain, kH200).variant, kSmallMStrip);
  EXPECT_EQ(supports_small_m(problem(8, 4000, 4096), kH200), "");
  EXPECT_NE(supports_small_m(problem(9, 4000, 4096), kH200), "");
  // Not where tiles were faster, and not below what was measured.
  EXPECT_NE(plan_small_m(problem(1, 27648, 5120), kH200).variant, kSmallMStrip);
  EXPECT_EQ(plan_small_m(problem(1, 27648, 5120, Direction::kGradInput), kH200).variant, kSmallMStrip);
  EXPECT_NE(plan_small_m(problem(8, 4096, 14336), kH200).variant, kSmallMStrip);
  EXPECT_EQ(plan_small_m(problem(4, 4096, 14336), kH200).variant, kSmallMStrip);
  EXPECT_NE(supports_small_m(problem(1, 48, 4096), kH200), "");
  EXPECT_NE(plan_small_m(problem(1, 16384, 2048), kH200).variant, kSmallMStrip);
}

}  // namespace
}  // namespace nybble
