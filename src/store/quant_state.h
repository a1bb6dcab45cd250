// The JSON that bitsandbytes keeps beside a 4-bit weight ("<weight>.quant_state.bitsandbytes__nf4"), spelled as Python's json.dumps does:
// {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [N, K], "nested_blocksize": 256, "nested_dtype": "float32",
//  "nested_offset": 0.044470928609371185}
// The nested fields are there when the scales are nested. Readers must take NaN and Infinity, which Python writes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nybble/format.h"
#include "nybble/store.h"

namespace nybble {

struct QuantStateFields {
  QuantType quant_type = QuantType::kNf4;
  int64_t block_size = 64;
  DType dtype = DType::kBFloat16;
  std::optional<std::vector<int64_t>> shape;  // empty: null
  bool nested = false;
  DType nested_dtype = DType::kFloat32;
  double offset = 0;
};

// Python's repr() of a float: the shortest digits that read back, exponent form below 1e-4 and from 1e16. NaN and Infinity as json.dumps
// spells them.
std::string python_repr(double value);

std::string format_quant_state(const QuantStateFields& fields);

// Notes every missing, ill-typed or impossible field under `subject`. Empty when one made the result unusable.
std::optional<QuantStateFields> parse_quant_state(std::string_view json, const std::string& subject, Faults& faults);

std::optional<DType> dtype_from_torch_name(std::string_view name);   // "bfloat16"
std::optional<DType> dtype_from_safetensors(std::string_view name);  // "BF16"

}  // namespace nybble
