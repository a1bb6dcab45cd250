// Double quantisation of scales: their mean in float64 in the fixed order of scales.cpp, and 8-bit codes of the differences to it. A warp
// takes a group of 256 scales, lane l those at l, l + 32, ...; there is one scale per 32 or more weights, so neither kernel is ever hot.
#include <algorithm>
#include <limits>

#include "core/cuda_check.h"
#include "format/anywhere.cuh"
#include "format/arithmetic.cuh"
#include "nybble/cuda.h"

namespace nybble::format {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kGroup = kNestedBlockSize;
constexpr int kLaneValues = kGroup / 32;
constexpr int kFinishThreads = 1024;

// ---- mean ----

__device__ __forceinline__ double load_value(const float* values, int64_t index) { return static_cast<double>(load_f32(values, index)); }
__device__ __forceinline__ double load_value(const double* values, int64_t index) { return values[index]; }

// Sum of values[first .. first + 256), fewer at the end, in lane 0.
template <typename T>
__device__ __forceinline__ double sum_group(const T* values, int64_t first, int64_t count, int lane) {
  double sum = 0.0;
  for (int i = 0; i < kLaneValues; i++) {
    const int64_t index = first + lane + 32 * i;
    if (index < count) sum = __dadd_rn(sum, load_value(values, index));
  }
  for (int half = 16; half > 0; half /= 2) sum = __dadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, half));
  return sum;
}

__global__ void __launch_bounds__(kThreads) sum_groups_kernel(const float* absmax, int64_t blocks, double* sums) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (group * kGroup >= blocks) return;
  const double sum = sum_group(absmax, group * kGroup, blocks, threadIdx.x % 32);
  if (threadIdx.x % 32 == 0) sums[group] = sum;
}

// One CTA reduces the group sums level by level, in place: a round reads 32 groups of 256 before it writes 32 sums, and no later round
// reads those places again.
__global__ void __launch_bounds__(kFinishThreads) finish_mean_kernel(double* sums, int64_t count, int64_t blocks, float* mean) {
  constexpr int kGroupsAtOnce = kFinishThreads / 32;
  const int lane = threadIdx.x % 32;
  while (count > 1) {
    const int64_t groups = (count + kGroup - 1) / kGroup;
    for (int64_t first = 0; first < groups; first += kGroupsAtOnce) {
      const int64_t group = first + threadIdx.x / 32;
      const double sum = sum_group(sums, group * kGroup, count, lane);
      __syncthreads();
      if (lane == 0 && group < groups) sums[group] = sum;
      __syncthreads();
    }
    count = groups;
  }
  if (threadIdx.x == 0) store_f32(mean, 0, static_cast<float>(__ddiv_rn(sums[0], static_cast<double>(blocks))));
}

// ---- codes ----

struct Params {
  const float* absmax;
  int64_t blocks;
  const float* offset;
  const float* code;
  uint8_t* codes;
  float* nested_absmax;
};

// Nearest entry of the code in shared memory: a search over odd indices that ends on an even one, so exact ties go to the even index. NaN
// falls to index 0.
__device__ __forceinline__ uint32_t nearest_code(const float* code, float x) {
  int index = 127;
  for (int step = 64; step > 0; step /= 2) index += x > code[index] ? step : -step;
  const bool above = x > code[index];
  if (!above && index == 0) return 0;
  const int neighbour = above ? index + 1 : index - 1;
  const float middle = device::multiply_flushed(add_flushed(code[neighbour], code[index]), 0.5f);
  return (above ? x > middle : x < middle) ? neighbour : index;
}

__global__ void __launch_bounds__(kThreads) quantize_scales_kernel(const Params p) {
  __shared__ float code[256];
  for (int i = threadIdx.x; i < 256; i += kThreads) code[i] = flush(load_f32(p.code, i));
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t first = group * kGroup + lane;
  if (group * kGroup >= p.blocks) return;
  const float offset = load_f32(p.offset, 0);
  float differences[kLaneValues];
  float largest = -std::numeric_limits<float>::max();
#pragma unroll
  for (int i = 0; i < kLaneValues; i++) {
    const int64_t block = first + 32 * i;
    differences[i] = block < p.blocks ? add(load_f32(p.absmax, block), -offset) : 0.0f;
    largest = max_magnitude(largest, differences[i]);
  }
  for (int step = 16; step > 0; step /= 2) largest = max_magnitude(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (lane == 0) store_f32(p.nested_absmax, group, largest);
  const float inverse = reciprocal_approximate(largest);
#pragma unroll
  for (int i = 0; i < kLaneValues; i++) {
    const int64_t block = first + 32 * i;
    if (block < p.blocks) p.codes[block] = static_cast<uint8_t>(nearest_code(code, device::multiply_flushed(differences[i], inverse)));
  }
}

}  // namespace
}  // namespace nybble::format

namespace nybble {

void absmax_mean_cuda(const float* absmax, int64_t blocks, double* workspace, float* mean, CudaStream stream) {
  if (blocks <= 0) fail(ErrorKind::kValue, "absmax_mean_cuda of ", blocks, " scales, expected at least 1");
  const int64_t groups = num_blocks(blocks, kNestedBlockSize);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto grid = static_cast<unsigned>(num_blocks(groups, format::kWarps));
  format::sum_groups_kernel<<<grid, format::kThreads, 0, cuda_stream>>>(absmax, blocks, workspace);
  check_launch();
  format::finish_mean_kernel<<<1, format::kFinishThreads, 0, cuda_stream>>>(workspace, groups, blocks, mean);
  check_launch();
}

void quantize_scales_cuda(const float* absmax, int64_t blocks, const float* offset, const float* nested_code, uint8_t* codes,
                          float* nested_absmax, CudaStream stream) {
  if (blocks < 0) fail(ErrorKind::kValue, "quantize_scales_cuda of ", blocks, " scales, expected at least 0");
  if (blocks == 0) return;
  const auto grid = static_cast<unsigned>(num_blocks(num_blocks(blocks, kNestedBlockSize), format::kWarps));
  const format::Params params{absmax, blocks, offset, nested_code, codes, nested_absmax};
  format::quantize_scales_kernel<<<grid, format::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch();
}

}  // namespace nybble
