// CPU codec rates beside memcpy in one run: format_bench [rounds] [threads]. Least time of the rounds; GB/s of output bytes for dequantise
// and memcpy, of input bytes for quantise. memcpy moves the output bytes with the same threads.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "format/rounding.h"
#include "nybble/format.h"

namespace {

using namespace nybble;

constexpr int64_t kRows = 4096;
constexpr int64_t kColumns = 4096;
constexpr int64_t kCount = kRows * kColumns;

struct Arm {
  std::string name;
  double bytes = 0;
  std::function<void()> run;
  double best_seconds = 1e30;
};

void copy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kChunk = 1 << 20;
  parallel_for(num_blocks(bytes, kChunk), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kChunk;
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, std::min(end * kChunk, bytes) - first);
  });
}

void time_rounds(std::vector<Arm>& arms, int rounds) {
  for (int round = 0; round < rounds; round++) {
    for (size_t i = 0; i < arms.size(); i++) {
      Arm& arm = arms[(i + round) % arms.size()];
      const auto start = std::chrono::steady_clock::now();
      arm.run();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      arm.best_seconds = std::min(arm.best_seconds, seconds.count());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  set_num_threads(argc > 2 ? std::atoi(argv[2]) : num_threads());
  std::vector<uint16_t> x(kCount), out(kCount), other(kCount);
  std::vector<float> wide(kCount), wide_other(kCount);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (auto& value : x) value = format::to_bf16(normal(random));
  std::vector<uint8_t> packed(packed_bytes(kCount));
  std::vector<float> absmax(num_blocks(kCount, 64)), nested(num_blocks(num_blocks(kCount, 64), kNestedBlockSize));
  std::vector<uint8_t> codes(absmax.size());
  quantize_4bit(x.data(), DType::kBFloat16, kCount, 64, QuantType::kNf4, packed.data(), absmax.data());
  const float offset = absmax_mean(absmax.data(), int64_t(absmax.size()));
  const float* code = nested_code_table().data();
  quantize_scales(absmax.data(), int64_t(absmax.size()), offset, code, codes.data(), nested.data());
  Nf4Weight weight{packed.data(), {}, kRows, kColumns, 64, QuantType::kNf4};
  weight.scales = {nullptr, codes.data(), nested.data(), code, &offset, DType::kFloat32};

  const auto quantize = [&](QuantType type, int block_size) {
    quantize_4bit(x.data(), DType::kBFloat16, kCount, block_size, type, packed.data(), absmax.data());
  };
  std::vector<Arm> arms;
  arms.push_back({"memcpy, 16-bit output", 2.0 * kCount, [&] { copy(out.data(), other.data(), 2 * kCount); }});
  arms.push_back(
      {"dequantize nf4 nested -> bfloat16", 2.0 * kCount, [&] { dequantize_4bit(weight, DType::kBFloat16, 0, kCount, out.data()); }});
  arms.push_back(
      {"dequantize nf4 nested -> float16", 2.0 * kCount, [&] { dequantize_4bit(weight, DType::kFloat16, 0, kCount, out.data()); }});
  arms.push_back({"memcpy, fp32 output", 4.0 * kCount, [&] { copy(wide.data(), wide_other.data(), 4 * kCount); }});
  arms.push_back(
      {"dequantize nf4 nested -> float32", 4.0 * kCount, [&] { dequantize_4bit(weight, DType::kFloat32, 0, kCount, wide.data()); }});
  arms.push_back({"quantize bfloat16 -> nf4, block 64", 2.0 * kCount, [&] { quantize(QuantType::kNf4, 64); }});
  arms.push_back({"quantize bfloat16 -> fp4, block 64", 2.0 * kCount, [&] { quantize(QuantType::kFp4, 64); }});
  arms.push_back({"quantize bfloat16 -> nf4, block 4096", 2.0 * kCount, [&] { quantize(QuantType::kNf4, 4096); }});
  time_rounds(arms, rounds);

  std::printf("%ldx%ld, %d threads, least of %d rounds\n%-40s %10s %10s %8s\n", long(kRows), long(kColumns), num_threads(), rounds, "",
              "ms", "GB/s", "/memcpy");
  double memcpy_rate = 0;
  for (const Arm& arm : arms) {
    const double rate = arm.bytes / arm.best_seconds * 1e-9;
    if (arm.name.rfind("memcpy", 0) == 0) memcpy_rate = rate;
    std::printf("%-40s %10.3f %10.2f %8.2f\n", arm.name.c_str(), arm.best_seconds * 1e3, rate, rate / memcpy_rate);
  }
}
