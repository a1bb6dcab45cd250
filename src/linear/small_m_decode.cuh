// What the two consumers of the small-M kernel share: the byte table, scales of blocks.
#pragma once

#include "device/byte_table.cuh"
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

// Two weights of one row.
template <typename T, int I>
__device__ __forceinline__ uint32_t decode_byte(uint32_t word, uint32_t lane_table, float scale) {
  const float2 v = look_up_byte(word, lane_table, byte_selector(I));
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
