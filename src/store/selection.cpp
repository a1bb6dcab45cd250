#include "store/selection.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "nybble/error.h"
#include "store/names.h"
#include "store/quant_state.h"
#include "store/quantized_keys.h"

namespace nybble {
namespace {

// Modules inside numbered layers that are no nn.Linear, or whose few weights decide too much (routers).
constexpr std::array kNotByDefault = {"*embed*", "*norm*", "*lm_head*", "*.ln_*", "*.wte", "*.wpe", "*.gate", "*router*", "*rotary*"};

bool matches(std::string_view pattern, std::string_view tensor) {
  return glob_match(pattern, module_of(tensor)) || glob_match(pattern, tensor);
}

bool any_matches(const std::vector<std::string>& patterns, std::string_view tensor) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) { return matches(pattern, tensor); });
}

bool is_matrix(const TensorView& tensor) {
  return tensor.shape.size() == 2 && tensor.name.ends_with(".weight") && !tensor.bytes.empty() && dtype_from_safetensors(tensor.dtype);
}

bool chosen_by_default(const TensorView& tensor) {
  return is_matrix(tensor) && !layer_of(tensor.name).empty() &&
         std::none_of(kNotByDefault.begin(), kNotByDefault.end(),
                      [&](const char* pattern) { return glob_match(pattern, module_of(tensor.name)); });
}

void check_patterns(const Checkpoint& source, const std::vector<std::string>& patterns, const char* option) {
  for (const auto& pattern : patterns) {
    const bool used =
        std::any_of(source.tensors().begin(), source.tensors().end(), [&](const auto* tensor) { return matches(pattern, tensor->name); });
    if (!used) {
      fail(ErrorKind::kValue, option, " ", pattern, " matches none of ", source.tensors().size(),
           " tensors; patterns are shell patterns over module names, e.g. \"*.mlp.up_proj\" (`nybble inspect` lists them)");
    }
  }
}

// A pattern that someone wrote must not be ignored in silence: a matrix in an integer type that it names is an error.
bool is_chosen(const TensorView& tensor, const QuantizeOptions& options) {
  if (any_matches(options.exclude, tensor.name)) return false;
  if (options.include.empty()) return chosen_by_default(tensor);
  if (!any_matches(options.include, tensor.name)) return false;
  if (is_matrix(tensor)) return true;
  if (tensor.shape.size() == 2 && tensor.name.ends_with(".weight")) {
    fail(ErrorKind::kValue, tensor.name, " is ", tensor.dtype, ", expected BF16, F16 or F32; leave it out with --exclude ",
         module_of(tensor.name));
  }
  return false;
}

WeightPlan plan_weight(const TensorView& tensor, const QuantizeOptions& options) {
  WeightPlan weight;
  weight.name = tensor.name;
  weight.shape = tensor.shape;
  weight.elements = tensor.shape[0] * tensor.shape[1];
  weight.block_size = options.block_size;
  weight.quant_type = options.quant_type;
  weight.dtype = *dtype_from_safetensors(tensor.dtype);
  weight.nested = options.nested;
  weight.dense = &tensor;
  return weight;
}

WeightPlan plan_copy(const QuantizedTensor& tensor) {
  if (!tensor.shape_known()) {
    fail(ErrorKind::kFormat, tensor.name,
         ": its quant state says \"shape\": null, expected [out_features, in_features]; quantise the original ", "checkpoint instead");
  }
  WeightPlan weight;
  weight.name = tensor.name;
  weight.shape = tensor.shape;
  weight.elements = tensor.elements;
  weight.block_size = tensor.block_size;
  weight.quant_type = tensor.quant_type;
  weight.dtype = tensor.state_dtype;
  weight.nested = tensor.nested;
  weight.prequantized = &tensor;
  return weight;
}

struct NaturalOrder {
  bool operator()(const std::string& a, const std::string& b) const { return natural_less(a, b); }
};

}  // namespace

std::vector<FilePlan> plan_files(const Checkpoint& source, const std::vector<QuantizedTensor>& prequantized,
                                 const QuantizeOptions& options) {
  check_patterns(source, options.include, "--include");
  check_patterns(source, options.exclude, "--exclude");
  // Whoever quantised a source chose what to leave: only --include takes more.
  const bool relayout = !prequantized.empty() && options.include.empty();
  std::map<std::string, FilePlan, NaturalOrder> by_layer;
  std::set<std::string> four_bit;
  for (const auto& tensor : prequantized) {
    by_layer[std::string(layer_of(tensor.name))].weights.push_back(plan_copy(tensor));
    four_bit.insert(tensor.name);
  }
  for (const TensorView* tensor : source.tensors()) {
    if (four_bit.contains(quantized_weight_of(tensor->name).value_or(tensor->name)) || is_padding(tensor->name)) continue;
    FilePlan& file = by_layer[std::string(layer_of(tensor->name))];
    if (!relayout && is_chosen(*tensor, options)) {
      file.weights.push_back(plan_weight(*tensor, options));
    } else {
      file.dense.push_back({tensor, 0});
    }
  }
  std::vector<FilePlan> files;
  for (auto& [layer, file] : by_layer) {
    file.layer = layer;
    std::sort(file.weights.begin(), file.weights.end(), [](const auto& a, const auto& b) { return natural_less(a.name, b.name); });
    files.push_back(std::move(file));
  }
  for (size_t i = 0; i < files.size(); i++) {
    char name[64];
    std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    files[i].file_name = name;
    files[i].metadata = {{"format", "pt"}, {kStoreMetadataKey, kStoreVersion}};
    for (const auto& [other, stored] : source.aliases()) {
      if (layer_of(stored) == files[i].layer) files[i].metadata[other] = stored;
    }
    lay_out(files[i]);
  }
  return files;
}

}  // namespace nybble
