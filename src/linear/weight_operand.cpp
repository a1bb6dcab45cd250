#include "linear/weight_operand.h"

#include <algorithm>
#include <bit>

#include "format/tables.h"

namespace nybble {

WeightOperand weight_operand(const Nf4Weight& weight) {
  const Scales& scales = weight.scales;
  const bool nested = scales.nested();
  WeightOperand w{};
  w.packed = weight.packed;
  w.codes = nested ? scales.absmax_codes : reinterpret_cast<const uint8_t*>(scales.absmax);
  w.scales = nested ? scales.nested_absmax : scales.absmax;
  w.code_values = nested ? scales.nested_code : nullptr;
  w.offset = nested ? scales.offset : nullptr;
  w.scale_shift = nested ? 8 : 0;
  w.block_shift = std::countr_zero(static_cast<uint32_t>(weight.block_size));
  const auto& values = weight.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  std::copy(values.begin(), values.end(), w.values);
  return w;
}

}  // namespace nybble
