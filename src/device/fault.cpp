// Only in builds with NYBBLE_FAULT_SWITCHES.
#include "device/fault.h"

#include <iterator>
#include <vector>

#include "core/cuda_check.h"

namespace nybble::fault {
namespace {

using Setter = void (*)(const Switches&);

std::vector<Setter>& units() {
  static std::vector<Setter> all;
  return all;
}

Switches host_switches;

}  // namespace

// What a search for faults in a finished library looks for.
extern "C" [[gnu::used, gnu::visibility("default")]] const char nybble_fault_switches_mark[] = "nybble_fault_switches_mark";

bool add_unit(Setter set) {
  units().push_back(set);
  return true;
}

const Switches& on_host() { return host_switches; }

void set(const Switches& switches) {
  host_switches = switches;
  check(cudaDeviceSynchronize());
  for (const Setter unit : units()) unit(switches);
  check(cudaGetLastError());
}

}  // namespace nybble::fault

// For the test that plants faults under the gates, through ctypes. Status 0: done, 1: a CUDA error. faults: bit i is kNames[i].
extern "C" [[gnu::visibility("default")]] int nybble_plant_faults(unsigned faults, unsigned delay_odds, unsigned delay_ns) {
  try {
    nybble::fault::set({faults, delay_odds, delay_ns > 0 ? delay_ns : 1});
    return 0;
  } catch (...) {
    return 1;
  }
}

// The name of fault i, null behind the last.
extern "C" [[gnu::visibility("default")]] const char* nybble_fault_name(unsigned i) {
  return i < std::size(nybble::fault::kNames) ? nybble::fault::kNames[i] : nullptr;
}
