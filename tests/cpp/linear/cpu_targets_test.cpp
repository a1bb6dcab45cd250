// The CPU multiply on each instruction set that this build has and this CPU runs, and on weights of unusual scales.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "linear/cpu_case.h"
#include "linear/cpu_paths.h"

namespace nybble {
namespace {

std::vector<int64_t> targets() {
  std::vector<int64_t> result;
  for (int64_t left = cpu::supported_targets(); left != 0; left &= left - 1) result.push_back(left & -left);
  return result;
}

class OnTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { cpu::force_target(GetParam()); }
  void TearDown() override { cpu::force_target(0); }
};

TEST_P(OnTarget, TheProductIsWithinTheFp32Bound) {
  const LinearCase cases[] = {
      {.m = 1, .n = 37, .k = 320, .bias = true},
      {.m = 3, .n = 20, .k = 4500, .block_size = 128, .nested = false},
      {.m = 4, .n = 33, .k = 97, .dtype = DType::kFloat16, .quant_type = QuantType::kFp4},
      {.m = 21, .n = 300, .k = 544, .bias = true, .extra_stride = 3, .packed_offset = 1},
      {.m = 40, .n = 29, .k = 300, .dtype = DType::kFloat32, .block_size = 32, .nested = false},
      {.m = 1, .n = 300, .k = 97, .direction = Direction::kGradInput},
      {.m = 1, .n = 530, .k = 2100, .dtype = DType::kFloat16, .block_size = 4096, .direction = Direction::kGradInput},
      {.m = 21, .n = 300, .k = 544, .nested = false, .direction = Direction::kGradInput, .packed_offset = 3},
      {.m = 9, .n = 29, .k = 333, .dtype = DType::kFloat32, .block_size = 32, .direction = Direction::kGradInput},
  };
  for (const LinearCase& c : cases) {
    LinearData data(c);
    const Reference expected = reference(data, c.dtype);
    EXPECT_EQ(count_wrong(data.run(), c.dtype, expected), 0) << describe(c);
    data.packed_byte(packed_bytes(c.n * c.k) / 2) ^= 0x80;
    EXPECT_GT(count_wrong(data.run(), c.dtype, expected), 0) << "flipped nibble, " << describe(c);
  }
}

// Reductions of length one: every output is a weight times 1, so that infinities and NaN stay where they are.
TEST_P(OnTarget, WeightsOfUnusualScalesAreThoseOfDequantize4Bit) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float scales[] = {0.0f,   -0.0f,    0x1p-130f,  0x1p-126f,  0x1.3p-120f,   0x1.7p-119f,
                          1.0f,   -0.5f,    0x1.1p-20f, 0x1.9p-15f, 65519.0f,      65520.0f,
                          1.0e9f, 3.39e38f, kInfinity,  -kInfinity, std::nanf(""), std::bit_cast<float>(0x7FFFFFFFu)};
  const int64_t count = 32 * std::ssize(scales);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
      for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
        for (const int64_t m : {1, 2, 5, 40}) {
          LinearCase c{.m = m, .dtype = dtype, .quant_type = type, .block_size = 32, .nested = false, .direction = direction};
          (direction == Direction::kForward ? c.n : c.k) = count;
          LinearData data(c);
          data.set_scales(scales);
          for (int64_t row = 0; row < m; row++) data.set_input(row, 0, 1.0f);
          const std::vector<uint8_t> out = data.run();
          std::vector<uint8_t> dense(count * size_of(dtype));
          dequantize_4bit(data.weight(), dtype, 0, count, dense.data());
          int64_t different = 0;
          for (int64_t i = 0; i < m * count; i++) {
            const float got = element(out, dtype, i);
            const float want = element(dense, dtype, i % count);
            different += !(got == want || (std::isnan(got) && std::isnan(want)));
          }
          EXPECT_EQ(different, 0) << describe(c);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Highway, OnTarget, ::testing::ValuesIn(targets()), [](const auto& info) {
  cpu::force_target(info.param);
  const std::string name = cpu::target_name();
  cpu::force_target(0);
  return name;
});

std::vector<uint8_t> row_of(LinearData& data, const std::vector<uint8_t>& out, int64_t row) {
  const int64_t bytes = data.columns() * size_of(data.problem().dtype);
  return {out.begin() + row * bytes, out.begin() + (row + 1) * bytes};
}

// m rows at once, then each alone: which of them keep their bits?
int64_t rows_that_change(LinearCase c) {
  LinearData many(c);
  const std::vector<uint8_t> together = many.run();
  LinearCase alone = c;
  alone.m = 1;
  int64_t changed = 0;
  for (int64_t row = 0; row < c.m; row++) {
    LinearData one(alone);
    for (int64_t i = 0; i < many.reduction(); i++) one.set_input(0, i, many.input(row, i));
    changed += one.run() != row_of(many, together, row);
  }
  return changed;
}

TEST(LinearCpuOrder, BatchInvariantRowsKeepTheirBitsInAnyCompany) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t m : {2, 5, 33}) {
      LinearCase c{.m = m, .n = 90, .k = 700, .dtype = dtype, .bias = true, .batch_invariant = true};
      EXPECT_EQ(rows_that_change(c), 0) << describe(c);
      c = {.m = m, .n = 700, .k = 90, .dtype = dtype, .direction = Direction::kGradInput};
      EXPECT_EQ(rows_that_change(c), 0) << describe(c) << ": grad_x has one order";
    }
  }
}

TEST(LinearCpuOrder, ThePlanTellsIt) {
  for (const int64_t m : {1, 4, 5}) {
    LinearData forward({.m = m, .n = 8, .k = 64});
    LinearData invariant({.m = m, .n = 8, .k = 64, .batch_invariant = true});
    LinearData grad({.m = m, .n = 8, .k = 64, .direction = Direction::kGradInput});
    EXPECT_FALSE(plan_linear(forward.problem(), DeviceModel{}).batch_invariant);
    EXPECT_TRUE(plan_linear(invariant.problem(), DeviceModel{}).batch_invariant);
    EXPECT_TRUE(plan_linear(grad.problem(), DeviceModel{}).batch_invariant);
    EXPECT_EQ(plan_linear(forward.problem(), DeviceModel{}).variant, m <= 4 ? 1 : 0);
    EXPECT_EQ(plan_linear(invariant.problem(), DeviceModel{}).variant, 0);
  }
}

TEST(LinearCpuOrderControl, ByDefaultFewRowsHaveAnotherOrderThanMany) {
  LinearCase c{.m = 33, .n = 90, .k = 700, .dtype = DType::kFloat32};
  EXPECT_GT(rows_that_change(c), 0) << describe(c);
  c.m = 4;
  EXPECT_EQ(rows_that_change(c), 0) << describe(c);
}

}  // namespace
}  // namespace nybble
