// Dequantisation: weight = fl(table[code] * scale) in fp32, flushed, then one rounding to the wanted dtype. A block has one scale, hence
// 16 possible results: they are computed once a block, kept as byte planes in registers, and its codes select among them by byte shuffles.
#include "nybble/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/dequantize.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "core/parallel.h"
#include "format/rounding.h"
#include "format/tables.h"
#include "nybble/error.h"

#ifndef NYBBLE_FORMAT_DEQUANTIZE_ONCE
#  define NYBBLE_FORMAT_DEQUANTIZE_ONCE
namespace nybble::format {

constexpr int64_t kChunk = 32768;  // weights a thread takes at a time; a multiple of every block size
constexpr int64_t kGroup = 32;     // weights a vector step makes; divides every block size

// Weights [first, end) of a flattened weight. scales[0] belongs to the block of `first`.
struct Run {
  const uint8_t* packed = nullptr;
  const float* table = nullptr;  // [16]
  const float* scales = nullptr;
  int64_t block_size = 0;
  int64_t first = 0;
  int64_t end = 0;
  unsigned char* out = nullptr;
};

}  // namespace nybble::format
#endif

HWY_BEFORE_NAMESPACE();
namespace nybble::format::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// For processors without byte shuffles.
template <DType DTYPE>
void dequantize_run(const Run& run) {
  using T = std::conditional_t<DTYPE == DType::kFloat32, float, uint16_t>;
  const float* scale = run.scales;
  unsigned char* out = run.out;
  for (int64_t i = run.first; i < run.end;) {
    const int64_t stop = std::min(run.end, (i / run.block_size + 1) * run.block_size);
    T values[16];
    for (int code = 0; code < 16; code++) {
      const float product = multiply_flushed(run.table[code], *scale);
      if constexpr (DTYPE == DType::kFloat32) values[code] = product;
      if constexpr (DTYPE == DType::kFloat16) values[code] = to_fp16(product);
      if constexpr (DTYPE == DType::kBFloat16) values[code] = to_bf16(product);
    }
    scale++;
    for (; i < stop; i++, out += sizeof(T)) {
      const uint8_t byte = run.packed[i / 2];
      std::memcpy(out, values + (i % 2 == 0 ? byte >> 4 : byte & 15), sizeof(T));
    }
  }
}

#else

namespace hn = hwy::HWY_NAMESPACE;

// 128 bits everywhere: the byte shuffle works in 128-bit lanes, and this is already at memory speed.
constexpr hn::FixedTag<float, 4> kF32;
constexpr hn::FixedTag<uint32_t, 4> kU32;
constexpr hn::FixedTag<uint16_t, 8> kU16;
constexpr hn::FixedTag<uint8_t, 16> kU8;
using VecF32 = hn::Vec<decltype(kF32)>;
using VecU32 = hn::Vec<decltype(kU32)>;
using VecU16 = hn::Vec<decltype(kU16)>;
using VecU8 = hn::Vec<decltype(kU8)>;

HWY_INLINE VecU32 select(hn::Mask<decltype(kU32)> condition, VecU32 yes, VecU32 no) { return hn::IfThenElse(condition, yes, no); }

// Bits of multiply_flushed(value, scale); |value| <= 1.
HWY_INLINE VecU32 product_bits(VecF32 value, VecF32 scale) {
  const VecU32 bits = hn::BitCast(kU32, hn::Mul(value, scale));
  const VecF32 scaled = hn::Mul(hn::Mul(value, hn::Set(kF32, kTinyScale)), scale);
  const auto tiny = hn::RebindMask(kU32, hn::Lt(hn::Abs(scaled), hn::Set(kF32, kTinyBound)));
  return select(tiny, hn::And(bits, hn::Set(kU32, 0x80000000u)), bits);
}

// Each function below takes bits of 4 floats to bits of 4 values of the dtype, as rounding.h does for one.
HWY_INLINE VecU32 to_bf16_bits(VecU32 bits) {
  const VecU32 odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kU32, 1u));
  const VecU32 rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(kU32, 0x7FFFu))));
  const auto nan = hn::Gt(hn::And(bits, hn::Set(kU32, 0x7FFFFFFFu)), hn::Set(kU32, 0x7F800000u));
  return select(nan, hn::Set(kU32, 0x7FFFu), rounded);
}

HWY_INLINE VecU32 to_fp16_bits(VecU32 bits) {
  const VecU32 sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(kU32, 0x8000u));
  const VecU32 magnitude = hn::And(bits, hn::Set(kU32, 0x7FFFFFFFu));
  const VecU32 odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(kU32, 1u));
  const VecU32 normal = hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(kU32, 0x38000000u - 0xFFFu)), odd));
  const VecF32 sum = hn::Add(hn::BitCast(kF32, magnitude), hn::Set(kF32, 0.5f));
  const VecU32 small = hn::Sub(hn::BitCast(kU32, sum), hn::Set(kU32, 0x3F000000u));
  VecU32 result = select(hn::Lt(magnitude, hn::Set(kU32, 0x38800000u)), small, normal);
  result = select(hn::Gt(magnitude, hn::Set(kU32, 0x477FEFFFu)), hn::Set(kU32, 0x7C00u), result);
  result = hn::Or(result, sign);
  return select(hn::Gt(magnitude, hn::Set(kU32, 0x7F800000u)), hn::Set(kU32, 0x7FFFu), result);
}

template <DType DTYPE>
HWY_INLINE VecU32 round_bits(VecU32 bits) {
  if constexpr (DTYPE == DType::kBFloat16) return to_bf16_bits(bits);
  if constexpr (DTYPE == DType::kFloat16) return to_fp16_bits(bits);
  return bits;
}

// The 16 results of a block: plane p holds byte p of each.
template <DType DTYPE>
struct Planes {
  VecU8 plane[DTYPE == DType::kFloat32 ? 4 : 2];
};

HWY_INLINE VecU16 even_halves(VecU32 high, VecU32 low) { return hn::ConcatEven(kU16, hn::BitCast(kU16, high), hn::BitCast(kU16, low)); }
HWY_INLINE VecU16 odd_halves(VecU32 high, VecU32 low) { return hn::ConcatOdd(kU16, hn::BitCast(kU16, high), hn::BitCast(kU16, low)); }
HWY_INLINE VecU8 even_bytes(VecU16 high, VecU16 low) { return hn::ConcatEven(kU8, hn::BitCast(kU8, high), hn::BitCast(kU8, low)); }
HWY_INLINE VecU8 odd_bytes(VecU16 high, VecU16 low) { return hn::ConcatOdd(kU8, hn::BitCast(kU8, high), hn::BitCast(kU8, low)); }

template <DType DTYPE>
HWY_INLINE Planes<DTYPE> make_planes(const float* table, float scale_value) {
  const VecF32 scale = hn::Set(kF32, flush(scale_value));
  VecU32 bits[4];
  for (int i = 0; i < 4; i++) bits[i] = round_bits<DTYPE>(product_bits(hn::LoadU(kF32, table + 4 * i), scale));
  Planes<DTYPE> planes;
  const VecU16 low0 = even_halves(bits[1], bits[0]);
  const VecU16 low1 = even_halves(bits[3], bits[2]);
  planes.plane[0] = even_bytes(low1, low0);
  planes.plane[1] = odd_bytes(low1, low0);
  if constexpr (DTYPE == DType::kFloat32) {
    const VecU16 high0 = odd_halves(bits[1], bits[0]);
    const VecU16 high1 = odd_halves(bits[3], bits[2]);
    planes.plane[2] = even_bytes(high1, high0);
    planes.plane[3] = odd_bytes(high1, high0);
  }
  return planes;
}

// out[0 .. 16) = the results that 16 codes select.
template <DType DTYPE>
HWY_INLINE void store_selected(const Planes<DTYPE>& planes, VecU8 codes, unsigned char* out) {
  const VecU8 byte0 = hn::TableLookupBytes(planes.plane[0], codes);
  const VecU8 byte1 = hn::TableLookupBytes(planes.plane[1], codes);
  const VecU8 low = hn::InterleaveLower(kU8, byte0, byte1);
  const VecU8 high = hn::InterleaveUpper(kU8, byte0, byte1);
  if constexpr (DTYPE == DType::kFloat32) {
    const VecU8 byte2 = hn::TableLookupBytes(planes.plane[2], codes);
    const VecU8 byte3 = hn::TableLookupBytes(planes.plane[3], codes);
    const VecU16 low_top = hn::BitCast(kU16, hn::InterleaveLower(kU8, byte2, byte3));
    const VecU16 high_top = hn::BitCast(kU16, hn::InterleaveUpper(kU8, byte2, byte3));
    hn::StoreU(hn::BitCast(kU8, hn::InterleaveLower(kU16, hn::BitCast(kU16, low), low_top)), kU8, out);
    hn::StoreU(hn::BitCast(kU8, hn::InterleaveUpper(kU16, hn::BitCast(kU16, low), low_top)), kU8, out + 16);
    hn::StoreU(hn::BitCast(kU8, hn::InterleaveLower(kU16, hn::BitCast(kU16, high), high_top)), kU8, out + 32);
    hn::StoreU(hn::BitCast(kU8, hn::InterleaveUpper(kU16, hn::BitCast(kU16, high), high_top)), kU8, out + 48);
  } else {
    hn::StoreU(low, kU8, out);
    hn::StoreU(high, kU8, out + 16);
  }
}

// 16 bytes of codes to 32 weights; element 2j is the high nibble of byte j.
template <DType DTYPE>
HWY_INLINE void store_group(const Planes<DTYPE>& planes, const uint8_t* packed, unsigned char* out) {
  const VecU8 bytes = hn::LoadU(kU8, packed);
  const VecU8 low_nibbles = hn::Set(kU8, 0x0F);
  const VecU8 even = hn::And(hn::BitCast(kU8, hn::ShiftRight<4>(hn::BitCast(kU16, bytes))), low_nibbles);
  const VecU8 odd = hn::And(bytes, low_nibbles);
  constexpr int64_t kHalf = 16 * (DTYPE == DType::kFloat32 ? 4 : 2);
  store_selected<DTYPE>(planes, hn::InterleaveLower(kU8, even, odd), out);
  store_selected<DTYPE>(planes, hn::InterleaveUpper(kU8, even, odd), out + kHalf);
}

// Weights [first, end) of one block that do not fill whole bytes or whole groups: through a buffer, so that nothing is read or written
// outside the caller's arrays.
template <DType DTYPE>
HWY_NOINLINE void store_rest(const Planes<DTYPE>& planes, const uint8_t* packed, int64_t first, int64_t end, unsigned char* out) {
  constexpr int64_t kItem = DTYPE == DType::kFloat32 ? 4 : 2;
  uint8_t codes[kGroup / 2];
  unsigned char weights[kGroup * kItem];
  while (first < end) {
    const int64_t start = first / 2 * 2;
    const int64_t stop = std::min(end, start + kGroup);
    std::memcpy(codes, packed + start / 2, (stop - start + 1) / 2);
    store_group<DTYPE>(planes, codes, weights);
    std::memcpy(out, weights + (first - start) * kItem, (stop - first) * kItem);
    out += (stop - first) * kItem;
    first = stop;
  }
}

template <DType DTYPE>
void dequantize_run(const Run& run) {
  constexpr int64_t kItem = DTYPE == DType::kFloat32 ? 4 : 2;
  const float* scale = run.scales;
  unsigned char* out = run.out;
  for (int64_t i = run.first; i < run.end;) {
    const int64_t stop = std::min(run.end, (i / run.block_size + 1) * run.block_size);
    const Planes<DTYPE> planes = make_planes<DTYPE>(run.table, *scale++);
    if (i % 2 == 0) {
      for (; i + kGroup <= stop; i += kGroup, out += kGroup * kItem) store_group<DTYPE>(planes, run.packed + i / 2, out);
    }
    if (i < stop) store_rest<DTYPE>(planes, run.packed, i, stop, out);
    out += (stop - i) * kItem;
    i = stop;
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

void dequantize(const Run& run, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return dequantize_run<DType::kFloat32>(run);
    case DType::kFloat16:
      return dequantize_run<DType::kFloat16>(run);
    case DType::kBFloat16:
      return dequantize_run<DType::kBFloat16>(run);
  }
}

}  // namespace nybble::format::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nybble {
namespace format {
HWY_EXPORT(dequantize);
}

void dequantize_4bit(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, void* out) {
  if (!is_block_size(weight.block_size)) {
    fail(ErrorKind::kValue, "block size ", weight.block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (first < 0 || count < 0 || first > weight.n * weight.k - count) {
    fail(ErrorKind::kValue, "weights ", first, " .. ", first + count, " of a weight of ", weight.n * weight.k, " values");
  }
  if (count == 0) return;
  name(dtype);  // throws for a value that is no dtype
  const auto& table = weight.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  const int64_t end = first + count;
  const int64_t first_chunk = first / format::kChunk;
  parallel_for((end - 1) / format::kChunk + 1 - first_chunk, 1, [&](int64_t chunk, int64_t chunk_end) {
    for (; chunk < chunk_end; chunk++) {
      format::Run run;
      run.packed = weight.packed;
      run.table = table.data();
      run.block_size = weight.block_size;
      run.first = std::max(first, (first_chunk + chunk) * format::kChunk);
      run.end = std::min(end, (first_chunk + chunk + 1) * format::kChunk);
      run.out = static_cast<unsigned char*>(out) + (run.first - first) * size_of(dtype);
      float scales[format::kChunk / kMinBlockSize];
      const int64_t block = run.first / weight.block_size;
      expand_scales(weight.scales, block, (run.end - 1) / weight.block_size + 1 - block, scales);
      run.scales = scales;
      HWY_DYNAMIC_DISPATCH(format::dequantize)(run, dtype);
    }
  });
}

}  // namespace nybble
#endif
