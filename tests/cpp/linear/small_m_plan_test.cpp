#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "linear/small_m.h"
#include "nybble/error.h"
#include "nybble/tune.h"

namespace nybble {
namespace {

using small_m::Work;

const DeviceModel kH200{"NVIDIA H200", 90, 132, 60 << 20, 232448};
const std::pair<int64_t, int64_t> kShapes[] = {{14336, 4096}, {4096, 14336}, {4096, 4096},  {1024, 4096}, {1024, 1024},
                                               {256, 1024},   {28672, 8192}, {8192, 28672}, {768, 3072},  {53248, 1024}};
constexpr Direction kDirections[] = {Direction::kForward, Direction::kGradInput};

LinearProblem problem(int64_t m, int64_t n, int64_t k, Direction direction = Direction::kForward) {
  LinearProblem p;
  p.m = m, p.n = n, p.k = k, p.direction = direction;
  return p;
}

// Empty, or what is wrong with how units are given to CTAs and pieces to slots.
std::string cut_fault(const Work& w) {
  std::vector<int> taken(static_cast<size_t>(w.tiles) * w.units, 0);
  std::set<int> used;
  for (int cta = 0; cta < w.ctas; cta++) {
    const int first = small_m::first_unit(w, cta), end = small_m::first_unit(w, cta + 1);
    if (first >= end) return "CTA " + std::to_string(cta) + " has nothing to do";
    for (int unit = first; unit < end; unit++) {
      taken[unit]++;
      if (small_m::cta_of_unit(w, unit) != cta) return "unit " + std::to_string(unit) + " is attributed to another CTA";
    }
    for (int tile = first / w.units; tile <= (end - 1) / w.units; tile++) {
      if (cta < small_m::first_cta(w, tile) || cta > small_m::last_cta(w, tile)) return "a CTA outside the range of its tile";
      const int slot = small_m::slot_of_piece(cta, tile);
      if (slot < 0 || slot >= small_m::slots(w)) return "slot " + std::to_string(slot) + " outside the workspace";
      if (!used.insert(slot).second) return "slot " + std::to_string(slot) + " is used twice";
    }
  }
  for (const int count : taken) {
    if (count != 1) return "a unit is taken " + std::to_string(count) + " times";
  }
  return "";
}

// The sum walks the slots of a tile one by one.
int gaps(const Work& w) {
  int count = 0;
  for (int tile = 0; tile < w.tiles; tile++) {
    for (int cta = small_m::first_cta(w, tile); cta <= small_m::last_cta(w, tile); cta++) {
      const int first = small_m::first_unit(w, cta), end = small_m::first_unit(w, cta + 1);
      count += end <= tile * w.units || first >= (tile + 1) * w.units;
    }
  }
  return count;
}

TEST(SmallMWork, EveryUnitHasOneCtaAndEveryPieceItsSlot) {
  for (const auto& [n, k] : kShapes) {
    for (const Direction direction : kDirections) {
      for (const int sms : {1, 7, 78, 114, 132, 264}) {
        DeviceModel device = kH200;
        device.sm_count = sms;
        const LinearProblem p = problem(16, n, k, direction);
        const Work w = small_m_work(p, plan_small_m_tiles(p, device));
        EXPECT_LE(w.ctas, sms);
        EXPECT_EQ(cut_fault(w), "") << n << " " << k << " " << sms;
        EXPECT_EQ(gaps(w), 0) << n << " " << k << " " << sms;
      }
    }
  }
}

TEST(SmallMWork, ALostTileAndAnIdleCtaAreSeen) {
  const LinearProblem p = problem(16, 14336, 4096);
  const Work good = small_m_work(p, plan_small_m_tiles(p, kH200));
  ASSERT_EQ(cut_fault(good), "");
  Work w = good;
  w.ctas = w.tiles * w.units + 1;
  EXPECT_NE(cut_fault(w), "");
  const std::function<int(int)> lost = [&](int unit) { return small_m::cta_of_unit(good, unit + 1); };
  EXPECT_NE(lost(small_m::first_unit(good, 1) - 1), 0);  // one further is another CTA's
}

TEST(SmallMWorkspace, HoldsXThenAllPieces) {
  for (const auto& [n, k] : kShapes) {
    for (const Direction direction : kDirections) {
      for (const int64_t m : {1, 8, 9, 32, 33, 64, 65, 128}) {
        const LinearProblem p = problem(m, n, k, direction);
        const LinearPlan plan = plan_small_m_tiles(p, kH200);
        const Work w = small_m_work(p, plan);
        const SmallMWorkspace layout = small_m_workspace(p, plan);
        EXPECT_EQ(layout.permuted_bytes, direction == Direction::kForward && m > 32 ? m * k * 2 : 0);
        EXPECT_GE(layout.partials, layout.permuted_bytes);
        EXPECT_EQ(layout.partials % 256, 0);
        EXPECT_EQ(layout.bytes, layout.partials + int64_t{1024} * small_m_tokens(plan.variant) * small_m::slots(w));
        EXPECT_EQ(plan.workspace_bytes, layout.bytes);
      }
    }
  }
}

TEST(SmallMPlan, StaysWithin32MiBWhatItTakes) {
  int refused = 0;
  for (const auto& [n, k] : kShapes) {
    for (const Direction direction : kDirections) {
      const LinearProblem p = problem(128, n, k, direction);
      const bool takes = supports_small_m_tiles(p, kH200).empty();
      refused += !takes;
      EXPECT_EQ(takes, plan_small_m_tiles(p, kH200).workspace_bytes <= 32 << 20) << n << " " << k;
    }
  }
  EXPECT_EQ(refused, 1);  // 53248 x 1024 forward
  EXPECT_EQ(plan_small_m_tiles(problem(128, 28672, 8192), kH200).grid, 129);
}

TEST(SmallMPlan, IsTheSameForEqualProblems) {
  const LinearProblem p = problem(8, 14336, 4096);
  EXPECT_EQ(to_string(plan_small_m_tiles(p, kH200)), to_string(plan_small_m_tiles(p, kH200)));
  EXPECT_TRUE(plan_small_m_tiles(p, kH200).batch_invariant);
  EXPECT_FALSE(plan_small_m_tiles(problem(8, 14336, 4096, Direction::kGradInput), kH200).batch_invariant);
  for (int size = 0; size < kSmallMSizes; size++) {
    const LinearPlan plan = plan_small_m_tiles(problem(kSmallMTokens[size], 4096, 4096), kH200);
    EXPECT_EQ(small_m_tokens(plan.variant), kSmallMTokens[size]);
    EXPECT_LT(plan.variant, kSmallMStrip);
  }
}

TEST(SmallMPlan, TheCutDoesNotDependOnTheNumberOfTokens) {
  for (const auto& [n, k] : kShapes) {
    const LinearPlan one = plan_small_m_tiles(problem(1, n, k), kH200);
    for (const int64_t m : {8, 17, 64, 128}) {
      const LinearPlan more = plan_small_m_tiles(problem(m, n, k), kH200);
      EXPECT_EQ(one.grid, more.grid);
      EXPECT_EQ(one.split, more.split);
    }
  }
}

TEST(SmallMPlan, ShortGradientsHaveOnePieceACtaWhereRunsGrowLittle) {
  const auto grid = [](int64_t m, int64_t n, int64_t k) { return plan_small_m_tiles(problem(m, n, k, Direction::kGradInput), kH200).grid; };
  for (const int64_t m : {9, 16, 17, 32, 64}) {
    EXPECT_EQ(grid(m, 4096, 14336), 112);  // 56 tiles of 16 units: 8 instead of 7
    EXPECT_EQ(grid(m, 27648, 5120), 120);
    EXPECT_EQ(grid(m, 5120, 27648), 132);  // 20 instead of 17 are too many
  }
  for (const int64_t m : {8, 65, 128}) EXPECT_EQ(grid(m, 4096, 14336), 132);
}

struct Refusal {
  const char* word;  // of the reason; empty: supported
  std::function<void(LinearProblem&, DeviceModel&)> change;
};

TEST(SmallMSupports, TellsTheReason) {
  const Refusal refusals[] = {
      {"", [](auto&, auto&) {}},
      {"", [](auto& p, auto&) { p.dtype = DType::kFloat16, p.quant_type = QuantType::kFp4, p.nested = false; }},
      {"", [](auto& p, auto&) { p.x_row_stride = 4104; }},
      {"", [](auto& p, auto&) { p.m = 128, p.k = 28672; }},
      {"9.0", [](auto&, auto& d) { d.sm = 100; }},
      {"shared memory", [](auto&, auto& d) { d.smem_per_block_bytes = 101376; }},
      {"float32", [](auto& p, auto&) { p.dtype = DType::kFloat32; }},
      {"m 129", [](auto& p, auto&) { p.m = 129; }},
      {"batch_invariant", [](auto& p, auto&) { p.batch_invariant = true; }},
      {"n 14464", [](auto& p, auto&) { p.n = 14464; }},
      {"k 4608", [](auto& p, auto&) { p.k = 4608; }},
      {"k 29696", [](auto& p, auto&) { p.k = 29696; }},
      {"elements", [](auto& p, auto&) { p.n = int64_t{1} << 30; }},
      {"block size 128", [](auto& p, auto&) { p.block_size = 128; }},
      {"nested scales in bfloat16", [](auto& p, auto&) { p.nested_dtype = DType::kBFloat16; }},
      {"row stride 4100", [](auto& p, auto&) { p.x_row_stride = 4100; }},
      {"address 8", [](auto& p, auto&) { p.x_alignment = 8; }},
      {"needs 16", [](auto& p, auto&) { p.packed_alignment = 8; }},
      {"needs 16", [](auto& p, auto&) { p.scales_alignment = 4; }},
      {"workspace", [](auto& p, auto&) { p.m = 128, p.n = 256000; }},
  };
  for (const Refusal& refusal : refusals) {
    LinearProblem p = problem(8, 14336, 4096);
    DeviceModel device = kH200;
    refusal.change(p, device);
    const std::string reason = supports_small_m_tiles(p, device);
    if (refusal.word[0] == '\0') {
      EXPECT_EQ(reason, "");
    } else {
      EXPECT_NE(reason.find(refusal.word), std::string::npos) << "'" << reason << "' lacks '" << refusal.word << "'";
    }
  }
}

TEST(SmallMPlan, ATuneEntrySelectsAnotherPath) {
  TuneEntry entry;
  entry.device = kH200.name, entry.direction = Direction::kForward, entry.dtype = DType::kBFloat16;
  entry.n = 14336, entry.k = 4096, entry.m_min = 17, entry.m_max = 64, entry.path = LinearPath::kHopper;
  TuneTable tune;
  tune.add(entry);
  EXPECT_EQ(plan_linear(problem(32, 14336, 4096), kH200, &tune).path, LinearPath::kHopper);
  EXPECT_EQ(plan_linear(problem(16, 14336, 4096), kH200, &tune).path, LinearPath::kSmallM);
  EXPECT_EQ(plan_linear(problem(32, 14336, 4096), kH200).path, LinearPath::kSmallM);
}

}  // namespace
}  // namespace nybble
