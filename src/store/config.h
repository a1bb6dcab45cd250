// What a store needs beside its tensors so that transformers loads it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "store/layout.h"

namespace nybble {

// The source's config.json, checked. Throws kFormat when it is missing or no object, kUnsupported for models whose linear layers keep
// their weights as [in, out] (Conv1D).
std::string read_source_config(const std::filesystem::path& source_folder);

// `config` with a complete quantization_config; key order kept. Modules that stay dense are listed, since transformers otherwise expects
// 4-bit weights in every linear layer.
std::string store_config(const std::string& config, const std::vector<FilePlan>& files);

// model.safetensors.index.json. total_bytes: of all tensors but padding.
std::string store_index(const std::vector<FilePlan>& files, int64_t total_bytes);

// Tokenizer files and the like: every file of the folder that holds no weights and is small.
std::vector<std::filesystem::path> companion_files(const std::filesystem::path& source_folder);

}  // namespace nybble
