// GPU codec rates beside a device copy in one run: format_cuda_bench [rounds]. Weights rotate over more than 3 x L2; arms are CUDA graphs
// of one launch per buffer set, shuffled in every round; medians. Bytes: (0.5 + scales + output) a weight, and twice the size for a copy.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "nybble/cuda.h"

namespace {

using namespace nybble;

constexpr int kLaunches = 12;  // of one graph

struct Buffer {
  explicit Buffer(int64_t bytes) { check(cudaMalloc(&data, static_cast<size_t>(bytes))); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  void* data = nullptr;
};

// One weight with everything that both directions of the codec touch.
struct Set {
  explicit Set(int64_t n)
      : x(2 * n),
        packed(packed_bytes(n)),
        absmax(4 * num_blocks(n, 64)),
        codes(num_blocks(n, 64)),
        nested(4 * num_blocks(num_blocks(n, 64), 256)),
        out(2 * n) {}
  Buffer x, packed, absmax, codes, nested, out;
};

struct Arm {
  std::string name;
  double bytes = 0;
  std::function<void(int set, cudaStream_t)> launch;
  cudaGraphExec_t graph = nullptr;
  std::vector<double> us;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void record(Arm& arm, cudaStream_t stream, int sets) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLaunches; i++) arm.launch(i % sets, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&arm.graph, graph, 0));
  check(cudaGraphDestroy(graph));
}

void run_rounds(std::vector<Arm>& arms, int rounds, cudaStream_t stream) {
  cudaEvent_t start = nullptr, stop = nullptr;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<size_t> order(arms.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(1);
  for (int round = -2; round < rounds; round++) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      check(cudaEventRecord(start, stream));
      check(cudaGraphLaunch(arms[i].graph, stream));
      check(cudaEventRecord(stop, stream));
      check(cudaEventSynchronize(stop));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, start, stop));
      if (round >= 0) arms[i].us.push_back(ms * 1e3 / kLaunches);
    }
  }
}

void bench(int64_t rows, int64_t columns, int rounds) {
  const int64_t n = rows * columns, blocks = num_blocks(n, 64), groups = num_blocks(blocks, 256);
  const int sets = std::max<int>(3, static_cast<int>(num_blocks(int64_t{200} << 20, n * 5 / 2)));
  std::vector<std::unique_ptr<Set>> all;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Buffer code(1024), offset(4), workspace(8 * groups);
  check(cudaMemcpy(code.data, nested_code_table().data(), 1024, cudaMemcpyHostToDevice));
  std::vector<uint16_t> x(n);
  std::mt19937 random(7);
  for (auto& value : x) value = static_cast<uint16_t>(0x3C00 + (random() & 0x1FF) + ((random() & 1) << 15));
  for (int i = 0; i < sets; i++) {
    all.push_back(std::make_unique<Set>(n));
    check(cudaMemcpy(all[i]->x.data, x.data(), 2 * n, cudaMemcpyHostToDevice));
  }
  const auto float_of = [](Buffer& buffer) { return static_cast<float*>(buffer.data); };
  const auto quantize = [&](int i, cudaStream_t s, QuantType type, int block_size) {
    quantize_4bit_cuda(all[i]->x.data, DType::kBFloat16, n, block_size, type, static_cast<uint8_t*>(all[i]->packed.data),
                       float_of(all[i]->absmax), s);
  };
  const auto nest = [&](int i, cudaStream_t s) {
    absmax_mean_cuda(float_of(all[i]->absmax), blocks, static_cast<double*>(workspace.data), float_of(offset), s);
    quantize_scales_cuda(float_of(all[i]->absmax), blocks, float_of(offset), float_of(code), static_cast<uint8_t*>(all[i]->codes.data),
                         float_of(all[i]->nested), s);
  };
  const auto dequantize = [&](int i, cudaStream_t s, bool nested) {
    Nf4Weight weight{static_cast<uint8_t*>(all[i]->packed.data), {}, rows, columns, 64, QuantType::kNf4};
    if (nested) {
      weight.scales = {
          nullptr, static_cast<uint8_t*>(all[i]->codes.data), float_of(all[i]->nested), float_of(code), float_of(offset), DType::kFloat32};
    } else {
      weight.scales.absmax = float_of(all[i]->absmax);
    }
    dequantize_4bit_cuda(weight, DType::kBFloat16, 0, n, all[i]->out.data, s);
  };
  for (int i = 0; i < sets; i++) quantize(i, stream, QuantType::kNf4, 64), nest(i, stream);
  check(cudaStreamSynchronize(stream));

  const double nested_bytes = 2.5 * double(n) + double(blocks) + 4.0 * double(groups), plain_bytes = 2.5 * double(n) + 4.0 * double(blocks);
  const auto copied = static_cast<size_t>(nested_bytes / 2);
  std::vector<Arm> arms;
  arms.push_back(
      {"copy of the same bytes",
       2.0 * double(copied),
       [&](int i, cudaStream_t s) { check(cudaMemcpyAsync(all[i]->out.data, all[i]->x.data, copied, cudaMemcpyDeviceToDevice, s)); },
       nullptr,
       {}});
  arms.push_back({"dequantize nf4 nested", nested_bytes, [&](int i, cudaStream_t s) { dequantize(i, s, true); }, nullptr, {}});
  arms.push_back({"dequantize nf4 plain", plain_bytes, [&](int i, cudaStream_t s) { dequantize(i, s, false); }, nullptr, {}});
  arms.push_back({"mean + 8-bit scales", 5.0 * double(blocks), [&](int i, cudaStream_t s) { nest(i, s); }, nullptr, {}});
  arms.push_back({"quantize nf4 64", plain_bytes, [&](int i, cudaStream_t s) { quantize(i, s, QuantType::kNf4, 64); }, nullptr, {}});
  arms.push_back({"quantize fp4 64", plain_bytes, [&](int i, cudaStream_t s) { quantize(i, s, QuantType::kFp4, 64); }, nullptr, {}});
  arms.push_back(
      {"quantize nf4 4096", 2.5 * double(n), [&](int i, cudaStream_t s) { quantize(i, s, QuantType::kNf4, 4096); }, nullptr, {}});
  for (Arm& arm : arms) record(arm, stream, sets);
  run_rounds(arms, rounds, stream);
  const double copy_rate = arms[0].bytes / median(arms[0].us);
  std::printf("%ldx%ld, %d sets, median of %d rounds of %d launches\n", long(rows), long(columns), sets, rounds, kLaunches);
  for (const Arm& arm : arms) {
    const double us = median(arm.us);
    const auto [low, high] = std::minmax_element(arm.us.begin(), arm.us.end());
    std::printf("  %-24s %8.2f us  (%.2f .. %.2f)  %7.1f GB/s  %.3f of copy\n", arm.name.c_str(), us, *low, *high, arm.bytes / us * 1e-3,
                arm.bytes / us / copy_rate);
  }
  for (Arm& arm : arms) cudaGraphExecDestroy(arm.graph);
  check(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs, L2 %d MiB\n", properties.name, properties.multiProcessorCount, properties.l2CacheSize >> 20);
  bench(14336, 4096, rounds);
  bench(4096, 4096, rounds);
  bench(1024, 4096, rounds);
}
