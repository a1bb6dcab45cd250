// Names of tensors, modules, layers and files in a checkpoint.
#pragma once

#include <string>
#include <string_view>

namespace nybble {

constexpr const char* kIndexFileName = "model.safetensors.index.json";
constexpr const char* kSingleFileName = "model.safetensors";
constexpr const char* kConfigFileName = "config.json";

// Runs of digits compare as numbers: "layers.2.x" before "layers.10.x". A strict order: equal only for equal strings.
bool natural_less(std::string_view a, std::string_view b);

// The layer that a tensor belongs to: everything up to the first numbered component ("model.layers.3"), or "".
std::string_view layer_of(std::string_view tensor_name);

// "model.layers.0.mlp.up_proj" of "model.layers.0.mlp.up_proj.weight"; the name itself when it has no such ending.
std::string_view module_of(std::string_view tensor_name);

// Shell-like: * stands for any text (dots too), ? for one character. Must match all of `text`.
bool glob_match(std::string_view pattern, std::string_view text);

}  // namespace nybble
