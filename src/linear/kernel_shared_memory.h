// Lets a kernel use more than 48 KiB of dynamic shared memory, asked for once a device.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/cuda_check.h"

namespace nybble {

class SharedMemoryAllowance {
 public:
  // On the current device. Thread safe; not a stream operation, so allowed while a stream is captured.
  void allow(const void* kernel, int bytes) {
    int ordinal = 0;
    check(cudaGetDevice(&ordinal));
    const uint64_t bit = uint64_t{1} << (ordinal & 63);
    if (done_.load(std::memory_order_acquire) & bit) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t> done_{0};  // a bit a device
};

}  // namespace nybble
