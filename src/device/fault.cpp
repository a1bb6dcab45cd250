// Only in builds with NYBBLE_FAULT_SWITCHES.
#include "device/fault.h"

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
