// Checkpoints on disk: safetensors in, NF4 store out. A store is a Hugging Face checkpoint that transformers + bitsandbytes load as it is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {

// One tensor of a safetensors file: a view into the mapped file.
struct TensorView {
  std::string name;
  std::string dtype;  // safetensors' spelling: "BF16", "F16", "F32", "U8", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

// A memory-mapped safetensors file. The whole header is validated before the constructor returns: size, JSON, dtypes, shapes, offsets
// inside the file, no overlap, no gap, sizes that match. Throws kFormat with file, tensor, found, expected.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::vector<TensorView>& tensors() const;  // in file order
  const TensorView* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nybble
