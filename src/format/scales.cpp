// Double quantisation: the fp32 scales of a weight as 8-bit codes, one fp32 nested scale per 256 of them, and an offset.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "format/reciprocal.h"
#include "format/rounding.h"
#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble {
namespace {

using format::flush;
using format::load;

constexpr int kLanes = 32;

// The fixed order of absmax_mean: 32 lane sums, lane l over elements l, l + 32, ..., then halves added pairwise 16, 8, 4, 2, 1. It is
// what a GPU warp does, so that the CUDA twin gives the same bits.
template <typename T>
double sum_group(const T* values, int64_t count) {
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i++) lanes[i % kLanes] += static_cast<double>(load<T>(values, i));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Nearest entry of the 256-entry code. The search visits odd indices only and ends on an even one, so exact ties go to the even index.
// NaN falls to index 0.
uint8_t nearest_code(const float* code, float x) {
  int index = 127;
  for (int step = 64; step > 0; step /= 2) index += x > code[index] ? step : -step;
  if (x > code[index]) {
    const float middle = flush(flush(code[index + 1] + code[index]) * 0.5f);
    return static_cast<uint8_t>(x > middle ? index + 1 : index);
  }
  if (index == 0) return 0;
  const float middle = flush(flush(code[index - 1] + code[index]) * 0.5f);
  return static_cast<uint8_t>(x < middle ? index - 1 : index);
}

struct ScaleSource {
  const float* absmax = nullptr;
  int64_t blocks = 0;
  float offset = 0.0f;
  float code[256];
  format::Inverse inverse;
};

void quantize_scale_group(const ScaleSource& source, int64_t group, uint8_t* codes, float* nested_absmax) {
  const int64_t first = group * kNestedBlockSize;
  const int64_t end = std::min(first + kNestedBlockSize, source.blocks);
  float differences[kNestedBlockSize];
  // A partial group is padded with zeros, hence its nested scale is never below 0.
  float largest = end - first == kNestedBlockSize ? -std::numeric_limits<float>::max() : 0.0f;
  for (int64_t i = first; i < end; i++) {
    const float difference = flush(load<float>(source.absmax, i) - source.offset);
    if (std::fabs(difference) > largest) largest = std::fabs(difference);
    differences[i - first] = difference;
  }
  const float inverse = source.inverse(largest);
  for (int64_t i = first; i < end; i++) codes[i] = nearest_code(source.code, format::multiply_flushed(differences[i - first], inverse));
  std::memcpy(nested_absmax + group, &largest, sizeof largest);
}

}  // namespace

float absmax_mean(const float* absmax, int64_t blocks) {
  if (blocks <= 0) fail(ErrorKind::kValue, "absmax_mean of ", blocks, " scales, expected at least 1");
  std::vector<double> sums(static_cast<size_t>(num_blocks(blocks, kNestedBlockSize)));
  parallel_for(static_cast<int64_t>(sums.size()), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = i * kNestedBlockSize;
      sums[i] = sum_group(absmax + first, std::min(kNestedBlockSize, blocks - first));
    }
  });
  while (sums.size() > 1) {
    const auto count = static_cast<int64_t>(sums.size());
    const int64_t groups = num_blocks(count, kNestedBlockSize);
    for (int64_t i = 0; i < groups; i++) {
      const int64_t first = i * kNestedBlockSize;
      sums[i] = sum_group(sums.data() + first, std::min(kNestedBlockSize, count - first));
    }
    sums.resize(static_cast<size_t>(groups));
  }
  return static_cast<float>(sums[0] / static_cast<double>(blocks));
}

void quantize_scales(const float* absmax, int64_t blocks, float offset, const float* nested_code, uint8_t* codes, float* nested_absmax,
                     Reciprocal reciprocal) {
  ScaleSource source{absmax, blocks, offset, {}, format::Inverse(reciprocal)};
  for (int i = 0; i < 256; i++) source.code[i] = flush(load<float>(nested_code, i));
  parallel_for(num_blocks(blocks, kNestedBlockSize), 16, [&](int64_t group, int64_t end) {
    for (; group < end; group++) quantize_scale_group(source, group, codes, nested_absmax);
  });
}

void expand_scales(const Scales& scales, int64_t first, int64_t count, float* out) {
  if (!scales.nested()) {
    if (count > 0) std::memcpy(out, scales.absmax + first, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  // torch rounds the offset to the dtype of the scales before it adds.
  const float offset = format::round_to(scales.nested_dtype, load<float>(scales.offset, 0));
  for (int64_t i = 0; i < count; i++) {
    const int64_t block = first + i;
    const float product = format::multiply_flushed(load<float>(scales.nested_code, scales.absmax_codes[block]),
                                                   load<float>(scales.nested_absmax, block / kNestedBlockSize));
    out[i] = format::round_to(scales.nested_dtype, format::round_to(scales.nested_dtype, product) + offset);
  }
}

}  // namespace nybble
