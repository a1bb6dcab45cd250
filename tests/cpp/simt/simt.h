// Runs device code on the CPU: one CTA at a time, a fiber a thread, so that a kernel's indices, barriers, tails and hand-overs are tested
// where there is no GPU. The folder shadows src/device: put it first on the include path, and the kernel's headers compile as they are.
//
// What it is strict about: threads run in a shuffled order until they block (a missing barrier changes results between seeds); asynchronous
// copies poison their destination and land as late as allowed; reads and writes are checked against the buffers that were declared; warp
// collectives need all 32 lanes at the same place; a barrier that not everybody reaches is an error. It knows nothing of time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::fmaf;
using std::memcpy;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct SimtIndex {
  unsigned x;
};
extern SimtIndex threadIdx, blockIdx, gridDim;

namespace simt {

// A 16-bit float as its bits; HALF: binary16, else bfloat16.
template <bool HALF>
struct Float16 {
  uint16_t bits;
  Float16() = default;
  explicit Float16(float value);
  operator float() const;
};

// Runs `body` as every thread of every CTA, CTAs in ascending order of blockIdx. shared: the kernel's dynamic shared memory, poisoned
// before each CTA. Throws std::runtime_error for a deadlock, a diverged collective or an access outside the declared buffers.
void launch(int grid, int threads, void* shared, size_t shared_bytes, uint64_t seed, const std::function<void()>& body);

// Buffers that the kernel may touch; reset by clear_buffers().
void allow(const void* begin, size_t bytes, bool write);
void clear_buffers();
void check_access(const void* pointer, size_t bytes, bool write);

uint8_t* at_shared(uint32_t address, size_t bytes, size_t alignment);
uint32_t shared_offset(const void* pointer);

void barrier();
// Every lane of the warp brings `operand`; the last one computes for all with `combine(operands)`, operands in lane order.
void collective(const char* kind, void* operand, const std::function<void(void* const*)>& combine);

void copy_async(uint32_t destination, const void* source, int total, int valid);
void commit_copies();
void wait_copies(int pending);
[[noreturn]] void fail(const char* what);

float round_16(float value, bool half);  // to nearest even, as fp32 again
}  // namespace simt

using __half = simt::Float16<true>;
using __nv_bfloat16 = simt::Float16<false>;

inline void __syncthreads() { simt::barrier(); }
inline void __threadfence() {}
inline void __syncwarp() {
  char none = 0;
  simt::collective("syncwarp", &none, [](void* const*) {});
}
inline void __trap() { simt::fail("a trap"); }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift < 32 ? shift : 32));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

template <typename T>
T __ldcg(const T* pointer) {
  simt::check_access(pointer, sizeof(T), false);
  return *pointer;
}
template <typename T>
void __stcg(T* pointer, const T& value) {
  simt::check_access(pointer, sizeof(T), true);
  *pointer = value;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  T in = value;
  struct Operand {
    T in, *out;
    int mask;
  } operand{in, &value, mask};
  simt::collective("shfl_xor", &operand, [](void* const* lanes) {
    for (int i = 0; i < 32; i++) {
      auto* lane = static_cast<Operand*>(lanes[i]);
      *lane->out = static_cast<Operand*>(lanes[i ^ lane->mask])->in;
    }
  });
  return value;
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  struct Operand {
    T in, *out;
    int source;
  } operand{value, &value, source};
  simt::collective("shfl", &operand, [](void* const* lanes) {
    for (int i = 0; i < 32; i++) {
      auto* lane = static_cast<Operand*>(lanes[i]);
      *lane->out = static_cast<Operand*>(lanes[lane->source & 31])->in;
    }
  });
  return value;
}
