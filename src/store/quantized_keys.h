// How bitsandbytes names the parts of a quantised weight: suffixes of the weight's own name.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace nybble {

constexpr const char* kAbsmax = ".absmax";
constexpr const char* kQuantMap = ".quant_map";
constexpr const char* kNestedAbsmax = ".nested_absmax";
constexpr const char* kNestedQuantMap = ".nested_quant_map";
constexpr const char* kStateNf4 = ".quant_state.bitsandbytes__nf4";
constexpr const char* kStateFp4 = ".quant_state.bitsandbytes__fp4";
constexpr const char* kTypeFp4 = "bitsandbytes__fp4";

// The weight that a tensor is a part of, by its name; empty for the packed codes themselves and for anything else.
std::optional<std::string> quantized_weight_of(std::string_view tensor_name);

}  // namespace nybble
