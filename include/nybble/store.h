// Checkpoints on disk: safetensors in, NF4 store out. A store is a Hugging Face checkpoint that transformers + bitsandbytes load as it is,
// with each layer's packed weights and scales in one aligned run of bytes. Layout: docs/store.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {

// One thing that is wrong with a checkpoint. `subject` is a file or a tensor.
struct Fault {
  std::string subject;
  std::string found;
  std::string expected;
  std::string remedy;
};
using Faults = std::vector<Fault>;
std::string to_string(const Fault& fault);
// Throws kFormat with the first fault and the number of others; returns when there is none.
void throw_if_any(const Faults& faults);

// One tensor of a safetensors file: a view into the mapped file, valid as long as the file object.
struct TensorView {
  std::string name;
  std::string dtype;  // safetensors' spelling: "BF16", "F16", "F32", "U8", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  int64_t file_offset = 0;  // of bytes[0]
};

// A memory-mapped safetensors file. The whole header is validated before the constructor returns: size, JSON, dtypes, shapes, offsets
// inside the file, no overlap, no gap, no duplicate, sizes that match. Throws kFormat with file, tensor, found, expected; kIo.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::filesystem::path& path() const;
  const std::vector<TensorView>& tensors() const;  // in file order
  const TensorView* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;
  // Gives the pages of a range of the mapped file back to the system, so that resident memory stays bounded; it stays readable.
  void release(std::span<const std::byte> bytes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A Hugging Face checkpoint: a folder with model.safetensors.index.json and its shards, a folder with model.safetensors, or one file.
class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& path);  // throws the first fault
  // Opens what can be opened and notes every fault: missing and broken shards, index entries that lie, names in two shards.
  Checkpoint(const std::filesystem::path& path, Faults& faults);

  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  // Natural order of names (layers.2 before layers.10). Pointers stay valid as long as the checkpoint.
  const std::vector<const TensorView*>& tensors() const { return tensors_; }
  // Follows aliases: safetensors stores a tensor that modules share once and notes the other names in the metadata.
  const TensorView* find(std::string_view name) const;
  const std::map<std::string, std::string, std::less<>>& aliases() const { return aliases_; }  // other name -> stored name
  const SafetensorsFile& file_of(const TensorView& tensor) const;

 private:
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::vector<const TensorView*> tensors_;
  std::map<std::string, std::pair<const TensorView*, size_t>, std::less<>> by_name_;  // tensor and index of its file
  std::map<std::string, std::string, std::less<>> aliases_;
};

// A weight that bitsandbytes quantised, gathered from its parts (which may lie in different shards). Views into the checkpoint,
// except for the code tables, which are widened to fp32.
struct QuantizedTensor {
  std::string name;            // of the weight: "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // of the dense weight, any rank; {-1} when the state says null
  int64_t elements = 0;
  int64_t block_size = 0;
  QuantType quant_type = QuantType::kNf4;
  DType state_dtype = DType::kBFloat16;  // what the weight was before
  std::string state_json;
  std::span<const std::byte> packed;  // [packed_bytes(elements)], whatever quant_storage was
  std::span<const std::byte> absmax;  // fp32 [blocks], or uint8 [blocks] when nested
  std::vector<float> quant_map;       // [16]
  bool nested = false;
  std::span<const std::byte> nested_absmax;  // fp32 [ceil(blocks / 256)]
  std::vector<float> nested_quant_map;       // [256]
  DType nested_dtype = DType::kFloat32;
  float offset = 0;
  bool shape_known() const { return shape.empty() || shape[0] >= 0; }
  // As a matrix: the last dimension is K, the others are N. Pointers into this object and the checkpoint.
  Nf4Weight view() const;
};

// Every quantised weight whose parts are complete and consistent, in natural order of names. What is missing or does not fit is noted.
std::vector<QuantizedTensor> quantized_tensors(const Checkpoint& checkpoint, Faults& faults);

// Where one layer of a store lies: `bytes` from `offset` of `file` hold the packed weights and scales of all its quantised weights.
struct StoredWeight {
  std::string name;
  int64_t packed_offset = 0;  // from the start of the layer, multiples of 256
  int64_t absmax_offset = 0;
  int64_t nested_absmax_offset = -1;  // -1 when plain
  size_t index = 0;                   // into quantized_tensors()
};
struct StoredLayer {
  std::string name;  // "model.layers.0"; "" holds what is outside numbered layers
  std::filesystem::path file;
  int64_t offset = 0;  // in the file, a multiple of 4096
  int64_t bytes = 0;
  std::vector<StoredWeight> weights;
};
// Throws kFormat when the checkpoint is not laid out as a store (convert it with `nybble quantize`).
std::vector<StoredLayer> stored_layers(const Checkpoint& checkpoint, const std::vector<QuantizedTensor>& weights);

struct VerifyReport {
  Faults faults;
  int64_t tensors = 0;
  int64_t quantized = 0;
};
// Checks every shape, sidecar, state field, table and scale, the index, the configuration and the layout. Never stops at the first fault.
VerifyReport verify_store(const std::filesystem::path& path);

}  // namespace nybble
