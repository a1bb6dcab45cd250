// The doctor's report as text and as JSON, and what follows from it. Pure.
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/support.h"
#include "doctor.h"
#include "nybble/error.h"
#include "units.h"

namespace nybble::cli {
namespace {

std::string limit_text(int64_t bytes) { return bytes < 0 ? "unlimited" : human_bytes(bytes); }
std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

void write_cuda(std::ostream& out, const CudaReport& cuda) {
  if (!cuda.built) {
    out << "cuda     built without CUDA: the GPU paths are not in this build\n";
    return;
  }
  out << "cuda     built with " << version_text(cuda.runtime_version) << " for " << cuda.targets << ", driver takes up to "
      << (cuda.driver_version == 0 ? "nothing (no driver)" : version_text(cuda.driver_version)) << "\n";
  if (!cuda.problem.empty()) out << "gpu      none: " << cuda.problem << "\n";
  for (const GpuReport& gpu : cuda.gpus) {
    out << "gpu      " << gpu.name << ", sm_" << gpu.compute_capability << ", " << gpu.multiprocessors << " multiprocessors, "
        << human_bytes(gpu.memory_bytes) << ", " << gpu.copy_engines << " copy engines\n";
  }
}

void write_python(std::ostream& out, const PythonReport& python) {
  out << "python   " << python.program;
  if (!python.version.empty()) out << " (" << python.version << ")";
  if (!python.torch.empty()) out << ", torch " << python.torch << (python.torch_cuda.empty() ? " without CUDA" : "");
  if (!python.torch_cuda.empty()) out << " for CUDA " << python.torch_cuda;
  out << "\n";
}

void cuda_notes(const CudaReport& cuda, std::vector<std::string>& result) {
  if (!cuda.built) return;
  // No driver is the usual state of a machine without GPU and nothing to remark on.
  if (cuda.driver_version != 0) result.push_back(refusal_of_driver(cuda.runtime_version, cuda.driver_version));
  for (const GpuReport& gpu : cuda.gpus) {
    const std::string refusal = refusal_of_gpu(gpu.name, gpu.compute_capability, cuda.targets);
    result.push_back(refusal.empty() ? note_on_gpu(gpu.name, gpu.compute_capability) : refusal);
  }
}

}  // namespace

std::vector<std::string> notes(const Report& report) {
  std::vector<std::string> result = {note_on_cpu(report.cpu.avx2)};
  cuda_notes(report.cuda, result);
  if (!report.python.problem.empty()) result.push_back(report.python.program + ": " + report.python.problem);
  if (!report.cuda.gpus.empty() && !report.python.torch.empty() && report.python.torch_cuda.empty() && report.python.problem.empty()) {
    result.push_back("there is a GPU, but torch " + report.python.torch + " is built without CUDA; install torch's CUDA build");
  }
  std::erase(result, "");
  return result;
}

std::string to_text(const Report& report) {
  std::ostringstream out;
  const posix::SystemLimits& limits = report.limits;
  out << "nybble   " << report.version << "\ncpu      " << report.cpu.model << ", " << report.cpu.threads << " threads,";
  for (const std::string& feature : report.cpu.features) out << " " << feature;
  out << "\nmemory   " << human_bytes(limits.memory_bytes) << ", " << human_bytes(limits.available_bytes)
      << " available, control-group limit " << limit_text(limits.group_limit_bytes) << "\npinning  at most "
      << limit_text(limits.lockable_bytes) << " (RLIMIT_MEMLOCK; CUDA's own pinning is not bound by it)\npages    " << limits.page_bytes
      << " bytes\ndriver   " << (report.driver.empty() ? "no NVIDIA driver is loaded" : report.driver) << "\n";
  write_cuda(out, report.cuda);
  write_python(out, report.python);
  for (const std::string& note : notes(report)) out << "note     " << note << "\n";
  return out.str();
}

nlohmann::ordered_json to_json(const Report& report) {
  const posix::SystemLimits& limits = report.limits;
  nlohmann::ordered_json gpus = nlohmann::ordered_json::array();
  for (const GpuReport& gpu : report.cuda.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"compute_capability", gpu.compute_capability},
                    {"multiprocessors", gpu.multiprocessors},
                    {"memory_bytes", gpu.memory_bytes},
                    {"copy_engines", gpu.copy_engines}});
  }
  return {
      {"version", report.version},
      {"cpu", {{"model", report.cpu.model}, {"threads", report.cpu.threads}, {"features", report.cpu.features}, {"avx2", report.cpu.avx2}}},
      {"memory",
       {{"bytes", limits.memory_bytes},
        {"available_bytes", limits.available_bytes},
        {"control_group_limit_bytes", limits.group_limit_bytes},
        {"lockable_bytes", limits.lockable_bytes},
        {"page_bytes", limits.page_bytes}}},
      {"driver", report.driver},
      {"cuda",
       {{"built", report.cuda.built},
        {"runtime_version", report.cuda.runtime_version},
        {"driver_version", report.cuda.driver_version},
        {"targets", report.cuda.targets},
        {"problem", report.cuda.problem},
        {"gpus", gpus}}},
      {"python",
       {{"program", report.python.program},
        {"version", report.python.version},
        {"torch", report.python.torch},
        {"torch_cuda", report.python.torch_cuda},
        {"problem", report.python.problem}}},
      {"notes", notes(report)}};
}

Report report_from_json(const std::string& text, const std::string& file) try {
  const auto json = nlohmann::json::parse(text);
  const auto &cpu = json.at("cpu"), &memory = json.at("memory"), &cuda = json.at("cuda"), &python = json.at("python");
  Report report;
  report.version = json.at("version");
  report.cpu = {cpu.at("model"), cpu.at("threads"), cpu.at("features"), cpu.at("avx2")};
  report.limits.memory_bytes = memory.at("bytes");
  report.limits.available_bytes = memory.at("available_bytes");
  report.limits.group_limit_bytes = memory.at("control_group_limit_bytes");
  report.limits.lockable_bytes = memory.at("lockable_bytes");
  report.limits.page_bytes = memory.at("page_bytes");
  report.driver = json.at("driver");
  report.cuda = {cuda.at("built"), cuda.at("runtime_version"), cuda.at("driver_version"), cuda.at("targets"), cuda.at("problem"), {}};
  for (const auto& gpu : cuda.at("gpus")) {
    report.cuda.gpus.push_back(
        {gpu.at("name"), gpu.at("compute_capability"), gpu.at("multiprocessors"), gpu.at("memory_bytes"), gpu.at("copy_engines")});
  }
  report.python = {python.at("program"), python.at("version"), python.at("torch"), python.at("torch_cuda"), python.at("problem")};
  return report;
} catch (const nlohmann::json::exception& error) {
  fail(ErrorKind::kFormat, file, ": ", error.what(), "; expected what `nybble doctor --json` prints");
}

}  // namespace nybble::cli
