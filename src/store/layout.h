// How the files of a store are laid out. One file a layer:
//
//   header, padded with spaces to a multiple of 4096
//   streamed:  weight 0: packed | absmax | nested_absmax, weight 1: ...     each begins at a multiple of 256
//   tail:      nested_quant_map of each weight, quant_map of each weight, dense tensors by falling element size, quant-state JSON of each
//   weight
//
// safetensors forbids gaps, so up to 255 bytes before a view are a tensor of zeros: see padding_name().
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nybble/store.h"
#include "store/safetensors_header.h"

namespace nybble {

constexpr int64_t kViewAlignment = 256;
constexpr int64_t kLayerAlignment = 4096;
constexpr const char* kStoreMetadataKey = "nybble_store";
constexpr const char* kStoreVersion = "1";

// One quantised weight of a file to be: `dense` is quantised now, or `prequantized` is copied. Offsets count from the start of the data.
struct WeightPlan {
  std::string name;
  std::vector<int64_t> shape;
  int64_t elements = 0;
  int64_t block_size = 64;
  QuantType quant_type = QuantType::kNf4;
  DType dtype = DType::kBFloat16;  // of the dense weight
  bool nested = true;
  const TensorView* dense = nullptr;
  const QuantizedTensor* prequantized = nullptr;
  int64_t packed_offset = 0;
  int64_t absmax_offset = 0;
  int64_t nested_absmax_offset = 0;
  int64_t nested_quant_map_offset = 0;
  int64_t quant_map_offset = 0;

  int64_t blocks() const { return num_blocks(elements, block_size); }
  int64_t absmax_bytes() const { return nested ? blocks() : blocks() * 4; }
  int64_t nested_absmax_bytes() const { return nested ? num_blocks(blocks(), kNestedBlockSize) * 4 : 0; }
  int64_t source_bytes() const;
};

struct DensePlan {
  const TensorView* tensor = nullptr;
  int64_t offset = 0;
};

struct FilePlan {
  std::string file_name;
  std::string layer;
  std::vector<WeightPlan> weights;
  std::vector<DensePlan> dense;
  std::vector<HeaderTensor> padding;
  std::map<std::string, std::string> metadata;
  int64_t states_offset = 0;  // of the first JSON; the others follow without a gap
  int64_t data_start = 0;     // in the file: room for the longest header that the states can need

  int64_t source_bytes() const;
};

// The JSON of a weight, given the offset of its nested scales.
std::string state_json(const WeightPlan& weight, float offset);
// Key of that JSON.
std::string state_key(const WeightPlan& weight);

// Fills every offset of the plan, its padding and data_start. Depends on names, shapes and options only.
void lay_out(FilePlan& plan);

// All tensors of the file in order, once the lengths of the JSON texts are known.
std::vector<HeaderTensor> header_tensors(const FilePlan& plan, const std::vector<int64_t>& state_lengths);

// "rotary_emb.inv_freq" is in it because loaders skip tensors of that name (transformers, vLLM and others, for old checkpoints that had
// them): a store loads without a warning about unknown tensors.
std::string padding_name(const std::string& layer, size_t index);
bool is_padding(std::string_view tensor_name);

}  // namespace nybble
