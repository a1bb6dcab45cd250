// The C ABI over the core, see c_api.h for its contracts.
#include "nybble/c_api.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/build_info.h"
#include "core/last_error.h"
#include "core/parallel.h"
#include "core/support.h"
#include "nybble/cuda.h"
#include "nybble/linear.h"
#include "nybble/tune.h"

namespace {

using namespace nybble;

constexpr int kPaths = static_cast<int>(LinearPath::kHopper) + 1;

bool on_cpu(int32_t device) { return device == NYBBLE_DEVICE_CPU; }

// A code of a C struct as the enum it stands for; codes run from 0 to last.
template <typename Enum>
Enum enum_of(int32_t code, Enum last, const char* name) {
  if (code < 0 || code > static_cast<int32_t>(last)) {
    fail(ErrorKind::kValue, name, " code ", code, ", expected 0 to ", static_cast<int32_t>(last));
  }
  return static_cast<Enum>(code);
}

void require(const void* pointer, const char* name) {
  if (pointer == nullptr) fail(ErrorKind::kValue, name, " is null, expected a pointer");
}

void require_cuda(int32_t device) {
#ifdef NYBBLE_HAVE_CUDA
  cuda_device_model(device);
#else
  fail(ErrorKind::kUnsupported, "nybble was built without CUDA, but device ", device, " was asked for; use -1 (CPU) or the CUDA build");
#endif
}

Nf4Weight weight_of(const nybble_weight& from) {
  Nf4Weight weight;
  weight.packed = static_cast<const uint8_t*>(from.packed);
  weight.scales.absmax = from.absmax;
  weight.scales.absmax_codes = from.absmax_codes;
  weight.scales.nested_absmax = from.nested_absmax;
  weight.scales.nested_code = from.nested_code;
  weight.scales.offset = from.offset;
  weight.scales.nested_dtype = enum_of(from.nested_dtype, DType::kBFloat16, "nested_dtype");
  weight.n = from.n;
  weight.k = from.k;
  weight.block_size = from.block_size;
  weight.quant_type = enum_of(from.quant_type, QuantType::kFp4, "quant_type");
  if (weight.n < 0 || weight.k < 0) fail(ErrorKind::kValue, "weight shape [", weight.n, ", ", weight.k, "], expected none below 0");
  if (!is_block_size(weight.block_size))
    fail(ErrorKind::kValue, "block size ", weight.block_size, ", expected a power of two from 32 to 4096");
  require(from.packed, "packed");
  if (from.absmax_codes == nullptr) {
    require(from.absmax, "absmax");
  } else {
    require(from.nested_absmax, "nested_absmax");
    require(from.nested_code, "nested_code");
    require(from.offset, "offset");
  }
  return weight;
}

int32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return static_cast<int32_t>(std::min<uintptr_t>(256, bits == 0 ? 256 : bits & -bits));
}

LinearProblem problem_of(const nybble_linear_call& call) {
  const Nf4Weight weight = weight_of(call.weight);
  LinearProblem problem;
  problem.m = call.m;
  problem.n = weight.n;
  problem.k = weight.k;
  problem.direction = enum_of(call.direction, Direction::kGradInput, "direction");
  problem.dtype = enum_of(call.dtype, DType::kBFloat16, "dtype");
  problem.state_dtype = enum_of(call.state_dtype, DType::kBFloat16, "state_dtype");
  problem.quant_type = weight.quant_type;
  problem.block_size = weight.block_size;
  problem.nested = weight.scales.nested();
  problem.nested_dtype = weight.scales.nested_dtype;
  problem.bias = call.bias != nullptr;
  problem.batch_invariant = call.batch_invariant != 0;
  problem.mode = enum_of(call.mode, LinearMode::kDequant, "mode");
  problem.x_row_stride = call.in_row_stride;
  problem.x_alignment = alignment_of(call.in);
  problem.packed_alignment = alignment_of(weight.packed);
  problem.scales_alignment = weight.scales.nested()
                                 ? std::min(alignment_of(weight.scales.absmax_codes), alignment_of(weight.scales.nested_absmax))
                                 : alignment_of(weight.scales.absmax);
  return problem;
}

DeviceModel model_of(int32_t device) {
  if (on_cpu(device)) return {};
  require_cuda(device);
#ifdef NYBBLE_HAVE_CUDA
  return cuda_device_model(device);
#else
  return {};
#endif
}

// Plans on CUDA devices follow the active tune table.
LinearPlan plan_on(const LinearProblem& problem, const DeviceModel& device) {
  return plan_linear(problem, device, device.sm == 0 ? nullptr : active_tune_table());
}

void run_linear(const nybble_linear_call& call) {
  const LinearProblem problem = problem_of(call);
  const LinearPlan plan = plan_on(problem, model_of(call.device));
  if (plan.path == LinearPath::kNone) return;
  if (plan.path == LinearPath::kDequant) {
    fail(ErrorKind::kUnsupported, "no fused path: ", plan.reason, "; call nybble_dequantize_4bit() and multiply with a dense matmul");
  }
  require(call.in, "in");
  require(call.out, "out");
  if (plan.workspace_bytes > 0) require(call.workspace, "workspace");
  LinearArgs args;
  args.in = call.in;
  args.in_row_stride = call.in_row_stride;
  args.weight = weight_of(call.weight);
  args.bias = call.bias;
  args.out = call.out;
  args.workspace = call.workspace;
  if (plan.path == LinearPath::kCpu) {
    linear_cpu(problem, args);
    return;
  }
#ifdef NYBBLE_HAVE_CUDA
  linear_cuda(plan, problem, args, call.stream);
#endif
}

void copy_text(const std::string& from, char* to, size_t size) {
  if (size == 0) return;
  const size_t length = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

}  // namespace

extern "C" {

const char* nybble_version(void) { return nybble::version(); }
const char* nybble_build_info(void) { return nybble::build_info_json(); }
const char* nybble_last_error(void) { return nybble::last_error_text(); }
int nybble_last_error_kind(void) { return nybble::last_error_kind(); }

int nybble_table(int which, float* out) {
  const auto write = [out](auto table) {
    std::copy(table.begin(), table.end(), out);
    return static_cast<int>(table.size());
  };
  if (out == nullptr || which < 0 || which > 2) return 0;
  return which == 2 ? write(nested_code_table()) : write(code_table(static_cast<QuantType>(which)));
}

void nybble_set_num_threads(int count) { nybble::set_num_threads(count); }
int nybble_num_threads(void) { return nybble::num_threads(); }

const char* nybble_path_name(int path) { return path < 0 || path >= kPaths ? nullptr : name(static_cast<LinearPath>(path)); }
int64_t nybble_launches(int path, int direction) {
  if (path < 0 || path >= kPaths || direction < 0 || direction > 1) return 0;
  return launches(static_cast<LinearPath>(path), static_cast<Direction>(direction));
}
void nybble_reset_launches(void) { nybble::reset_launches(); }

int nybble_linear(const nybble_linear_call* call) {
  return run_recorded([&] {
    require(call, "call");
    run_linear(*call);
  });
}

int nybble_linear_workspace(const nybble_linear_call* call, int64_t* bytes) {
  return run_recorded([&] {
    require(call, "call");
    require(bytes, "bytes");
    *bytes = plan_on(problem_of(*call), model_of(call->device)).workspace_bytes;
  });
}

int nybble_linear_plan(const nybble_linear_call* call, int32_t* fused, char* text, size_t size) {
  return run_recorded([&] {
    require(call, "call");
    require(fused, "fused");
    require(text, "text");
    const LinearProblem problem = problem_of(*call);
    const DeviceModel device = model_of(call->device);
    const std::string refusal = supports_fused(problem, device);
    *fused = refusal.empty() ? 1 : 0;
    copy_text(refusal.empty() ? to_string(plan_on(problem, device)) : refusal, text, size);
  });
}

int nybble_linear_explain(const nybble_linear_call* call, char* text, size_t size) {
  return run_recorded([&] {
    require(call, "call");
    require(text, "text");
    copy_text(to_string(plan_on(problem_of(*call), model_of(call->device))), text, size);
  });
}

int nybble_device_note(int32_t device, char* text, size_t size) {
  return run_recorded([&] {
    require(text, "text");
    const DeviceModel model = model_of(device);
    copy_text(on_cpu(device) ? note_on_cpu(cpu_has_avx2()) : note_on_gpu(model.name, model.sm), text, size);
  });
}

int nybble_set_tune_table(const char* json) {
  return run_recorded([&] { set_active_tune_table(json ? tune_table_from_json(json, "given as text") : TuneTable{}); });
}

int nybble_tune_table(char* text, size_t size, size_t* needed, uint64_t* hash) {
  return run_recorded([&] {
    require(needed, "needed");
    require(hash, "hash");
    const TuneTable* table = active_tune_table();
    const std::string json = table ? to_json(*table) : "";
    *needed = json.size() + 1;
    *hash = table ? table->hash() : 0;
    if (size > 0) require(text, "text");
    copy_text(json, text, size);
  });
}

int nybble_quantize_4bit(const void* x, int32_t dtype, int64_t count, int32_t block_size, int32_t quant_type, uint8_t* packed,
                         float* absmax, int32_t device, [[maybe_unused]] void* stream) {
  return run_recorded([&] {
    const DType type = enum_of(dtype, DType::kBFloat16, "dtype");
    const QuantType quant = enum_of(quant_type, QuantType::kFp4, "quant_type");
    if (count < 0) fail(ErrorKind::kValue, "count ", count, ", expected at least 0");
    if (count == 0) return;
    require(x, "x");
    require(packed, "packed");
    require(absmax, "absmax");
    if (on_cpu(device)) {
      quantize_4bit(x, type, count, block_size, quant, packed, absmax);
      return;
    }
    require_cuda(device);
#ifdef NYBBLE_HAVE_CUDA
    quantize_4bit_cuda(x, type, count, block_size, quant, packed, absmax, stream);
#endif
  });
}

int nybble_dequantize_4bit(const nybble_weight* weight, int32_t dtype, int64_t first, int64_t count, void* out, int32_t device,
                           [[maybe_unused]] void* stream) {
  return run_recorded([&] {
    require(weight, "weight");
    const Nf4Weight view = weight_of(*weight);
    const DType type = enum_of(dtype, DType::kBFloat16, "dtype");
    const int64_t total = view.n * view.k;
    if (first < 0 || count < 0 || first > total - count) {
      fail(ErrorKind::kValue, "range [", first, ", ", first, " + ", count, "), expected inside a weight of ", total, " elements");
    }
    if (count == 0) return;
    require(out, "out");
    if (on_cpu(device)) {
      dequantize_4bit(view, type, first, count, out);
      return;
    }
    require_cuda(device);
#ifdef NYBBLE_HAVE_CUDA
    dequantize_4bit_cuda(view, type, first, count, out, stream);
#endif
  });
}

}  // extern "C"
