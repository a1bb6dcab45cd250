// verify lists every fault of a store, and none of a good one.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "nybble/convert.h"
#include "store/checkpoint_builder.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;
const std::string kWeight = "model.layers.1.mlp.up_proj.weight";

class Verify : public ::testing::Test {
 protected:
  Verify() {
    write_tiny_checkpoint(folder_ / "source");
    quantize_checkpoint(folder_ / "source", store_, {});
  }
  std::string messages() {
    std::string text;
    for (const auto& fault : verify_store(store_).faults) text += to_string(fault) + "\n";
    return text;
  }
  // Overwrites bytes of a tensor in its file.
  void poke(const std::string& tensor, size_t at, const std::string& bytes) {
    fs::path file;
    int64_t offset = 0;
    {
      const Checkpoint checkpoint(store_);
      const TensorView* view = checkpoint.find(tensor);
      ASSERT_NE(view, nullptr) << tensor;
      ASSERT_LE(at + bytes.size(), view->bytes.size());
      file = checkpoint.file_of(*view).path();
      offset = view->file_offset;
    }
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(offset + static_cast<int64_t>(at));
    stream << bytes;
  }
  TemporaryFolder folder_;
  const fs::path store_ = folder_ / "store";
};

const std::string kNan("\x00\x00\xc0\x7f", 4);
const std::string kInfinity("\x00\x00\x80\x7f", 4);

TEST_F(Verify, AGoodStoreHasNoFault) {
  EXPECT_EQ(messages(), "");
  EXPECT_EQ(verify_store(store_).quantized, 4);
}

TEST_F(Verify, NonFiniteScalesAreFound) {
  poke(kWeight + kNestedAbsmax, 0, kNan);
  EXPECT_NE(messages().find(kWeight + ".nested_absmax: found 1 values that are NaN or Inf"), std::string::npos) << messages();
}

TEST_F(Verify, NonFiniteNestedTablesAreFound) {
  poke(kWeight + kNestedQuantMap, 400, kInfinity);
  EXPECT_NE(messages().find(kWeight + ".nested_quant_map: found entry 100 = Infinity"), std::string::npos) << messages();
}

TEST_F(Verify, ANestedTableMustBeTheSameACodeTableNameTheSameCodes) {
  const auto bytes = [](float value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  const float code = code_table(QuantType::kNf4)[3], scale = nested_code_table()[200];
  poke(kWeight + kQuantMap, 12, bytes(code * (1 + 1.0f / 256)));  // as far as rounding to bfloat16 goes
  EXPECT_EQ(messages(), "");
  poke(kWeight + kQuantMap, 12, bytes(code * (1 + 1.0f / 100)));
  EXPECT_NE(messages().find(kWeight + ".quant_map: found entry 3 = "), std::string::npos) << messages();
  poke(kWeight + kQuantMap, 12, bytes(code));
  EXPECT_EQ(messages(), "");
  poke(kWeight + kNestedQuantMap, 800, bytes(std::nextafter(scale, 1.0f)));
  EXPECT_NE(messages().find(kWeight + ".nested_quant_map: found entry 200 = "), std::string::npos) << messages();
  EXPECT_NE(messages().find(", as in every nested table"), std::string::npos) << messages();
}

TEST_F(Verify, ScalesThatOverflowTogetherAreFound) {
  poke(kWeight + kNestedAbsmax, 0, std::string("\xff\xff\x7f\x7f", 4));
  poke(kWeight + kNestedQuantMap, 1020, std::string("\xff\xff\x7f\x7f", 4));  // entry 255, the largest scale's
  poke(kWeight + kAbsmax, 0, "\xff");
  EXPECT_NE(messages().find("the scale of block 0 is NaN or Inf"), std::string::npos) << messages();
}

TEST_F(Verify, AnotherCodeTableIsFound) {
  poke(kWeight + kQuantMap, 60, std::string("\x00\x00\x00\x40", 4));
  EXPECT_NE(messages().find("entry 15 = 2.0"), std::string::npos) << messages();
}

TEST_F(Verify, PaddingThatIsNotZeroIsFound) {
  poke("model.layers.1.rotary_emb.inv_freq.padding.0", 0, "x");
  EXPECT_NE(messages().find("padding of zeros"), std::string::npos) << messages();
}

TEST_F(Verify, DamagedStatesAreFound) {
  poke(kWeight + kStateNf4, 0, "[");
  EXPECT_NE(messages().find("not a JSON object"), std::string::npos) << messages();
}

TEST_F(Verify, EveryFaultIsListed) {
  poke("model.layers.0.mlp.up_proj.weight" + std::string(kNestedAbsmax), 0, kNan);
  poke("model.layers.0.self_attn.q_proj.weight" + std::string(kQuantMap), 0, kInfinity);
  poke(kWeight + kStateNf4, 1, "X");
  fs::remove(store_ / "model-00001-of-00003.safetensors");
  auto config = nlohmann::json::parse(read_text(store_ / "config.json"));
  config["quantization_config"]["load_in_4bit"] = false;
  config["quantization_config"].erase("bnb_4bit_quant_type");
  write_text(store_ / "config.json", config.dump());
  const std::string text = messages();
  for (const char* part :
       {"layers.0.mlp.up_proj.weight.nested_absmax", "layers.0.self_attn.q_proj.weight.quant_map", "quant_state.bitsandbytes__nf4",
        "model-00001-of-00003.safetensors", "load_in_4bit: false", "bnb_4bit_quant_type: missing"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST_F(Verify, AConfigurationThatTransformersWouldMisreadIsFound) {
  fs::remove(store_ / "config.json");
  EXPECT_NE(messages().find("no such file"), std::string::npos);
  write_text(store_ / "config.json", kTinyConfig);
  EXPECT_NE(messages().find("no quantization_config"), std::string::npos);
  write_text(store_ / "config.json",
             R"({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}})");
  EXPECT_NE(messages().find("the dense matrix lm_head is not in llm_int8_skip_modules"), std::string::npos) << messages();
}

TEST_F(Verify, AnythingElseIsAFaultNotACrash) {
  EXPECT_EQ(verify_store(folder_ / "nowhere").faults.size(), 1);
  EXPECT_NE(to_string(verify_store(folder_ / "source").faults.at(0)).find("no 4-bit weight"), std::string::npos);
  write_text(folder_ / "text.safetensors", "hello");
  EXPECT_GE(verify_store(folder_ / "text.safetensors").faults.size(), 1);
}

// Every byte of a header that is changed is either noticed or harmless; nothing crashes.
TEST_F(Verify, FlippedHeaderBytesNeverCrash) {
  const fs::path file = store_ / "model-00003-of-00003.safetensors";
  const std::string good = read_text(file);
  int noticed = 0, flips = 0;
  for (size_t at = 0; at < 3000; at += 7, flips++) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
    write_text(file, bad);
    noticed += !verify_store(store_).faults.empty();
  }
  EXPECT_GT(noticed, flips / 2);
}

}  // namespace
}  // namespace nybble
