#include "store/layout.h"

#include <algorithm>
#include <limits>

#include "nybble/error.h"
#include "store/names.h"
#include "store/quant_state.h"
#include "store/quantized_keys.h"

namespace nybble {
namespace {

constexpr std::string_view kPaddingPart = "rotary_emb.inv_freq.padding.";

// Places tensors one after the other and fills gaps with padding tensors.
class Cursor {
 public:
  explicit Cursor(FilePlan& plan) : plan_(plan) {}

  int64_t place(int64_t bytes) {
    const int64_t at = position_;
    position_ += bytes;
    return at;
  }
  void align() {
    const int64_t end = (position_ + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
    if (end == position_) return;
    plan_.padding.push_back({padding_name(plan_.layer, plan_.padding.size()), "U8", {end - position_}, position_, end});
    position_ = end;
  }
  int64_t position() const { return position_; }

 private:
  FilePlan& plan_;
  int64_t position_ = 0;
};

// No offset has a longer JSON text than this one: 17 digits, a sign and an exponent of two digits.
constexpr float kLongestOffset = -1.17549435e-38f;

int64_t longest_state(const WeightPlan& weight) { return static_cast<int64_t>(state_json(weight, kLongestOffset).size()) + 1; }

}  // namespace

int64_t WeightPlan::source_bytes() const {
  return dense != nullptr ? static_cast<int64_t>(dense->bytes.size()) : packed_bytes(elements) + absmax_bytes() + nested_absmax_bytes();
}

int64_t FilePlan::source_bytes() const {
  int64_t total = 0;
  for (const auto& weight : weights) total += weight.source_bytes();
  for (const auto& copy : dense) total += static_cast<int64_t>(copy.tensor->bytes.size());
  return total;
}

std::string state_json(const WeightPlan& weight, float offset) {
  if (weight.prequantized != nullptr) return weight.prequantized->state_json;
  return format_quant_state({weight.quant_type, weight.block_size, weight.dtype, weight.shape, weight.nested, DType::kFloat32, offset});
}

std::string state_key(const WeightPlan& weight) { return weight.name + (weight.quant_type == QuantType::kNf4 ? kStateNf4 : kStateFp4); }

std::string padding_name(const std::string& layer, size_t index) {
  return (layer.empty() ? "" : layer + ".") + std::string(kPaddingPart) + std::to_string(index);
}

bool is_padding(std::string_view tensor_name) { return tensor_name.find(kPaddingPart) != std::string_view::npos; }

void lay_out(FilePlan& plan) {
  plan.padding.clear();
  Cursor cursor(plan);
  for (auto& weight : plan.weights) {
    weight.packed_offset = cursor.place(packed_bytes(weight.elements));
    cursor.align();
    weight.absmax_offset = cursor.place(weight.absmax_bytes());
    cursor.align();
    if (!weight.nested) continue;
    weight.nested_absmax_offset = cursor.place(weight.nested_absmax_bytes());
    cursor.align();
  }
  for (auto& weight : plan.weights) {
    if (weight.nested) weight.nested_quant_map_offset = cursor.place(256 * sizeof(float));
  }
  for (auto& weight : plan.weights) weight.quant_map_offset = cursor.place(16 * sizeof(float));
  std::stable_sort(plan.dense.begin(), plan.dense.end(),
                   [](const auto& a, const auto& b) { return bits_of(a.tensor->dtype) > bits_of(b.tensor->dtype); });
  for (auto& copy : plan.dense) copy.offset = cursor.place(static_cast<int64_t>(copy.tensor->bytes.size()));
  plan.states_offset = cursor.position();
  std::vector<int64_t> longest;
  for (const auto& weight : plan.weights) longest.push_back(longest_state(weight));
  plan.data_start = static_cast<int64_t>(format_safetensors_header(header_tensors(plan, longest), plan.metadata, kLayerAlignment).size());
}

std::vector<HeaderTensor> header_tensors(const FilePlan& plan, const std::vector<int64_t>& state_lengths) {
  std::vector<HeaderTensor> tensors = plan.padding;
  const auto add = [&](const std::string& name, const char* dtype, std::vector<int64_t> shape, int64_t begin, int64_t bytes) {
    tensors.push_back({name, dtype, std::move(shape), begin, begin + bytes});
  };
  int64_t state_offset = plan.states_offset;
  for (size_t i = 0; i < plan.weights.size(); i++) {
    const auto& weight = plan.weights[i];
    const int64_t packed = packed_bytes(weight.elements), blocks = weight.blocks();
    add(weight.name, "U8", {packed, 1}, weight.packed_offset, packed);
    add(weight.name + kAbsmax, weight.nested ? "U8" : "F32", {blocks}, weight.absmax_offset, weight.absmax_bytes());
    add(weight.name + kQuantMap, "F32", {16}, weight.quant_map_offset, 64);
    if (weight.nested) {
      add(weight.name + kNestedAbsmax, "F32", {weight.nested_absmax_bytes() / 4}, weight.nested_absmax_offset,
          weight.nested_absmax_bytes());
      add(weight.name + kNestedQuantMap, "F32", {256}, weight.nested_quant_map_offset, 1024);
    }
    add(state_key(weight), "U8", {state_lengths[i]}, state_offset, state_lengths[i]);
    state_offset += state_lengths[i];
  }
  for (const auto& copy : plan.dense) {
    const auto bytes = static_cast<int64_t>(copy.tensor->bytes.size());
    add(copy.tensor->name, copy.tensor->dtype.c_str(), copy.tensor->shape, copy.offset, bytes);
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  return tensors;
}

}  // namespace nybble
