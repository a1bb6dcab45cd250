// What the doctor knows of a machine's GPUs. One implementation with CUDA, one without.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nybble::cli {

struct GpuReport {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int copy_engines = 0;
};

struct CudaReport {
  bool built = false;
  int runtime_version = 0;  // 13000 for 13.0, of this build
  int driver_version = 0;   // the newest runtime that the driver takes; 0 without a driver
  std::string problem;      // why no device can be used; empty when there are devices
  std::vector<GpuReport> gpus;
};
CudaReport cuda_report();

}  // namespace nybble::cli
