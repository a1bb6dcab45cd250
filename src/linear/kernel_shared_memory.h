// Lets a kernel use more than 48 KiB of dynamic shared memory, and says how much of an SM's memory is to be shared memory; once a device.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/cuda_check.h"

namespace nybble {

class SharedMemoryAllowance {
 public:
  // On the current device. Thread safe; not a stream operation, so allowed while a stream is captured. What `ctas` CTAs of an SM leave
  // over is L1 cache; 0: all that there is is shared memory, so that the next kernel's CTAs find room beside this one's.
  void allow(const void* kernel, int bytes, int ctas = 0) {
    int ordinal = 0;
    check(cudaGetDevice(&ordinal));
    const uint64_t bit = uint64_t{1} << (ordinal & 63);
    if (done_.load(std::memory_order_acquire) & bit) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               ctas > 0 ? percent(ordinal, ctas, bytes) : cudaSharedmemCarveoutMaxShared));
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  static int attribute(int ordinal, cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, ordinal));
    return value;
  }

  // Of the SM's shared memory; the driver rounds up to a size that the hardware has.
  static int percent(int ordinal, int ctas, int bytes) {
    const int sm = attribute(ordinal, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int wanted = ctas * (bytes + attribute(ordinal, cudaDevAttrReservedSharedMemoryPerBlock));
    return std::min(100, (100 * wanted + sm - 1) / sm);
  }

  std::atomic<uint64_t> done_{0};  // a bit a device
};

}  // namespace nybble
