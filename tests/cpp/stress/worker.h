// One stream of the stress test: batches of random multiplies that share a workspace, and the comparison of every output.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda_check.h"
#include "stress/reference.h"

namespace nybble::stress {

struct Options {
  std::vector<Kernels> kernels;
  int64_t cases = 10000;  // of all streams
  int streams = 2;
  int batch = 32;
  double size = 1.0;
  uint64_t seed = 1;
  double seconds = 3600;     // stop after, with what was done so far
  double hang_seconds = 20;  // without progress of a stream
  bool poison = true;        // false: memory that nothing has written stays so, for initcheck
};

// Device memory, uninitialised.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) { check(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes))); }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_;
};

// Random operands that all streams read.
struct Pools {
  explicit Pools(uint64_t seed);
  Memory bytes, scales, activations[2], code, offset;  // activations: float16, bfloat16
  static int of(DType dtype) { return dtype == DType::kFloat16 ? 0 : 1; }
};

struct Failure {
  std::string text;  // empty: none
};

class Worker {
 public:
  Worker(const Options& options, const Pools& pools, const DeviceModel& device, int index);
  ~Worker();

  // Runs `count` cases; true while all outputs are right. A batch is one of: two eager runs, whose bits must be equal; three replays of one
  // graph on changing activations; one-hot activations, where every output is a weight to the bit.
  bool run_batch(int count);

  const std::string& failure() const { return failure_; }
  const std::map<std::string, int64_t>& counts() const { return counts_; }  // "path variant direction" -> cases
  std::atomic<int64_t> done{0};                                             // cases
  std::atomic<int64_t> beats{0};                                            // rises with every sign of life
  std::string latest() const;                                               // the batch at hand, for a report of a hang

 private:
  struct Item {
    Case c;
    LinearArgs args;
    int64_t bytes;
  };
  void draw(int count);
  void refresh_activations();
  void poison_outputs(const Memory& arena);
  void launch(const Memory& arena, bool backwards);
  void run_eager();
  void run_graph();
  void run_one_hot();
  bool judge();

  const Options& options_;
  const Pools& pools_;
  const DeviceModel& device_;
  Random random_;
  cudaStream_t stream_ = nullptr;
  Memory activations_[2], first_, second_, workspace_, dense_, report_;
  std::vector<Item> items_;
  int64_t out_bytes_ = 0;
  bool exact_ = false;
  std::string failure_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace nybble::stress
