// A checkpoint becomes a store: every byte against the codec, the layout's promises, and the same bytes however often it was interrupted.
#include "nybble/convert.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/parallel.h"
#include "store/checkpoint_builder.h"
#include "store/layout.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename().string()] = read_text(entry.path());
  return files;
}

struct Stop {};

class Convert : public ::testing::Test {
 protected:
  Convert() { write_tiny_checkpoint(source_); }
  QuantizeSummary convert(const std::string& name, const QuantizeOptions& options = {}) {
    return quantize_checkpoint(source_, folder_ / name, options);
  }

  TemporaryFolder folder_;
  const fs::path source_ = folder_ / "source";
};

void expect_is_quantized(const QuantizedTensor& weight, const TensorView& dense, const QuantizeOptions& options) {
  const int64_t n = weight.elements, blocks = num_blocks(n, options.block_size);
  std::vector<uint8_t> packed(packed_bytes(n));
  std::vector<float> absmax(blocks);
  quantize_4bit(dense.bytes.data(), DType::kBFloat16, n, static_cast<int>(options.block_size), options.quant_type, packed.data(),
                absmax.data());
  ASSERT_EQ(std::memcmp(weight.packed.data(), packed.data(), packed.size()), 0) << weight.name;
  EXPECT_EQ(weight.shape, dense.shape);
  ASSERT_EQ(weight.nested, options.nested);
  if (!options.nested) {
    EXPECT_EQ(std::memcmp(weight.absmax.data(), absmax.data(), absmax.size() * 4), 0);
    return;
  }
  std::vector<uint8_t> codes(blocks);
  std::vector<float> nested(num_blocks(blocks, 256));
  EXPECT_EQ(weight.offset, absmax_mean(absmax.data(), blocks));
  quantize_scales(absmax.data(), blocks, weight.offset, nested_code_table().data(), codes.data(), nested.data());
  EXPECT_EQ(std::memcmp(weight.absmax.data(), codes.data(), codes.size()), 0);
  EXPECT_EQ(std::memcmp(weight.nested_absmax.data(), nested.data(), nested.size() * 4), 0);
}

TEST_F(Convert, EveryByteIsTheCodecs) {
  const Checkpoint source(source_);
  int tried = 0;
  for (const auto type : {QuantType::kNf4, QuantType::kFp4}) {
    for (const int64_t block_size : {32, 64, 4096}) {
      for (const bool nested : {true, false}) {
        const QuantizeOptions options{type, block_size, nested, {}, {}};
        const std::string name = "store" + std::to_string(tried++);
        const auto summary = convert(name, options);
        EXPECT_EQ(summary.quantized, 4);
        EXPECT_EQ(summary.dense, 7);
        Faults faults;
        const Checkpoint store(folder_ / name);
        const auto weights = quantized_tensors(store, faults);
        ASSERT_EQ(weights.size(), 4);
        for (const auto& weight : weights) expect_is_quantized(weight, *source.find(weight.name), options);
        for (const char* kept : {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.bias"}) {
          ASSERT_NE(store.find(kept), nullptr);
          EXPECT_TRUE(std::ranges::equal(store.find(kept)->bytes, source.find(kept)->bytes));
        }
        const auto report = verify_store(folder_ / name);
        EXPECT_TRUE(report.faults.empty()) << to_string(report.faults.at(0));
      }
    }
  }
}

TEST_F(Convert, ALayerIsOneAlignedRunOfBytes) {
  convert("store");
  Faults faults;
  const Checkpoint store(folder_ / "store");
  const auto weights = quantized_tensors(store, faults);
  const auto layers = stored_layers(store, weights);
  ASSERT_EQ(layers.size(), 2);
  for (const auto& layer : layers) {
    EXPECT_EQ(layer.offset % 4096, 0);
    ASSERT_EQ(layer.weights.size(), 2);
    const std::string file = read_text(layer.file);
    for (const auto& stored : layer.weights) {
      const auto& weight = weights[stored.index];
      EXPECT_EQ(weight.name, stored.name);
      const std::pair<int64_t, std::span<const std::byte>> views[] = {{stored.packed_offset, weight.packed},
                                                                      {stored.absmax_offset, weight.absmax},
                                                                      {stored.nested_absmax_offset, weight.nested_absmax}};
      for (const auto& [offset, bytes] : views) {
        EXPECT_EQ(offset % 256, 0);
        ASSERT_LE(offset + static_cast<int64_t>(bytes.size()), layer.bytes);
        EXPECT_EQ(std::memcmp(file.data() + layer.offset + offset, bytes.data(), bytes.size()), 0);
      }
    }
  }
  EXPECT_THROW(stored_layers(Checkpoint(source_), weights), Error) << "control: the source is not laid out so";
}

TEST_F(Convert, BytesDependNeitherOnThreadsNorOnInterruptions) {
  set_num_threads(1);
  convert("once");
  const auto expected = contents(folder_ / "once");
  ASSERT_EQ(expected.size(), 3 + 3);  // three files, index, configuration, tokenizer
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    const std::string name = "again" + std::to_string(threads);
    // Stops at the first progress call, then at the second, ..., each run going on from where the last one stopped.
    int runs = 0;
    for (int calls = 1; runs < 100; calls++, runs++) {
      int left = calls;
      try {
        quantize_checkpoint(source_, folder_ / name, {}, [&](const QuantizeProgress&) {
          if (--left == 0) throw Stop();
        });
        break;
      } catch (const Stop&) {
        const auto note = incomplete_note(folder_ / name);
        ASSERT_TRUE(note);
        EXPECT_NE(note->find("resume with `nybble quantize"), std::string::npos);
        EXPECT_FALSE(fs::exists(folder_ / name));
      }
    }
    EXPECT_GT(runs, 3);
    EXPECT_EQ(contents(folder_ / name), expected);
    EXPECT_FALSE(fs::exists(folder_ / (name + ".partial")));
    EXPECT_FALSE(incomplete_note(folder_ / name));
  }
}

TEST_F(Convert, RefusesToOverwrite) {
  convert("store");
  const auto before = contents(folder_ / "store");
  EXPECT_THROW(convert("store"), DestinationError);
  EXPECT_THROW(convert("store/"), DestinationError);
  EXPECT_THROW(convert("source"), DestinationError);
  EXPECT_EQ(contents(folder_ / "store"), before);
  fs::create_directory(folder_ / "empty");
  EXPECT_NO_THROW(convert("empty"));
}

TEST_F(Convert, ADamagedFileOfAnEarlierRunIsWrittenAgain) {
  convert("once");
  EXPECT_THROW(quantize_checkpoint(source_, folder_ / "store", {},
                                   [](const QuantizeProgress& progress) {
                                     if (progress.layer == "model.layers.1") throw Stop();
                                   }),
               Stop);
  const fs::path written = folder_ / "store.partial" / "store" / "model-00002-of-00003.safetensors";
  ASSERT_TRUE(fs::exists(written));
  fs::resize_file(written, fs::file_size(written) - 1);
  EXPECT_EQ(convert("store").kept_files, 1);
  EXPECT_EQ(contents(folder_ / "store"), contents(folder_ / "once"));
}

TEST_F(Convert, AnUnfinishedRunIsFinishedWithItsOwnTerms) {
  const auto stop_late = [](const QuantizeProgress& progress) {
    if (progress.layer == "model.layers.0") throw Stop();
  };
  EXPECT_THROW(quantize_checkpoint(source_, folder_ / "store", {}, stop_late), Stop);
  QuantizeOptions other;
  other.block_size = 128;
  EXPECT_THROW(convert("store", other), DestinationError);
  fs::last_write_time(source_ / "model.safetensors", fs::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_THROW(convert("store"), DestinationError) << "the source has changed";
  fs::remove_all(folder_ / "store.partial");
  EXPECT_NO_THROW(convert("store", other));
}

TEST_F(Convert, ALeftOverOfTheLastCleanUpIsRemoved) {
  convert("store");
  fs::create_directory(folder_ / "store.partial");
  EXPECT_FALSE(incomplete_note(folder_ / "store"));
  EXPECT_TRUE(convert("store").was_complete);
  EXPECT_FALSE(fs::exists(folder_ / "store.partial"));
  EXPECT_THROW(convert("store"), DestinationError);
}

TEST_F(Convert, PatternsChooseModules) {
  QuantizeOptions options;
  options.exclude = {"*.q_proj"};
  EXPECT_EQ(convert("a", options).quantized, 2);
  options = {};
  options.include = {"*.up_proj", "lm_head"};
  EXPECT_EQ(convert("b", options).quantized, 3);
  const auto config = nlohmann::json::parse(read_text(folder_ / "b" / "config.json"));
  EXPECT_EQ(config["quantization_config"]["llm_int8_skip_modules"],
            nlohmann::json({"model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}));
  EXPECT_TRUE(verify_store(folder_ / "b").faults.empty());
  options.include = {"*.up_projection"};
  EXPECT_THROW(convert("c", options), Error);
  options = {};
  options.exclude = {"*"};
  EXPECT_THROW(convert("c", options), Error) << "nothing left to quantise";
  EXPECT_FALSE(fs::exists(folder_ / "c"));
}

TEST_F(Convert, IntegerWeightsAreRefused) {
  Entries entries = tiny_model();
  entries["model.layers.0.self_attn.k_proj.weight"] = {"I16", {2, 2}, "abcdefgh"};
  write_tiny_checkpoint(source_, entries);
  EXPECT_EQ(convert("kept").quantized, 4) << "by default they stay as they are";
  QuantizeOptions options;
  options.include = {"*_proj"};
  EXPECT_THROW(convert("store", options), Error);
  entries["model.layers.0.self_attn.k_proj.weight"] = {"U8", {4, 2}, "abcdefgh"};
  write_tiny_checkpoint(source_, entries);
  EXPECT_THROW(convert("store"), Error) << "codes without a state";
}

TEST_F(Convert, NonFiniteWeightsAreRefusedByName) {
  for (const uint16_t word : {0x7f80, 0xff80, 0x7fc0}) {
    Entries entries = tiny_model();
    std::memcpy(entries["model.layers.1.mlp.up_proj.weight"].bytes.data() + 2 * 1001, &word, 2);
    write_tiny_checkpoint(source_, entries);
    try {
      convert("store" + std::to_string(word));
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("model.layers.1.mlp.up_proj.weight: element 1001"), std::string::npos) << error.what();
    }
  }
}

TEST_F(Convert, FourBitSourcesKeepTheirBytes) {
  Entries entries = quantized_parts("model.layers.0.q.weight");
  entries["model.norm.weight"] = {"F32", {1}, "abcd"};
  entries["model.layers.0.q.weight"].dtype = "F32";
  entries["model.layers.0.q.weight"].shape = {24, 1};
  write_tiny_checkpoint(source_, entries);
  const auto summary = convert("store");
  EXPECT_EQ(summary.copied_quantized, 1);
  EXPECT_EQ(summary.quantized, 0);
  Faults faults;
  const Checkpoint store(folder_ / "store");
  const auto weights = quantized_tensors(store, faults);
  ASSERT_EQ(weights.size(), 1);
  EXPECT_EQ(store.find("model.layers.0.q.weight")->dtype, "U8");
  for (const auto& [name, entry] : entries) {
    ASSERT_NE(store.find(name), nullptr) << name;
    EXPECT_EQ(std::memcmp(store.find(name)->bytes.data(), entry.bytes.data(), entry.bytes.size()), 0) << name;
  }
  EXPECT_TRUE(verify_store(folder_ / "store").faults.empty());
  const auto again = quantize_checkpoint(folder_ / "store", folder_ / "again", {});
  EXPECT_EQ(again.copied_quantized, 1);
  EXPECT_EQ(contents(folder_ / "again"), contents(folder_ / "store"));
}

TEST_F(Convert, ConfigurationIsNeededAndChecked) {
  fs::remove(source_ / "config.json");
  EXPECT_THROW(convert("store"), Error);
  for (const char* bad : {"[]", "{", R"({"model_type": "gpt2"})", R"({"quantization_config": {"quant_method": "awq"}})"}) {
    write_text(source_ / "config.json", bad);
    EXPECT_THROW(convert("store"), Error) << bad;
  }
  EXPECT_FALSE(fs::exists(folder_ / "store.partial"));
}

}  // namespace
}  // namespace nybble
