// Scalar conversions with the rounding of the GPU's instructions: cvt.rn.{bf16,f16}.f32 and mul.ftz.f32. Host only.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "nybble/format.h"

namespace nybble::format {

// A value at any address.
template <typename T>
inline T load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const unsigned char*>(base) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// fp32 subnormals become a zero of their sign.
inline float flush(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x7F800000u) == 0 ? std::bit_cast<float>(bits & 0x80000000u) : value;
}

// mul.ftz.f32 decides by the product as it would be with an exponent of any size, so a product just below 2^-126 is flushed although it
// rounds to 2^-126 (seen on sm_90). The scaled product has such an exponent. Where a * 2^64 overflows, the product is far from subnormal.
constexpr float kTinyScale = 0x1p64f;
constexpr float kTinyBound = 0x1p-62f;  // 2^-126 * 2^64

inline float multiply_flushed(float a, float b) {
  a = flush(a), b = flush(b);
  const float product = a * b, scaled = a * kTinyScale * b;
  const bool tiny = scaled < kTinyBound && scaled > -kTinyBound;
  return tiny ? std::bit_cast<float>(std::bit_cast<uint32_t>(product) & 0x80000000u) : product;
}

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

inline uint16_t to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 puts the fp16 subnormal's unit, 2^-24, in the last place of the sum, which rounds to nearest even.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
}

inline float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      return from_fp16(to_fp16(value));
    case DType::kBFloat16:
      return from_bf16(to_bf16(value));
    case DType::kFloat32:
      break;
  }
  return value;
}

inline float load_as_float(const void* x, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return from_fp16(load<uint16_t>(x, index));
    case DType::kBFloat16:
      return from_bf16(load<uint16_t>(x, index));
    case DType::kFloat32:
      break;
  }
  return load<float>(x, index);
}

}  // namespace nybble::format
