#include <algorithm>

#include "core/cuda_check.h"
#include "format/device_copy.h"

namespace nybble {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;                  // loads of a thread in flight
constexpr int kPiece = kThreads * kAhead;  // of 16 bytes, contiguous
constexpr int kThreadsPerSm = 2048;

template <bool STREAMING>
__device__ __forceinline__ uint4 load(const uint4* from) {
  if constexpr (STREAMING) return __ldcs(from);
  return __ldg(from);
}

template <bool STREAMING>
__device__ __forceinline__ void store(uint4* to, const uint4& value) {
  if constexpr (STREAMING) {
    __stcs(to, value);
  } else {
    *to = value;
  }
}

template <bool STREAMING>
__global__ void __launch_bounds__(kThreads) copy_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, uint32_t count) {
  for (uint32_t first = blockIdx.x * kPiece; first < count; first += gridDim.x * kPiece) {
    const uint32_t i = first + threadIdx.x;
    if (first + kPiece <= count) {
      uint4 values[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; j++) values[j] = load<STREAMING>(from + i + j * kThreads);
#pragma unroll
      for (int j = 0; j < kAhead; j++) store<STREAMING>(to + i + j * kThreads, values[j]);
    } else {
#pragma unroll 1
      for (uint32_t last = i; last < count; last += kThreads) to[last] = from[last];
    }
  }
}

int resident_ctas() {
  int device = 0, sms = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms * (kThreadsPerSm / kThreads);
}

}  // namespace

void copy_by_kernel(const CopyKernel& kernel, const void* from, void* to, int64_t bytes, CudaStream stream) {
  if (bytes % 16 != 0 || bytes >> 34 != 0) fail(ErrorKind::kValue, bytes, " bytes, expected a multiple of 16 below 16 GiB");
  const auto count = static_cast<uint32_t>(bytes / 16);
  const int pieces = static_cast<int>((count + kPiece - 1) / kPiece);
  const int grid = kernel.one_pass ? pieces : std::min(pieces, resident_ctas());
  const auto launch = kernel.streaming ? copy_kernel<true> : copy_kernel<false>;
  launch<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to), count);
  check_launch();
}

}  // namespace nybble
