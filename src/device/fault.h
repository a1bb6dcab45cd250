// Faults that a test build can switch on inside the kernels, so that the stress test is seen to catch them, and random delays that let
// races show. Only the build option NYBBLE_FAULT_SWITCHES gives them a body; in the product every fault is the constant false and a delay
// is nothing.
//
//   if (!NYBBLE_FAULT(kNoProxyFence)) async_proxy_fence();      a fault: what a kernel must not leave out
//   NYBBLE_DELAY(3);                                            a place where a warp may sleep; the number makes its sleeps differ
//   NYBBLE_ANY_OF(count)                  a number below count that the clock picks, for kArrivalOrder; 0 in the product
#pragma once

#ifndef NYBBLE_FAULT_SWITCHES

#  define NYBBLE_FAULT(which) false
#  define NYBBLE_DELAY(place) static_cast<void>(0)
#  define NYBBLE_ANY_OF(count) 0

#else

#  include <cuda_runtime_api.h>

#  define NYBBLE_FAULT(which) ::nybble::fault::is_on(::nybble::fault::Fault::which)
#  define NYBBLE_DELAY(place) ::nybble::fault::delay(place)
#  define NYBBLE_ANY_OF(count) ::nybble::fault::any_of(count)

namespace nybble::fault {

enum class Fault : unsigned {
  kNoProxyFence,     // stores to shared memory are not made visible to wgmma, TMA and bulk copies
  kReleasedUnread,   // a slot goes back to its producer before it is read
  kReleasedEarly,    // a slot goes back to its producer while it is still read
  kWrongParity,      // a full barrier is awaited with the other parity
  kPeerNotAwaited,   // the half of a weight tile that the other CTA copies is not waited for
  kFlagNotReset,     // flags and counters of partial sums keep what an earlier launch left
  kFlagNotCleared,   // a flag of partial sums stays set once its reader has seen it
  kNoGridWait,       // a kernel that was started early does not wait for the kernel before it
  kCopyNotAwaited,   // results of cp.async are read without waiting
  kArrivalOrder,     // partial sums are added in an order that the clock picks, as atomics would add them
  kForRacecheck,     // no fault, but what racecheck can follow: a barrier behind loads that nobody uses, arrivals of every lane,
                     // one wait for the cluster
  kSumsNotAwaited,   // sums of other warps are read from shared memory without the barrier
  kSpareNotAwaited,  // output is staged where weights are still being copied to the peer
  kEndNotAwaited,    // a CTA ends while the other of its cluster may still send to it
};
constexpr const char* kNames[] = {"no_proxy_fence", "released_unread",  "released_early",    "wrong_parity",     "peer_not_awaited",
                                  "flag_not_reset", "flag_not_cleared", "no_grid_wait",      "copy_not_awaited", "arrival_order",
                                  "for_racecheck",  "sums_not_awaited", "spare_not_awaited", "end_not_awaited"};

// faults: bit i is Fault i. One visit of a place in delay_odds sleeps, up to delay_ns; odds 0: none.
struct Switches {
  unsigned faults = 0, delay_odds = 0, delay_ns = 1;
};

// Sets the switches of the host and of every kernel, on the current device. Kernels that run at the time may see either.
void set(const Switches& switches);
const Switches& on_host();
bool add_unit(void (*set)(const Switches&));  // every source with kernels has switches of its own

#  ifdef __CUDACC__
namespace {
__constant__ Switches switches;
void set_here(const Switches& s) { cudaMemcpyToSymbol(switches, &s, sizeof s); }
[[maybe_unused]] const bool added = add_unit(set_here);

__host__ __device__ __forceinline__ bool is_on(Fault fault) {
#    ifdef __CUDA_ARCH__
  return switches.faults >> static_cast<unsigned>(fault) & 1;
#    else
  return on_host().faults >> static_cast<unsigned>(fault) & 1;
#    endif
}

// Lanes that call it together read one clock, so they sleep together.
__device__ __forceinline__ void delay(unsigned place) {
  if (switches.delay_odds == 0) return;
  unsigned random;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(random));
  random = (random ^ place * 0x9E3779B9u ^ blockIdx.x * 0x85EBCA6Bu) * 0xC2B2AE35u;
  random ^= random >> 15;
  if (random % switches.delay_odds == 0) __nanosleep((random >> 12) % switches.delay_ns);
}

__device__ __forceinline__ int any_of(int count) {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return static_cast<int>((now >> 4) % static_cast<unsigned>(count));
}
}  // namespace
#  else
inline bool is_on(Fault fault) { return on_host().faults >> static_cast<unsigned>(fault) & 1; }
#  endif

}  // namespace nybble::fault

#endif
