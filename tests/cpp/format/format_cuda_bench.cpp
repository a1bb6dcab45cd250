// GPU codec rates beside device copies in one run: format_cuda_bench [rounds]. Weights rotate over more than 3 x L2; arms are CUDA graphs
// that visit every buffer set, shuffled in every round; medians. Bytes: (0.5 + scales + output) a weight, and twice the size for a copy.
// Rates are compared with the fastest copy: cudaMemcpyAsync (well below what a kernel reaches on an H200) and the kernels of device_copy.h.
// Exit 1: a copy is wrong, or on an H200 dequantising 14336 x 4096 is below kLeastOfCopy of the fastest copy; 3: below it elsewhere.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "format/device_copy.h"
#include "nybble/cuda.h"

namespace {

using namespace nybble;

constexpr int kLeastLaunches = 12;  // of one graph
constexpr double kLeastOfCopy = 0.85;

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
  bool copy = false, judged = false;
  cudaGraphExec_t graph = nullptr;
  std::vector<double> us = {};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int launches_of(int sets) { return std::max(kLeastLaunches, sets); }

void record(Arm& arm, cudaStream_t stream, int sets) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches_of(sets); i++) arm.launch(i % sets, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&arm.graph, graph, 0));
  check(cudaGraphDestroy(graph));
}

void run_rounds(std::vector<Arm>& arms, int rounds, int launches, cudaStream_t stream) {
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
      if (round >= 0) arms[i].us.push_back(ms * 1e3 / launches);
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

  // Half of what dequantising moves is read, half written.
  int64_t copy_bytes() const { return static_cast<int64_t>(nested_bytes() / 2) / 16 * 16; }
  void copy(int i, cudaStream_t stream) const {
    check(cudaMemcpyAsync(sets_[i]->out.data, sets_[i]->x.data, static_cast<size_t>(copy_bytes()), cudaMemcpyDeviceToDevice, stream));
  }
  void copy(int i, cudaStream_t stream, const CopyKernel& kernel) const {
    copy_by_kernel(kernel, sets_[i]->x.data, sets_[i]->out.data, copy_bytes(), stream);
  }
  bool copies_right(const CopyKernel& kernel) const {
    std::vector<uint8_t> from(copy_bytes()), to(copy_bytes());
    check(cudaMemset(sets_[0]->out.data, 0xFF, to.size()));
    copy(0, nullptr, kernel);
    check(cudaMemcpy(from.data(), sets_[0]->x.data, from.size(), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(to.data(), sets_[0]->out.data, to.size(), cudaMemcpyDeviceToHost));
    return from == to;
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

double rate_of(const Arm& arm) { return arm.bytes / median(arm.us); }

double fastest_copy(const std::vector<Arm>& arms) {
  double fastest = 0;
  for (const Arm& arm : arms) {
    if (arm.copy) fastest = std::max(fastest, rate_of(arm));
  }
  return fastest;
}

void print(const std::vector<Arm>& arms) {
  for (const Arm& arm : arms) {
    const auto [low, high] = std::minmax_element(arm.us.begin(), arm.us.end());
    std::printf("  %-24s %8.2f us  (%.2f .. %.2f)  %7.1f GB/s  %.3f of the fastest copy\n", arm.name.c_str(), median(arm.us), *low, *high,
                rate_of(arm) * 1e-3, rate_of(arm) / fastest_copy(arms));
  }
}

// A line for each judged arm; how many are below the target.
int judge(const std::vector<Arm>& arms) {
  int missed = 0;
  for (const Arm& arm : arms) {
    if (!arm.judged) continue;
    const double ratio = rate_of(arm) / fastest_copy(arms);
    const bool met = ratio >= kLeastOfCopy;
    missed += !met;
    std::printf("VERDICT %s: %.4f of the fastest copy, at least %.2f: %s\n", arm.name.c_str(), ratio, kLeastOfCopy, met ? "met" : "MISSED");
  }
  return missed;
}

std::vector<Arm> arms_of(const Weights& w, bool judged) {
  std::vector<Arm> arms;
  const auto add = [&](const char* name, double bytes, std::function<void(int, cudaStream_t)> launch) -> Arm& {
    arms.push_back({name, bytes, std::move(launch)});
    return arms.back();
  };
  const double copied = 2.0 * double(w.copy_bytes());
  add("memcpy", copied, [&w](int i, cudaStream_t s) { w.copy(i, s); }).copy = true;
  for (const CopyKernel& kernel : kCopyKernels) {
    if (!w.copies_right(kernel)) fail(ErrorKind::kValue, kernel.name, " does not copy");
    add(kernel.name, copied, [&w, kernel](int i, cudaStream_t s) { w.copy(i, s, kernel); }).copy = true;
  }
  add("dequantize nf4 nested", w.nested_bytes(), [&w](int i, cudaStream_t s) { w.dequantize(i, s, true); }).judged = judged;
  add("dequantize nf4 plain", w.plain_bytes(64), [&w](int i, cudaStream_t s) { w.dequantize(i, s, false); }).judged = judged;
  add("mean + 8-bit scales", w.nest_bytes(), [&w](int i, cudaStream_t s) { w.nest(i, s); });
  add("quantize nf4 64", w.plain_bytes(64), [&w](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kNf4, 64); });
  add("quantize fp4 64", w.plain_bytes(64), [&w](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kFp4, 64); });
  add("quantize nf4 4096", w.plain_bytes(4096), [&w](int i, cudaStream_t s) { w.quantize(i, s, QuantType::kNf4, 4096); });
  return arms;
}

// How many judged arms are below the target.
int bench(int64_t rows, int64_t columns, int rounds, bool judged) {
  const Weights w(rows, columns);
  std::vector<Arm> arms = arms_of(w, judged);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaDeviceSynchronize());
  for (Arm& arm : arms) record(arm, stream, w.count());
  run_rounds(arms, rounds, launches_of(w.count()), stream);
  std::printf("%ldx%ld, %d sets, median of %d rounds of %d launches\n", long(rows), long(columns), w.count(), rounds,
              launches_of(w.count()));
  print(arms);
  for (Arm& arm : arms) cudaGraphExecDestroy(arm.graph);
  check(cudaStreamDestroy(stream));
  return judge(arms);
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs, L2 %d MiB\n", properties.name, properties.multiProcessorCount, properties.l2CacheSize >> 20);
  bench(1024, 4096, rounds, false);
  bench(4096, 4096, rounds, false);
  const int missed = bench(14336, 4096, rounds, true);  // last: run_all.py shows the last lines
  if (missed == 0) return 0;
  return std::strstr(properties.name, "H200") ? 1 : 3;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
