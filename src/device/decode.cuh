// 4-bit codes to 16-bit weights, bit-identical with bitsandbytes' dequantize_4bit: weight = RNE16(fl32(table[code] * scale)).
// Rounding 16 products per block and looking codes up costs 21 ALU instructions per 8 weights, where a product per weight costs twice that.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

// The 16 weights of one block, as a plane of low bytes and a plane of high bytes: PRMT selects 4 bytes of 8.
struct ScaledTable {
  uint32_t low[4];   // byte j of low[i]: low byte of the weight of code 4 i + j
  uint32_t high[4];  // likewise
};

// values: anything indexable by constants, 16 floats by code (FP4's code 8 as -0). T: __nv_bfloat16 or __half.
template <typename T, typename Values>
__device__ __forceinline__ ScaledTable make_scaled_table(const Values& values, float scale) {
  ScaledTable table;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t a = pack_pair<T>(multiply_flushed(values[4 * i], scale), multiply_flushed(values[4 * i + 1], scale));
    const uint32_t b = pack_pair<T>(multiply_flushed(values[4 * i + 2], scale), multiply_flushed(values[4 * i + 3], scale));
    table.low[i] = permute_bytes(a, b, 0x6420);
    table.high[i] = permute_bytes(a, b, 0x7531);
  }
  return table;
}

// Four codes (one per selector nibble, bit 3 ignored) from one plane: `select` picks byte i of the lower or of the upper 8 entries.
__device__ __forceinline__ uint32_t look_up_bytes(const uint32_t (&plane)[4], uint32_t codes, uint32_t select) {
  return permute_bytes(permute_bytes(plane[0], plane[1], codes), permute_bytes(plane[2], plane[3], codes), select);
}

// One word of packed bytes, 8 codes: weights e0 .. e7 in memory order, two per output word, e0 (high nibble of byte 0) lowest.
__device__ __forceinline__ void decode_8(const ScaledTable& table, uint32_t packed, uint32_t (&out)[4]) {
  const uint32_t codes = packed & 0x77777777u;                            // bits 0 to 2 of every code
  const uint32_t select = and_or(packed >> 1, 0x44444444u, 0x32103210u);  // bit 3 of code i -> byte i of the lower or upper half
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t c = half ? codes >> 16 : codes, s = half ? select >> 16 : select;
    const uint32_t low = look_up_bytes(table.low, c, s);
    const uint32_t high = look_up_bytes(table.high, c, s);
    out[2 * half] = permute_bytes(low, high, 0x4051);  // nibbles of a byte: high one first
    out[2 * half + 1] = permute_bytes(low, high, 0x6273);
  }
}

}  // namespace nybble::device
