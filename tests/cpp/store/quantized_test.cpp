// Weights that bitsandbytes quantised: gathered from their parts, or each part that does not fit is named.
#include <gtest/gtest.h>

#include <bit>

#include "store/checkpoint_builder.h"

namespace nybble {
namespace {

const std::string kWeight = "m.layers.0.q.weight";

class QuantizedParts : public ::testing::Test {
 protected:
  std::vector<QuantizedTensor> gather(const Entries& entries, Faults& faults) {
    write_safetensors(folder_ / "model.safetensors", entries);
    checkpoint_.emplace(folder_.path());
    return quantized_tensors(*checkpoint_, faults);
  }
  Faults faults_of(const Entries& entries) {
    Faults faults;
    const size_t gathered = gather(entries, faults).size();
    EXPECT_EQ(gathered, faults.empty() ? 1 : 0);
    return faults;
  }
  TemporaryFolder folder_;
  std::optional<Checkpoint> checkpoint_;
};

TEST_F(QuantizedParts, AreGathered) {
  Faults faults;
  const auto weights = gather(quantized_parts(kWeight), faults);
  ASSERT_TRUE(faults.empty()) << to_string(faults[0]);
  const QuantizedTensor& weight = weights.at(0);
  EXPECT_EQ(weight.name, kWeight);
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{4, 48}));
  EXPECT_EQ(weight.elements, 192);
  EXPECT_EQ(weight.offset, 0.05f);
  const Nf4Weight view = weight.view();
  EXPECT_EQ(view.n, 4);
  EXPECT_EQ(view.k, 48);
  float scales[3];
  expand_scales(view.scales, 0, 3, scales);
  const auto code = nested_code_table();
  EXPECT_EQ(scales[1], code[0x90] * 0.01f + 0.05f);
  float out[192];
  dequantize_4bit(view, DType::kFloat32, 0, 192, out);
  EXPECT_EQ(out[0], code_table(QuantType::kNf4)[7] * scales[0]);
  EXPECT_EQ(out[65], code_table(QuantType::kNf4)[10] * scales[1]);
}

TEST_F(QuantizedParts, MayLieInDifferentShards) {
  const Entries parts = quantized_parts(kWeight);
  std::string map;
  int shard = 0;
  for (const auto& [name, entry] : parts) {
    const std::string file = "s" + std::to_string(shard++) + ".safetensors";
    write_safetensors(folder_ / file, {{name, entry}});
    map += (map.empty() ? "\"" : ", \"") + name + "\": \"" + file + "\"";
  }
  write_text(folder_ / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
  Faults faults;
  const Checkpoint checkpoint(folder_.path());
  EXPECT_EQ(quantized_tensors(checkpoint, faults).size(), 1);
  EXPECT_TRUE(faults.empty());
}

TEST_F(QuantizedParts, FloatStorageCarriesTheSameBytes) {
  const std::pair<const char*, int64_t> storages[] = {{"BF16", 48}, {"F16", 48}, {"F32", 24}, {"I8", 96}};
  for (const auto& [dtype, count] : storages) {
    for (const bool column : {true, false}) {
      Entries parts = quantized_parts(kWeight);
      std::string bytes(96, '\0');
      for (int i = 0; i < 96; i++) bytes[i] = static_cast<char>(0x7f + i * 37);  // NaN patterns among them
      parts[kWeight] = {dtype, column ? std::vector<int64_t>{count, 1} : std::vector<int64_t>{count}, bytes};
      Faults faults;
      const auto weights = gather(parts, faults);
      ASSERT_EQ(weights.size(), 1) << dtype;
      EXPECT_EQ(std::memcmp(weights[0].packed.data(), bytes.data(), 96), 0) << dtype;
    }
  }
}

TEST_F(QuantizedParts, TablesIn16BitsAreWidened) {
  Entries parts = quantized_parts(kWeight);
  std::vector<uint16_t> words;
  for (const float value : code_table(QuantType::kNf4))
    words.push_back(static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0x8000) >> 16));
  parts[kWeight + kQuantMap] = {"BF16", {16}, bytes_of(words)};
  // fp16: 1, -1, 2^-14, 2^-24, -0, 65504
  std::vector<uint16_t> halves(256, 0);
  const uint16_t patterns[] = {0x3c00, 0xbc00, 0x0400, 0x0001, 0x8000, 0x7bff};
  std::copy(std::begin(patterns), std::end(patterns), halves.begin());
  parts[kWeight + kNestedQuantMap] = {"F16", {256}, bytes_of(halves)};
  Faults faults;
  const auto weights = gather(parts, faults);
  ASSERT_EQ(weights.size(), 1);
  EXPECT_EQ(weights[0].quant_map[15], 1.0f);
  EXPECT_EQ(weights[0].quant_map[1], std::bit_cast<float>(uint32_t{words[1]} << 16));
  const float expected[] = {1.0f, -1.0f, 0x1p-14f, 0x1p-24f, -0.0f, 65504.0f};
  for (int i = 0; i < 6; i++) EXPECT_EQ(std::bit_cast<uint32_t>(weights[0].nested_quant_map[i]), std::bit_cast<uint32_t>(expected[i])) << i;
}

TEST_F(QuantizedParts, ShapeNullIsReadAsUnknown) {
  Entries parts = quantized_parts(kWeight);
  set_state(
      parts, kWeight,
      R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": null, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0})");
  Faults faults;
  const auto weights = gather(parts, faults);
  ASSERT_EQ(weights.size(), 1);
  EXPECT_FALSE(weights[0].shape_known());
  EXPECT_EQ(weights[0].elements, 192);
}

TEST_F(QuantizedParts, PlainScalesAreFp32) {
  Entries parts = quantized_parts(kWeight);
  set_state(parts, kWeight, R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 48]})");
  parts.erase(kWeight + kNestedAbsmax);
  parts.erase(kWeight + kNestedQuantMap);
  EXPECT_EQ(faults_of(parts).size(), 1) << "absmax is still uint8";
  parts[kWeight + kAbsmax] = {"F32", {3}, bytes_of(std::vector<float>{1, 2, 3})};
  EXPECT_TRUE(faults_of(parts).empty());
}

struct Damage {
  const char* name;
  void (*apply)(Entries&);
  const char* subject;  // suffix of the weight's name
  const char* message;
};
const Damage kDamages[] = {
    {"no_state", [](Entries& parts) { parts.erase(kWeight + kStateNf4); }, "", "no quant state"},
    {"only_the_codes",
     [](Entries& parts) {
       for (const char* part : {kStateNf4, kAbsmax, kQuantMap, kNestedAbsmax, kNestedQuantMap}) parts.erase(kWeight + part);
     },
     "", "U8 codes without a quant state"},
    {"no_codes", [](Entries& parts) { parts.erase(kWeight); }, "", "no such tensor"},
    {"two_states", [](Entries& parts) { parts[kWeight + kStateFp4] = parts[kWeight + kStateNf4]; }, "", "an NF4 and an FP4"},
    {"state_under_the_other_type",
     [](Entries& parts) {
       parts[kWeight + kStateFp4] = parts[kWeight + kStateNf4];
       parts.erase(kWeight + kStateNf4);
     },
     kStateFp4, "quant_type \"nf4\""},
    {"state_is_float",
     [](Entries& parts) {
       parts[kWeight + kStateNf4] = {"F32", {1}, "abcd"};
     },
     kStateNf4, "F32 [1]"},
    {"codes_are_int32",
     [](Entries& parts) {
       parts[kWeight] = {"I32", {24, 1}, std::string(96, 'x')};
     },
     "", "I32 [24, 1]"},
    {"codes_one_short",
     [](Entries& parts) {
       parts[kWeight] = {"U8", {95, 1}, std::string(95, 'x')};
     },
     "", "95 bytes"},
    {"codes_one_more",
     [](Entries& parts) {
       parts[kWeight] = {"U8", {97, 1}, std::string(97, 'x')};
     },
     "", "97 bytes"},
    {"no_absmax", [](Entries& parts) { parts.erase(kWeight + kAbsmax); }, kAbsmax, "no such tensor"},
    {"absmax_one_short",
     [](Entries& parts) {
       parts[kWeight + kAbsmax] = {"U8", {2}, "ab"};
     },
     kAbsmax, "U8 [2]"},
    {"absmax_is_float",
     [](Entries& parts) {
       parts[kWeight + kAbsmax] = {"F32", {3}, std::string(12, '\0')};
     },
     kAbsmax, "F32 [3]"},
    {"table_of_15",
     [](Entries& parts) {
       parts[kWeight + kQuantMap] = {"F32", {15}, std::string(60, '\0')};
     },
     kQuantMap, "F32 [15]"},
    {"table_of_int8",
     [](Entries& parts) {
       parts[kWeight + kQuantMap] = {"I8", {16}, std::string(16, '\0')};
     },
     kQuantMap, "I8 [16]"},
    {"no_table", [](Entries& parts) { parts.erase(kWeight + kQuantMap); }, kQuantMap, "no such tensor"},
    {"no_nested_absmax", [](Entries& parts) { parts.erase(kWeight + kNestedAbsmax); }, kNestedAbsmax, "no such tensor"},
    {"nested_absmax_of_2",
     [](Entries& parts) {
       parts[kWeight + kNestedAbsmax] = {"F32", {2}, std::string(8, '\0')};
     },
     kNestedAbsmax, "F32 [2]"},
    {"nested_table_of_255",
     [](Entries& parts) {
       parts[kWeight + kNestedQuantMap] = {"F32", {255}, std::string(1020, '\0')};
     },
     kNestedQuantMap, "F32 [255]"},
    {"blocksize_63",
     [](Entries& parts) { set_state(parts, kWeight, R"({"quant_type": "nf4", "blocksize": 63, "dtype": "bfloat16", "shape": [4, 48]})"); },
     kStateNf4, "blocksize: 63"},
};

class DamagedParts : public QuantizedParts, public ::testing::WithParamInterface<Damage> {};

TEST_P(DamagedParts, AreNamed) {
  Entries parts = quantized_parts(kWeight);
  EXPECT_TRUE(faults_of(parts).empty()) << "the good twin";
  GetParam().apply(parts);
  const Faults faults = faults_of(parts);
  ASSERT_GE(faults.size(), 1);
  EXPECT_EQ(faults[0].subject, kWeight + GetParam().subject);
  EXPECT_NE(faults[0].found.find(GetParam().message), std::string::npos) << to_string(faults[0]);
  EXPECT_FALSE(faults[0].expected.empty());
  EXPECT_FALSE(faults[0].remedy.empty());
}

INSTANTIATE_TEST_SUITE_P(Table, DamagedParts, ::testing::ValuesIn(kDamages), [](const auto& info) { return info.param.name; });

TEST_F(QuantizedParts, AllFaultsAreListed) {
  Entries parts = quantized_parts(kWeight);
  parts[kWeight + kAbsmax] = {"U8", {2}, "ab"};
  parts.erase(kWeight + kQuantMap);
  parts[kWeight + kNestedAbsmax] = {"F32", {0}, ""};
  EXPECT_EQ(faults_of(parts).size(), 3);
}

}  // namespace
}  // namespace nybble
