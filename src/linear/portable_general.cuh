// The portable kernel's loads for every other case: any k and n, blocks of 32, packed weights at any byte, rows of x at any even address. A
// unit of 64 consecutive weights may start in the middle of a byte and touch three blocks; it is decoded weight by weight through the
// unscaled values in shared memory. About 2.7 times the time of the fast loads at 128 tokens.
#pragma once

#include "linear/portable.cuh"

namespace nybble::portable {

// Stands in for Activations.
template <class C>
struct GeneralActivations {
  uint32_t destination;
  const char* source[C::kPasses];
  int passes;  // with a row below m
  int left;    // elements of the row from this thread's chunk on; 0 or less: zeros

  __device__ __forceinline__ explicit GeneralActivations(uint32_t shared) {
    const int row = threadIdx.x >> 3, chunk = threadIdx.x & 7;
    destination = shared + row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void start(const Params& p, const Segment& s, int thread) {
    const int row = thread >> 3, column = s.begin * 64 + (thread & 7) * 8;
    passes = (p.m - s.token_tile * C::kBlockM - row + C::kRowsPerPass - 1) / C::kRowsPerPass;
    left = reduction_length<C>(p) - column;
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) {
      const int64_t first = static_cast<int64_t>(s.token_tile * C::kBlockM + row + i * C::kRowsPerPass) * p.x_stride;
      source[i] = static_cast<const char*>(p.x) + (first + column) * 2;
    }
  }

  __device__ __forceinline__ void issue(const Params& p, int buffer, bool wanted, int ahead) {
    const int elements = max(0, min(8, left));
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) {
      if (wanted && i < passes) {
        load_chunk(destination + buffer * C::kXBytes + i * C::kRowsPerPass * 128, source[i] + ahead * 128, elements, p.x_alignment, p.x);
      }
    }
    left -= 64;
  }

  __device__ __forceinline__ void advance_two_stages() {
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) source[i] += 256;
  }

  // 8 elements, zeros from `elements` on. readable: any address that may be named where nothing is read.
  static __device__ __forceinline__ void load_chunk(uint32_t to, const char* from, int elements, int alignment, const void* readable) {
    if (alignment >= 16) {
      device::copy_async_fill_16b(to, elements ? from : readable, elements * 2);
    } else if (alignment >= 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int bytes = max(0, min(4, elements * 2 - i * 4));
        device::copy_async_fill_4b(to + 4 * i, bytes ? from + 4 * i : readable, bytes);
      }
    } else {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t low = 2 * i < elements ? device::load_global_u16(from + 4 * i) : 0;
        const uint32_t high = 2 * i + 1 < elements ? device::load_global_u16(from + 4 * i + 2) : 0;
        pairs[i] = low | high << 16;
      }
      device::store_shared_u128(to, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

// Stands in for PackedWeights. Codes outside W get the scale 0.
template <class C>
struct GeneralWeights {
  static constexpr int kWords = 9;  // 64 codes from any nibble of the first word on
  uint32_t destination, codes, values;
  int n, k;              // first weight of the unit
  int count;             // weights of the unit inside W
  const uint8_t* first;  // the word that holds the first code
  int shift;             // bits from there to the byte of the first code; bit 6: it is the low nibble
  int second, third;     // weight at which the unit's second and third block start
  uint32_t words[kWords];
  uint32_t code[3];
  float scale[3];  // absmax until build_table()

  __device__ __forceinline__ explicit GeneralWeights(uint32_t shared) {
    destination = shared + C::kWOffset + (threadIdx.x % C::kBlockN) * 128 + ((threadIdx.x & 7) << 4);
    codes = shared + C::kCodeOffset;
    values = shared + C::kValueOffset;
  }

  __device__ __forceinline__ void start(const Params& p, const Segment& s, int thread, int group) {
    const int row = thread % C::kBlockN, stage = s.begin + group;
    n = C::kForward ? s.column_tile * C::kBlockN + row : stage * 64 + (row & 63);
    k = C::kForward ? stage * 64 : s.column_tile * C::kBlockN + (row >> 6) * 64;
    fetch(p, false);
  }

  // Words that lie wholly inside the packed bytes; build_table() patches the few that straddle an end. No branch: the loads stay in flight.
  __device__ __forceinline__ void fetch(const Params& p, bool next) {
    if (next) (C::kForward ? k : n) += 64 * C::kDecodeGroups;
    count = n < p.n ? min(64, p.k - k) : 0;
    const int64_t total = static_cast<int64_t>(p.n) * p.k, at = count > 0 ? static_cast<int64_t>(n) * p.k + k : 0;
    const uint8_t *begin = p.packed, *end = p.packed + ((total + 1) >> 1), *byte = p.packed + (at >> 1);
    const int misaligned = static_cast<int>(reinterpret_cast<size_t>(byte) & 3);
    first = byte - misaligned;
    shift = misaligned * 8 + static_cast<int>(at & 1) * 64;
#pragma unroll
    for (int i = 0; i < kWords; i++)
      words[i] = device::load_global_u32_if(first + 4 * i, first + 4 * i >= begin && first + 4 * i + 4 <= end);
    const int block_size = 1 << p.block_shift;
    second = block_size - static_cast<int>(at & (block_size - 1));
    third = second + block_size;
    const int64_t block = at >> p.block_shift, last = (total - 1) >> p.block_shift;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const int64_t b = block + i < last ? block + i : last;
      code[i] = device::load_global_u8(p.codes + b);
      scale[i] = device::load_global_f32(p.scales + (b >> p.scale_shift));
    }
  }

  __device__ __forceinline__ void build_table(const Params& p) {
    const float offset =
        device::load_shared_f32(codes + C::kScheduleOffset - C::kCodeOffset + static_cast<uint32_t>(offsetof(Schedule, offset)));
#pragma unroll
    for (int i = 0; i < 3; i++) {
      scale[i] = __fadd_rn(device::multiply_flushed(device::load_shared_f32(codes + 4 * code[i]), scale[i]), offset);
    }
    const uint8_t *begin = p.packed, *end = p.packed + ((static_cast<int64_t>(p.n) * p.k + 1) >> 1);
    if (first >= begin && first + 4 * kWords <= end) return;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const uint8_t* word = first + 4 * i;
      if (word >= begin && word + 4 <= end) continue;
      words[i] = 0;
#pragma unroll
      for (int b = 0; b < 4; b++) {
        if (word + b >= begin && word + b < end) words[i] |= device::load_global_u8(word + b) << (8 * b);
      }
    }
  }

  // Eight codes from number 8c on, the first in the high nibble of the lowest byte.
  __device__ __forceinline__ uint32_t aligned_word(int c) const {
    const uint32_t low = words[c], high = words[c + 1];
    const int bits = shift & 31;
    const uint32_t from_byte = __funnelshift_r(low, high, bits);
    if (!(shift & 64)) return from_byte;
    const uint32_t from_next_byte = __funnelshift_rc(low, high, bits + 8);
    return ((from_byte << 4) & 0xF0F0F0F0u) | ((from_next_byte >> 4) & 0x0F0F0F0Fu);
  }

  __device__ __forceinline__ float weight(uint32_t word, int in_word, int index) const {
    const int bit = 8 * (in_word >> 1) + (in_word & 1 ? 0 : 4);  // of the code
    const uint32_t offset = (bit >= 2 ? word >> (bit - 2) : word << 2) & 60;
    const float s = index < second ? scale[0] : index < third ? scale[1] : scale[2];
    return device::multiply_flushed(device::load_shared_f32(values | offset), index < count ? s : 0.f);
  }

  __device__ __forceinline__ void decode(int buffer, int from, int to) {
#pragma unroll
    for (int c = 0; c < 8; c++) {
      if (c < from || c >= to) continue;
      const uint32_t word = aligned_word(c);
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        w[i] = device::pack_pair<typename C::Element>(weight(word, 2 * i, 8 * c + 2 * i), weight(word, 2 * i + 1, 8 * c + 2 * i + 1));
      }
      device::store_shared_u128((destination ^ (c << 4)) + buffer * C::kWBytes, w[0], w[1], w[2], w[3]);
    }
  }

  __device__ __forceinline__ void issue(const Params&, int, bool) {}
};

}  // namespace nybble::portable
