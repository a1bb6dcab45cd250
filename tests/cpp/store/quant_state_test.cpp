// The JSON beside a weight: written as bitsandbytes writes it, read with every field checked.
#include "store/quant_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace nybble {
namespace {

// Expected texts come from Python: repr() and, for the last three, json.dumps().
TEST(PythonRepr, SpellsFloatsAsPythonDoes) {
  const std::pair<double, const char*> table[] = {
      {0.0, "0.0"},
      {-0.0, "-0.0"},
      {1.0, "1.0"},
      {0.1, "0.1"},
      {-2.5, "-2.5"},
      {100.0, "100.0"},
      {1234.5, "1234.5"},
      {0.0001, "0.0001"},
      {0.00001, "1e-05"},
      {0.00012345, "0.00012345"},
      {1.2345e-5, "1.2345e-05"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {123456789012345680.0, "1.2345678901234568e+17"},
      {1e100, "1e+100"},
      {5e-324, "5e-324"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {static_cast<double>(0.044470928609371185f), "0.044470928609371185"},
      {static_cast<double>(-1.17549435e-38f), "-1.1754943508222875e-38"},
      {static_cast<double>(16777216.0f), "16777216.0"},
      {NAN, "NaN"},
      {std::numeric_limits<double>::infinity(), "Infinity"},
      {-std::numeric_limits<double>::infinity(), "-Infinity"},
  };
  for (const auto& [value, text] : table) EXPECT_EQ(python_repr(value), text);
}

TEST(QuantState, IsSpelledAsBitsandbytesSpellsIt) {
  QuantStateFields fields{QuantType::kNf4,     64, DType::kBFloat16, std::vector<int64_t>{4096, 14336}, true, DType::kFloat32,
                          0.044470928609371185};
  EXPECT_EQ(format_quant_state(fields),
            R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4096, 14336], "nested_blocksize": 256, )"
            R"("nested_dtype": "float32", "nested_offset": 0.044470928609371185})");
  fields = {QuantType::kFp4, 128, DType::kFloat16, std::vector<int64_t>{7}, false, DType::kFloat32, 0};
  EXPECT_EQ(format_quant_state(fields), R"({"quant_type": "fp4", "blocksize": 128, "dtype": "float16", "shape": [7]})");
  fields.shape.reset();
  EXPECT_EQ(format_quant_state(fields), R"({"quant_type": "fp4", "blocksize": 128, "dtype": "float16", "shape": null})");
}

TEST(QuantState, ReadsWhatItWrites) {
  const QuantStateFields fields{QuantType::kNf4, 4096, DType::kFloat32, std::vector<int64_t>{3, 5, 7}, true, DType::kBFloat16, -1.5e-5};
  Faults faults;
  const auto read = parse_quant_state(format_quant_state(fields), "w", faults);
  ASSERT_TRUE(read) << to_string(faults.at(0));
  EXPECT_EQ(read->quant_type, fields.quant_type);
  EXPECT_EQ(read->block_size, fields.block_size);
  EXPECT_EQ(read->dtype, fields.dtype);
  EXPECT_EQ(read->shape, fields.shape);
  EXPECT_TRUE(read->nested);
  EXPECT_EQ(read->nested_dtype, fields.nested_dtype);
  EXPECT_EQ(read->offset, fields.offset);
}

TEST(QuantState, ExtraFieldsAndWhiteSpaceAreAllowed) {
  Faults faults;
  const auto read = parse_quant_state(
      "{\"made_by\": {\"x\": [1]},\n\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float16\",\"shape\":null} ", "w", faults);
  ASSERT_TRUE(read);
  EXPECT_FALSE(read->shape.has_value());
  EXPECT_FALSE(read->nested);
}

struct BadState {
  const char* name;
  const char* from;  // text of the good state that is replaced
  const char* to;
  std::vector<const char*> messages;  // one fault each
};

const BadState kBadStates[] = {
    {"cut_off", "0.25}", "", {"not a JSON object"}},
    {"array", "{\"quant_type\": \"nf4\"", "[1", {"not a JSON object"}},
    {"no_quant_type", "\"quant_type\": \"nf4\", ", "", {"quant_type: the field is missing"}},
    {"other_quant_type", "\"nf4\"", "\"int4\"", {"quant_type: \"int4\""}},
    {"quant_type_is_a_number", "\"nf4\"", "4", {"quant_type: 4"}},
    {"no_blocksize", "\"blocksize\": 64, ", "", {"blocksize: the field is missing"}},
    {"blocksize_0", "\"blocksize\": 64", "\"blocksize\": 0", {"blocksize: 0"}},
    {"blocksize_63", "\"blocksize\": 64", "\"blocksize\": 63", {"blocksize: 63"}},
    {"blocksize_negative", "\"blocksize\": 64", "\"blocksize\": -64", {"blocksize: -64"}},
    {"blocksize_text", "\"blocksize\": 64", "\"blocksize\": \"64\"", {"blocksize: \"64\""}},
    {"blocksize_float", "\"blocksize\": 64", "\"blocksize\": 64.0", {"blocksize: 64.0"}},
    {"blocksize_huge", "\"blocksize\": 64", "\"blocksize\": 18446744073709551615", {"blocksize: 18446744073709551615"}},
    {"no_dtype", "\"dtype\": \"bfloat16\", ", "", {"dtype: the field is missing"}},
    {"dtype_int8", "\"bfloat16\"", "\"int8\"", {"dtype: \"int8\""}},
    {"no_shape", "\"shape\": [4, 48], ", "", {"shape: the field is missing"}},
    {"shape_text", "[4, 48]", "\"4x48\"", {"shape: \"4x48\""}},
    {"shape_negative", "[4, 48]", "[-4, -48]", {"shape: [-4,-48]"}},
    {"shape_fraction", "[4, 48]", "[4.5, 48]", {"shape: [4.5,48]"}},
    {"shape_overflow", "[4, 48]", "[4611686018427387904, 4]", {"shape: [4611686018427387904,4]"}},
    {"shape_beyond_int64", "[4, 48]", "[18446744073709551615, 1]", {"shape: [18446744073709551615,1]"}},
    {"nested_blocksize_128", "256", "128", {"nested_blocksize: 128"}},
    {"no_nested_blocksize", "\"nested_blocksize\": 256, ", "", {"nested_blocksize: the field is missing"}},
    {"no_nested_dtype", "\"nested_dtype\": \"float32\", ", "", {"nested_dtype: the field is missing"}},
    {"no_offset", ", \"nested_offset\": 0.25", "", {"nested_offset: the field is missing"}},
    {"offset_text", "0.25", "\"0.25\"", {"nested_offset: \"0.25\""}},
    {"offset_null", "0.25", "null", {"nested_offset: null"}},
    {"offset_nan", "0.25", "NaN", {"nested_offset: \"NaN\""}},
    {"offset_infinity", "0.25", "-Infinity", {"nested_offset: \"-Infinity\""}},
    {"offset_beyond_float", "0.25", "1e300", {"nested_offset: 1e+300"}},
    {"two_faults", "64, \"dtype\": \"bfloat16\"", "63, \"dtype\": 1", {"blocksize: 63", "dtype: 1"}},
};

class BadQuantState : public ::testing::TestWithParam<BadState> {};

TEST_P(BadQuantState, NamesEachWrongField) {
  std::string json = R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 48], "nested_blocksize": 256, )"
                     R"("nested_dtype": "float32", "nested_offset": 0.25})";
  const size_t at = json.find(GetParam().from);
  ASSERT_NE(at, std::string::npos);
  Faults faults;
  EXPECT_TRUE(parse_quant_state(json, "w", faults)) << "the good twin";
  json.replace(at, std::string(GetParam().from).size(), GetParam().to);
  EXPECT_FALSE(parse_quant_state(json, "w", faults));
  ASSERT_EQ(faults.size(), GetParam().messages.size()) << to_string(faults.at(0));
  for (size_t i = 0; i < faults.size(); i++)
    EXPECT_NE(faults[i].found.find(GetParam().messages[i]), std::string::npos) << to_string(faults[i]);
}

INSTANTIATE_TEST_SUITE_P(Table, BadQuantState, ::testing::ValuesIn(kBadStates), [](const auto& info) { return info.param.name; });

TEST(QuantState, DeepNestingIsRefusedNotFollowed) {
  Faults faults;
  EXPECT_FALSE(parse_quant_state("{\"a\":" + std::string(1000000, '['), "w", faults));
  EXPECT_FALSE(parse_quant_state("{\"a\":" + std::string(30000, '['), "w", faults));
  EXPECT_EQ(faults.size(), 2);
}

}  // namespace
}  // namespace nybble
