// What the two consumers of the small-M kernel share: the byte table, scales of blocks.
#pragma once

#include "device/scales.cuh"
#include "linear/small_m_kernel.cuh"

namespace nybble::small_m {

__device__ __forceinline__ float2 load_shared_f32x2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared_float4(uint32_t address, const float4& v) {
  store_shared_u128(address, __float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

// The value of a code without indexing: a table in local or constant memory, indexed by lane, costs thousands of clocks at the start.
__device__ __forceinline__ float select_value(const float (&values)[16], int code) {
  float v = values[0];
#pragma unroll
  for (int i = 1; i < 16; i++) {
    asm("{.reg .pred p;\nsetp.eq.s32 p, %1, %2;\nselp.f32 %0, %3, %0, p;}" : "+f"(v) : "r"(code), "r"(i), "f"(values[i]));
  }
  return v;
}

// Byte of W -> its two values in fp32, one copy a lane; two threads an entry, rotated so that 8 lanes write 8 different chunks.
__device__ __forceinline__ void fill_byte_table(uint32_t table, const float (&values)[16], int thread) {
  const int byte = thread & 255;
  const uint32_t high = __float_as_uint(select_value(values, byte >> 4)), low = __float_as_uint(select_value(values, byte & 15));
  const uint32_t to = table + byte * 256 + (thread >> 8) * 128;
#pragma unroll
  for (int j = 0; j < 8; j++) store_shared_u128(to + ((j + thread) & 7) * 16, high, low, high, low);
}

// The values of byte I of a word. lane_table: table | lane << 3; one PRMT makes the address table | byte << 8 | lane << 3.
// selector: byte_selector(I).
__device__ __forceinline__ constexpr uint32_t byte_selector(int i) { return 0x7604u | static_cast<uint32_t>(i) << 4; }
__device__ __forceinline__ float2 look_up(uint32_t word, uint32_t lane_table, uint32_t selector) {
  const uint32_t address = permute_bytes(word, lane_table, selector);
  float2 v;
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));  // not volatile: the table does not change
  return v;
}

// Two weights of one row.
template <typename T, int I>
__device__ __forceinline__ uint32_t decode_byte(uint32_t word, uint32_t lane_table, float scale) {
  const float2 v = look_up(word, lane_table, byte_selector(I));
  return pack_pair<T>(multiply_flushed(v.x, scale), multiply_flushed(v.y, scale));
}

// Scales of blocks of the unit in a stage.
template <typename L>
struct ScaleReader {
  const Smem<L> s;
  const bool nested;
  const int blocks;  // of a row of W

  // Once, by all consumers, before a barrier of theirs.
  __device__ __forceinline__ ScaleReader(const Params& p, const Smem<L>& smem, int thread) : s(smem), nested(p.nested), blocks(p.k >> 6) {
    if (!nested) return;
    if (thread < 256) store_shared_u32(s.code_values() + thread * 4, __float_as_uint(p.nested_code[thread]));
    if (thread == 256) store_shared_u32(s.offset(), __float_as_uint(*p.offset));
  }

  // Row 0 .. 255 and block column of the whole row; codes: the buffer that holds them.
  __device__ __forceinline__ float read(int stage, int codes, int row, int block) const {
    if (!nested) return load_shared_f32(s.codes(codes) + row * 16 + (block & 3) * 4);
    const uint32_t code = load_shared_u8(s.codes(codes) + row * 16 + (block & 15));
    const uint32_t group = static_cast<uint32_t>(row * blocks + block) >> 8;
    return nested_scale(load_shared_f32(s.code_values() + code * 4), load_shared_f32(s.nested(stage) + group * 4),
                        load_shared_f32(s.offset()), DType::kFloat32);
  }
};

}  // namespace nybble::small_m
