// Conversions to 16 bits, at every value and at every midpoint between two values, one by one and through the vector code.
#include "format/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "format/guarded.h"
#include "nybble/format.h"

namespace nybble::test {
namespace {

// The value of a 16-bit pattern from its definition, in float64.
double value_of(DType dtype, uint16_t bits) {
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int bias = dtype == DType::kFloat16 ? 15 : 127;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 2 * bias + 1) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  const double fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias - mantissa_bits);
}

uint16_t round_scalar(DType dtype, float value) { return dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value); }

struct Rounding {
  float value;
  uint16_t expected;
};

// Every finite value, and on both sides of and at each midpoint to the next one (above the largest: to infinity).
std::vector<Rounding> all_roundings(DType dtype) {
  const uint16_t infinity = dtype == DType::kFloat16 ? 0x7C00 : 0x7F80;
  std::vector<Rounding> cases;
  for (int sign = 0; sign < 2; sign++) {
    for (uint32_t magnitude = 0; magnitude < infinity; magnitude++) {
      const auto bits = static_cast<uint16_t>(magnitude | sign << 15);
      const auto next = static_cast<uint16_t>(bits + 1);
      const double here = value_of(dtype, bits);
      const double step = magnitude == 0 ? value_of(dtype, next) : here - value_of(dtype, bits - 1);
      const double there = magnitude + 1 == infinity ? here + step : value_of(dtype, next);
      const auto middle = static_cast<float>((here + there) / 2);
      cases.push_back({static_cast<float>(here), bits});
      cases.push_back({middle, magnitude % 2 == 0 ? bits : next});
      cases.push_back({std::nextafterf(middle, static_cast<float>(here)), bits});
      cases.push_back({std::nextafterf(middle, static_cast<float>(sign ? -HUGE_VAL : HUGE_VAL)), next});
    }
    cases.push_back({static_cast<float>(sign ? -HUGE_VAL : HUGE_VAL), static_cast<uint16_t>(infinity | sign << 15)});
  }
  return cases;
}

class RoundingTest : public ::testing::TestWithParam<DType> {};

TEST_P(RoundingTest, EveryPatternConvertsToItsValue) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const auto pattern = static_cast<uint16_t>(bits);
    const double expected = value_of(GetParam(), pattern);
    const float got = GetParam() == DType::kFloat16 ? format::from_fp16(pattern) : format::from_bf16(pattern);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(got), expected) << bits;
      ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    }
  }
}

TEST_P(RoundingTest, TiesGoToEvenOneByOne) {
  int64_t compared = 0;
  for (const Rounding& rounding : all_roundings(GetParam())) {
    ASSERT_EQ(round_scalar(GetParam(), rounding.value), rounding.expected) << rounding.value;
    compared++;
  }
  EXPECT_GT(compared, 100'000);
  EXPECT_EQ(round_scalar(GetParam(), std::nanf("")), 0x7FFF);
}

// NF4 code 15 is 1.0, so a weight of that code is its scale rounded to the dtype; fp32 subnormals are flushed on the way.
TEST_P(RoundingTest, TiesGoToEvenInDequantisedWeights) {
  const std::vector<Rounding> cases = all_roundings(GetParam());
  std::vector<float> scales;
  for (const Rounding& rounding : cases) scales.push_back(rounding.value);
  Nf4Weight weight;
  weight.n = static_cast<int64_t>(scales.size());
  weight.k = weight.block_size = kMinBlockSize;
  const std::vector<uint8_t> packed(packed_bytes(weight.n * weight.k), 0xFF);
  weight.packed = packed.data();
  weight.scales.absmax = scales.data();
  Guarded<uint16_t> out(weight.n * weight.k);
  dequantize_4bit(weight, GetParam(), 0, weight.n * weight.k, out.data());
  EXPECT_TRUE(out.guards_intact());
  int64_t flushed = 0;
  for (int64_t i = 0; i < weight.n; i++) {
    const bool subnormal = cases[i].value != 0.0f && std::fabs(cases[i].value) < std::numeric_limits<float>::min();
    const uint16_t expected = subnormal ? (std::signbit(cases[i].value) ? 0x8000 : 0) : cases[i].expected;
    flushed += subnormal;
    for (int64_t j = 0; j < weight.k; j++) ASSERT_EQ(out.data()[i * weight.k + j], expected) << cases[i].value;
  }
  EXPECT_EQ(flushed > 0, GetParam() == DType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(DTypes, RoundingTest, ::testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Products just below 2^-126 that an sm_90 card flushed although they round to 2^-126, and the first above, which it kept.
TEST(Flushing, IsDecidedBeforeTheExponentEnds) {
  struct Pair {
    int code;
    float scale;
  };
  const Pair seen_flushed[] = {{2, 2.23872522e-38f}, {4, 4.13264161e-38f}, {12, 2.66727494e-38f}, {13, 2.08933307e-38f}};
  for (const auto& [code, scale] : seen_flushed) {
    const std::vector<uint8_t> packed(16, static_cast<uint8_t>(code << 4 | code));
    Nf4Weight weight{packed.data(), {}, 1, 32, 32, QuantType::kNf4};
    weight.scales.absmax = &scale;
    float out[32];
    dequantize_4bit(weight, DType::kFloat32, 0, 32, out);
    EXPECT_EQ(out[0] * 0x1p126f, 0.0f) << code;
    EXPECT_EQ(code_table(QuantType::kNf4)[code] * scale, std::copysign(0x1p-126f, out[0])) << "the product rounds to the smallest normal";
    const float next = std::nextafter(scale, 1.0f);
    weight.scales.absmax = &next;
    dequantize_4bit(weight, DType::kFloat32, 0, 32, out);
    EXPECT_EQ(std::fabs(out[0]), 0x1p-126f) << code;
  }
}

}  // namespace
}  // namespace nybble::test
