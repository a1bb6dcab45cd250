// A library for benchmarks/harness (portable_time.py, portable_check.py, hopper_plans.py): kernels with the plan chosen by the caller, the
// portable kernel's dense skeleton, its emulation of slower tensor cores, and the dequantisation alone. Not part of the product.
#include <cstring>
#include <string>

#include "linear/hopper.h"
#include "linear/portable_launch.cuh"
#include "linear/portable_params.h"
#include "linear/row.h"
#include "linear/sm90.h"
#include "linear/small_m.h"
#include "nybble/cuda.h"
#include "portable_yardstick.cuh"

using namespace nybble;

extern "C" {

enum BenchPath : int {
  kBenchAuto = 0,
  kBenchPortable = 1,
  kBenchRow = 2,
  kBenchDense = 3,
  kBenchHopper = 4,
  kBenchSmallM = 5,
  kBenchDequantize = 6,  // out: W[n][k]; needs no bench_plan
};

struct BenchCall {
  int path, variant, cut, repeat;  // variant: of the path, -1: as planned; kBenchSmallM: strips, or as planned for tiles; cut of
                                   // kBenchHopper: token tiles of a raster group; repeat: 1, or 5 (256x128 tile, bf16)
  int direction, dtype, quant_type, block_size, sm, sm_count;
  int64_t m, n, k, x_stride;
  const void *x, *packed, *absmax, *codes, *nested_absmax, *nested_code, *offset,
      *bias;  // absmax: plain scales; packed: dense W for kBenchDense
  void *out, *workspace, *stream;
  int64_t workspace_bytes;  // out of bench_plan
  char text[512];           // out: the plan, or what went wrong
};

}  // extern "C"

namespace {

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<int>(address & (~address + 1));
}

LinearProblem problem_of(const BenchCall& c) {
  LinearProblem p;
  p.m = c.m, p.n = c.n, p.k = c.k, p.direction = static_cast<Direction>(c.direction), p.dtype = static_cast<DType>(c.dtype);
  p.quant_type = static_cast<QuantType>(c.quant_type), p.block_size = c.block_size, p.nested = c.codes != nullptr;
  p.bias = c.bias != nullptr, p.x_row_stride = c.x_stride, p.x_alignment = alignment_of(c.x);
  p.mode = LinearMode::kFused;
  p.packed_alignment = c.path == kBenchDense ? 256 : alignment_of(c.packed);
  return p;
}

LinearPlan hopper_plan_of(const BenchCall& c, const LinearProblem& problem, const DeviceModel& device) {
  const std::string refusal = supports_hopper(problem, device);
  if (!refusal.empty()) fail(ErrorKind::kUnsupported, refusal);
  if (c.variant < 0) return plan_hopper(problem, device);
  return plan_hopper_as(problem, device, {hopper_tile(c.variant), hopper_schedule(c.variant), hopper_scales(c.variant), c.cut});
}

LinearPlan plan_of(const BenchCall& c, const LinearProblem& problem) {
  const DeviceModel device{"bench", c.sm, c.sm_count, 0, kSm90SharedBytes};
  if (c.path == kBenchHopper) return hopper_plan_of(c, problem, device);
  if (c.path == kBenchSmallM) {
    if (c.variant == kSmallMStrip && takes_strips(problem, device)) return plan_small_m(problem, device);
    const std::string refusal = supports_small_m_tiles(problem, device);
    if (!refusal.empty()) fail(ErrorKind::kUnsupported, refusal);
    return plan_small_m_tiles(problem, device);
  }
  const bool row = c.path == kBenchRow || (c.path == kBenchAuto && supports_row(problem, device).empty());
  const bool fast = c.variant >= 0 && c.variant != kPortableGeneral;
  const std::string refusal = row    ? supports_row(problem, device)
                              : fast ? supports_portable_fast(problem, device)
                                     : supports_portable(problem, device);
  if (!refusal.empty()) fail(ErrorKind::kUnsupported, refusal);
  if (row) return plan_row(problem, device);
  if (c.variant < 0) return plan_portable(problem, device);
  return plan_portable_as(static_cast<PortableVariant>(c.variant), c.cut != 0, problem, device);
}

LinearArgs args_of(const BenchCall& c) {
  LinearArgs a;
  a.in = c.x, a.in_row_stride = c.x_stride, a.bias = c.bias, a.out = c.out, a.workspace = c.workspace;
  a.weight.packed = static_cast<const uint8_t*>(c.packed), a.weight.n = c.n, a.weight.k = c.k, a.weight.block_size = c.block_size;
  a.weight.quant_type = static_cast<QuantType>(c.quant_type);
  Scales& s = a.weight.scales;
  s.absmax = static_cast<const float*>(c.absmax), s.absmax_codes = static_cast<const uint8_t*>(c.codes);
  s.nested_absmax = static_cast<const float*>(c.nested_absmax), s.nested_code = static_cast<const float*>(c.nested_code);
  s.offset = static_cast<const float*>(c.offset);
  return a;
}

template <Direction DIRECTION, int REPEAT, bool DENSE>
void launch_yardstick(int variant, const portable::Params& p, int grid, cudaStream_t stream) {
  using namespace portable;
  using C256 = Traits<DIRECTION, __nv_bfloat16, 256, 128, 64, 64, 1, REPEAT>;
  using C128 = Traits<DIRECTION, __nv_bfloat16, 128, 128, 64, 32, 1, REPEAT>;
  if constexpr (DENSE) {
    if (variant == kPortable256x128) return launch<C256, Activations, DenseWeights>(p, grid, stream);
    if (variant == kPortable128x128 && REPEAT == 1) return launch<C128, Activations, DenseWeights>(p, grid, stream);
  } else {
    if (variant == kPortable256x128) return launch<C256>(p, grid, stream);
  }
  fail(ErrorKind::kUnsupported, "no yardstick for variant ", variant, " with every mma issued ", REPEAT, " times");
}

template <Direction DIRECTION>
void run_yardstick(const BenchCall& c, const LinearPlan& plan, const portable::Params& p) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (c.path == kBenchDense) {
    c.repeat == 1 ? launch_yardstick<DIRECTION, 1, true>(plan.variant, p, plan.grid, stream)
                  : launch_yardstick<DIRECTION, 5, true>(plan.variant, p, plan.grid, stream);
  } else {
    launch_yardstick<DIRECTION, 5, false>(plan.variant, p, plan.grid, stream);
  }
}

void run(BenchCall& c) {
  if (c.path == kBenchDequantize) {
    return dequantize_4bit_cuda(args_of(c).weight, static_cast<DType>(c.dtype), 0, c.n * c.k, c.out, c.stream);
  }
  const LinearProblem problem = problem_of(c);
  const LinearPlan plan = plan_of(c, problem);
  const LinearArgs args = args_of(c);
  if (plan.path == LinearPath::kHopper) return launch_hopper(plan, problem, args, c.stream);
  if (plan.path == LinearPath::kSmallM) return launch_small_m(plan, problem, args, c.stream);
  if (plan.path == LinearPath::kRow) return launch_row(plan, problem, args, c.stream);
  if (c.path != kBenchDense && c.repeat == 1) return launch_portable(plan, problem, args, c.stream);
  const portable::Params p = portable::make_params(plan, problem, args);
  if (plan.split_tiles > 0) check(cudaMemsetAsync(p.flags, 0, static_cast<size_t>(plan.grid) * 4, static_cast<cudaStream_t>(c.stream)));
  problem.direction == Direction::kForward ? run_yardstick<Direction::kForward>(c, plan, p)
                                           : run_yardstick<Direction::kGradInput>(c, plan, p);
}

template <typename Body>
int guarded(BenchCall* call, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(call->text, error.what(), sizeof call->text - 1);
    return 1;
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bench_plan(BenchCall* call) {
  return guarded(call, [&] {
    const LinearPlan plan = plan_of(*call, problem_of(*call));
    call->workspace_bytes = plan.workspace_bytes;
    std::strncpy(call->text, to_string(plan).c_str(), sizeof call->text - 1);
  });
}

extern "C" __attribute__((visibility("default"))) int bench_run(BenchCall* call) {
  return guarded(call, [&] { run(*call); });
}
