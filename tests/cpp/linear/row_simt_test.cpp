// The row kernels on the CPU (tests/cpp/simt), every compiled number of tokens, both directions, with and without a second launch.
#include <gtest/gtest.h>

#include <string>

#include "linear/row.cuh"
#include "linear/row.h"
#include "linear/simt_case.h"

namespace nybble::row {
alignas(128) uint8_t shared[kSharedLimit];
}

namespace nybble {
namespace {

template <typename T, int TOKENS>
void run_tokens(Direction direction, const row::Params& p, int grid, int64_t bytes, uint64_t seed) {
  simt::launch(grid, row::threads(TOKENS), row::shared, bytes, seed,
               [&] { direction == Direction::kForward ? row::row_forward<T, TOKENS>(p) : row::row_grad<T, TOKENS>(p); });
  if (!p.partials) return;
  const int columns = direction == Direction::kForward ? p.n : p.k;
  simt::launch((p.m * columns + 255) / 256, 256, row::shared, 0, seed, [&] { row::row_sum<T>(p, columns); });
}

template <typename T>
void run_typed(int tokens, Direction direction, const row::Params& p, int grid, int64_t bytes, uint64_t seed) {
  switch (tokens) {
    case 1:
      return run_tokens<T, 1>(direction, p, grid, bytes, seed);
    case 2:
      return run_tokens<T, 2>(direction, p, grid, bytes, seed);
    case 4:
      return run_tokens<T, 4>(direction, p, grid, bytes, seed);
    case 8:
      return run_tokens<T, 8>(direction, p, grid, bytes, seed);
  }
  FAIL() << "variant " << tokens;
}

std::vector<uint16_t> run(const SimtCase& c, SimtOperands& o, int sm_count, uint64_t seed, LinearPlan* used = nullptr) {
  const DeviceModel device{"simulated", 86, sm_count, 0, 0};
  const LinearProblem problem = c.problem();
  EXPECT_EQ(supports_row(problem, device), "");
  const LinearPlan plan = plan_row(problem, device);
  if (used) *used = plan;
  SimtLaunch launch(c, o, plan.workspace_bytes);
  const row::Params p = row::make_params(plan, problem, launch.args());
  const auto typed = c.half ? run_typed<__half> : run_typed<__nv_bfloat16>;
  typed(plan.variant, c.direction, p, plan.grid, row::shared_bytes(plan, problem), seed);
  return launch.take_output();
}

struct RowCase {
  SimtCase base;
  int sm_count;
  int split_at_least;
};

class RowSimt : public ::testing::TestWithParam<RowCase> {};

TEST_P(RowSimt, MatchesFloat64AndRepeatsUnderAnyThreadOrder) {
  const SimtCase& c = GetParam().base;
  SimtOperands o = make_operands(c);
  LinearPlan plan;
  const std::vector<uint16_t> out = run(c, o, GetParam().sm_count, 1, &plan);
  EXPECT_GE(plan.split, GetParam().split_at_least) << to_string(plan);
  EXPECT_EQ(count_wrong(c, o, out), 0) << to_string(plan);
  EXPECT_TRUE(out == run(c, o, GetParam().sm_count, 2)) << "another order of threads changed bits";
  o.packed[o.packed.size() / 2] ^= 0x40;  // control: one flipped bit of one nibble
  EXPECT_GT(count_wrong(c, o, run(c, o, GetParam().sm_count, 3)), 0);
}

constexpr Direction kF = Direction::kForward, kG = Direction::kGradInput;

INSTANTIATE_TEST_SUITE_P(
    Cases, RowSimt,
    ::testing::Values(
        RowCase{{.title = "OneToken", .direction = kF, .m = 1, .n = 37, .k = 1056, .bias = true}, 2, 1},
        RowCase{{.title = "OneTokenPlain32", .direction = kF, .m = 1, .n = 9, .k = 96, .block_size = 32, .nested = false}, 1, 1},
        RowCase{{.title = "TwoTokens", .direction = kF, .m = 2, .n = 130, .k = 2048, .block_size = 4096}, 3, 1},
        RowCase{{.title = "ThreeTokensCut", .direction = kF, .m = 3, .n = 21, .k = 4128, .bias = true}, 4, 2},
        RowCase{{.title = "EightTokensCut", .direction = kF, .m = 8, .n = 26, .k = 2080, .half = true}, 5, 3},
        RowCase{{.title = "FiveTokensFp4", .direction = kF, .m = 5, .n = 5, .k = 64, .quant_type = QuantType::kFp4}, 1, 1},
        RowCase{{.title = "GradOneToken", .direction = kG, .m = 1, .n = 205, .k = 1056}, 4, 2},
        RowCase{{.title = "GradOneRange", .direction = kG, .m = 2, .n = 70, .k = 96, .block_size = 32, .nested = false}, 1, 1},
        RowCase{{.title = "GradFour", .direction = kG, .m = 4, .n = 131, .k = 544, .half = true}, 6, 2},
        RowCase{{.title = "GradEight", .direction = kG, .m = 7, .n = 99, .k = 320, .quant_type = QuantType::kFp4}, 4, 2}),
    [](const auto& info) { return info.param.base.title; });

}  // namespace
}  // namespace nybble
