// The mma.sync kernel for sm_80 and later: what it takes, how it is planned, and its launch. Host-only.
#pragma once

#include <span>
#include <string>

#include "nybble/cuda.h"
#include "nybble/linear.h"

struct CUstream_st;

namespace nybble {

// Plan variants, by output tile (tokens x columns). General: 128 x 128, for what the others do not take.
enum PortableVariant : int { kPortable256x128 = 0, kPortable128x128, kPortable64x128, kPortable16x128, kPortableGeneral };

struct PortableTile {
  int tokens, columns;
  int threads;
  int shared_bytes;
  int registers;  // a thread, at most
};
std::span<const PortableTile> portable_tiles();

// CTAs of a variant that share an SM of this device.
int portable_ctas_per_sm(const PortableTile& tile, const DeviceModel& device);

// Why the fast variants do not take the problem, empty when they do.
std::string supports_portable_fast(const LinearProblem& problem, const DeviceModel& device);

// Why no variant takes the problem, empty when one does. The general one stands back above 128 tokens unless mode fused asks for it: a
// separate dequantisation is faster then.
std::string supports_portable(const LinearProblem& problem, const DeviceModel& device);

// The variant by number of tokens; reductions are cut (stream-K) where whole tiles would leave SMs idle, never with batch_invariant.
// A row's sum ascends in steps of 16 in every variant, so uncut plans give a row the same bits for any m.
LinearPlan plan_portable(const LinearProblem& problem, const DeviceModel& device);

// The same for a given variant and for cut reductions on (at least one tile) or off: what a benchmark compares.
LinearPlan plan_portable_as(PortableVariant variant, bool cut, const LinearProblem& problem, const DeviceModel& device);

// Workspace: [grid] flags, then at the next multiple of 256 bytes [grid][tile] fp32 partial sums. Enqueues a memset of the flags where
// tiles are cut. Counts the launch.
void launch_portable(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream);

namespace portable {

struct Params;

// One definition each, in portable_bf16.cu and portable_fp16.cu: they compile side by side.
void launch_bf16(Direction direction, int variant, const Params& params, int grid, CUstream_st* stream);
void launch_fp16(Direction direction, int variant, const Params& params, int grid, CUstream_st* stream);

}  // namespace portable
}  // namespace nybble
