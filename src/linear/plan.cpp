// plan_linear(): validation, the candidates in the order of the threshold table, and the words of every decision. Host-only and pure.
#include <bit>
#include <iomanip>
#include <sstream>

#include "linear/cpu_paths.h"
#include "linear/hopper.h"
#include "linear/portable.h"
#include "linear/row.h"
#include "linear/small_m.h"
#include "linear/thresholds.h"
#include "nybble/error.h"
#include "nybble/linear.h"
#include "nybble/tune.h"

namespace nybble {
namespace {

// A fused CUDA path: supports() gives a reason against, or nothing.
struct FusedPath {
  LinearPath path;
  std::string (*supports)(const LinearProblem&, const DeviceModel&);
  LinearPlan (*plan)(const LinearProblem&, const DeviceModel&);
};

// Paths whose kernels this build has, in the order in which mode fused falls back on them. A build without CUDA launches nothing, so it
// plans with all of them.
constexpr FusedPath kFusedPaths[] = {
#if !defined(NYBBLE_HAVE_CUDA) || defined(NYBBLE_HAVE_SM90A)
    {LinearPath::kHopper, supports_hopper, plan_hopper},
    {LinearPath::kSmallM, supports_small_m, plan_small_m},
#endif
    {LinearPath::kPortable, supports_portable, plan_portable},
    {LinearPath::kRow, supports_row, plan_row},
};

std::span<const FusedPath> fused_paths() { return kFusedPaths; }

const FusedPath* find_path(LinearPath path) {
  for (const FusedPath& candidate : fused_paths()) {
    if (candidate.path == path) return &candidate;
  }
  return nullptr;
}

bool fits(int64_t a, int64_t b) { return b == 0 || a <= std::numeric_limits<int64_t>::max() / 8 / b; }

void validate(const LinearProblem& p) {
  if (p.m < 0 || p.n < 0 || p.k < 0) fail(ErrorKind::kValue, "shape m ", p.m, ", n ", p.n, ", k ", p.k, ", expected none below 0");
  if (!fits(p.n, p.k) || !fits(p.m, p.n) || !fits(p.m, p.k)) {
    fail(ErrorKind::kValue, "shape m ", p.m, ", n ", p.n, ", k ", p.k, " does not fit a 64-bit count of bytes");
  }
  if (!is_block_size(p.block_size)) {
    fail(ErrorKind::kValue, "block size ", p.block_size, ", expected a power of two from ", kMinBlockSize, " to ", kMaxBlockSize);
  }
  const int64_t reduction = p.direction == Direction::kForward ? p.k : p.n;
  if (p.x_row_stride != 0 && p.x_row_stride < reduction && p.m > 1) {
    fail(ErrorKind::kValue, "row stride ", p.x_row_stride, " of the activation, expected at least its ", reduction,
         " columns (0: contiguous); pass a contiguous tensor");
  }
  if (p.bias && p.direction == Direction::kGradInput) fail(ErrorKind::kValue, "a bias in the input gradient, expected none");
  for (const int32_t alignment : {p.x_alignment, p.packed_alignment, p.scales_alignment}) {
    if (alignment < 1 || alignment > 256 || !std::has_single_bit(static_cast<uint32_t>(alignment))) {
      fail(ErrorKind::kValue, "alignment ", alignment, ", expected a power of two from 1 to 256");
    }
  }
}

bool covers(const Threshold& row, const LinearProblem& problem, const DeviceModel& device) {
  const bool direction = problem.direction == Direction::kForward ? row.forward : row.backward;
  return direction && row.sm_min <= device.sm && device.sm <= row.sm_max && row.m_min <= problem.m && problem.m <= row.m_max &&
         problem.n * problem.k >= row.weights_min;
}

LinearPlan dequant_plan(const std::string& reason) {
  LinearPlan plan;
  plan.path = LinearPath::kDequant;
  plan.batch_invariant = false;  // the dense multiply is the caller's
  plan.reason = reason;
  return plan;
}

LinearPlan cpu_plan(const LinearProblem& problem) {
  if (problem.mode == LinearMode::kDequant) return dequant_plan("mode dequant");
  LinearPlan plan;
  plan.path = LinearPath::kCpu;
  plan.variant = cpu::takes_few_rows(problem) ? 1 : 0;  // cpu_paths.h
  plan.batch_invariant = problem.batch_invariant || problem.direction == Direction::kGradInput;
  plan.measured = true;
  plan.reason = "CPU tensors";
  return plan;
}

// The fastest fused path by the table (rows for dequant are passed over), or an error that tells why there is none.
LinearPlan fused_plan(const LinearProblem& problem, const DeviceModel& device) {
  for (const Threshold& row : thresholds()) {
    const FusedPath* path = find_path(row.path);
    if (path && covers(row, problem, device) && path->supports(problem, device).empty()) return path->plan(problem, device);
  }
  for (const FusedPath& path : fused_paths()) {
    if (path.supports(problem, device).empty()) return path.plan(problem, device);
  }
  fail(ErrorKind::kUnsupported, "mode fused: ", supports_fused(problem, device), "; use mode auto or dequant");
}

LinearPlan auto_plan(const LinearProblem& problem, const DeviceModel& device, const TuneTable* tune) {
  const TuneEntry* tuned = tune && !problem.batch_invariant ? tune->find(problem, device) : nullptr;
  if (tuned) {
    const FusedPath* path = find_path(tuned->path);
    if (path && path->supports(problem, device).empty()) {
      LinearPlan plan = path->plan(problem, device);
      plan.measured = true;
      plan.reason = "tune table";
      return plan;
    }
    if (tuned->path == LinearPath::kDequant) {
      LinearPlan plan = dequant_plan("tune table");
      plan.measured = true;
      return plan;
    }
  }
  std::string refusal = supports_fused(problem, device);
  if (!refusal.empty()) return dequant_plan(refusal);
  if (problem.batch_invariant) {  // one path for every m: the table must not choose by it
    for (const FusedPath& path : fused_paths()) {
      if (path.supports(problem, device).empty()) return path.plan(problem, device);
    }
  }
  for (const Threshold& row : thresholds()) {
    if (!covers(row, problem, device)) continue;
    const FusedPath* path = find_path(row.path);
    LinearPlan plan;
    if (path && path->supports(problem, device).empty()) {
      plan = path->plan(problem, device);
    } else if (row.path == LinearPath::kDequant) {
      plan = dequant_plan("faster than the fused kernels at this number of tokens on this card");
    } else {
      continue;
    }
    plan.measured = row.record[0] != '\0';
    return plan;
  }
  return fused_plan(problem, device);
}

}  // namespace

const char* name(LinearPath path) {
  switch (path) {
    case LinearPath::kNone:
      return "none";
    case LinearPath::kCpu:
      return "cpu";
    case LinearPath::kDequant:
      return "dequant";
    case LinearPath::kRow:
      return "row";
    case LinearPath::kPortable:
      return "portable";
    case LinearPath::kSmallM:
      return "small_m";
    case LinearPath::kHopper:
      return "hopper";
  }
  return "unknown";
}

std::string to_string(const LinearPlan& plan) {
  std::ostringstream text;
  text << name(plan.path) << " variant " << plan.variant << ", grid " << plan.grid << ", split " << plan.split << ", group " << plan.group
       << ", workspace " << plan.workspace_bytes << " bytes" << (plan.batch_invariant ? ", batch invariant" : "")
       << (plan.measured ? ", measured" : ", unmeasured") << ", tune " << std::hex << std::setw(16) << std::setfill('0') << plan.tune_hash;
  if (!plan.reason.empty()) text << " (" << plan.reason << ")";
  return text.str();
}

std::string supports_fused(const LinearProblem& problem, const DeviceModel& device) {
  validate(problem);
  if (device.sm == 0) return "";
  if (problem.dtype == DType::kFloat32) return "fp32 activations have no fused kernel";
  if (device.sm < 80) return "no fused kernel for compute capability " + std::to_string(device.sm) + ", the oldest is 80";
  std::string reason = "no fused kernel in this build";
  for (const FusedPath& path : fused_paths()) {
    const std::string refusal = path.supports(problem, device);
    if (refusal.empty()) return "";
    reason = std::string(name(path.path)) + ": " + refusal;
  }
  return reason;
}

LinearPlan plan_linear(const LinearProblem& problem, const DeviceModel& device, const TuneTable* tune) {
  validate(problem);
  const int64_t columns = problem.direction == Direction::kForward ? problem.n : problem.k;
  LinearPlan plan;
  if (problem.m == 0 || columns == 0) {
    plan.reason = "empty output";
    plan.batch_invariant = plan.measured = true;
  } else if (device.sm == 0) {
    plan = cpu_plan(problem);
  } else if (problem.mode == LinearMode::kDequant) {
    plan = dequant_plan("mode dequant");
  } else if (problem.mode == LinearMode::kFused) {
    plan = fused_plan(problem, device);
  } else {
    plan = auto_plan(problem, device, tune);
  }
  plan.tune_hash = tune ? tune->hash() : 0;
  return plan;
}

}  // namespace nybble
