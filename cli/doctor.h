// What the doctor knows of a machine, what it says about it, and the report's JSON form.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/posix.h"

namespace nybble::cli {

struct CpuReport {
  std::string model;
  int threads = 0;
  std::vector<std::string> features;
  bool avx2 = true;
};

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
  std::string targets;      // of this build, "80 90a"
  std::string problem;      // why no device can be used; empty when there are devices
  std::vector<GpuReport> gpus;
};
CudaReport cuda_report();  // one implementation with CUDA, one without

// The Python package and its torch, as the interpreter sees them that bench and tune would use.
struct PythonReport {
  std::string program;
  std::string version;     // of Python; empty without a package
  std::string torch;       // torch.__version__
  std::string torch_cuda;  // empty: this torch has no CUDA
  std::string problem;     // why the package cannot be imported, or cannot use this torch
};

struct Report {
  std::string version;  // of nybble
  CpuReport cpu;
  posix::SystemLimits limits;
  std::string driver;  // the driver's own version line; empty where there is none
  CudaReport cuda;
  PythonReport python;
};

// What does not work on this machine, or works less well, one sentence each.
std::vector<std::string> notes(const Report& report);
std::string to_text(const Report& report);
nlohmann::ordered_json to_json(const Report& report);
Report report_from_json(const std::string& text, const std::string& file);  // throws kFormat

}  // namespace nybble::cli
