#include "linear/cpu_case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <sstream>

#include "format/rounding.h"

namespace nybble {
namespace {

constexpr int kGuard = 64;
constexpr uint8_t kGuardByte = 0xA5;

void store(std::vector<uint8_t>& bytes, DType dtype, int64_t index, float value) {
  const uint16_t half = dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value);
  const void* source = dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &half;
  std::memcpy(bytes.data() + index * size_of(dtype), source, size_of(dtype));
}

// A unit in the last place of |value| in dtype; half of it bounds one rounding.
double ulp(DType dtype, double value) {
  const int digits = dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7;
  const int least = dtype == DType::kFloat16 ? -14 : -126;
  const int exponent = value == 0 ? least : std::max(least, std::ilogb(value));
  return std::ldexp(1.0, exponent - digits);
}

}  // namespace

std::string describe(const LinearCase& c) {
  std::ostringstream text;
  text << (c.direction == Direction::kForward ? "forward" : "grad input") << " m " << c.m << " n " << c.n << " k " << c.k << " "
       << name(c.dtype) << " " << name(c.quant_type) << " block " << c.block_size << (c.nested ? " nested" : " plain")
       << (c.bias ? " bias" : "") << " stride +" << c.extra_stride << " packed +" << c.packed_offset
       << (c.batch_invariant ? " batch invariant" : "");
  return text.str();
}

LinearData::LinearData(const LinearCase& c, uint64_t seed) : case_(c) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.02f, 0.06f);
  const int64_t blocks = num_blocks(c.n * c.k, c.block_size);
  packed_.resize(c.packed_offset + packed_bytes(c.n * c.k));
  for (auto& byte : packed_) byte = static_cast<uint8_t>(random());
  absmax_.resize(blocks);
  for (auto& scale : absmax_) scale = uniform(random);
  if (c.nested) {
    absmax_codes_.resize(blocks);
    nested_absmax_.resize(num_blocks(blocks, kNestedBlockSize));
    offset_ = blocks > 0 ? absmax_mean(absmax_.data(), blocks) : 0.0f;
    quantize_scales(absmax_.data(), blocks, offset_, nested_code_table().data(), absmax_codes_.data(), nested_absmax_.data());
  }
  bias_.resize(c.n * size_of(c.dtype));
  for (int64_t i = 0; i < c.n; i++) store(bias_, c.dtype, i, normal(random));
  const int64_t stride = reduction() + c.extra_stride;
  in_.resize((c.m > 0 ? (c.m - 1) * stride + reduction() : 0) * size_of(c.dtype), 0xFF);  // gaps between rows hold NaN
  for (int64_t row = 0; row < c.m; row++) {
    for (int64_t column = 0; column < reduction(); column++) set_input(row, column, normal(random));
  }
}

LinearProblem LinearData::problem() const {
  LinearProblem p;
  p.m = case_.m;
  p.n = case_.n;
  p.k = case_.k;
  p.direction = case_.direction;
  p.dtype = p.state_dtype = case_.dtype;
  p.quant_type = case_.quant_type;
  p.block_size = case_.block_size;
  p.nested = case_.nested;
  p.bias = case_.bias;
  p.batch_invariant = case_.batch_invariant;
  p.x_row_stride = reduction() + case_.extra_stride;
  return p;
}

Nf4Weight LinearData::weight() const {
  Nf4Weight w;
  w.packed = packed_.data() + case_.packed_offset;
  if (case_.nested) {
    w.scales.absmax_codes = absmax_codes_.data();
    w.scales.nested_absmax = nested_absmax_.data();
    w.scales.nested_code = nested_code_table().data();
    w.scales.offset = &offset_;
  } else {
    w.scales.absmax = absmax_.data();
  }
  w.n = case_.n;
  w.k = case_.k;
  w.block_size = case_.block_size;
  w.quant_type = case_.quant_type;
  return w;
}

LinearArgs LinearData::args() {
  const int64_t bytes = rows() * columns() * size_of(case_.dtype);
  out_.assign(bytes + 2 * kGuard, kGuardByte);
  std::fill(out_.begin() + kGuard, out_.begin() + kGuard + bytes, 0xFF);
  LinearArgs a;
  a.in = in_.data();
  a.in_row_stride = reduction() + case_.extra_stride;
  a.weight = weight();
  a.bias = case_.bias ? bias_.data() : nullptr;
  a.out = out_.data() + kGuard;
  return a;
}

std::vector<uint8_t> LinearData::run() {
  linear_cpu(problem(), args());
  for (int i = 0; i < kGuard; i++) {
    EXPECT_EQ(out_[i], kGuardByte) << "guard before the output, byte " << i - kGuard;
    EXPECT_EQ(out_[out_.size() - kGuard + i], kGuardByte) << "guard after the output, byte " << i;
  }
  return {out_.begin() + kGuard, out_.end() - kGuard};
}

void LinearData::set_input(int64_t row, int64_t column, float value) {
  store(in_, case_.dtype, row * (reduction() + case_.extra_stride) + column, value);
}

float LinearData::input(int64_t row, int64_t column) const {
  return element(in_, case_.dtype, row * (reduction() + case_.extra_stride) + column);
}

float LinearData::bias(int64_t column) const { return case_.bias ? element(bias_, case_.dtype, column) : 0.0f; }

void LinearData::swap_scales(int64_t a, int64_t b) {
  std::swap(absmax_[a], absmax_[b]);
  if (case_.nested) std::swap(absmax_codes_[a], absmax_codes_[b]);
}

void LinearData::set_scales(std::span<const float> scales) { absmax_.assign(scales.begin(), scales.end()); }

Reference reference(const LinearData& data, DType dtype) {
  const Nf4Weight weight = data.weight();
  const bool forward = data.problem().direction == Direction::kForward;
  std::vector<uint8_t> dense(weight.n * weight.k * size_of(dtype));
  dequantize_4bit(weight, dtype, 0, weight.n * weight.k, dense.data());
  Reference result;
  for (int64_t row = 0; row < data.rows(); row++) {
    for (int64_t column = 0; column < data.columns(); column++) {
      double sum = data.bias(column);
      double magnitude = std::fabs(sum);
      for (int64_t r = 0; r < data.reduction(); r++) {
        const double w = element(dense, dtype, forward ? column * weight.k + r : r * weight.k + column);
        const double product = w * data.input(row, r);
        sum += product;
        magnitude += std::fabs(product);
      }
      // Chains of at most 256 products, the chains' sums added one after the other.
      const double steps = static_cast<double>(std::min<int64_t>(data.reduction(), 256) + data.reduction() / 256 + 2);
      result.values.push_back(sum);
      result.bounds.push_back(0.5 * ulp(dtype, sum) + steps * 0x1p-24 * magnitude);
    }
  }
  return result;
}

float element(const std::vector<uint8_t>& bytes, DType dtype, int64_t index) { return format::load_as_float(bytes.data(), dtype, index); }

int64_t count_wrong(const std::vector<uint8_t>& out, DType dtype, const Reference& expected) {
  int64_t wrong = 0;
  for (size_t i = 0; i < expected.values.size(); i++) {
    wrong += !(std::fabs(element(out, dtype, i) - expected.values[i]) <= expected.bounds[i]);
  }
  return wrong;
}

}  // namespace nybble
