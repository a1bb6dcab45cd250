// The CUDA entry of the multiply: what a device is, and which kernel a plan means.
#include <array>
#include <mutex>

#include "core/build_info.h"
#include "core/cuda_check.h"
#include "core/support.h"
#include "linear/hopper.h"
#include "linear/portable.h"
#include "linear/row.h"
#include "linear/small_m.h"
#include "nybble/cuda.h"
#include "nybble/error.h"

namespace nybble {
namespace {

constexpr int kMaxDevices = 64;

void check_driver() {
  int build = 0, driver = 0;
  check(cudaRuntimeGetVersion(&build));
  check(cudaDriverGetVersion(&driver));
  const std::string refusal = refusal_of_driver(build, driver);
  if (!refusal.empty()) fail(ErrorKind::kUnsupported, refusal);
}

DeviceModel read_model(int ordinal) {
  const int count = cuda_device_count();
  if (count == 0) check_driver();
  if (ordinal >= count) fail(ErrorKind::kValue, "CUDA device ", ordinal, ", found ", count, count == 1 ? " device" : " devices");
  DeviceModel model;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal));
  model.name = properties.name;
  model.sm = properties.major * 10 + properties.minor;
  model.sm_count = properties.multiProcessorCount;
  model.l2_bytes = properties.l2CacheSize;
  model.smem_per_block_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  const std::string refusal = refusal_of_gpu(model.name, model.sm, cuda_targets());
  if (!refusal.empty()) fail(ErrorKind::kUnsupported, refusal);
  return model;
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

const DeviceModel& cuda_device_model(int ordinal) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceModel, kMaxDevices> models;
  if (ordinal < 0 || ordinal >= kMaxDevices) fail(ErrorKind::kValue, "CUDA device ", ordinal, ", expected 0 to ", kMaxDevices - 1);
  std::call_once(once[ordinal], [ordinal] { models[ordinal] = read_model(ordinal); });
  return models[ordinal];
}

void linear_cuda(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream) {
  if (plan.path == LinearPath::kNone) return;
  if (plan.path == LinearPath::kRow) return launch_row(plan, problem, args, stream);
  if (plan.path == LinearPath::kPortable) return launch_portable(plan, problem, args, stream);
#ifdef NYBBLE_HAVE_SM90A
  if (plan.path == LinearPath::kHopper) return launch_hopper(plan, problem, args, stream);
  if (plan.path == LinearPath::kSmallM) return launch_small_m(plan, problem, args, stream);
#endif
  fail(ErrorKind::kUnsupported, "a plan for the path ", name(plan.path), " given to linear_cuda, which runs fused CUDA paths only");
}

}  // namespace nybble
