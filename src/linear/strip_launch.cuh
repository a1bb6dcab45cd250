// The launches of the strip kernels, a template over the activation type. Included by one file per type, so that they compile side by side.
#pragma once

#include "linear/kernel_shared_memory.h"
#include "linear/overlapping_launch.h"
#include "linear/strip.h"
#include "linear/strip_grad.cuh"

namespace nybble::small_m::strip {

struct Enqueue {
  bool overlap;
  cudaStream_t stream;

  void operator()(void (*kernel)(Params), int blocks, int threads, uint32_t shared_bytes, const Params& p) const {
    launch_overlapping(overlap, stream, {static_cast<unsigned>(blocks), 1, threads, shared_bytes}, kernel, p);
  }
};

template <typename T>
void launch_forward(const LinearPlan& plan, const Params& p, const Enqueue& enqueue) {
  static SharedMemoryAllowance allowance;
  allowance.allow(reinterpret_cast<const void*>(multiply<T>), kSm90SharedBytes);
  enqueue(multiply<T>, plan.grid, kThreads, static_cast<uint32_t>(forward_shared_bytes(p.work.group, p.work)), p);
  if (p.work.ranges == 1) return;
  const int64_t vectors = static_cast<int64_t>(p.m) * p.n / 4;
  enqueue(add_ranges<T>, static_cast<int>((vectors + kSumThreads - 1) / kSumThreads), kSumThreads, 0, p);
}

template <typename T>
void launch_grad(const LinearPlan& plan, const Params& p, const Enqueue& enqueue) {
  static SharedMemoryAllowance allowance;
  allowance.allow(reinterpret_cast<const void*>(multiply_grad<T>), kGradSharedBytes);
  enqueue(multiply_grad<T>, plan.grid, kThreads, kGradSharedBytes, p);
  if (plan.split == 1) return;
  const int vectors = p.work.bands * p.m * (kSliceColumns / 4);
  enqueue(add_partials<T>, (vectors + kSumThreads - 1) / kSumThreads, kSumThreads, 0, p);
}

template <typename T>
void launch(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, bool overlap, CUstream_st* stream) {
  const Params p = make_params(plan, problem, args);
  const Enqueue enqueue{overlap, stream};
  if (problem.direction == Direction::kForward) {
    launch_forward<T>(plan, p, enqueue);
  } else {
    launch_grad<T>(plan, p, enqueue);
  }
}

}  // namespace nybble::small_m::strip
