#include "doctor.h"

#ifdef NYBBLE_HAVE_CUDA
#  include <cuda_runtime_api.h>

#  include "core/build_info.h"

namespace nybble::cli {

CudaReport cuda_report() {
  CudaReport report;
  report.built = true;
  report.targets = cuda_targets();
  cudaRuntimeGetVersion(&report.runtime_version);
  cudaDriverGetVersion(&report.driver_version);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    report.problem = report.driver_version == 0 ? "no NVIDIA driver is loaded" : cudaGetErrorString(status);
    return report;
  }
  for (int i = 0; i < count; i++) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    report.gpus.push_back({properties.name, properties.major * 10 + properties.minor, properties.multiProcessorCount,
                           static_cast<int64_t>(properties.totalGlobalMem), properties.asyncEngineCount});
  }
  return report;
}

}  // namespace nybble::cli
#else

nybble::cli::CudaReport nybble::cli::cuda_report() {
  CudaReport report;
  report.problem = "built without CUDA";
  return report;
}
#endif
