#include "store/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "nybble/error.h"

namespace nybble {
namespace {

struct DtypeBits {
  const char* name;
  int bits;
};
constexpr DtypeBits kDtypes[] = {{"BOOL", 8},        {"U8", 8},          {"I8", 8},    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
                                 {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16},
                                 {"U16", 16},        {"F16", 16},        {"BF16", 16}, {"I32", 32},    {"U32", 32},    {"F32", 32},
                                 {"C64", 64},        {"F64", 64},        {"I64", 64},  {"U64", 64}};

constexpr std::string_view kDamaged = "; the file is damaged or was cut off, fetch or write it again";

// Streams the JSON into a SafetensorsHeader. Knows at every token what may come, so depth and size of hostile input never matter.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, std::string_view file) : header_(header), file_(file) {}

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kStart:
        return go(Place::kTop);
      case Place::kTopValue:
        if (key_ == "__metadata__") return go(Place::kMetadata);
        header_.tensors.push_back({key_, "", {}, 0, 0});
        seen_fields_ = 0;
        return go(Place::kTensor);
      default:
        return unexpected("an object");
    }
  }
  bool end_object() override {
    if (place_ == Place::kTop) return go(Place::kEnd);
    if (place_ == Place::kTensor && seen_fields_ != 7) {
      bad(" has not all of dtype, shape and data_offsets");
    }
    return go(Place::kTop);
  }
  bool start_array(size_t) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return unexpected("an array");
    if (in_array_) return unexpected("an array in an array");
    in_array_ = true;
    numbers_.clear();
    return true;
  }
  bool end_array() override {
    auto& tensor = header_.tensors.back();
    in_array_ = false;
    if (place_ == Place::kShape) {
      tensor.shape = numbers_;
    } else {
      if (numbers_.size() != 2) bad(" has ", numbers_.size(), " data_offsets, expected 2");
      tensor.begin = numbers_[0];
      tensor.end = numbers_[1];
    }
    return go(Place::kTensor);
  }
  bool key(std::string& name) override {
    if (place_ == Place::kTop) {
      if (!names_.insert(name).second)
        fail(ErrorKind::kFormat, file_, ": the name ", quoted(name), " appears twice in the header", kDamaged);
      key_ = name;
      return go(Place::kTopValue);
    }
    if (place_ == Place::kMetadata) {
      if (header_.metadata.count(name)) fail(ErrorKind::kFormat, file_, ": the metadata key ", quoted(name), " appears twice", kDamaged);
      metadata_key_ = name;
      return go(Place::kMetadataValue);
    }
    const int field = name == "dtype" ? 0 : name == "shape" ? 1 : name == "data_offsets" ? 2 : -1;
    if (field < 0) bad(" has the field ", quoted(name), ", expected dtype, shape and data_offsets");
    if (seen_fields_ & (1 << field)) bad(" has the field ", quoted(name), " twice");
    seen_fields_ |= 1 << field;
    return go(field == 0 ? Place::kDtype : field == 1 ? Place::kShape : Place::kOffsets);
  }
  bool string(std::string& text) override {
    if (place_ == Place::kMetadataValue) {
      header_.metadata[metadata_key_] = text;
      return go(Place::kMetadata);
    }
    if (place_ != Place::kDtype) return unexpected("a string");
    if (bits_of(text) == 0) bad(" has the unknown dtype ", quoted(text), ", expected one of BF16, F16, F32, U8, ...");
    header_.tensors.back().dtype = text;
    return go(Place::kTensor);
  }
  bool number_unsigned(uint64_t value) override {
    if (!in_array_) return unexpected("a number");
    if (value > static_cast<uint64_t>(INT64_MAX)) bad(" has the number ", value, ", expected at most 2^63 - 1");
    if (numbers_.size() == kMaxRank) bad(" has more than ", kMaxRank, " dimensions");
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_integer(int64_t value) override { return in_array_ ? bad(" has the negative number ", value) : unexpected("a number"); }
  bool number_float(double, const std::string& text) override {
    return in_array_ ? bad(" has the number ", text, ", expected an integer") : unexpected("a number");
  }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a truth value"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail(ErrorKind::kFormat, file_, ": the header is not JSON (byte ", position + 7, " of the file)", kDamaged);
  }

 private:
  enum class Place : uint8_t { kStart, kTop, kTopValue, kMetadata, kMetadataValue, kTensor, kDtype, kShape, kOffsets, kEnd };
  static constexpr size_t kMaxRank = 64;

  bool go(Place place) {
    place_ = place;
    return true;
  }
  static std::string quoted(std::string_view text) {
    return nlohmann::json(text.substr(0, 200)).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  }
  template <typename... Parts>
  [[noreturn]] bool bad(const Parts&... parts) {
    fail(ErrorKind::kFormat, file_, ": tensor ", quoted(key_), parts..., kDamaged);
  }
  [[noreturn]] bool unexpected(const char* what) {
    fail(ErrorKind::kFormat, file_, ": the header has ", what, " at or below ", quoted(key_),
         ", expected {name: {dtype: text, shape: [integers], data_offsets: [begin, end]}}", kDamaged);
  }

  SafetensorsHeader& header_;
  std::string_view file_;
  Place place_ = Place::kStart;
  std::string key_, metadata_key_;
  std::set<std::string> names_;
  std::vector<int64_t> numbers_;
  int seen_fields_ = 0;
  bool in_array_ = false;
};

void check_tensor_size(const HeaderTensor& tensor, std::string_view file, int64_t data_bytes) {
  const auto damaged = [&](const auto&... parts) { fail(ErrorKind::kFormat, file, ": tensor \"", tensor.name, "\" ", parts..., kDamaged); };
  if (tensor.begin > tensor.end) damaged("ends at ", tensor.end, " before it begins at ", tensor.begin);
  if (tensor.end > data_bytes) damaged("ends at byte ", tensor.end, " of the data, but the file has only ", data_bytes);
  const int64_t count = element_count(tensor.shape);
  const int bits = bits_of(tensor.dtype);
  int64_t total_bits = 0;
  if (count < 0 || __builtin_mul_overflow(count, int64_t{bits}, &total_bits)) damaged("has a shape whose size overflows 2^63");
  if (total_bits % 8 != 0) damaged("has ", count, " elements of ", bits, " bits, expected whole bytes");
  if (total_bits / 8 != tensor.end - tensor.begin) {
    damaged("occupies ", tensor.end - tensor.begin, " bytes, but its shape and dtype need ", total_bits / 8);
  }
}

// The tensors, in order of their offsets, tile [0, data_bytes).
void check_tiling(std::vector<HeaderTensor>& tensors, std::string_view file, int64_t data_bytes) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  int64_t expected = 0;
  for (const auto& tensor : tensors) {
    check_tensor_size(tensor, file, data_bytes);
    if (tensor.begin != expected) {
      fail(ErrorKind::kFormat, file, ": tensor \"", tensor.name, "\" begins at byte ", tensor.begin, " of the data, expected ", expected,
           tensor.begin < expected ? " (it overlaps the tensor before it)" : " (there is a gap)", kDamaged);
    }
    expected = tensor.end;
  }
  if (expected != data_bytes) {
    fail(ErrorKind::kFormat, file, ": the tensors end at byte ", expected, " of the data, but the file has ", data_bytes, kDamaged);
  }
}

}  // namespace

int bits_of(std::string_view dtype) {
  for (const auto& known : kDtypes) {
    if (dtype == known.name) return known.bits;
  }
  return 0;
}

int64_t element_count(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return -1;
  }
  return count;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view file_name) {
  if (file.size() < 8) {
    fail(ErrorKind::kFormat, file_name, ": the file has ", file.size(), " bytes, expected a header length of 8 bytes", kDamaged);
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; i--) length = length << 8 | std::to_integer<uint64_t>(file[i]);
  if (length > kMaxHeaderBytes) {
    fail(ErrorKind::kFormat, file_name, ": the header says it has ", length, " bytes, expected at most ", kMaxHeaderBytes,
         "; this is not a safetensors file or it is damaged");
  }
  if (length > file.size() - 8) {
    fail(ErrorKind::kFormat, file_name, ": the header says it has ", length, " bytes, but only ", file.size() - 8, " follow", kDamaged);
  }
  SafetensorsHeader header;
  header.data_start = static_cast<int64_t>(8 + length);
  const auto* text = reinterpret_cast<const char*>(file.data()) + 8;
  HeaderReader reader(header, file_name);
  nlohmann::json::sax_parse(text, text + length, &reader);
  check_tiling(header.tensors, file_name, static_cast<int64_t>(file.size()) - header.data_start);
  return header;
}

std::string format_safetensors_header(const std::vector<HeaderTensor>& tensors, const std::map<std::string, std::string>& metadata,
                                      int64_t alignment, int64_t data_start) {
  nlohmann::ordered_json json;
  if (!metadata.empty()) json["__metadata__"] = metadata;
  for (const auto& tensor : tensors) {
    json[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = json.dump();
  const auto used = static_cast<int64_t>(8 + text.size());
  if (data_start == 0) data_start = (used + alignment - 1) / alignment * alignment;
  if (used > data_start || data_start - 8 > kMaxHeaderBytes) {
    fail(ErrorKind::kValue, "a header of ", used, " bytes does not fit before byte ", std::min(data_start, kMaxHeaderBytes + 8));
  }
  text.append(static_cast<size_t>(data_start - used), ' ');
  std::string file(8, '\0');
  const auto length = static_cast<uint64_t>(text.size());
  for (int i = 0; i < 8; i++) file[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return file + text;
}

}  // namespace nybble
