// linear_cpu against float64 loops over dequantize_4bit's weights.
#include <gtest/gtest.h>

#include "core/parallel.h"
#include "linear/cpu_case.h"
#include "nybble/error.h"

namespace nybble {
namespace {

struct Shape {
  int64_t m, n, k;
  int block_size;
};

// One row, ragged rows, odd sizes, K not a multiple of the block, a partial last block, blocks that span rows, one element.
constexpr Shape kShapes[] = {
    {1, 1, 1, 32},       {1, 64, 64, 64},   {1, 7, 256, 64},    {1, 37, 320, 32},   {1, 5, 4096, 4096}, {1, 33, 97, 64},
    {1, 3, 4099, 128},   {2, 16, 128, 64},  {3, 50, 192, 64},   {5, 31, 96, 64},    {7, 13, 61, 32},    {8, 64, 512, 128},
    {9, 65, 257, 256},   {16, 40, 640, 64}, {17, 11, 33, 64},   {23, 96, 288, 512}, {32, 100, 256, 64}, {33, 129, 100, 64},
    {40, 8, 2048, 1024}, {61, 70, 576, 64}, {4, 300, 70, 2048}, {130, 20, 544, 64}, {6, 700, 32, 32},
};

std::vector<LinearCase> all_cases() {
  std::vector<LinearCase> cases;
  int index = 0;
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
        LinearCase c{.m = shape.m, .n = shape.n, .k = shape.k, .dtype = dtype, .block_size = shape.block_size, .direction = direction};
        c.quant_type = index % 3 == 0 ? QuantType::kFp4 : QuantType::kNf4;
        c.nested = index % 2 == 0;
        c.bias = direction == Direction::kForward && index % 4 < 2;
        c.extra_stride = index % 5 == 0 ? 13 : 0;
        c.packed_offset = index % 7;
        c.batch_invariant = index % 4 == 3;
        cases.push_back(c);
        index += dtype == DType::kFloat32 ? 2 : 1;  // an odd step: options meet shapes and dtypes in every combination
      }
    }
  }
  return cases;
}

TEST(LinearCpu, IsWithinTheFp32BoundOfTheFloat64Product) {
  for (const LinearCase& c : all_cases()) {
    LinearData data(c);
    EXPECT_EQ(count_wrong(data.run(), c.dtype, reference(data, c.dtype)), 0) << describe(c);
  }
}

TEST(LinearCpu, IdentityInputGivesTheWeightsOfDequantize4Bit) {
  for (LinearCase c : all_cases()) {
    c.bias = false;
    c.m = c.direction == Direction::kForward ? c.k : c.n;
    if (c.m > 700) continue;
    LinearData data(c);
    for (int64_t row = 0; row < c.m; row++) {
      for (int64_t column = 0; column < c.m; column++) data.set_input(row, column, row == column ? 1.0f : 0.0f);
    }
    const std::vector<uint8_t> out = data.run();
    std::vector<uint8_t> dense(c.n * c.k * size_of(c.dtype));
    dequantize_4bit(data.weight(), c.dtype, 0, c.n * c.k, dense.data());
    int64_t different = 0;
    for (int64_t n = 0; n < c.n; n++) {
      for (int64_t k = 0; k < c.k; k++) {
        const int64_t index = c.direction == Direction::kForward ? k * c.n + n : n * c.k + k;
        different += element(out, c.dtype, index) != element(dense, c.dtype, n * c.k + k);  // +0 equals -0: a sum drops the sign of zero
      }
    }
    EXPECT_EQ(different, 0) << describe(c);
  }
}

// The comparison must fail for each of the faults that a kernel could have.
TEST(LinearCpuControl, AFlippedNibbleASwappedScaleAndASwappedRowAreSeen) {
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      const LinearCase c{.m = 9, .n = 40, .k = 192, .dtype = dtype, .direction = direction};
      LinearData data(c);
      const Reference expected = reference(data, dtype);
      ASSERT_EQ(count_wrong(data.run(), dtype, expected), 0);

      LinearData flipped(c);
      flipped.packed_byte(96 * 7 + 5) ^= 0x80;
      EXPECT_GT(count_wrong(flipped.run(), dtype, expected), 0) << "flipped nibble, " << describe(c);

      LinearData shifted(c);
      shifted.swap_scales(11, 12);
      EXPECT_GT(count_wrong(shifted.run(), dtype, expected), 0) << "scale off by one block, " << describe(c);

      LinearData swapped(c);
      for (int64_t i = 0; i < data.reduction(); i++) {
        const float first = swapped.input(3, i);
        swapped.set_input(3, i, swapped.input(4, i));
        swapped.set_input(4, i, first);
      }
      EXPECT_GT(count_wrong(swapped.run(), dtype, expected), 0) << "swapped row, " << describe(c);
    }
  }
}

TEST(LinearCpu, GivesTheBiasWhereTheReductionIsEmpty) {
  const LinearCase c{.m = 3, .n = 5, .k = 0, .bias = true};
  LinearData data(c);
  const std::vector<uint8_t> out = data.run();
  for (int64_t i = 0; i < 15; i++) EXPECT_EQ(element(out, c.dtype, i), data.bias(i % 5));
}

TEST(LinearCpu, LeavesAnEmptyOutputAlone) {
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    LinearData no_rows({.m = 0, .n = 8, .k = 64, .direction = direction});
    EXPECT_TRUE(no_rows.run().empty());
  }
}

TEST(LinearCpu, CountsEachLaunchOfItsDirection) {
  reset_launches();
  LinearData data({.m = 2, .n = 8, .k = 64});
  data.run();
  data.run();
  EXPECT_EQ(launches(LinearPath::kCpu, Direction::kForward), 2);
  EXPECT_EQ(launches(LinearPath::kCpu, Direction::kGradInput), 0);
  EXPECT_EQ(launches(LinearPath::kDequant, Direction::kForward), 0);
}

TEST(LinearCpu, RefusesWhatDoesNotFitTogether) {
  struct Fault {
    const char* word;
    void (*spoil)(LinearProblem&, LinearArgs&);
  };
  const Fault faults[] = {
      {"shape", [](LinearProblem& p, LinearArgs&) { p.k = 128; }},
      {"block size", [](LinearProblem& p, LinearArgs& a) { p.block_size = a.weight.block_size = 63; }},
      {"block size", [](LinearProblem& p, LinearArgs&) { p.block_size = 128; }},
      {"type", [](LinearProblem& p, LinearArgs&) { p.quant_type = QuantType::kFp4; }},
      {"nested", [](LinearProblem& p, LinearArgs&) { p.nested = false; }},
      {"row stride", [](LinearProblem&, LinearArgs& a) { a.in_row_stride = 63; }},
      {"no packed", [](LinearProblem&, LinearArgs& a) { a.weight.packed = nullptr; }},
      {"no scales", [](LinearProblem&, LinearArgs& a) { a.weight.scales.nested_absmax = nullptr; }},
      {"no in", [](LinearProblem&, LinearArgs& a) { a.in = nullptr; }},
      {"no out", [](LinearProblem&, LinearArgs& a) { a.out = nullptr; }},
      {"no bias", [](LinearProblem& p, LinearArgs&) { p.bias = true; }},
      {"bias", [](LinearProblem& p, LinearArgs&) { p.bias = true, p.direction = Direction::kGradInput; }},
  };
  for (const Fault& fault : faults) {
    LinearData data({.m = 2, .n = 64, .k = 64});
    LinearProblem problem = data.problem();
    LinearArgs args = data.args();
    fault.spoil(problem, args);
    try {
      linear_cpu(problem, args);
      ADD_FAILURE() << "no error for: " << fault.word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kValue);
      EXPECT_NE(std::string(error.what()).find(fault.word), std::string::npos) << error.what();
    }
  }
}

TEST(LinearCpu, GivesTheSameBitsOnAnyNumberOfThreads) {
  const LinearCase cases[] = {
      {.m = 1, .n = 70, .k = 320},
      {.m = 1, .n = 300, .k = 192, .direction = Direction::kGradInput},
      {.m = 19, .n = 70, .k = 320, .bias = true},
      {.m = 19, .n = 300, .k = 192, .direction = Direction::kGradInput},
  };
  const int before = num_threads();
  for (const LinearCase& c : cases) {
    LinearData data(c);
    set_num_threads(1);
    const std::vector<uint8_t> expected = data.run();
    int64_t different = 0;
    for (int repeat = 0; repeat < 250; repeat++) {  // 1000 in all
      set_num_threads(1 + repeat % 3);
      different += data.run() != expected;
    }
    EXPECT_EQ(different, 0) << describe(c);
  }
  set_num_threads(before);
}

}  // namespace
}  // namespace nybble
