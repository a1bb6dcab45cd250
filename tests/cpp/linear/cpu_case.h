// A multiply with random operands at awkward addresses, its float64 reference and an error bound: the contract suite of every path.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nybble/linear.h"

namespace nybble {

struct LinearCase {
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  DType dtype = DType::kBFloat16;
  QuantType quant_type = QuantType::kNf4;
  int block_size = 64;
  bool nested = true;
  bool bias = false;
  Direction direction = Direction::kForward;
  int64_t extra_stride = 0;   // elements between the end of a row of the activation and the next row
  int64_t packed_offset = 0;  // bytes between an aligned address and packed
  bool batch_invariant = false;
};
std::string describe(const LinearCase& c);

// Operands and output of one case. Every buffer ends where its data ends, so that a read past it is seen by the address sanitizer.
class LinearData {
 public:
  explicit LinearData(const LinearCase& c, uint64_t seed = 1);

  LinearProblem problem() const;
  LinearArgs args();
  // Runs linear_cpu into an output of NaN between guard bytes; checks the guards and returns the output as bytes.
  std::vector<uint8_t> run();

  int64_t rows() const { return case_.m; }
  int64_t columns() const { return case_.direction == Direction::kForward ? case_.n : case_.k; }
  int64_t reduction() const { return case_.direction == Direction::kForward ? case_.k : case_.n; }
  Nf4Weight weight() const;
  uint8_t& packed_byte(int64_t index) { return packed_[case_.packed_offset + index]; }
  void set_input(int64_t row, int64_t column, float value);
  float input(int64_t row, int64_t column) const;
  float bias(int64_t column) const;
  void swap_scales(int64_t a, int64_t b);
  void set_scales(std::span<const float> scales);  // plain weights: all of them

 private:
  LinearCase case_;
  std::vector<uint8_t> packed_;
  std::vector<float> absmax_;
  std::vector<uint8_t> absmax_codes_;
  std::vector<float> nested_absmax_;
  float offset_ = 0;
  std::vector<uint8_t> in_;
  std::vector<uint8_t> bias_;
  std::vector<uint8_t> out_;
};

// The exact product of the operands with dequantize_4bit's weights, and how far fp32 accumulation and one rounding may be from it.
struct Reference {
  std::vector<double> values;  // [rows][columns]
  std::vector<double> bounds;  // [rows][columns]
};
Reference reference(const LinearData& data, DType dtype);

float element(const std::vector<uint8_t>& bytes, DType dtype, int64_t index);
// Number of elements of out that are farther from the reference than its bound allows; NaN counts.
int64_t count_wrong(const std::vector<uint8_t>& out, DType dtype, const Reference& expected);

}  // namespace nybble
