#include "store/config.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/posix.h"
#include "nybble/error.h"
#include "store/names.h"

namespace nybble {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr uintmax_t kMaxCompanionBytes = 64 << 20;  // large tokenizers have 35 MB
constexpr std::array kConv1dModels = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"};
constexpr std::array kWeightEndings = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz"};

// The value that most weights have.
template <typename T>
T most_common(const std::vector<FilePlan>& files, T WeightPlan::*member, T otherwise) {
  std::map<T, int64_t> counts;
  for (const auto& file : files) {
    for (const auto& weight : file.weights) counts[weight.*member]++;
  }
  const auto largest = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return largest == counts.end() ? otherwise : largest->first;
}

// The head is listed even when it is tied and so in no file. What a 4-bit source listed stays listed.
std::vector<std::string> dense_modules(const std::vector<FilePlan>& files, const Json& earlier) {
  std::set<std::string> modules = {"lm_head"};
  const auto listed = earlier.find("llm_int8_skip_modules");
  if (listed != earlier.end() && listed->is_array()) {
    for (const auto& module : *listed) {
      if (module.is_string()) modules.insert(module.get<std::string>());
    }
  }
  for (const auto& file : files) {
    for (const auto& copy : file.dense) {
      if (copy.tensor->shape.size() == 2 && copy.tensor->name.ends_with(".weight")) modules.emplace(module_of(copy.tensor->name));
    }
  }
  for (const auto& file : files) {
    for (const auto& weight : file.weights) modules.erase(std::string(module_of(weight.name)));
  }
  std::vector<std::string> sorted(modules.begin(), modules.end());
  std::sort(sorted.begin(), sorted.end(), natural_less);
  return sorted;
}

bool is_four_bit_config(const Json& entry) { return entry.is_object() && entry.value("quant_method", Json()) == "bitsandbytes"; }

}  // namespace

std::string read_source_config(const fs::path& source_folder) {
  const fs::path path = source_folder / kConfigFileName;
  if (!fs::exists(path)) {
    fail(ErrorKind::kFormat, path.string(),
         " does not exist, expected the configuration of the model beside its weights; fetch it or write it with save_pretrained");
  }
  std::string text = posix::read_file(path, kMaxConfigBytes);
  const Json config = Json::parse(text, nullptr, false);
  if (!config.is_object()) fail(ErrorKind::kFormat, path.string(), " is not a JSON object, expected a model configuration; fetch it again");
  const auto type = config.find("model_type");
  if (type != config.end() && std::find(kConv1dModels.begin(), kConv1dModels.end(), *type) != kConv1dModels.end()) {
    fail(ErrorKind::kUnsupported, path.string(), ": models of type ", type->dump(),
         " keep linear weights as [in, out], expected [out, in]; ",
         "load the model with BitsAndBytesConfig and save it with save_pretrained instead");
  }
  if (config.contains("quantization_config") && !is_four_bit_config(config["quantization_config"])) {
    fail(ErrorKind::kUnsupported, path.string(), ": the checkpoint is quantised already, ",
         config["quantization_config"].dump().substr(0, 200), "; expected dense weights or bitsandbytes 4-bit ones");
  }
  return text;
}

std::string store_config(const std::string& config_text, const std::vector<FilePlan>& files) {
  Json config = Json::parse(config_text);
  const Json earlier = config.value("quantization_config", Json::object());
  const char* dtype = name(most_common(files, &WeightPlan::dtype, DType::kBFloat16));
  config["quantization_config"] = {
      {"bnb_4bit_compute_dtype", earlier.value("bnb_4bit_compute_dtype", Json(dtype))},
      {"bnb_4bit_quant_storage", "uint8"},
      {"bnb_4bit_quant_type", name(most_common(files, &WeightPlan::quant_type, QuantType::kNf4))},
      {"bnb_4bit_use_double_quant", most_common(files, &WeightPlan::nested, true)},
      {"llm_int8_enable_fp32_cpu_offload", false},
      {"llm_int8_has_fp16_weight", false},
      {"llm_int8_skip_modules", dense_modules(files, earlier)},
      {"llm_int8_threshold", 6.0},
      {"load_in_4bit", true},
      {"load_in_8bit", false},
      {"quant_method", "bitsandbytes"},
  };
  return config.dump(2) + "\n";
}

std::string store_index(const std::vector<FilePlan>& files, int64_t total_bytes) {
  std::map<std::string, std::string> weight_map;
  for (const auto& file : files) {
    for (const auto& tensor : header_tensors(file, std::vector<int64_t>(file.weights.size(), 0))) weight_map[tensor.name] = file.file_name;
  }
  return Json{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}}.dump(2) + "\n";
}

std::vector<fs::path> companion_files(const fs::path& source_folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(source_folder.empty() ? "." : source_folder)) {
    const std::string file_name = entry.path().filename().string();
    const bool weights =
        std::any_of(kWeightEndings.begin(), kWeightEndings.end(), [&](const char* ending) { return file_name.ends_with(ending); });
    if (weights || !entry.is_regular_file() || file_name.starts_with('.') || file_name.ends_with(".index.json") ||
        file_name == kConfigFileName || file_name.ends_with(posix::kTemporarySuffix) || entry.file_size() > kMaxCompanionBytes) {
      continue;
    }
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace nybble
