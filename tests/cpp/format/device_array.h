// Device memory of the GPU tests, with guard bytes, and the rule for machines without a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/cuda_check.h"

namespace nybble::test {

// First line of every GPU test: skips without a GPU, and fails instead when NYBBLE_REQUIRE_GPU=1.
#define NYBBLE_NEEDS_GPU()                                                                      \
  do {                                                                                          \
    if (::nybble::test::has_gpu()) break;                                                       \
    const char* required = std::getenv("NYBBLE_REQUIRE_GPU");                                   \
    if (required && std::string(required) == "1") FAIL() << "NYBBLE_REQUIRE_GPU=1, but no GPU"; \
    GTEST_SKIP() << "no GPU";                                                                   \
  } while (false)

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// `count` values at a byte offset from a 256-byte boundary; the bytes start as 0xFF (NaN in every float format), 256 guard bytes around.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count, int64_t misalignment = 0) : bytes_(count * static_cast<int64_t>(sizeof(T))), shift_(misalignment) {
    check(cudaMalloc(reinterpret_cast<void**>(&base_), total_bytes()));
    check(cudaMemset(base_, kGuardByte, total_bytes()));
    check(cudaMemset(data(), 0xFF, bytes_));
    check(cudaStreamSynchronize(nullptr));  // streams of the tests do not wait for the default stream: on a busy card the fill came last
  }
  template <typename Value>
  explicit DeviceArray(const std::vector<Value>& values, int64_t misalignment = 0)
      : DeviceArray(static_cast<int64_t>(values.size() * sizeof(Value) / sizeof(T)), misalignment) {
    check(cudaMemcpy(data(), values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(base_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() { return reinterpret_cast<T*>(base_ + kGuard + shift_); }

  std::vector<T> to_host() {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cudaMemcpy(values.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return values;
  }
  bool guards_intact() {
    std::vector<uint8_t> all(total_bytes());
    check(cudaMemcpy(all.data(), base_, total_bytes(), cudaMemcpyDeviceToHost));
    const auto intact = [](uint8_t byte) { return byte == kGuardByte; };
    return std::all_of(all.begin(), all.begin() + kGuard + shift_, intact) &&
           std::all_of(all.begin() + kGuard + shift_ + bytes_, all.end(), intact);
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr int kGuardByte = 0xA5;
  size_t total_bytes() const { return static_cast<size_t>(bytes_ + shift_ + 2 * kGuard); }

  int64_t bytes_;
  int64_t shift_;
  uint8_t* base_ = nullptr;
};

}  // namespace nybble::test
