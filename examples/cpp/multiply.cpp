// Quantises a weight W [n][k] to NF4, multiplies x [m][k] by it, and checks y = x W^T against the dequantised weight in float64.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "nybble/error.h"
#include "nybble/format.h"
#include "nybble/linear.h"

int main() try {
  constexpr int64_t m = 3, n = 96, k = 576;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> w(n * k), x(m * k), y(m * n), dense(n * k);
  for (float& value : w) value = 0.02f * normal(random);
  for (float& value : x) value = normal(random);

  std::vector<uint8_t> packed(nybble::packed_bytes(n * k));
  std::vector<float> absmax(nybble::num_blocks(n * k, 64));
  nybble::quantize_4bit(w.data(), nybble::DType::kFloat32, n * k, 64, nybble::QuantType::kNf4, packed.data(), absmax.data());
  const nybble::Nf4Weight weight{.packed = packed.data(), .scales = {.absmax = absmax.data()}, .n = n, .k = k, .block_size = 64};

  const nybble::LinearProblem problem{.m = m, .n = n, .k = k, .dtype = nybble::DType::kFloat32, .nested = false};
  std::puts(to_string(nybble::plan_linear(problem, nybble::DeviceModel{})).c_str());
  nybble::linear_cpu(problem, {.in = x.data(), .weight = weight, .out = y.data()});

  nybble::dequantize_4bit(weight, nybble::DType::kFloat32, 0, n * k, dense.data());
  double largest = 0;
  for (int64_t row = 0; row < m; row++)
    for (int64_t column = 0; column < n; column++) {
      double sum = 0;
      for (int64_t i = 0; i < k; i++) sum += double(x[row * k + i]) * dense[column * k + i];
      largest = std::fmax(largest, std::fabs(sum - y[row * n + column]));
    }
  std::printf("%lld bytes for %lld weights, largest error %.1e\n", (long long)(packed.size() + 4 * absmax.size()), (long long)(n * k),
              largest);
  return largest < 1e-4 ? 0 : 1;
} catch (const nybble::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
