// The multiply: y = x W^T (+ bias) and grad_x = grad_y W from the packed bytes of W. plan_linear() decides, purely; the launch
// functions obey the plan. Shapes: x [m][k], y [m][n], W [n][k] row major.
#pragma once

#include <cstdint>
#include <string>

#include "nybble/format.h"

namespace nybble {

enum class Direction : uint8_t { kForward = 0, kGradInput = 1 };

// Which code multiplies. kDequant is dequantize_4bit + the caller's dense matmul (the core only dequantises).
enum class LinearPath : uint8_t { kNone = 0, kCpu, kDequant, kRow, kPortable, kSmallM, kHopper };
const char* name(LinearPath path);

enum class LinearMode : uint8_t { kAuto = 0, kFused = 1, kDequant = 2 };

// Everything a plan may depend on. Strides and alignments, never addresses.
struct LinearProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Direction direction = Direction::kForward;
  DType dtype = DType::kBFloat16;        // of x, y, grads and bias
  DType state_dtype = DType::kBFloat16;  // quant_state.dtype; the dequant path rounds through it
  QuantType quant_type = QuantType::kNf4;
  int32_t block_size = 64;
  bool nested = true;
  DType nested_dtype = DType::kFloat32;  // in which nested scales are rounded, see Scales
  bool bias = false;
  bool batch_invariant = false;
  LinearMode mode = LinearMode::kAuto;
  int64_t x_row_stride = 0;        // elements between rows of the activation operand, 0: contiguous; each row is contiguous
  int32_t x_alignment = 256;       // largest power of two, at most 256, that divides the address of the activation operand
  int32_t packed_alignment = 256;  // the same for packed
  int32_t scales_alignment = 256;  // the least of absmax / absmax_codes / nested_absmax
};

// What a plan may know of the device. cpu: sm = 0.
struct DeviceModel {
  std::string name;
  int sm = 0;  // compute capability, 90 for 9.0; 0 = CPU
  int sm_count = 0;
  int64_t l2_bytes = 0;
  int64_t smem_per_block_bytes = 0;
};

// The printable decision. Same problem, device and tune table: same plan, same bits.
struct LinearPlan {
  LinearPath path = LinearPath::kNone;
  int variant = 0;               // which instantiation of the path, see the path's header
  int grid = 0;                  // CTAs (0 on the CPU)
  int split = 1;                 // pieces of the reduction that are summed in ascending order
  int group = 1;                 // rasterisation group
  int64_t split_tiles = 0;       // output tiles that are cut into `split` pieces, the others are summed whole
  int64_t workspace_bytes = 0;   // the caller passes this much device memory, 256-byte aligned
  bool batch_invariant = false;  // a row's bits do not depend on m
  bool measured = false;         // the thresholds behind this choice come from a record for this device
  uint64_t tune_hash = 0;        // of the tune table that was consulted, 0: none
  std::string reason;            // why this path; for kDequant, why not a fused one
};
std::string to_string(const LinearPlan& plan);

// Choices that a user measured on one card, see tune.h. Null or empty: the built-in thresholds.
class TuneTable;

// Pure and host-only. Throws kValue for a problem no path can take and kUnsupported when mode asks for a path that is not available.
// Path kNone: the output is empty, launch nothing.
LinearPlan plan_linear(const LinearProblem& problem, const DeviceModel& device, const TuneTable* tune = nullptr);

// Empty when a fused path takes the problem on this device, otherwise the reason in words a user understands.
std::string supports_fused(const LinearProblem& problem, const DeviceModel& device);

// Operands of one launch. in: x (forward) or grad_y (grad input); out: y or grad_x, contiguous [m][n] or [m][k], dtype of the problem.
struct LinearArgs {
  const void* in = nullptr;
  int64_t in_row_stride = 0;  // elements, 0: contiguous
  Nf4Weight weight;
  const void* bias = nullptr;  // [n], dtype of the problem; forward only
  void* out = nullptr;
  void* workspace = nullptr;  // plan.workspace_bytes, 256-byte aligned
};

// On the CPU, panel by panel: never more than 32 MiB of dense W for all threads together. fp32 sums in a fixed order, the same on any
// number of threads; grad_x, and forward with batch_invariant, also for any number of rows (else at most 4 rows are summed in a faster
// order).
void linear_cpu(const LinearProblem& problem, const LinearArgs& args);

// Counts of launches per (path, direction) since start, kept beside the launch; thread safe.
void count_launch(LinearPath path, Direction direction);
int64_t launches(LinearPath path, Direction direction);
void reset_launches();

}  // namespace nybble
