// The byte table: a byte of packed weights -> its two values in fp32, one copy for each lane of a warp, 64 KB of shared memory. A look-up
// costs a byte permute and a conflict-free 8-byte load, whatever the bytes are.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

constexpr uint32_t kByteTableBytes = 65536;  // also its alignment: the byte is byte 1 of an address in it

// The value of a code without indexing: a table in local or constant memory, indexed by lane, costs thousands of clocks at the start.
__device__ __forceinline__ float select_value(const float (&values)[16], int code) {
  float v = values[0];
#pragma unroll
  for (int i = 1; i < 16; i++) {
    asm("{.reg .pred p;\nsetp.eq.s32 p, %1, %2;\nselp.f32 %0, %3, %0, p;}" : "+f"(v) : "r"(code), "r"(i), "f"(values[i]));
  }
  return v;
}

// 512 shares: share i writes half of the copies of byte i % 256, rotated so that 8 lanes write 8 different chunks of 16 bytes.
__device__ __forceinline__ void fill_byte_table(uint32_t table, const float (&values)[16], int share) {
  const int byte = share & 255;
  const uint32_t high = __float_as_uint(select_value(values, byte >> 4)), low = __float_as_uint(select_value(values, byte & 15));
  const uint32_t to = table + byte * 256 + (share >> 8) * 128;
#pragma unroll
  for (int j = 0; j < 8; j++) store_shared_u128(to + ((j + share) & 7) * 16, high, low, high, low);
}

// Selects byte `i` of a word for byte_table_address().
constexpr uint32_t byte_selector(int i) { return 0x7604u | static_cast<uint32_t>(i) << 4; }

// The values of one byte of a word: x of the high nibble, y of the low one. lane_table: table | lane << 3, so one PRMT makes the address
// table | byte << 8 | lane << 3.
__device__ __forceinline__ float2 look_up_byte(uint32_t word, uint32_t lane_table, uint32_t selector) {
  const uint32_t address = permute_bytes(word, lane_table, selector);
  float2 v;
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));  // not volatile: the table does not change
  return v;
}

}  // namespace nybble::device
