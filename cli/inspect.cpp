// nybble inspect PATH: what a checkpoint holds, layer by layer.
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "commands.h"
#include "exit_codes.h"
#include "nybble/convert.h"
#include "nybble/store.h"
#include "store/layout.h"
#include "store/names.h"
#include "store/quantized_keys.h"
#include "units.h"

namespace nybble::cli {
namespace {

struct Natural {
  bool operator()(const std::string& a, const std::string& b) const { return natural_less(a, b); }
};

struct Layer {
  int64_t quantized = 0;  // weights in 4 bits
  int64_t quantized_elements = 0;
  int64_t quantized_bytes = 0;  // with scales, tables and state
  int64_t dense = 0;
  int64_t dense_elements = 0;
  int64_t dense_bytes = 0;
  std::set<std::string> types;  // "nf4/64 nested", "BF16"

  int64_t bytes() const { return quantized_bytes + dense_bytes; }
  double bits() const {
    const int64_t elements = quantized_elements + dense_elements;
    return elements == 0 ? 0 : 8.0 * static_cast<double>(bytes()) / static_cast<double>(elements);
  }
  void add(const Layer& other) {
    quantized += other.quantized, quantized_elements += other.quantized_elements, quantized_bytes += other.quantized_bytes;
    dense += other.dense, dense_elements += other.dense_elements, dense_bytes += other.dense_bytes;
    types.insert(other.types.begin(), other.types.end());
  }
};
using Layers = std::map<std::string, Layer, Natural>;

Layers layers_of(const Checkpoint& checkpoint, const std::vector<QuantizedTensor>& weights) {
  Layers layers;
  std::set<std::string> four_bit;
  for (const auto& weight : weights) {
    Layer& layer = layers[std::string(layer_of(weight.name))];
    four_bit.insert(weight.name);
    layer.quantized++;
    layer.quantized_elements += weight.elements;
    layer.types.insert(std::string(name(weight.quant_type)) + "/" + std::to_string(weight.block_size) + (weight.nested ? " nested" : ""));
  }
  for (const TensorView* tensor : checkpoint.tensors()) {
    Layer& layer = layers[std::string(layer_of(tensor->name))];
    const auto bytes = static_cast<int64_t>(tensor->bytes.size());
    if (is_padding(tensor->name)) continue;
    if (four_bit.contains(quantized_weight_of(tensor->name).value_or(tensor->name))) {
      layer.quantized_bytes += bytes;
      continue;
    }
    int64_t elements = 1;
    for (const int64_t size : tensor->shape) elements *= size;
    layer.dense++;
    layer.dense_elements += elements;
    layer.dense_bytes += bytes;
    layer.types.insert(tensor->dtype);
  }
  return layers;
}

std::string joined(const std::set<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

void print_row(const std::string& label, const Layer& layer) {
  std::printf("%-28s %8lld %8lld %12s %12s %7.3f  %s\n", label.c_str(), static_cast<long long>(layer.quantized),
              static_cast<long long>(layer.dense), human_bytes(layer.quantized_bytes).c_str(), human_bytes(layer.dense_bytes).c_str(),
              layer.bits(), joined(layer.types).c_str());
}

void print_table(const Layers& layers, const Layer& total) {
  std::printf("%-28s %8s %8s %12s %12s %7s  %s\n", "layer", "4-bit", "dense", "4-bit bytes", "dense bytes", "bits/w", "types");
  for (const auto& [name, layer] : layers) print_row(name.empty() ? "(outside layers)" : name, layer);
  print_row("total", total);
}

nlohmann::ordered_json json_of(const Layer& layer) {
  return {{"quantized", layer.quantized},
          {"quantized_elements", layer.quantized_elements},
          {"quantized_bytes", layer.quantized_bytes},
          {"dense", layer.dense},
          {"dense_elements", layer.dense_elements},
          {"dense_bytes", layer.dense_bytes},
          {"bits_per_weight", layer.bits()},
          {"types", layer.types}};
}

void print_json(const std::string& path, const Layers& layers, const Layer& total, const std::vector<QuantizedTensor>& weights) {
  nlohmann::ordered_json json = {
      {"path", path}, {"total", json_of(total)}, {"layers", nlohmann::ordered_json::array()}, {"weights", nlohmann::ordered_json::array()}};
  for (const auto& [name, layer] : layers) {
    auto entry = json_of(layer);
    entry["name"] = name;
    json["layers"].push_back(std::move(entry));
  }
  for (const auto& weight : weights) {
    nlohmann::ordered_json shape = weight.shape_known() ? nlohmann::ordered_json(weight.shape) : nlohmann::ordered_json(nullptr);
    json["weights"].push_back({{"name", weight.name},
                               {"shape", shape},
                               {"quant_type", name(weight.quant_type)},
                               {"block_size", weight.block_size},
                               {"dtype", name(weight.state_dtype)},
                               {"nested", weight.nested},
                               {"packed_bytes", weight.packed.size()}});
  }
  std::printf("%s\n", json.dump(2).c_str());
}

int inspect(const std::string& path, bool json) {
  if (const auto note = incomplete_note(path)) {
    std::fprintf(stderr, "nybble: %s: %s\n", path.c_str(), note->c_str());
    return kIncomplete;
  }
  const Checkpoint checkpoint(path);
  Faults faults;
  const auto weights = quantized_tensors(checkpoint, faults);
  const Layers layers = layers_of(checkpoint, weights);
  Layer total;
  for (const auto& [name, layer] : layers) total.add(layer);
  if (json) {
    print_json(path, layers, total, weights);
  } else {
    print_table(layers, total);
  }
  if (faults.empty()) return kOk;
  std::fprintf(stderr, "nybble: %s: %zu faults, the first: %s; `nybble verify` lists them\n", path.c_str(), faults.size(),
               to_string(faults[0]).c_str());
  return kFaults;
}

}  // namespace

void add_inspect(CLI::App& app, Run& run) {
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  auto* command = app.add_subcommand("inspect", "Layers, types, bytes and bits per weight of a checkpoint");
  command->add_option("PATH", *path, "store, Hugging Face checkpoint folder or .safetensors file")->required();
  command->add_flag("--json", *json, "machine-readable");
  command->callback([path, json, &run] { run = [path, json] { return inspect(*path, *json); }; });
}

}  // namespace nybble::cli
