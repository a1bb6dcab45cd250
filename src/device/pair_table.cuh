// Decode by table: the two unscaled fp32 values of every packed byte, 256 entries in shared memory, one copy a lane so that 32 lanes look
// up 32 different bytes without a bank conflict. One PRMT makes the address, one LDS.64 gives two values; the scale belongs to the lane, so
// blocks of any size from 32 do. About 3.5 instructions a weight, of which 1 is ALU (the scaled tables of decode.cuh: 3.4 and 2.9).
#pragma once

#include <cstdint>
#include <cstring>

#include "device/ptx.cuh"

namespace nybble::device {

constexpr int kPairTableBytes = 256 * 32 * 8;

// The halves of a word of two 16-bit floats, exactly.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  float2 values;
  if constexpr (__is_same(T, __half)) {
    T low, high;
    const uint16_t low_bits = static_cast<uint16_t>(pair), high_bits = static_cast<uint16_t>(pair >> 16);
    memcpy(&low, &low_bits, 2);
    memcpy(&high, &high_bits, 2);
    values.x = static_cast<float>(low);
    values.y = static_cast<float>(high);
  } else {
    values.x = __uint_as_float(pair << 16);
    values.y = __uint_as_float(pair & 0xFFFF0000u);
  }
  return values;
}

// Fills the table with `threads` threads; entry of byte b: (values[b >> 4], values[b & 15]). `values` in shared memory. A barrier must
// follow.
__device__ __forceinline__ void fill_pair_table(uint8_t* table, const float* values, int thread, int threads) {
  for (int i = thread; i < 512; i += threads) {  // half an entry each: 16 copies
    const float2 pair{values[i >> 5], values[(i >> 1) & 15]};
    float4* to = reinterpret_cast<float4*>(table + i * 128);
#pragma unroll
    for (int j = 0; j < 8; j++) to[(j + thread) & 7] = make_float4(pair.x, pair.y, pair.x, pair.y);  // staggered: no bank conflicts
  }
}

// Shared address of the table, fixed so that it is an immediate of the loads: a kernel's dynamic shared memory starts below it on every
// target.
constexpr int kPairTableAddress = 2048;

// Where the table lies in dynamic shared memory that starts at `shared`; it needs kPairTableAddress bytes more than the table.
__device__ __forceinline__ uint8_t* pair_table(uint8_t* shared) {
  return shared + (kPairTableAddress - static_cast<int>(smem_address(shared)));
}

// What a lane needs to look up bytes.
struct PairDecoder {
  uint32_t lane_bytes;  // 8 * lane

  // Weights 2i and 2i + 1 of the word (byte i), rounded to T once, as fp32.
  template <typename T>
  __device__ __forceinline__ float2 decode(uint32_t word, int i, float scale) const {
    const uint32_t at = permute_bytes(word, lane_bytes, 0x5504u | static_cast<uint32_t>(i) << 4);  // byte << 8 | 8 * lane
    const uint2 values = load_shared_u64_at<kPairTableAddress>(at);
    return unpack_pair<T>(
        pack_pair<T>(multiply_flushed(__uint_as_float(values.x), scale), multiply_flushed(__uint_as_float(values.y), scale)));
  }
};

}  // namespace nybble::device
