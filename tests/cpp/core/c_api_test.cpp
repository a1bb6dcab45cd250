#include "nybble/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "nybble/error.h"
#include "nybble/format.h"

extern "C" int c_header_compiles_as_c(void);

namespace {

using nybble::ErrorKind;

// A plain NF4 weight [n][k] in fp32, its scales and what it dequantises to.
struct Weight {
  int64_t n, k;
  std::vector<uint8_t> packed;
  std::vector<float> absmax;
  std::vector<float> dense;
  nybble_weight view{};

  Weight(int64_t rows, int64_t columns) : n(rows), k(columns) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(n * k);
    for (float& value : values) value = normal(random);
    packed.resize((n * k + 1) / 2);
    absmax.resize((n * k + 63) / 64);
    dense.assign(n * k, std::numeric_limits<float>::quiet_NaN());
    EXPECT_EQ(nybble_quantize_4bit(values.data(), 0, n * k, 64, 0, packed.data(), absmax.data(), NYBBLE_DEVICE_CPU, nullptr), 0);
    view.packed = packed.data();
    view.absmax = absmax.data();
    view.n = n;
    view.k = k;
    view.block_size = 64;
    EXPECT_EQ(nybble_dequantize_4bit(&view, 0, 0, n * k, dense.data(), NYBBLE_DEVICE_CPU, nullptr), 0);
  }
};

nybble_linear_call call_of(const Weight& weight, const std::vector<float>& in, std::vector<float>& out, int64_t m, int direction) {
  nybble_linear_call call{};
  call.weight = weight.view;
  call.m = m;
  call.in_row_stride = direction == 0 ? weight.k : weight.n;
  call.in = in.data();
  call.out = out.data();
  call.device = NYBBLE_DEVICE_CPU;
  call.direction = direction;
  return call;
}

TEST(CApi, HeaderCompilesAsC) { EXPECT_EQ(c_header_compiles_as_c(), static_cast<int>(sizeof(nybble_linear_call))); }

TEST(CApi, MultipliesBothWaysLikeDoubleLoops) {
  const Weight weight(33, 65);
  const int64_t m = 3;
  for (const int direction : {0, 1}) {
    const int64_t reduced = direction == 0 ? weight.k : weight.n, columns = direction == 0 ? weight.n : weight.k;
    std::vector<float> in(m * reduced), out(m * columns + 4, std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<float>(i % 17) - 8;
    const nybble_linear_call call = call_of(weight, in, out, m, direction);
    ASSERT_EQ(nybble_linear(&call), 0) << nybble_last_error();
    for (int64_t row = 0; row < m; row++) {
      for (int64_t column = 0; column < columns; column++) {
        double sum = 0;
        for (int64_t r = 0; r < reduced; r++) {
          const int64_t at = direction == 0 ? column * weight.k + r : r * weight.k + column;
          sum += static_cast<double>(in[row * reduced + r]) * weight.dense[at];
        }
        EXPECT_NEAR(out[row * columns + column], sum, 1e-4 * (1 + std::fabs(sum))) << direction << " " << row << " " << column;
      }
    }
    for (int64_t guard = m * columns; guard < m * columns + 4; guard++) EXPECT_TRUE(std::isnan(out[guard])) << "wrote past the output";
  }
}

TEST(CApi, DequantisesARangeAsPartOfTheWhole) {
  const Weight weight(16, 64);
  std::vector<float> part(100, std::numeric_limits<float>::quiet_NaN());
  ASSERT_EQ(nybble_dequantize_4bit(&weight.view, 0, 37, 90, part.data(), NYBBLE_DEVICE_CPU, nullptr), 0);
  EXPECT_EQ(std::memcmp(part.data(), weight.dense.data() + 37, 90 * sizeof(float)), 0);
  EXPECT_TRUE(std::isnan(part[90]));
}

TEST(CApi, CountsWhatRan) {
  const Weight weight(16, 64);
  std::vector<float> in(64, 1), out(16);
  nybble_reset_launches();
  const nybble_linear_call call = call_of(weight, in, out, 1, 0);
  ASSERT_EQ(nybble_linear(&call), 0);
  int counted = 0;
  for (int path = 0; nybble_path_name(path) != nullptr; path++) {
    const bool cpu = std::string(nybble_path_name(path)) == "cpu";
    EXPECT_EQ(nybble_launches(path, 0), cpu ? 1 : 0) << nybble_path_name(path);
    EXPECT_EQ(nybble_launches(path, 1), 0);
    counted += cpu;
  }
  EXPECT_EQ(counted, 1);
  EXPECT_EQ(nybble_path_name(-1), nullptr);
  EXPECT_EQ(nybble_launches(999, 0), 0);
}

struct BadCall {
  const char* name;
  void (*spoil)(nybble_linear_call&);
  ErrorKind kind;
  const char* text;
};

class CApiErrors : public testing::TestWithParam<BadCall> {};

TEST_P(CApiErrors, NameWhatWasFoundAndTouchNothing) {
  const Weight weight(16, 64);
  std::vector<float> in(64, 1), out(16, 42);
  nybble_linear_call call = call_of(weight, in, out, 1, 0);
  GetParam().spoil(call);
  EXPECT_NE(nybble_linear(&call), 0);
  EXPECT_EQ(nybble_last_error_kind(), static_cast<int>(GetParam().kind));
  EXPECT_NE(std::string(nybble_last_error()).find(GetParam().text), std::string::npos) << nybble_last_error();
  EXPECT_EQ(out, std::vector<float>(16, 42));
}

INSTANTIATE_TEST_SUITE_P(
    All, CApiErrors,
    testing::Values(BadCall{"NoPacked", [](nybble_linear_call& c) { c.weight.packed = nullptr; }, ErrorKind::kValue, "packed is null"},
                    BadCall{"NoScales", [](nybble_linear_call& c) { c.weight.absmax = nullptr; }, ErrorKind::kValue, "absmax is null"},
                    BadCall{"NoInput", [](nybble_linear_call& c) { c.in = nullptr; }, ErrorKind::kValue, "in is null"},
                    BadCall{"NoOutput", [](nybble_linear_call& c) { c.out = nullptr; }, ErrorKind::kValue, "out is null"},
                    BadCall{"BlockSize63", [](nybble_linear_call& c) { c.weight.block_size = 63; }, ErrorKind::kValue, "63"},
                    BadCall{"NegativeRows", [](nybble_linear_call& c) { c.m = -1; }, ErrorKind::kValue, "-1"},
                    BadCall{"ShortStride", [](nybble_linear_call& c) { c.m = 2, c.in_row_stride = 63; }, ErrorKind::kValue, "63"},
                    BadCall{"UnknownDtype", [](nybble_linear_call& c) { c.dtype = 3; }, ErrorKind::kValue, "dtype code 3"},
                    BadCall{"UnknownMode", [](nybble_linear_call& c) { c.mode = 7; }, ErrorKind::kValue, "mode code 7"},
                    BadCall{"NoDenseMatmul", [](nybble_linear_call& c) { c.mode = 2; }, ErrorKind::kUnsupported, "dense matmul"}),
    [](const auto& info) { return info.param.name; });

TEST(CApi, RangesOutsideTheWeightAreRefused) {
  const Weight weight(16, 64);
  float out = 0;
  EXPECT_NE(nybble_dequantize_4bit(&weight.view, 0, 1024, 1, &out, NYBBLE_DEVICE_CPU, nullptr), 0);
  EXPECT_NE(nybble_dequantize_4bit(&weight.view, 0, -1, 1, &out, NYBBLE_DEVICE_CPU, nullptr), 0);
  EXPECT_NE(std::string(nybble_last_error()).find("1024 elements"), std::string::npos) << nybble_last_error();
  EXPECT_EQ(nybble_dequantize_4bit(&weight.view, 0, 1024, 0, nullptr, NYBBLE_DEVICE_CPU, nullptr), 0);
}

TEST(CApi, TheLastErrorBelongsToItsThread) {
  EXPECT_NE(nybble_linear(nullptr), 0);
  const std::string here = nybble_last_error();
  EXPECT_EQ(here, "call is null, expected a pointer");
  std::thread([] {
    EXPECT_STREQ(nybble_last_error(), "");
    EXPECT_EQ(nybble_last_error_kind(), -1);
  }).join();
  EXPECT_EQ(nybble_last_error(), here);
}

TEST(CApi, PlansAreTextAndCutToTheBuffer) {
  const Weight weight(16, 64);
  std::vector<float> in(64, 1), out(16);
  const nybble_linear_call call = call_of(weight, in, out, 1, 0);
  int32_t fused = -1;
  char text[512], brief[5];
  ASSERT_EQ(nybble_linear_plan(&call, &fused, text, sizeof text), 0);
  EXPECT_EQ(fused, 1);
  EXPECT_NE(std::string(text).find("cpu"), std::string::npos) << text;
  ASSERT_EQ(nybble_linear_plan(&call, &fused, brief, sizeof brief), 0);
  EXPECT_EQ(std::string(brief), std::string(text).substr(0, 4));
  char plan[512];
  ASSERT_EQ(nybble_linear_explain(&call, plan, sizeof plan), 0);
  EXPECT_STREQ(plan, text) << "a fused path takes it";
  int64_t bytes = -1;
  ASSERT_EQ(nybble_linear_workspace(&call, &bytes), 0);
  EXPECT_EQ(bytes, 0);
}

TEST(CApi, TablesAreThoseOfTheFormat) {
  std::vector<float> table(256);
  ASSERT_EQ(nybble_table(0, table.data()), 16);
  EXPECT_EQ(table[15], 1.0f);
  ASSERT_EQ(nybble_table(2, table.data()), 256);
  EXPECT_EQ(table[127], 0.0f);
  EXPECT_EQ(nybble_table(3, table.data()), 0);
}

TEST(CApi, BuildInfoIsJson) {
  const auto info = nlohmann::json::parse(nybble_build_info());
  EXPECT_EQ(info.at("version"), nybble_version());
  EXPECT_TRUE(info.contains("cuda") && info.contains("compiler"));
}

}  // namespace
