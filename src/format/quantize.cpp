// Blockwise 4-bit quantisation with the decisions of bitsandbytes' CUDA kernels: per block the largest magnitude, its reciprocal, one
// flushed product per value, and a count of thresholds below it.
#include "nybble/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/quantize.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "format/reciprocal.h"
#include "format/rounding.h"
#include "format/tables.h"
#include "nybble/error.h"

#ifndef NYBBLE_FORMAT_QUANTIZE_ONCE
#  define NYBBLE_FORMAT_QUANTIZE_ONCE
namespace nybble::format {

struct Source {
  const uint8_t* x = nullptr;
  DType dtype = DType::kFloat32;
  int64_t n = 0;
  int64_t block_size = 0;
  QuantType type = QuantType::kNf4;
  const Inverse* inverse = nullptr;
};

}  // namespace nybble::format
#endif

HWY_BEFORE_NAMESPACE();
namespace nybble::format::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr hn::CappedTag<float, 16> kF32;
constexpr hn::Rebind<uint32_t, decltype(kF32)> kU32;
constexpr hn::Rebind<uint16_t, decltype(kF32)> kU16;
constexpr hn::Rebind<uint8_t, decltype(kF32)> kU8;
using VecF32 = hn::Vec<decltype(kF32)>;
using VecU32 = hn::Vec<decltype(kU32)>;

HWY_INLINE VecF32 flush_subnormals(VecF32 value) {
  const VecU32 bits = hn::BitCast(kU32, value);
  const auto subnormal = hn::Eq(hn::And(bits, hn::Set(kU32, 0x7F800000u)), hn::Zero(kU32));
  return hn::BitCast(kF32, hn::IfThenElse(subnormal, hn::And(bits, hn::Set(kU32, 0x80000000u)), bits));
}

// Lanes(d) values from any address.
template <class D>
HWY_INLINE hn::Vec<D> load_anywhere(D d, const uint8_t* x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(d, load<hn::TFromD<D>>(x, 0));
#else
  return hn::BitCast(d, hn::LoadU(hn::Repartition<uint8_t, D>(), x));
#endif
}

// Lanes(kF32) values as fp32 with subnormals flushed (fp16 subnormals are fp32 normals).
template <DType DTYPE>
HWY_INLINE VecF32 load_values(const uint8_t* x) {
  if constexpr (DTYPE == DType::kFloat32) {
    return flush_subnormals(load_anywhere(kF32, x));
  } else {
    const VecU32 wide = hn::PromoteTo(kU32, load_anywhere(kU16, x));
    if constexpr (DTYPE == DType::kBFloat16) return flush_subnormals(hn::BitCast(kF32, hn::ShiftLeft<16>(wide)));
    const VecU32 magnitude = hn::And(wide, hn::Set(kU32, 0x7FFFu));
    const VecU32 shifted = hn::ShiftLeft<13>(magnitude);
    const VecU32 normal = hn::Add(shifted, hn::Set(kU32, 0x38000000u));
    // Integer bits as a float with the exponent of 0.5, minus 0.5: magnitude * 2^-24 without touching an fp32 subnormal.
    const VecF32 half = hn::Set(kF32, 0.5f);
    const VecU32 small = hn::BitCast(kU32, hn::Sub(hn::BitCast(kF32, hn::Or(magnitude, hn::Set(kU32, 0x3F000000u))), half));
    VecU32 bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(kU32, 0x0400u)), small, normal);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(kU32, 0x7BFFu)), hn::Or(shifted, hn::Set(kU32, 0x7F800000u)), bits);
    return hn::BitCast(kF32, hn::Or(bits, hn::ShiftLeft<16>(hn::And(wide, hn::Set(kU32, 0x8000u)))));
  }
}

// Comparisons are strict: a tie takes the lower code, NaN takes code 0.
HWY_INLINE VecU32 count_if_above(VecU32 count, VecF32 value, float pivot) {
  return hn::Sub(count, hn::BitCast(kU32, hn::VecFromMask(kF32, hn::Gt(value, hn::Set(kF32, pivot)))));
}

HWY_INLINE VecU32 nf4_codes(VecF32 value) {
  VecU32 code = hn::Zero(kU32);
  for (const float pivot : kNf4Pivots) code = count_if_above(code, value, pivot);
  return code;
}

// Rank of the magnitude in bits 0-2, sign in bit 3; kFp4Order makes it a code.
HWY_INLINE VecU32 fp4_ranks(VecF32 value) {
  const VecF32 magnitude = hn::Abs(value);
  VecU32 rank = hn::Zero(kU32);
  for (const float pivot : kFp4Pivots) rank = count_if_above(rank, magnitude, pivot);
  const VecU32 negative = hn::BitCast(kU32, hn::VecFromMask(kF32, hn::Lt(value, hn::Zero(kF32))));
  return hn::Or(rank, hn::And(negative, hn::Set(kU32, 8u)));
}

template <DType DTYPE>
float largest_magnitude(const uint8_t* x, int64_t count) {
  constexpr int64_t kItem = DTYPE == DType::kFloat32 ? 4 : 2;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kF32));
  VecF32 largest = hn::Set(kF32, -std::numeric_limits<float>::max());
  for (int64_t i = 0; i < count; i += lanes) {
    const VecF32 magnitude = hn::Abs(load_values<DTYPE>(x + i * kItem));
    largest = hn::IfThenElse(hn::Gt(magnitude, largest), magnitude, largest);  // NaN never wins
  }
  return hn::GetLane(hn::MaxOfLanes(kF32, largest));
}

// `count` values, a multiple of 32, to count / 2 bytes.
template <DType DTYPE, QuantType TYPE>
void encode(const uint8_t* x, int64_t count, float inverse, uint8_t* packed) {
  constexpr int64_t kItem = DTYPE == DType::kFloat32 ? 4 : 2;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kF32));
  const VecF32 factor = hn::Set(kF32, inverse);
  HWY_ALIGN uint8_t codes[kMaxBlockSize];
  for (int64_t i = 0; i < count; i += lanes) {
    const VecF32 value = flush_subnormals(hn::Mul(load_values<DTYPE>(x + i * kItem), factor));
    const VecU32 code = TYPE == QuantType::kNf4 ? nf4_codes(value) : fp4_ranks(value);
    hn::StoreU(hn::DemoteTo(kU8, hn::BitCast(hn::RebindToSigned<decltype(kU32)>(), code)), kU8, codes + i);
  }
  if constexpr (TYPE == QuantType::kFp4) {
    for (int64_t i = 0; i < count; i++) codes[i] = static_cast<uint8_t>(kFp4Order[codes[i] & 7] | (codes[i] & 8));
  }
  for (int64_t i = 0; i < count / 2; i++) packed[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
}

template <DType DTYPE, QuantType TYPE>
void quantize_blocks(const Source& source, int64_t block, int64_t end, uint8_t* packed, float* absmax) {
  constexpr int64_t kItem = DTYPE == DType::kFloat32 ? 4 : 2;
  for (; block < end; block++) {
    const int64_t first = block * source.block_size;
    const int64_t count = std::min(source.block_size, source.n - first);
    const uint8_t* x = source.x + first * kItem;
    uint8_t* bytes = packed + first / 2;
    // A partial block is padded with zeros, which also stand for the missing half of an odd last byte.
    uint8_t padded[kMaxBlockSize * kItem];
    uint8_t padded_bytes[kMaxBlockSize / 2];
    const bool partial = count < source.block_size;
    if (partial) {
      std::memset(padded, 0, source.block_size * kItem);
      std::memcpy(padded, x, count * kItem);
      x = padded;
      bytes = padded_bytes;
    }
    const float largest = largest_magnitude<DTYPE>(x, source.block_size);
    encode<DTYPE, TYPE>(x, source.block_size, (*source.inverse)(largest), bytes);
    std::memcpy(absmax + block, &largest, sizeof largest);
    if (partial) std::memcpy(packed + first / 2, padded_bytes, (count + 1) / 2);
  }
}

template <QuantType TYPE>
void quantize_type(const Source& source, int64_t begin, int64_t end, uint8_t* packed, float* absmax) {
  switch (source.dtype) {
    case DType::kFloat32:
      return quantize_blocks<DType::kFloat32, TYPE>(source, begin, end, packed, absmax);
    case DType::kFloat16:
      return quantize_blocks<DType::kFloat16, TYPE>(source, begin, end, packed, absmax);
    case DType::kBFloat16:
      return quantize_blocks<DType::kBFloat16, TYPE>(source, begin, end, packed, absmax);
  }
}

void quantize(const Source& source, int64_t begin, int64_t end, uint8_t* packed, float* absmax) {
  if (source.type == QuantType::kNf4) return quantize_type<QuantType::kNf4>(source, begin, end, packed, absmax);
  quantize_type<QuantType::kFp4>(source, begin, end, packed, absmax);
}

}  // namespace nybble::format::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nybble {
namespace format {
HWY_EXPORT(quantize);
}

void quantize_4bit(const void* x, DType dtype, int64_t n, int block_size, QuantType type, uint8_t* packed, float* absmax,
                   Reciprocal reciprocal) {
  if (!is_block_size(block_size)) {
    fail(ErrorKind::kValue, "block size ", block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (n < 0) fail(ErrorKind::kValue, "quantize_4bit of ", n, " values, expected at least 0");
  name(dtype), name(type);  // throw for a value outside the enum
  const format::Inverse inverse(reciprocal);
  const format::Source source{static_cast<const uint8_t*>(x), dtype, n, block_size, type, &inverse};
  parallel_for(num_blocks(n, block_size), std::max(1, 32768 / block_size), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(format::quantize)(source, begin, end, packed, absmax);
  });
}

}  // namespace nybble
#endif
