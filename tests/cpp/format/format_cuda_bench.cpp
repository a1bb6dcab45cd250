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

// Buffer sets of one weight shape, already quantised, and the codec calls on set i.
class Weights {
 public:
  Weights(int64_t rows, int64_t columns)
      : rows_(rows),
        columns_(columns),
        n_(rows * columns),
        blocks_(num_blocks(n_, 64)),
        groups_(num_blocks(blocks_, kNestedBlockSize)),
        workspace_(8 * groups_) {
    check(cudaMemcpy(code_.data, nested_code_table().data(), 1024, cudaMemcpyHostToDevice));
    std::vector<uint16_t> x(n_);
    std::mt19937 random(7);
    for (auto& value : x) value = static_cast<uint16_t>(0x3C00 + (random() & 0x1FF) + ((random() & 1) << 15));
    const int64_t sets = std::max<int64_t>(3, num_blocks(int64_t{200} << 20, n_ * 5 / 2));
    for (int64_t i = 0; i < sets; i++) {
      sets_.push_back(std::make_unique<Set>(n_));
      check(cudaMemcpy(sets_.back()->x.data, x.data(), 2 * n_, cudaMemcpyHostToDevice));
      quantize(static_cast<int>(i), nullptr, QuantType::kNf4, 64);
      nest(static_cast<int>(i), nullptr);
    }
    check(cudaDeviceSynchronize());
  }

  int count() const { return static_cast<int>(sets_.size()); }
  double nested_bytes() const { return 2.5 * double(n_) + double(blocks_) + 4.0 * double(groups_); }
  double plain_bytes(int block_size) const { return 2.5 * double(n_) + 4.0 * double(num_blocks(n_, block_size)); }
  double nest_bytes() const { return 9.0 * double(blocks_); }  // absmax is read twice

  void copy(int i, cudaStream_t stream) const {
    const auto bytes = static_cast<size_t>(nested_bytes() / 2);
    check(cudaMemcpyAsync(sets_[i]->out.data, sets_[i]->x.data, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  void quantize(int i, cudaStream_t stream, QuantType type, int block_size) const {
    quantize_4bit_cuda(sets_[i]->x.data, DType::kBFloat16, n_, block_size, type, bytes_of(sets_[i]->packed), floats_of(sets_[i]->absmax),
                       stream);
  }
  void nest(int i, cudaStream_t stream) const {
    absmax_mean_cuda(floats_of(sets_[i]->absmax), blocks_, static_cast<double*>(workspace_.data), floats_of(offset_), stream);
    quantize_scales_cuda(floats_of(sets_[i]->absmax), blocks_, floats_of(offset_), floats_of(code_), bytes_of(sets_[i]->codes),
                         floats_of(sets_[i]->nested), stream);
  }
  void dequantize(int i, cudaStream_t stream, bool nested) const {
    Nf4Weight weight{bytes_of(sets_[i]->packed), {}, rows_, columns_, 64, QuantType::kNf4};
    if (nested) {
      weight.scales = {nullptr,          bytes_of(sets_[i]->codes), floats_of(sets_[i]->nested),
                       floats_of(code_), floats_of(offset_),        DType::kFloat32};
    } else {
      weight.scales.absmax = floats_of(sets_[i]->absmax);
    }
    dequantize_4bit_cuda(weight, DType::kBFloat16, 0, n_, sets_[i]->out.data, stream);
  }

 private:
  static float* floats_of(const Buffer& buffer) { return static_cast<float*>(buffer.data); }
  static uint8_t* bytes_of(const Buffer& buffer) { return static_cast<uint8_t*>(buffer.data); }

  int64_t rows_, columns_, n_, blocks_, groups_;
  Buffer code_{1024}, offset_{4}, workspace_;
  std::vector<std::unique_ptr<Set>> sets_;
};

void print(const std::vector<Arm>& arms) {
  const double copy_rate = arms[0].bytes / median(arms[0].us);
  for (const Arm& arm : arms) {
    const double us = median(arm.us);
    const auto [low, high] = std::minmax_element(arm.us.begin(), arm.us.end());
    std::printf("  %-24s %8.2f us  (%.2f .. %.2f)  %7.1f GB/s  %.3f of copy\n", arm.name.c_str(), us, *low, *high, arm.bytes / us * 1e-3,
                arm.bytes / us / copy_rate);
  }
}

void bench(int64_t rows, int64_t columns, int rounds) {
  const Weights w(rows, columns);
  std::vector<Arm> arms;
  const auto add = [&](const char* name, double bytes, std::function<void(int, cudaStream_t)> launch) {
    arms.push_back({name, bytes, std::move(launch), nullptr, {}});
  };
  add("copy of the same bytes", w.nested_bytes(), [&](int i, cudaStream_t s) { w.copy(i, s); });
  add("dequantize nf4 nested", w.nested_bytes(), [&](int i, cudaStream_t s) { w.dequantize(i, s, true); });
  add("dequantize nf4 plain", w.plain_bytes(64), [&](int i, cudaStream_t s) { w.dequantize(i, s, false); });
  add("mean + 8-bit scales", w.nest_bytes(), [&](int i, cudaStream_t s) { w.nest(i, s); });
  add("quantize nf4 64", w.plain_bytes(64), [&](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kNf4, 64); });
  add("quantize fp4 64", w.plain_bytes(64), [&](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kFp4, 64); });
  add("quantize nf4 4096", w.plain_bytes(4096), [&](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kNf4, 4096); });
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (Arm& arm : arms) record(arm, stream, w.count());
  run_rounds(arms, rounds, stream);
  std::printf("%ldx%ld, %d sets, median of %d rounds of %d launches\n", long(rows), long(columns), w.count(), rounds, kLaunches);
  print(arms);
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
