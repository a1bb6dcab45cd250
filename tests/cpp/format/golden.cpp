#include "format/golden.h"

#include <zlib.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "format/rounding.h"

namespace nybble::test {
namespace {

using Json = nlohmann::json;

struct GoldenFile {
  std::map<std::string, std::pair<std::string, std::vector<uint8_t>>> tensors;  // name -> dtype, bytes
  Json metadata;
};

GoldenFile read_file(const std::filesystem::path& path) {
  const std::vector<uint8_t> bytes = read_bytes(path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  const auto* begin = reinterpret_cast<const char*>(bytes.data()) + 8;
  const Json header = Json::parse(begin, begin + header_bytes);
  GoldenFile file;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      file.metadata = entry;
      continue;
    }
    const uint8_t* body = bytes.data() + 8 + header_bytes;
    const auto& offsets = entry.at("data_offsets");
    file.tensors[name] = {entry.at("dtype"), {body + offsets[0].get<uint64_t>(), body + offsets[1].get<uint64_t>()}};
  }
  return file;
}

std::vector<float> as_floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

DType dtype_named(const std::string& text) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (text == name(dtype)) return dtype;
  }
  throw std::runtime_error("golden file with dtype " + text);
}

GoldenCase make_case(const GoldenFile& file, const std::string& stem, bool nested) {
  const auto bytes = [&](const std::string& suffix) { return file.tensors.at(stem + suffix).second; };
  const std::string part = nested ? ".nested." : ".plain.";
  GoldenCase golden;
  golden.type = file.metadata.at("quant_type") == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
  golden.dtype = dtype_named(file.metadata.at("dtype"));
  golden.name = std::string(name(golden.type)) + "." + name(golden.dtype) + "." + stem + part.substr(0, part.size() - 1);
  const size_t block = stem.find(".bs") + 3;
  golden.block_size = std::stoi(stem.substr(block));
  golden.nested = nested;
  golden.input = bytes(".input");
  golden.n = static_cast<int64_t>(golden.input.size()) / size_of(golden.dtype);
  golden.packed = bytes(".plain.packed");  // the nested case has the same codes
  if (nested) {
    golden.scales = as_floats(bytes(".nested.scales"));
    golden.absmax_codes = bytes(".nested.absmax");
    golden.nested_absmax = as_floats(bytes(".nested.nested_absmax"));
    golden.nested_code = as_floats(file.tensors.at("nested_code").second);
    golden.offset = as_floats(bytes(".nested.offset")).at(0);
  } else {
    golden.scales = as_floats(bytes(".plain.absmax"));
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::string key = stem + part + "dequant_" + name(dtype);
    if (file.tensors.count(key)) golden.weights[dtype] = file.tensors.at(key).second;
  }
  return golden;
}

std::filesystem::path setting(const char* variable, const std::filesystem::path& otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::filesystem::path(value) : otherwise;
}

std::filesystem::path data_folder() { return setting("NYBBLE_TEST_DATA", NYBBLE_TEST_DATA); }

std::vector<std::filesystem::path> golden_files() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(setting("NYBBLE_GOLDEN", data_folder() / "golden"))) {
    if (entry.path().filename().string().find(".safetensors") != std::string::npos) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

struct Golden {
  std::vector<GoldenCase> cases;
  std::map<std::string, std::vector<float>> tables;
};

const Golden& golden() {
  static const Golden all = [] {
    Golden result;
    for (const auto& path : golden_files()) {
      const GoldenFile file = read_file(path);
      result.tables[path.filename().string()] = as_floats(file.tensors.at("code").second);
      for (const auto& [key, tensor] : file.tensors) {
        const size_t end = key.rfind(".input");
        if (end == std::string::npos) continue;
        for (const bool nested : {false, true}) result.cases.push_back(make_case(file, key.substr(0, end), nested));
      }
    }
    return result;
  }();
  return all;
}

}  // namespace

std::vector<uint8_t> read_bytes(const std::filesystem::path& path) {
  gzFile file = gzopen(path.c_str(), "rb");
  if (!file) throw std::runtime_error("cannot open " + path.string());
  std::vector<uint8_t> bytes;
  uint8_t buffer[1 << 16];
  int got = 0;
  while ((got = gzread(file, buffer, sizeof buffer)) > 0) bytes.insert(bytes.end(), buffer, buffer + got);
  gzclose(file);
  if (got < 0) throw std::runtime_error("cannot read " + path.string());
  return bytes;
}

std::vector<uint8_t> read_reciprocal_table() { return read_bytes(data_folder() / "rcp_approx_sm90.bin.gz"); }

Nf4Weight GoldenCase::weight() const {
  Nf4Weight result;
  result.packed = packed.data();
  result.n = 1;
  result.k = n;
  result.block_size = block_size;
  result.quant_type = type;
  if (nested) {
    result.scales.absmax_codes = absmax_codes.data();
    result.scales.nested_absmax = nested_absmax.data();
    result.scales.nested_code = nested_code.data();
    result.scales.offset = &offset;
  } else {
    result.scales.absmax = scales.data();
  }
  return result;
}

const std::vector<GoldenCase>& golden_cases() { return golden().cases; }
const std::map<std::string, std::vector<float>>& golden_code_tables() { return golden().tables; }

int64_t count_different(DType dtype, const void* a, const void* b, int64_t count) {
  const auto is_nan = [&](const void* values, int64_t i) {
    const float value = format::load_as_float(values, dtype, i);
    return value != value;
  };
  const int64_t item = size_of(dtype);
  int64_t different = 0;
  for (int64_t i = 0; i < count; i++) {
    const auto* left = static_cast<const uint8_t*>(a) + i * item;
    const auto* right = static_cast<const uint8_t*>(b) + i * item;
    if (std::memcmp(left, right, item) != 0 && !(is_nan(a, i) && is_nan(b, i))) different++;
  }
  return different;
}

}  // namespace nybble::test
