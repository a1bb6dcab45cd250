// The portable kernel's own dense skeleton: the same tiles, loads of x, barriers and mma, with W read as 16-bit values instead of decoded.
// What fusing costs is measured against it. Full tiles only.
#pragma once

#include "linear/portable.cuh"

namespace nybble::portable {

// Stands in for PackedWeights; Params::packed points at the dense W[n][k].
template <class C>
struct DenseWeights {
  static constexpr int kPasses = C::kBlockN / C::kRowsPerPass;
  uint32_t destination;
  const char* source;

  __device__ __forceinline__ explicit DenseWeights(uint32_t shared) {
    const int row = threadIdx.x >> 3, chunk = threadIdx.x & 7;
    destination = shared + C::kWOffset + row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void start(const Params& p, const Segment& s, int thread, int) {
    const int row = thread >> 3, column = (thread & 7) * 8;
    const int64_t n = C::kForward ? s.column_tile * C::kBlockN + row : s.begin * 64 + row;
    const int64_t k = C::kForward ? s.begin * 64 + column : s.column_tile * C::kBlockN + column;
    source = reinterpret_cast<const char*>(p.packed) + (n * p.k + k) * 2;
  }

  __device__ __forceinline__ void issue(const Params& p, int buffer, bool wanted) {
    const size_t row_bytes = static_cast<size_t>(p.k) * 2;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      const int row = i * C::kRowsPerPass;
      const size_t offset = C::kForward ? row * row_bytes : (row & 63) * row_bytes + (row >> 6) * 128;
      device::copy_async_if(destination + buffer * C::kWBytes + row * 128, source + offset, 0, wanted ? 1 : 0);
    }
    source += C::kForward ? 128 : 64 * row_bytes;
  }

  __device__ __forceinline__ void fetch(const Params&, bool) {}
  __device__ __forceinline__ void build_table(const Params&) {}
  __device__ __forceinline__ void decode(int, int, int) {}
};

}  // namespace nybble::portable
