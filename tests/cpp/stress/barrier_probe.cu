// What synccheck makes of two warps that meet at one barrier from two places of the code, which PTX allows (bar.sync counts the threads
// that arrive, whatever instruction they arrive at). The kernels do the same where roles differ by warp.
#include <cstdio>

#include "core/cuda_check.h"
#include "device/ptx.cuh"

namespace {

__global__ void meet(int* out) {
  __shared__ int value;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) value = 42;
    nybble::device::named_barrier(1, 64);
  } else {
    nybble::device::named_barrier(1, 64);
    if (threadIdx.x == 32) *out = value;
  }
}

}  // namespace

int main() {
  int *out = nullptr, found = 0;
  nybble::check(cudaMalloc(reinterpret_cast<void**>(&out), sizeof(int)));
  meet<<<1, 64>>>(out);
  nybble::check_launch();
  const cudaError_t status = cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost);
  std::printf("%s: %d through the barrier\n", status == cudaSuccess && found == 42 ? "RIGHT" : "stopped", found);
  return status == cudaSuccess && found == 42 ? 0 : 1;
}
