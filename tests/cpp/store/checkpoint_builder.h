// Builds checkpoints in a temporary folder, tensor by tensor and well or badly formed.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "nybble/format.h"
#include "nybble/store.h"
#include "store/quant_state.h"
#include "store/quantized_keys.h"
#include "store/safetensors_header.h"

namespace nybble {

// A folder that is gone when the test ends; in memory where that is possible, since stores flush every file.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const std::filesystem::path memory = "/dev/shm";
    const auto parent = ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
    std::string name = (parent / "nybble-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes of a safetensors file with this header text, whatever it says.
inline std::string raw_safetensors(const std::string& header, const std::string& data) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; i++) file[i] = static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i) & 0xff);
  return file + header + data;
}

struct Entry {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Entries = std::map<std::string, Entry>;

inline void write_safetensors(const std::filesystem::path& path, const Entries& entries,
                              const std::map<std::string, std::string>& metadata = {}) {
  std::vector<HeaderTensor> tensors;
  std::string data;
  for (const auto& [name, entry] : entries) {
    const auto begin = static_cast<int64_t>(data.size());
    data += entry.bytes;
    tensors.push_back({name, entry.dtype, entry.shape, begin, static_cast<int64_t>(data.size())});
  }
  write_text(path, format_safetensors_header(tensors, metadata, 8) + data);
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Normal bf16 values, the same for the same seed.
inline Entry random_bf16(int64_t rows, int64_t columns, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<uint16_t> words(static_cast<size_t>(rows * columns));
  for (auto& word : words) {
    const float value = normal(engine);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    word = static_cast<uint16_t>(bits >> 16);
  }
  return {"BF16", {rows, columns}, bytes_of(words)};
}

constexpr const char* kTinyConfig = R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-06})";

// Two layers of odd sizes, so that padding is needed, an embedding, a head and norms.
inline Entries tiny_model() {
  Entries entries;
  entries["model.embed_tokens.weight"] = random_bf16(13, 40, 1);
  entries["lm_head.weight"] = random_bf16(13, 40, 2);
  entries["model.norm.weight"] = {"BF16", {40}, std::string(80, '\x3f')};
  for (int layer = 0; layer < 2; layer++) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    entries[prefix + "self_attn.q_proj.weight"] = random_bf16(40, 40, 10 + layer);
    entries[prefix + "mlp.up_proj.weight"] = random_bf16(72, 40, 20 + layer);
    entries[prefix + "mlp.up_proj.bias"] = random_bf16(1, 72, 30 + layer);
    entries[prefix + "mlp.up_proj.bias"].shape = {72};
    entries[prefix + "input_layernorm.weight"] = {"BF16", {40}, std::string(80, '\x3f')};
  }
  return entries;
}

inline void write_tiny_checkpoint(const std::filesystem::path& folder, const Entries& entries = tiny_model()) {
  std::filesystem::create_directories(folder);
  write_safetensors(folder / "model.safetensors", entries);
  write_text(folder / "config.json", kTinyConfig);
  write_text(folder / "tokenizer.json", "{\"tokens\": []}");
}

// The parts of one nested NF4 weight [4, 48] of constant scales, as bitsandbytes names them.
inline Entries quantized_parts(const std::string& weight) {
  const auto code = code_table(QuantType::kNf4);
  const auto nested = nested_code_table();
  Entries parts;
  parts[weight] = {"U8", {96, 1}, std::string(96, '\x7a')};
  parts[weight + kAbsmax] = {"U8", {3}, std::string("\x80\x90\xa0", 3)};
  parts[weight + kQuantMap] = {"F32", {16}, bytes_of(std::vector<float>(code.begin(), code.end()))};
  parts[weight + kNestedAbsmax] = {"F32", {1}, bytes_of(std::vector<float>{0.01f})};
  parts[weight + kNestedQuantMap] = {"F32", {256}, bytes_of(std::vector<float>(nested.begin(), nested.end()))};
  const std::string json =
      format_quant_state({QuantType::kNf4, 64, DType::kBFloat16, std::vector<int64_t>{4, 48}, true, DType::kFloat32, 0.05f});
  parts[weight + kStateNf4] = {"U8", {static_cast<int64_t>(json.size())}, json};
  return parts;
}

inline void set_state(Entries& parts, const std::string& weight, const std::string& json) {
  parts[weight + kStateNf4] = {"U8", {static_cast<int64_t>(json.size())}, json};
}

}  // namespace nybble
