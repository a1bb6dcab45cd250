// Everything that can be wrong with a 4-bit checkpoint on disk, found without stopping.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/posix.h"
#include "nybble/store.h"
#include "store/layout.h"
#include "store/names.h"
#include "store/quant_state.h"
#include "store/quantized_keys.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;
constexpr const char* kRequantize = "quantise the original checkpoint again with `nybble quantize`";
constexpr int64_t kScalesPerPiece = 65536;

class Verifier {
 public:
  VerifyReport run(const fs::path& path) {
    try {
      const Checkpoint checkpoint(path, report_.faults);
      report_.tensors = static_cast<int64_t>(checkpoint.tensors().size());
      const auto weights = quantized_tensors(checkpoint, report_.faults);
      report_.quantized = static_cast<int64_t>(weights.size());
      for (const auto& weight : weights) check_weight(weight);
      if (weights.empty() && report_.faults.empty())
        note(path.string(), "no 4-bit weight", "a quantised checkpoint", "convert it with `nybble quantize`");
      check_config(checkpoint, weights);
      if (is_store(checkpoint)) check_layout(checkpoint, weights);
    } catch (const Error& error) {
      note(path.string(), error.what(), "a checkpoint that can be opened", "");
    }
    return std::move(report_);
  }

 private:
  void note(std::string subject, std::string found, std::string expected, std::string remedy) {
    report_.faults.push_back({std::move(subject), std::move(found), std::move(expected), std::move(remedy)});
  }

  void check_weight(const QuantizedTensor& weight) {
    if (!weight.shape_known()) note(weight.name, "\"shape\": null in its quant state", "[out_features, in_features]", kRequantize);
    check_tables(weight);
    if (weight.nested) {
      check_finite(weight.name + kNestedAbsmax, weight.nested_absmax);
    } else {
      check_finite(weight.name + kAbsmax, weight.absmax);
    }
    check_scales(weight);
  }

  // Multiplies use their own tables. A code table that a loader rounded to 16 bits still names the same codes; from the nested one the
  // scales are made, so that it must be the same.
  void check_tables(const QuantizedTensor& weight) {
    check_table(weight.name + kQuantMap, weight.quant_map, code_table(weight.quant_type), 1.0f / 128, name(weight.quant_type));
    if (weight.nested) check_table(weight.name + kNestedQuantMap, weight.nested_quant_map, nested_code_table(), 0, "nested");
  }

  void check_table(const std::string& tensor, std::span<const float> found, std::span<const float> expected, float rounded,
                   const char* what) {
    for (size_t i = 0; i < expected.size(); i++) {
      if (std::fabs(found[i] - expected[i]) <= std::fabs(expected[i]) * rounded) continue;
      note(tensor, "entry " + std::to_string(i) + " = " + python_repr(found[i]),
           python_repr(expected[i]) + ", as in every " + what + " table", kRequantize);
      return;
    }
  }

  void check_finite(const std::string& tensor, std::span<const std::byte> floats) {
    int64_t bad = 0, first = -1;
    for (size_t i = 0; i < floats.size() / 4; i++) {
      float value;
      std::memcpy(&value, floats.data() + 4 * i, 4);
      if (std::isfinite(value)) continue;
      if (bad++ == 0) first = static_cast<int64_t>(i);
    }
    if (bad > 0) {
      note(tensor, std::to_string(bad) + " values that are NaN or Inf, the first at " + std::to_string(first), "finite scales",
           kRequantize);
    }
  }

  // The scales as the multiply uses them: finite parts can still overflow together.
  void check_scales(const QuantizedTensor& weight) {
    if (!weight.nested || !all_finite(weight.nested_absmax)) return;
    const Nf4Weight view = weight.view();
    const int64_t blocks = num_blocks(weight.elements, weight.block_size);
    std::vector<float> scales(static_cast<size_t>(std::min(blocks, kScalesPerPiece)));
    for (int64_t begin = 0; begin < blocks; begin += kScalesPerPiece) {
      const int64_t count = std::min(kScalesPerPiece, blocks - begin);
      expand_scales(view.scales, begin, count, scales.data());
      for (int64_t i = 0; i < count; i++) {
        if (std::isfinite(scales[i])) continue;
        note(weight.name, "the scale of block " + std::to_string(begin + i) + " is NaN or Inf", "finite scales", kRequantize);
        return;
      }
    }
  }

  static bool all_finite(std::span<const std::byte> floats) {
    for (size_t i = 0; i < floats.size() / 4; i++) {
      float value;
      std::memcpy(&value, floats.data() + 4 * i, 4);
      if (!std::isfinite(value)) return false;
    }
    return true;
  }

  void check_config(const Checkpoint& checkpoint, const std::vector<QuantizedTensor>& weights) {
    const fs::path path = checkpoint.folder() / kConfigFileName;
    const std::string subject = path.string();
    if (!fs::exists(path)) return note(subject, "no such file", "the configuration of the model", "copy config.json from the source");
    const auto config = nlohmann::json::parse(posix::read_file(path, 16 << 20), nullptr, false);
    if (!config.is_object())
      return note(subject, "not a JSON object", "the configuration of the model", "copy config.json from the source");
    const auto entry = config.find("quantization_config");
    if (entry == config.end() || !entry->is_object()) {
      return note(subject, "no quantization_config", "{\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true, ...}", kRequantize);
    }
    const auto expect = [&](const char* key, const nlohmann::json& value) {
      const auto found = entry->find(key);
      if (found != entry->end() && *found == value) return;
      note(subject, std::string("quantization_config.") + key + ": " + (found == entry->end() ? "missing" : found->dump()), value.dump(),
           kRequantize);
    };
    expect("quant_method", "bitsandbytes");
    expect("load_in_4bit", true);
    if (weights.empty()) return;
    const auto same_type = [&](const auto& weight) { return weight.quant_type == weights[0].quant_type; };
    if (std::all_of(weights.begin(), weights.end(), same_type)) expect("bnb_4bit_quant_type", name(weights[0].quant_type));
    if (is_store(checkpoint)) check_skip_modules(checkpoint, subject, *entry);
  }

  // transformers makes every linear layer 4-bit unless the configuration lists it.
  void check_skip_modules(const Checkpoint& checkpoint, const std::string& subject, const nlohmann::json& entry) {
    std::set<std::string> skipped;
    for (const auto& module : entry.value("llm_int8_skip_modules", nlohmann::json::array())) {
      if (module.is_string()) skipped.insert(module.get<std::string>());
    }
    for (const TensorView* tensor : checkpoint.tensors()) {
      if (tensor->shape.size() != 2 || !tensor->name.ends_with(".weight") || !dtype_from_safetensors(tensor->dtype)) continue;
      const std::string module(module_of(tensor->name));
      if (!skipped.contains(module))
        note(subject, "the dense matrix " + module + " is not in llm_int8_skip_modules", "its name there", kRequantize);
    }
  }

  static bool is_store(const Checkpoint& checkpoint) {
    return std::any_of(checkpoint.files().begin(), checkpoint.files().end(),
                       [](const auto& file) { return file.metadata().contains(kStoreMetadataKey); });
  }

  void check_layout(const Checkpoint& checkpoint, const std::vector<QuantizedTensor>& weights) {
    try {
      stored_layers(checkpoint, weights);
    } catch (const Error& error) {
      note("layout", error.what(), "layers in one aligned run of bytes", "");
    }
    for (const TensorView* tensor : checkpoint.tensors()) {
      if (is_padding(tensor->name) &&
          std::any_of(tensor->bytes.begin(), tensor->bytes.end(), [](std::byte b) { return b != std::byte{}; })) {
        note(tensor->name, "bytes that are not zero", "padding of zeros", kRequantize);
      }
    }
  }

  VerifyReport report_;
};

}  // namespace

VerifyReport verify_store(const fs::path& path) { return Verifier().run(path); }

}  // namespace nybble
