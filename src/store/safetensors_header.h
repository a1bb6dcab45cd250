// The header of a safetensors file, read from untrusted bytes and written.
//
//   [8 bytes: n, little endian] [n bytes: JSON, padded with spaces] [data]
//   {"__metadata__": {str: str}, NAME: {"dtype": "U8", "shape": [..], "data_offsets": [begin, end]}, ...}
//
// Offsets count from the first byte of the data. The tensors tile the data: no overlap, no gap, none past the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nybble {

struct HeaderTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // in the data
  int64_t end = 0;
};

struct SafetensorsHeader {
  int64_t data_start = 0;             // in the file
  std::vector<HeaderTensor> tensors;  // ascending begin
  std::map<std::string, std::string> metadata;
};

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the safetensors reference reader

// Bits of one element, or 0 for an unknown dtype.
int bits_of(std::string_view dtype);
// The product of `shape` in int64, or -1 when a dimension is negative or the product overflows.
int64_t element_count(std::span<const int64_t> shape);

// Validates everything. `file` is the whole file; `file_name` only names it in messages. Throws kFormat.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view file_name);

// Length word and JSON, padded with spaces so that the data starts at `data_start`. 0: at the next multiple of `alignment`.
// Throws kValue when it does not fit.
std::string format_safetensors_header(const std::vector<HeaderTensor>& tensors, const std::map<std::string, std::string>& metadata,
                                      int64_t alignment, int64_t data_start = 0);

}  // namespace nybble
