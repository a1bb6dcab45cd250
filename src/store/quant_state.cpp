#include "store/quant_state.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

namespace nybble {
namespace {

using Json = nlohmann::json;
constexpr const char* kRemedy = "write the checkpoint again with a current bitsandbytes, or quantise the original with `nybble quantize`";

// Python writes NaN, Infinity and -Infinity, which JSON does not have. Outside strings they become the strings that number_of() knows.
std::string quote_python_floats(std::string_view text) {
  std::string out;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    if (in_string && text[i] == '\\') {
      out.append(text.substr(i, 2));
      i += 2;
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    size_t matched = 0;
    for (const std::string_view token : {"-Infinity", "Infinity", "NaN"}) {
      if (!in_string && matched == 0 && text.substr(i).starts_with(token)) matched = token.size();
    }
    if (matched > 0) {
      out.append("\"").append(text.substr(i, matched)).append("\"");
      i += matched;
    } else {
      out.push_back(text[i++]);
    }
  }
  return out;
}

std::optional<double> number_of(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return NAN;
  if (value == "Infinity") return INFINITY;
  if (value == "-Infinity") return -INFINITY;
  return std::nullopt;
}

// Reads fields one by one; each that is wrong becomes a fault and clears ok().
class FieldReader {
 public:
  FieldReader(const Json& json, const std::string& subject, Faults& faults) : json_(json), subject_(subject), faults_(faults) {}
  bool ok() const { return ok_; }

  void wrong(const std::string& field, const std::string& expected) {
    const auto found = json_.find(field);
    const std::string text =
        found == json_.end() ? "the field is missing" : found->dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 100);
    faults_.push_back({subject_, field + ": " + text, expected, kRemedy});
    ok_ = false;
  }
  const Json* get(const char* field) {
    const auto found = json_.find(field);
    return found == json_.end() ? nullptr : &*found;
  }
  template <typename T>
  T one_of(const char* field, std::initializer_list<T> allowed) {
    const Json* value = get(field);
    std::string expected;
    for (const T choice : allowed) {
      if (value != nullptr && *value == name(choice)) return choice;
      expected += (expected.empty() ? "\"" : " or \"") + std::string(name(choice)) + "\"";
    }
    wrong(field, expected);
    return *allowed.begin();
  }
  int64_t integer(const char* field) {
    const Json* value = get(field);
    return value != nullptr && value->is_number_unsigned() && value->get<uint64_t>() <= INT64_MAX ? value->get<int64_t>() : -1;
  }

 private:
  const Json& json_;
  const std::string& subject_;
  Faults& faults_;
  bool ok_ = true;
};

void read_shape(FieldReader& reader, QuantStateFields& fields) {
  const Json* shape = reader.get("shape");
  if (shape != nullptr && shape->is_null()) return;
  bool good = shape != nullptr && shape->is_array() && shape->size() <= 8;
  std::vector<int64_t> sizes;
  int64_t elements = 1;
  for (size_t i = 0; good && i < shape->size(); i++) {
    const Json& size = (*shape)[i];
    good =
        size.is_number_unsigned() && size.get<uint64_t>() <= INT64_MAX && !__builtin_mul_overflow(elements, size.get<int64_t>(), &elements);
    if (good) sizes.push_back(size.get<int64_t>());
  }
  if (good) {
    fields.shape = std::move(sizes);
  } else {
    reader.wrong("shape", "null or at most 8 sizes whose product is below 2^63");
  }
}

}  // namespace

std::string python_repr(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const std::string text(buffer, end);
  const size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return text;
  std::string sign, digits;
  for (const char c : text.substr(0, e)) {
    if (c == '-') sign = "-";
    if (c >= '0' && c <= '9') digits.push_back(c);
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto point = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= point) return sign + digits + std::string(point - digits.size(), '0') + ".0";
  return sign + digits.substr(0, point) + "." + digits.substr(point);
}

std::string format_quant_state(const QuantStateFields& fields) {
  std::string shape = "null";
  if (fields.shape) {
    shape = "[";
    for (const int64_t size : *fields.shape) shape += (shape.size() > 1 ? ", " : "") + std::to_string(size);
    shape += "]";
  }
  std::string text = std::string("{\"quant_type\": \"") + name(fields.quant_type) +
                     "\", \"blocksize\": " + std::to_string(fields.block_size) + ", \"dtype\": \"" + name(fields.dtype) +
                     "\", \"shape\": " + shape;
  if (fields.nested) {
    text += ", \"nested_blocksize\": " + std::to_string(kNestedBlockSize) + ", \"nested_dtype\": \"" + name(fields.nested_dtype) +
            "\", \"nested_offset\": " + python_repr(fields.offset);
  }
  return text + "}";
}

std::optional<QuantStateFields> parse_quant_state(std::string_view text, const std::string& subject, Faults& faults) {
  constexpr size_t kMaxBytes = 65536;  // real ones have under 300; a limit keeps hostile nesting harmless
  const Json json = text.size() > kMaxBytes ? Json(Json::value_t::discarded) : Json::parse(quote_python_floats(text), nullptr, false);
  if (json.is_discarded() || !json.is_object()) {
    faults.push_back({subject, std::to_string(text.size()) + " bytes that are not a JSON object", "the quant state as JSON", kRemedy});
    return std::nullopt;
  }
  QuantStateFields fields;
  FieldReader reader(json, subject, faults);
  const auto dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  fields.quant_type = reader.one_of("quant_type", {QuantType::kNf4, QuantType::kFp4});
  fields.block_size = reader.integer("blocksize");
  if (!is_block_size(fields.block_size)) reader.wrong("blocksize", "a power of two from 32 to 4096");
  fields.dtype = reader.one_of("dtype", dtypes);
  read_shape(reader, fields);
  fields.nested = json.contains("nested_offset") || json.contains("nested_blocksize") || json.contains("nested_dtype");
  if (fields.nested) {
    if (reader.integer("nested_blocksize") != kNestedBlockSize) reader.wrong("nested_blocksize", "256");
    fields.nested_dtype = reader.one_of("nested_dtype", dtypes);
    const Json* offset = reader.get("nested_offset");
    const auto value = offset == nullptr ? std::nullopt : number_of(*offset);
    if (!value || !std::isfinite(static_cast<float>(*value))) reader.wrong("nested_offset", "a finite number");
    fields.offset = value.value_or(0);
  }
  if (!reader.ok()) return std::nullopt;
  return fields;
}

std::optional<DType> dtype_from_torch_name(std::string_view text) {
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (text == name(type)) return type;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_safetensors(std::string_view text) {
  if (text == "F32") return DType::kFloat32;
  if (text == "F16") return DType::kFloat16;
  if (text == "BF16") return DType::kBFloat16;
  return std::nullopt;
}

}  // namespace nybble
