// Blockwise 4-bit quantisation with the decisions of bitsandbytes' CUDA kernels.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "format/reciprocal.h"
#include "format/rounding.h"
#include "format/tables.h"
#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {
namespace {

using format::flush;

// Comparisons are strict, so a tie takes the lower code and NaN takes code 0.
uint8_t nf4_code(float v) {
  int code = 0;
  for (const float pivot : format::kNf4Pivots) code += v > pivot;
  return static_cast<uint8_t>(code);
}

uint8_t fp4_code(float v) {
  int rank = 0;
  for (const float pivot : format::kFp4Pivots) rank += std::fabs(v) > pivot;
  return static_cast<uint8_t>(format::kFp4Order[rank] + (v < 0.0f ? 8 : 0));
}

struct Source {
  const void* x = nullptr;
  DType dtype = DType::kFloat32;
  int64_t n = 0;
  int block_size = 0;
  QuantType type = QuantType::kNf4;
  Reciprocal reciprocal = Reciprocal::kIeee;
};

void quantize_block(const Source& source, int64_t block, uint8_t* packed, float* absmax) {
  const int64_t first = block * source.block_size;
  const int64_t end = std::min(first + source.block_size, source.n);
  // A partial block is padded with zeros, hence its absmax is never below 0.
  float largest = end - first == source.block_size ? -std::numeric_limits<float>::max() : 0.0f;
  for (int64_t i = first; i < end; i++) {
    const float magnitude = std::fabs(flush(format::load_as_float(source.x, source.dtype, i)));
    if (magnitude > largest) largest = magnitude;
  }
  std::memcpy(absmax + block, &largest, sizeof largest);
  const float inverse = format::reciprocal(largest, source.reciprocal);
  for (int64_t i = first; i < end; i += 2) {
    uint8_t codes[2];
    for (int64_t j = 0; j < 2; j++) {
      const float x = i + j < end ? format::load_as_float(source.x, source.dtype, i + j) : 0.0f;
      const float v = format::multiply_flushed(x, inverse);
      codes[j] = source.type == QuantType::kNf4 ? nf4_code(v) : fp4_code(v);
    }
    packed[i / 2] = static_cast<uint8_t>(codes[0] << 4 | codes[1]);
  }
}

}  // namespace

void quantize_4bit(const void* x, DType dtype, int64_t n, int block_size, QuantType type, uint8_t* packed, float* absmax,
                   Reciprocal reciprocal) {
  if (!is_block_size(block_size)) {
    fail(ErrorKind::kValue, "block size ", block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (n < 0) fail(ErrorKind::kValue, "quantize_4bit of ", n, " values, expected at least 0");
  const Source source{x, dtype, n, block_size, type, reciprocal};
  parallel_for(num_blocks(n, block_size), std::max(1, 16384 / block_size), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) quantize_block(source, block, packed, absmax);
  });
}

}  // namespace nybble
