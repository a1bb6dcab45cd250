// nybble doctor: what this build and this machine can do.
#include "doctor.h"

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/parallel.h"
#include "core/support.h"
#include "exit_codes.h"

namespace nybble::cli {
namespace {

constexpr int64_t kLargestReport = int64_t{1} << 20;

CpuReport cpu_report() {
  CpuReport report;
  report.threads = num_threads();
  report.avx2 = cpu_has_avx2();
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

std::string driver_text() {
  std::ifstream version("/proc/driver/nvidia/version");
  std::string line;
  std::getline(version, line);
  return line;
}

// Asks the interpreter. The package says itself what is wrong with its torch.
PythonReport python_report() {
  constexpr const char* kProbe =
      "import json\n"
      "try:\n"
      "  from nybble.support import torch_report\n"
      "  report = torch_report()\n"
      "except Exception as error:\n"
      "  report = {'problem': str(error)}\n"
      "print(json.dumps(report))\n";
  PythonReport report;
  report.program = python_program();
  const posix::Output output = posix::capture_program({report.program, "-c", kProbe});
  const auto json = nlohmann::json::parse(output.text, nullptr, false);
  if (output.exit_code == posix::kNoProgram) {
    report.problem = "there is no such program; without Python only quantize, inspect, verify and doctor work";
  } else if (!json.is_object()) {
    report.problem = "ended with exit code " + std::to_string(output.exit_code) + " when it was asked for the nybble package";
  } else {
    report.version = json.value("python", "");
    report.torch = json.value("torch", "");
    report.torch_cuda = json.value("torch_cuda", "");
    report.problem = json.value("problem", "");
  }
  return report;
}

int doctor(bool json, const std::string& file) {
  const Report report = file.empty()
                            ? Report{NYBBLE_VERSION, cpu_report(), posix::system_limits(), driver_text(), cuda_report(), python_report()}
                            : report_from_json(posix::read_file(file, kLargestReport), file);
  std::fputs((json ? to_json(report).dump(2) + "\n" : to_text(report)).c_str(), stdout);
  return kOk;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  auto json = std::make_shared<bool>(false);
  auto file = std::make_shared<std::string>();
  auto* command = app.add_subcommand("doctor", "CPU, memory limits, driver, GPUs and torch, as this build sees them, and what follows");
  command->add_flag("--json", *json, "machine-readable");
  command->add_option("--read", *file, "explain a report that --json wrote, of this or another machine");
  command->callback([json, file, &run] { run = [json, file] { return doctor(*json, *file); }; });
}

}  // namespace nybble::cli
