// Dequantisation: weight = fl(table[code] * scale) in fp32, flushed, then one rounding to the wanted dtype. A block has one scale, hence
// 16 possible results: they are computed once a block, and its codes select among them.
#include <algorithm>

#include "core/parallel.h"
#include "format/rounding.h"
#include "format/tables.h"
#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {
namespace {

constexpr int64_t kChunk = 16384;  // weights a thread takes at a time

template <typename T>
T round_product(float value, DType dtype) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value);
  }
}

// Weights [first, end) of the flattened weight, all of one block.
template <typename T>
void dequantize_run(const uint8_t* packed, const T* values, int64_t first, int64_t end, unsigned char* out) {
  for (int64_t i = first; i < end; i++) {
    const uint8_t byte = packed[i / 2];
    std::memcpy(out + (i - first) * sizeof(T), values + (i % 2 == 0 ? byte >> 4 : byte & 15), sizeof(T));
  }
}

template <typename T>
void dequantize_chunk(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, unsigned char* out) {
  const auto& table = weight.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  const int64_t end = first + count;
  const int64_t first_block = first / weight.block_size;
  float scales[kChunk / kMinBlockSize + 2];
  expand_scales(weight.scales, first_block, (end - 1) / weight.block_size - first_block + 1, scales);
  for (int64_t i = first; i < end;) {
    const int64_t block = i / weight.block_size;
    const int64_t stop = std::min(end, (block + 1) * weight.block_size);
    T values[16];
    for (int code = 0; code < 16; code++) {
      values[code] = round_product<T>(format::multiply_flushed(table[code], scales[block - first_block]), dtype);
    }
    dequantize_run(weight.packed, values, i, stop, out + (i - first) * sizeof(T));
    i = stop;
  }
}

}  // namespace

void dequantize_4bit(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, void* out) {
  if (!is_block_size(weight.block_size)) {
    fail(ErrorKind::kValue, "block size ", weight.block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (first < 0 || count < 0 || first + count > weight.n * weight.k) {
    fail(ErrorKind::kValue, "weights ", first, " .. ", first + count, " of a weight of ", weight.n * weight.k, " values");
  }
  auto* bytes = static_cast<unsigned char*>(out);
  const int64_t item = size_of(dtype);
  parallel_for(num_blocks(count, kChunk), 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
      const int64_t offset = chunk * kChunk;
      const int64_t size = std::min(kChunk, count - offset);
      if (dtype == DType::kFloat32) {
        dequantize_chunk<float>(weight, dtype, first + offset, size, bytes + offset * item);
      } else {
        dequantize_chunk<uint16_t>(weight, dtype, first + offset, size, bytes + offset * item);
      }
    }
  });
}

}  // namespace nybble
