#include "format/tables.h"

#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {
namespace {

// FP4 as bitsandbytes stores it in `code`: the sign of code 8 is lost there.
constexpr std::array<float, 16> stored_fp4() {
  std::array<float, 16> values = format::kFp4Values;
  values[8] = 0.0f;
  return values;
}

constexpr std::array<float, 256> dynamic_map() {
  std::array<float, 256> values{};
  for (size_t k = 1; k <= 128; k++) {
    const float value = std::bit_cast<float>(format::kDynamicUpperBits[k - 1]);
    values[127 + k] = value;
    if (k <= 127) values[127 - k] = -value;
  }
  return values;
}

constexpr std::array<float, 16> kStoredFp4 = stored_fp4();
constexpr std::array<float, 256> kDynamicMap = dynamic_map();

}  // namespace

const char* name(QuantType type) {
  switch (type) {
    case QuantType::kNf4:
      return "nf4";
    case QuantType::kFp4:
      return "fp4";
  }
  fail(ErrorKind::kValue, "quant type ", int(type), ", expected 0 (nf4) or 1 (fp4)");
}

const char* name(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  fail(ErrorKind::kType, "dtype ", int(type), ", expected 0 (float32), 1 (float16) or 2 (bfloat16)");
}

int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

std::span<const float, 16> code_table(QuantType type) { return type == QuantType::kNf4 ? format::kNf4Values : kStoredFp4; }

std::span<const float, 256> nested_code_table() { return kDynamicMap; }

bool is_block_size(int64_t block_size) {
  return block_size >= kMinBlockSize && block_size <= kMaxBlockSize && (block_size & (block_size - 1)) == 0;
}

}  // namespace nybble
