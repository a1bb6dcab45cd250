// nybble doctor: what this build and this machine can do.
#include "doctor.h"

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/parallel.h"
#include "core/posix.h"
#include "exit_codes.h"
#include "units.h"

namespace nybble::cli {
namespace {

struct CpuReport {
  std::string model;
  std::vector<std::string> features;
};

CpuReport cpu_report() {
  CpuReport report;
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; report.model.empty() && std::getline(info, line);) {
    if (line.starts_with("model name")) report.model = line.substr(line.find(':') + 2);
  }
#if defined(__x86_64__)
  const auto has = [&](bool present, const char* feature) {
    if (present) report.features.emplace_back(feature);
  };
  has(__builtin_cpu_supports("sse4.2"), "sse4.2");
  has(__builtin_cpu_supports("avx2"), "avx2");
  has(__builtin_cpu_supports("fma"), "fma");
  has(__builtin_cpu_supports("avx512f"), "avx512f");
  has(__builtin_cpu_supports("avx512bw"), "avx512bw");
  has(__builtin_cpu_supports("avx512vnni"), "avx512vnni");
  has(__builtin_cpu_supports("avx512bf16"), "avx512bf16");
#endif
  return report;
}

// The driver's own version line; empty where there is none.
std::string driver_text() {
  std::ifstream version("/proc/driver/nvidia/version");
  std::string line;
  std::getline(version, line);
  return line;
}

std::string limit_text(int64_t bytes) { return bytes < 0 ? "unlimited" : human_bytes(bytes); }
std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

void print_text(const CpuReport& cpu, const posix::SystemLimits& limits, const CudaReport& cuda) {
  std::string features;
  for (const auto& feature : cpu.features) features += " " + feature;
  std::printf("nybble   %s\n", NYBBLE_VERSION);
  std::printf("cpu      %s, %d threads,%s\n", cpu.model.c_str(), num_threads(), features.c_str());
  std::printf("memory   %s, %s available, control-group limit %s\n", human_bytes(limits.memory_bytes).c_str(),
              human_bytes(limits.available_bytes).c_str(), limit_text(limits.group_limit_bytes).c_str());
  std::printf("pinning  at most %s (RLIMIT_MEMLOCK; CUDA's own pinning is not bound by it)\n", limit_text(limits.lockable_bytes).c_str());
  std::printf("pages    %lld bytes\n", static_cast<long long>(limits.page_bytes));
  const std::string driver = driver_text();
  std::printf("driver   %s\n", driver.empty() ? "no NVIDIA driver is loaded" : driver.c_str());
  if (!cuda.built) {
    std::printf("cuda     built without CUDA: the GPU paths are not in this build\n");
    return;
  }
  std::printf("cuda     built with %s, driver takes up to %s\n", version_text(cuda.runtime_version).c_str(),
              cuda.driver_version == 0 ? "nothing (no driver)" : version_text(cuda.driver_version).c_str());
  if (!cuda.problem.empty()) std::printf("gpu      none: %s\n", cuda.problem.c_str());
  for (const auto& gpu : cuda.gpus) {
    std::printf("gpu      %s, sm_%d, %d multiprocessors, %s, %d copy engines\n", gpu.name.c_str(), gpu.compute_capability,
                gpu.multiprocessors, human_bytes(gpu.memory_bytes).c_str(), gpu.copy_engines);
  }
}

void print_json(const CpuReport& cpu, const posix::SystemLimits& limits, const CudaReport& cuda) {
  nlohmann::ordered_json gpus = nlohmann::ordered_json::array();
  for (const auto& gpu : cuda.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"compute_capability", gpu.compute_capability},
                    {"multiprocessors", gpu.multiprocessors},
                    {"memory_bytes", gpu.memory_bytes},
                    {"copy_engines", gpu.copy_engines}});
  }
  const nlohmann::ordered_json json = {{"version", NYBBLE_VERSION},
                                       {"cpu", {{"model", cpu.model}, {"threads", num_threads()}, {"features", cpu.features}}},
                                       {"memory",
                                        {{"bytes", limits.memory_bytes},
                                         {"available_bytes", limits.available_bytes},
                                         {"control_group_limit_bytes", limits.group_limit_bytes},
                                         {"lockable_bytes", limits.lockable_bytes},
                                         {"page_bytes", limits.page_bytes}}},
                                       {"driver", driver_text()},
                                       {"cuda",
                                        {{"built", cuda.built},
                                         {"runtime_version", cuda.runtime_version},
                                         {"driver_version", cuda.driver_version},
                                         {"problem", cuda.problem},
                                         {"gpus", gpus}}}};
  std::printf("%s\n", json.dump(2).c_str());
}

int doctor(bool json) {
  const auto print = json ? print_json : print_text;
  print(cpu_report(), posix::system_limits(), cuda_report());
  return kOk;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  auto json = std::make_shared<bool>(false);
  auto* command = app.add_subcommand("doctor", "CPU, memory limits, driver and GPUs, as this build sees them");
  command->add_flag("--json", *json, "machine-readable");
  command->callback([json, &run] { run = [json] { return doctor(*json); }; });
}

}  // namespace nybble::cli
