// The portable kernel on the CPU (tests/cpp/simt): what it reads, decodes, sums and stores, on every tile shape, without a GPU.
#include <gtest/gtest.h>

#include <stdexcept>

#include "linear/portable.h"
#include "linear/portable_general.cuh"
#include "linear/simt_case.h"

namespace nybble::portable {
alignas(128) uint8_t shared[99 * 1024];
}

namespace nybble {
namespace {

template <class C, template <class> class X = portable::Activations, template <class> class W = portable::PackedWeights>
void run_kernel(const portable::Params& p, int grid, uint64_t seed) {
  simt::launch(grid, C::kThreads, portable::shared, C::kSharedBytes, seed, [&] { portable::portable_kernel<C, X, W>(p); });
}

template <Direction DIRECTION, typename T>
void run_variant(int variant, const portable::Params& p, int grid, uint64_t seed) {
  switch (variant) {
    case kPortable256x128:
      return run_kernel<portable::Traits<DIRECTION, T, 256, 128, 64, 64, 1>>(p, grid, seed);
    case kPortable128x128:
      return run_kernel<portable::Traits<DIRECTION, T, 128, 128, 64, 32, 1>>(p, grid, seed);
    case kPortable64x128:
      return run_kernel<portable::Traits<DIRECTION, T, 64, 128, 32, 32, 2>>(p, grid, seed);
    case kPortable16x128:
      return run_kernel<portable::Traits<DIRECTION, T, 16, 128, 16, 32, 4>>(p, grid, seed);
    case kPortableGeneral:
      return run_kernel<portable::Traits<DIRECTION, T, 128, 128, 64, 32, 1>, portable::GeneralActivations, portable::GeneralWeights>(
          p, grid, seed);
  }
  FAIL() << "variant " << variant;
}

struct PortableCase {
  SimtCase base;
  PortableVariant variant;
  int sms_to_cut_for = 0;  // > 0: cut reductions, on a device with so many SMs
};

std::vector<uint16_t> run(const PortableCase& c, SimtOperands& o, uint64_t seed, LinearPlan* used = nullptr) {
  const DeviceModel device{"simulated", 80, c.sms_to_cut_for > 0 ? c.sms_to_cut_for : 3, 0, 0};
  LinearProblem problem = c.base.problem();
  problem.mode = LinearMode::kFused;  // the general variant also above 128 tokens
  EXPECT_EQ(c.variant == kPortableGeneral ? supports_portable(problem, device) : supports_portable_fast(problem, device), "");
  const LinearPlan plan = plan_portable_as(c.variant, c.sms_to_cut_for > 0, problem, device);
  if (used) *used = plan;
  SimtLaunch launch(c.base, o, plan.workspace_bytes);
  const portable::Params p = portable::make_params(plan, problem, launch.args());
  if (plan.split_tiles > 0) std::memset(p.flags, 0, plan.grid * sizeof(int));
  const auto run = c.base.forward()
                       ? (c.base.half ? run_variant<Direction::kForward, __half> : run_variant<Direction::kForward, __nv_bfloat16>)
                       : (c.base.half ? run_variant<Direction::kGradInput, __half> : run_variant<Direction::kGradInput, __nv_bfloat16>);
  run(c.variant, p, plan.grid, seed);
  return launch.take_output();
}

class PortableSimt : public ::testing::TestWithParam<PortableCase> {};

TEST_P(PortableSimt, MatchesFloat64AndRepeatsUnderAnyThreadOrder) {
  const PortableCase& c = GetParam();
  SimtOperands o = make_operands(c.base);
  LinearPlan plan;
  const std::vector<uint16_t> out = run(c, o, 1, &plan);
  EXPECT_EQ(plan.split_tiles > 0, c.sms_to_cut_for > 0) << to_string(plan);
  EXPECT_EQ(count_wrong(c.base, o, out), 0) << to_string(plan);
  EXPECT_TRUE(out == run(c, o, 2)) << "another order of threads changed bits";
  o.packed[o.packed.size() / 2] ^= 0x40;  // control: one flipped bit of one nibble
  EXPECT_GT(count_wrong(c.base, o, run(c, o, 3)), 0);
}

constexpr Direction kF = Direction::kForward, kG = Direction::kGradInput;

INSTANTIATE_TEST_SUITE_P(
    Cases, PortableSimt,
    ::testing::Values(
        PortableCase{{.title = "Tile256Tails", .direction = kF, .m = 258, .n = 136, .k = 192}, kPortable256x128},
        PortableCase{{.title = "Tile256GradTails", .direction = kG, .m = 257, .n = 136, .k = 192}, kPortable256x128},
        PortableCase{{.title = "Tile128", .direction = kF, .m = 70, .n = 130, .k = 128, .block_size = 128, .bias = true}, kPortable128x128},
        PortableCase{{.title = "Tile128Grad", .direction = kG, .m = 130, .n = 72, .k = 64}, kPortable128x128},
        PortableCase{{.title = "Tile64Plain", .direction = kF, .m = 33, .n = 257, .k = 256, .block_size = 4096, .nested = false},
                     kPortable64x128},
        PortableCase{{.title = "Tile64GradPlain", .direction = kG, .m = 64, .n = 264, .k = 192, .nested = false}, kPortable64x128},
        PortableCase{{.title = "OneToken", .direction = kF, .m = 1, .n = 129, .k = 320, .bias = true}, kPortable16x128},
        PortableCase{{.title = "Tile16Grad", .direction = kG, .m = 16, .n = 200, .k = 192, .block_size = 256}, kPortable16x128},
        PortableCase{{.title = "OneStage", .direction = kF, .m = 3, .n = 5, .k = 64}, kPortable16x128},
        PortableCase{{.title = "OneStageTwoGroups", .direction = kF, .m = 3, .n = 5, .k = 64}, kPortable128x128},
        PortableCase{{.title = "OneStageGrad", .direction = kG, .m = 3, .n = 8, .k = 64}, kPortable64x128},
        PortableCase{{.title = "Fp4Half", .m = 5, .n = 96, .k = 128, .bias = true, .half = true, .quant_type = QuantType::kFp4},
                     kPortable64x128},
        PortableCase{{.title = "HalfGrad", .direction = kG, .m = 5, .n = 96, .k = 128, .half = true}, kPortable16x128},
        PortableCase{{.title = "GeneralOddBytes", .m = 9, .n = 37, .k = 133, .packed_shift = 1}, kPortableGeneral},
        PortableCase{{.title = "GeneralOddBytesGrad", .direction = kG, .m = 9, .n = 137, .k = 33, .packed_shift = 3}, kPortableGeneral},
        PortableCase{{.title = "GeneralBlock32", .m = 70, .n = 65, .k = 100, .block_size = 32, .bias = true}, kPortableGeneral},
        PortableCase{{.title = "GeneralOddX", .m = 3, .n = 20, .k = 129, .block_size = 32, .nested = false, .x_shift = 1},
                     kPortableGeneral},
        PortableCase{{.title = "GeneralOddXGrad", .direction = kG, .m = 130, .n = 129, .k = 258, .x_shift = 1}, kPortableGeneral},
        PortableCase{{.title = "GeneralWordX", .direction = kG, .m = 2, .n = 66, .k = 7, .half = true, .x_shift = 2}, kPortableGeneral},
        PortableCase{{.title = "GeneralOne", .m = 1, .n = 1, .k = 1, .bias = true}, kPortableGeneral},
        PortableCase{{.title = "GeneralCut", .m = 5, .n = 130, .k = 1030, .block_size = 128}, kPortableGeneral, 5},
        PortableCase{{.title = "Cut", .direction = kF, .m = 130, .n = 264, .k = 640, .bias = true}, kPortable128x128, 9},
        PortableCase{{.title = "CutGrad", .direction = kG, .m = 70, .n = 640, .k = 192}, kPortable64x128, 3},
        PortableCase{{.title = "CutRemainder", .direction = kF, .m = 17, .n = 600, .k = 448}, kPortable16x128, 1},
        PortableCase{{.title = "CutManyPieces", .direction = kF, .m = 16, .n = 128, .k = 1088, .bias = true}, kPortable16x128, 4}),
    [](const auto& info) { return info.param.base.title; });

TEST(PortableSimtIdentity, GivesBackEveryWeightInBothDirections) {
  for (const Direction direction : {kF, kG}) {
    for (const PortableVariant variant : {kPortable128x128, kPortable16x128}) {
      PortableCase c{{.title = "", .direction = direction, .m = direction == kF ? 128 : 136, .n = 136, .k = 128}, variant};
      SimtOperands o = make_operands(c.base);
      std::fill(o.x.begin(), o.x.end(), 0);
      for (int64_t i = 0; i < c.base.m; i++) o.x[i * c.base.m + i] = to_16(1.f, false);
      const std::vector<uint16_t> out = run(c, o, 11);
      int64_t wrong = 0;
      for (int64_t i = 0; i < c.base.m; i++) {
        for (int64_t j = 0; j < c.base.columns(); j++) {
          wrong += from_16(out[i * c.base.columns() + j], false) != o.dense[direction == kF ? j * c.base.k + i : i * c.base.k + j];
        }
      }
      EXPECT_EQ(wrong, 0) << "direction " << int(direction) << " variant " << variant;
    }
  }
}

TEST(PortableSimtControl, AWrongScaleAndAReadPastTheEndAreCaught) {
  const PortableCase c{{.title = "", .direction = kF, .m = 16, .n = 128, .k = 640}, kPortable16x128};
  SimtOperands o = make_operands(c.base);
  ASSERT_EQ(count_wrong(c.base, o, run(c, o, 1)), 0);
  o.codes[3] ^= 0x40;
  EXPECT_GT(count_wrong(c.base, o, run(c, o, 1)), 0) << "a changed scale went unnoticed";
  o.packed = o.packed.first(o.packed.size() - 1);
  EXPECT_THROW(run(c, o, 1), std::runtime_error) << "a read past the packed weight went unnoticed";
}

}  // namespace
}  // namespace nybble
