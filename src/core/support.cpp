#include "core/support.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <vector>

namespace nybble {
namespace {

// The oldest driver branch of a CUDA major version on Linux, from the CUDA release notes; within a major version newer toolkits need no
// newer driver.
struct DriverBranch {
  int cuda_major;
  int driver;
};
constexpr DriverBranch kDriverBranches[] = {{12, 525}, {13, 580}};

std::string dotted(int version, int base) { return std::to_string(version / base) + "." + std::to_string(version % base); }
std::string cuda_text(int version) { return dotted(version / 10, 100); }  // 12080: 12.8
std::string sm_text(int sm) { return dotted(sm, 10); }

std::vector<int> numbers_of(std::string_view targets) {
  std::vector<int> result;
  std::istringstream words{std::string(targets)};
  for (std::string word; words >> word;) {
    int number = 0;
    std::from_chars(word.data(), word.data() + word.size(), number);
    result.push_back(number);
  }
  return result;
}

// Machine code runs on its own capability and later ones of the same major; PTX on any later card.
bool has_code_for(int sm, const std::vector<int>& targets) {
  const bool compiled = std::ranges::any_of(targets, [sm](int target) { return target / 10 == sm / 10 && target <= sm; });
  return compiled || (!targets.empty() && targets.back() <= sm);
}

}  // namespace

std::string refusal_of_driver(int build_cuda, int driver_cuda) {
  if (driver_cuda == 0) return "no NVIDIA driver is loaded, expected one; install it, or use the CPU";
  if (driver_cuda / 1000 >= build_cuda / 1000) return "";
  std::string needed = "a newer one";
  for (const DriverBranch& row : kDriverBranches) {
    if (row.cuda_major == build_cuda / 1000) needed = std::to_string(row.driver) + " or newer";
  }
  return "the NVIDIA driver takes CUDA up to " + cuda_text(driver_cuda) + ", but this nybble is built with CUDA " + cuda_text(build_cuda) +
         "; update the driver (" + needed + "), or build nybble with a CUDA " + std::to_string(driver_cuda / 1000) + " toolkit";
}

std::string refusal_of_gpu(const std::string& name, int sm, std::string_view targets) {
  const std::vector<int> numbers = numbers_of(targets);
  if (has_code_for(sm, numbers)) return "";
  std::string list;
  for (const int target : numbers) list += (list.empty() ? "" : ", ") + sm_text(target);
  return name + " has compute capability " + sm_text(sm) + ", but this nybble has code for " + list +
         " only; use another GPU or the CPU, or build with that target in NYBBLE_CUDA_TARGETS where the CUDA toolkit still has it";
}

std::string note_on_gpu(const std::string& name, int sm) {
  if (sm >= kOldestFusedSm) return "";
  return name + " has compute capability " + sm_text(sm) + ", and the fused multiply needs " + sm_text(kOldestFusedSm) +
         "; here every multiply dequantises the weight first (the numbers are right, the speed is that of dequantising)";
}

std::string note_on_cpu(bool avx2) {
  if (avx2) return "";
  return "this CPU has no AVX2 with FMA; the CPU code runs on narrower vectors, slower than in the records (the numbers are right)";
}

bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

}  // namespace nybble
