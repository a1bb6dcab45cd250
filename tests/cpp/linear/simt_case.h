// Problems for kernels that run on the CPU (tests/cpp/simt): random operands, a float64 reference, a poisoned output between guard words.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "nybble/linear.h"
#include "simt/simt.h"

namespace nybble {

struct SimtCase {
  std::string title;
  Direction direction = Direction::kForward;
  int64_t m = 1, n = 1, k = 64;
  int block_size = 64;
  bool nested = true, bias = false, half = false;
  QuantType quant_type = QuantType::kNf4;
  int packed_shift = 0, x_shift = 0;  // bytes, elements off a 256-byte boundary

  bool forward() const { return direction == Direction::kForward; }
  int64_t columns() const { return forward() ? n : k; }
  int64_t reduction() const { return forward() ? k : n; }
  LinearProblem problem() const {
    LinearProblem p;
    p.m = m, p.n = n, p.k = k, p.direction = direction, p.block_size = block_size, p.nested = nested, p.bias = bias;
    p.dtype = half ? DType::kFloat16 : DType::kBFloat16;
    p.quant_type = quant_type;
    const auto alignment = [](int bytes) { return bytes ? bytes & -bytes : 256; };
    p.packed_alignment = alignment(packed_shift);
    p.x_alignment = alignment(2 * x_shift);
    return p;
  }
};

inline uint16_t to_16(float v, bool half) { return half ? __half(v).bits : __nv_bfloat16(v).bits; }
inline float from_16(uint16_t bits, bool half) {
  if (half) return __half{std::bit_cast<__half>(bits)};
  return __nv_bfloat16{std::bit_cast<__nv_bfloat16>(bits)};
}

// Everything a launch reads.
struct SimtOperands {
  std::vector<uint8_t> memory, codes;
  std::span<uint8_t> packed;
  std::vector<float> scales, code_values, offset;
  std::vector<uint16_t> x_memory, bias;
  std::span<uint16_t> x;
  std::vector<float> dense;  // [n][k], the weights as dequantize_4bit gives them
  Nf4Weight weight;
};

// `count` values, `shift` of them past a 256-byte boundary.
template <typename V>
std::span<V> shifted(std::vector<V>& memory, int64_t count, int shift) {
  memory.assign(count + shift + 256 / sizeof(V), V{});
  const auto aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
  return {reinterpret_cast<V*>(aligned) + shift, static_cast<size_t>(count)};
}

inline SimtOperands make_operands(const SimtCase& c) {
  std::mt19937_64 random(c.m * 1000003 + c.n * 1009 + c.k);
  std::normal_distribution<float> normal;
  SimtOperands o;
  const int64_t blocks = num_blocks(c.n * c.k, c.block_size);
  o.packed = shifted(o.memory, packed_bytes(c.n * c.k), c.packed_shift);
  for (auto& byte : o.packed) byte = static_cast<uint8_t>(random());
  if (c.nested) {
    o.codes.resize(blocks);
    for (auto& code : o.codes) code = static_cast<uint8_t>(random());
    o.code_values.assign(nested_code_table().begin(), nested_code_table().end());
    o.offset = {0.04f};
  }
  o.scales.resize(c.nested ? num_blocks(blocks, kNestedBlockSize) : blocks);
  for (auto& scale : o.scales) scale = 0.01f + 0.02f * std::abs(normal(random));
  o.weight.n = c.n, o.weight.k = c.k, o.weight.block_size = c.block_size, o.weight.quant_type = c.quant_type;
  o.weight.packed = o.packed.data();
  Scales& s = o.weight.scales;
  (c.nested ? s.nested_absmax : s.absmax) = o.scales.data();
  if (c.nested) s.absmax_codes = o.codes.data(), s.nested_code = o.code_values.data(), s.offset = o.offset.data();
  o.x = shifted(o.x_memory, c.m * c.reduction(), c.x_shift);
  for (auto& v : o.x) v = to_16(normal(random), c.half);
  if (c.bias) o.bias.resize(c.n);
  for (auto& v : o.bias) v = to_16(normal(random), c.half);
  o.dense.resize(c.n * c.k);
  std::vector<uint16_t> rounded(c.n * c.k);
  dequantize_4bit(o.weight, c.half ? DType::kFloat16 : DType::kBFloat16, 0, c.n * c.k, rounded.data());
  for (size_t i = 0; i < rounded.size(); i++) o.dense[i] = from_16(rounded[i], c.half);
  return o;
}

// The memory of one launch, declared to the simulator.
class SimtLaunch {
 public:
  SimtLaunch(const SimtCase& c, SimtOperands& o, int64_t workspace_bytes)
      : out_(c.m * c.columns() + 2 * kGuards, kGuard), memory_(workspace_bytes + 256, 0x7F) {
    std::fill(out_.begin() + kGuards, out_.end() - kGuards, to_16(std::nanf(""), c.half));
    workspace_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 255) / 256 * 256);
    args_.in = o.x.data(), args_.weight = o.weight, args_.bias = c.bias ? o.bias.data() : nullptr;
    args_.out = out_.data() + kGuards, args_.workspace = workspace_;
    simt::clear_buffers();
    simt::allow(o.packed.data(), o.packed.size(), false);
    simt::allow(o.codes.data(), o.codes.size(), false);
    simt::allow(o.scales.data(), o.scales.size() * 4, false);
    simt::allow(o.x.data(), o.x.size() * 2, false);
    simt::allow(workspace_, workspace_bytes, true);
  }

  const LinearArgs& args() const { return args_; }
  std::vector<uint16_t> take_output() const {
    for (int i = 0; i < kGuards; i++) EXPECT_TRUE(out_[i] == kGuard && out_[out_.size() - 1 - i] == kGuard) << "guard words overwritten";
    return {out_.begin() + kGuards, out_.end() - kGuards};
  }

 private:
  static constexpr uint16_t kGuard = 0x7F7F;
  static constexpr int kGuards = 8;
  std::vector<uint16_t> out_;
  std::vector<char> memory_;
  char* workspace_;
  LinearArgs args_;
};

// Count of outputs that differ from the float64 reference by more than their own rounding and that of fp32 sums; NaN counts.
inline int64_t count_wrong(const SimtCase& c, const SimtOperands& o, const std::vector<uint16_t>& out) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < c.m; i++) {
    for (int64_t j = 0; j < c.columns(); j++) {
      double sum = c.bias ? from_16(o.bias[j], c.half) : 0, size = std::abs(sum);
      for (int64_t r = 0; r < c.reduction(); r++) {
        const double weight = o.dense[c.forward() ? j * c.k + r : r * c.k + j];
        const double product = from_16(o.x[i * c.reduction() + r], c.half) * weight;
        sum += product;
        size += std::abs(product);
      }
      const double tolerance = std::abs(sum) * (c.half ? 0x1p-11 : 0x1p-8) + size * 0x1p-20 + 1e-7;
      if (!(std::abs(from_16(out[i * c.columns() + j], c.half) - sum) <= tolerance)) wrong++;
    }
  }
  return wrong;
}

}  // namespace nybble
