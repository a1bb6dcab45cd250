// Up to 128 tokens on sm_90a: y = x W^T (+ bias) and grad_x = grad_y W from one packed copy of W, bf16 and fp16. Host-only interface. Two
// families of kernels: tiles, declared here (design and what bounds it: small_m_kernel.cuh), and strips, for the fewest tokens (strip.h).
#pragma once

#include <string>

#include "linear/small_m_work.h"
#include "nybble/cuda.h"
#include "nybble/linear.h"

namespace nybble {

constexpr int64_t kSmallMMaxTokens = 128;

// LinearPlan::variant of this path: how many tokens the kernel is built for, or strips.
constexpr int kSmallMTokens[] = {8, 16, 32, 64, 128};
constexpr int kSmallMSizes = 5;
constexpr int kSmallMStrip = kSmallMSizes;
constexpr int kSmallMVariants = kSmallMStrip + 1;
constexpr int small_m_tokens(int variant) { return kSmallMTokens[variant]; }

// Empty when a kernel of the path takes the problem, otherwise the reason in words a user understands.
std::string supports_small_m(const LinearProblem& problem, const DeviceModel& device);
// Pure. Requires supports_small_m(...) to be empty. Strips where takes_strips(), otherwise tiles.
LinearPlan plan_small_m(const LinearProblem& problem, const DeviceModel& device);

// Whether it takes strips: where docs/small_m.md has measured them faster, or the like.
bool takes_strips(const LinearProblem& problem, const DeviceModel& device);

// Tiles only. Forward: a row's bits do not depend on m.
std::string supports_small_m_tiles(const LinearProblem& problem, const DeviceModel& device);
LinearPlan plan_small_m_tiles(const LinearProblem& problem, const DeviceModel& device);

small_m::Work small_m_work(const LinearProblem& problem, const LinearPlan& plan);

// Byte offsets into the workspace. Nothing in it need be initialised.
struct SmallMWorkspace {
  int64_t permuted_bytes = 0;  // from 0: x in the kernel's order [m][k], forward above 32 tokens
  int64_t partials = 0;        // float4 [slots][16][tokens / 8][32]
  int64_t bytes = 0;
};
SmallMWorkspace small_m_workspace(const LinearProblem& problem, const LinearPlan& plan);

// For measurements.
struct SmallMLaunchOptions {
  bool overlap = true;  // set each kernel up while the one before it runs (programmatic dependent launch)
};

// in, packed, scales: 16-byte aligned. One to three kernels; counts one launch. Only in builds for 90a.
void launch_small_m(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream,
                    const SmallMLaunchOptions& options = {});

}  // namespace nybble
