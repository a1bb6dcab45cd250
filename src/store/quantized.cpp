// Gathers the parts of each bitsandbytes-quantised weight and checks that they fit together.
//
//   P.weight                              packed codes, 8 bits or a float type that only carries bytes
//   P.weight.absmax                       fp32 [blocks], or uint8 [blocks] when nested
//   P.weight.quant_map                    [16]
//   P.weight.nested_absmax, .nested_quant_map   fp32 [ceil(blocks / 256)], [256]; nested only
//   P.weight.quant_state.bitsandbytes__nf4|fp4  uint8: JSON
#include <bit>
#include <cstring>
#include <set>

#include "nybble/store.h"
#include "store/names.h"
#include "store/quant_state.h"
#include "store/quantized_keys.h"
#include "store/safetensors_header.h"

namespace nybble {
namespace {

constexpr const char* kRemedy = "quantise the original checkpoint again, e.g. with `nybble quantize`";

float widen(DType type, const std::byte* at) {
  if (type == DType::kFloat32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (type == DType::kBFloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const uint32_t sign = uint32_t{bits} >> 15 << 31, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

std::string describe(const TensorView& tensor) {
  std::string text = tensor.dtype + " [";
  for (size_t i = 0; i < tensor.shape.size(); i++) text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  return text + "]";
}

// Gathers one weight. Every part that is missing or does not fit becomes a fault; the weight is usable when none did.
class Gatherer {
 public:
  Gatherer(const Checkpoint& checkpoint, std::string name, Faults& faults) : checkpoint_(checkpoint), faults_(faults) {
    out_.name = std::move(name);
  }

  std::optional<QuantizedTensor> gather() {
    const size_t before = faults_.size();
    const auto fields = read_state();
    if (!fields) return std::nullopt;
    out_.block_size = fields->block_size;
    out_.quant_type = fields->quant_type;
    out_.state_dtype = fields->dtype;
    out_.nested = fields->nested;
    out_.nested_dtype = fields->nested_dtype;
    out_.offset = static_cast<float>(fields->offset);
    if (!read_packed(*fields)) return std::nullopt;
    const int64_t blocks = num_blocks(out_.elements, out_.block_size);
    out_.absmax = vector_part(kAbsmax, out_.nested ? "U8" : "F32", blocks);
    out_.quant_map = table_part(kQuantMap, 16);
    if (out_.nested) {
      out_.nested_absmax = vector_part(kNestedAbsmax, "F32", num_blocks(blocks, kNestedBlockSize));
      out_.nested_quant_map = table_part(kNestedQuantMap, 256);
    } else {
      for (const char* suffix : {kNestedAbsmax, kNestedQuantMap}) {
        if (part(suffix)) note(suffix, "a part of nested scales", "none, since the quant state has no nested fields");
      }
    }
    if (faults_.size() != before) return std::nullopt;
    return std::move(out_);
  }

 private:
  const TensorView* part(const char* suffix) const { return checkpoint_.find(out_.name + suffix); }
  void note(const char* suffix, const std::string& found, const std::string& expected) {
    faults_.push_back({out_.name + suffix, found, expected, kRemedy});
  }

  std::optional<QuantStateFields> read_state() {
    const TensorView* nf4 = part(kStateNf4);
    const TensorView* fp4 = part(kStateFp4);
    if (nf4 != nullptr && fp4 != nullptr) note("", "an NF4 and an FP4 quant state", "one of them");
    const char* suffix = nf4 != nullptr ? kStateNf4 : kStateFp4;
    const TensorView* state = nf4 != nullptr ? nf4 : fp4;
    if (state == nullptr) {
      note("", "no quant state", std::string("the tensor ") + out_.name + kStateNf4 + " or ..." + kTypeFp4);
      return std::nullopt;
    }
    if (state->dtype != "U8") {
      note(suffix, describe(*state), "U8 [bytes of JSON]");
      return std::nullopt;
    }
    out_.state_json.assign(reinterpret_cast<const char*>(state->bytes.data()), state->bytes.size());
    auto fields = parse_quant_state(out_.state_json, out_.name + suffix, faults_);
    if (fields && fields->quant_type != (nf4 != nullptr ? QuantType::kNf4 : QuantType::kFp4)) {
      note(suffix, std::string("quant_type \"") + nybble::name(fields->quant_type) + "\"", "the type that the tensor's name ends with");
      return std::nullopt;
    }
    return fields;
  }

  bool read_packed(const QuantStateFields& fields) {
    const TensorView* packed = part("");
    if (packed == nullptr) {
      note("", "no such tensor", "the packed codes of the quant state beside it");
      return false;
    }
    static const std::set<std::string, std::less<>> kStorages = {"U8", "I8", "BF16", "F16", "F32"};
    if (!kStorages.contains(packed->dtype)) {
      note("", describe(*packed), "packed codes as U8, BF16, F16 or F32");
      return false;
    }
    const auto bytes = static_cast<int64_t>(packed->bytes.size());
    out_.packed = packed->bytes;
    out_.shape = fields.shape.value_or(std::vector<int64_t>{-1});
    out_.elements = fields.shape ? element_count(*fields.shape) : 2 * bytes;
    if (packed_bytes(out_.elements) == bytes) return true;
    note("", describe(*packed) + ", " + std::to_string(bytes) + " bytes",
         std::to_string(packed_bytes(out_.elements)) + " bytes for " + std::to_string(out_.elements) + " weights");
    return false;
  }

  std::span<const std::byte> vector_part(const char* suffix, const char* dtype, int64_t size) {
    const TensorView* tensor = part(suffix);
    const std::string expected = std::string(dtype) + " [" + std::to_string(size) + "]";
    if (tensor == nullptr) {
      note(suffix, "no such tensor", expected);
      return {};
    }
    if (tensor->dtype != dtype || element_count(tensor->shape) != size) {
      note(suffix, describe(*tensor), expected);
      return {};
    }
    return tensor->bytes;
  }

  // Code tables: some loaders rounded them to 16 bits before they were saved.
  std::vector<float> table_part(const char* suffix, int64_t size) {
    const TensorView* tensor = part(suffix);
    const std::string expected = "F32, BF16 or F16 [" + std::to_string(size) + "]";
    const auto dtype = tensor == nullptr ? std::nullopt : dtype_from_safetensors(tensor->dtype);
    if (!dtype || element_count(tensor->shape) != size) {
      note(suffix, tensor == nullptr ? "no such tensor" : describe(*tensor), expected);
      return {};
    }
    std::vector<float> values(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; i++) values[i] = widen(*dtype, tensor->bytes.data() + i * size_of(*dtype));
    return values;
  }

  const Checkpoint& checkpoint_;
  Faults& faults_;
  QuantizedTensor out_;
};

}  // namespace

std::optional<std::string> quantized_weight_of(std::string_view tensor_name) {
  for (const char* suffix : {kStateNf4, kStateFp4, kNestedAbsmax, kNestedQuantMap, kAbsmax, kQuantMap}) {
    if (tensor_name.ends_with(suffix)) return std::string(tensor_name.substr(0, tensor_name.size() - std::strlen(suffix)));
  }
  return std::nullopt;
}

Nf4Weight QuantizedTensor::view() const {
  Nf4Weight weight;
  weight.packed = reinterpret_cast<const uint8_t*>(packed.data());
  weight.k = shape.empty() ? 1 : shape.back() < 0 ? elements : shape.back();
  weight.n = weight.k == 0 ? 0 : elements / weight.k;
  weight.block_size = static_cast<int32_t>(block_size);
  weight.quant_type = quant_type;
  if (nested) {
    weight.scales.absmax_codes = reinterpret_cast<const uint8_t*>(absmax.data());
    weight.scales.nested_absmax = reinterpret_cast<const float*>(nested_absmax.data());
    weight.scales.nested_code = nested_quant_map.data();
    weight.scales.offset = &offset;
    weight.scales.nested_dtype = nested_dtype;
  } else {
    weight.scales.absmax = reinterpret_cast<const float*>(absmax.data());
  }
  return weight;
}

std::vector<QuantizedTensor> quantized_tensors(const Checkpoint& checkpoint, Faults& faults) {
  std::vector<QuantizedTensor> weights;
  std::set<std::string> seen;
  for (const TensorView* tensor : checkpoint.tensors()) {
    const auto weight = quantized_weight_of(tensor->name);
    if (!weight || !seen.insert(*weight).second) continue;
    if (auto gathered = Gatherer(checkpoint, *weight, faults).gather()) weights.push_back(std::move(*gathered));
  }
  for (const TensorView* tensor : checkpoint.tensors()) {
    if (tensor->dtype != "U8" || !tensor->name.ends_with(".weight") || seen.contains(tensor->name)) continue;
    faults.push_back(
        {tensor->name, "U8 codes without a quant state", "the tensors " + tensor->name + ".absmax, .quant_map, .quant_state.*", kRemedy});
  }
  return weights;
}

}  // namespace nybble
