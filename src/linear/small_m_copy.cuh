// The producers of the small-M kernel: the copying lane and the warps that put x in order.
#pragma once

#include "linear/small_m_kernel.cuh"

namespace nybble::small_m {

// Two queues, packed units and activation slots, fed by one lane that blocks on neither.
template <typename L>
struct Copier {
  const Params& p;
  const Smem<L> s;
  const int end;  // first unit of the next CTA
  Ring<L::STAGES> stage{0, 1};
  int unit, tile, step;  // of the next packed unit; step: along the reduction
  int code_buffer = 0;
  Ring<L::X_SLOTS> slot{0, 1};
  int x_unit, x_step, x_part = 0;

  __device__ __forceinline__ Copier(const Params& params, const Smem<L>& smem, int first, int end_)
      : p(params), s(smem), end(end_), unit(first), tile(first / p.work.units), step(first - tile * p.work.units) {
    x_unit = unit;
    x_step = step;
    first_ = first;
  }

  // Packed bytes and scales of the next unit. A box of codes holds 4 units side by side: forward loads it for the first of them only.
  __device__ __forceinline__ void load_unit() {
    NYBBLE_DELAY(6);
    const int row_block = L::FORWARD ? tile : step, column_block = L::FORWARD ? step : tile;
    const uint32_t bar = s.full_stage(stage.slot);
    const uint32_t nested_bytes = p.nested ? p.k >> 4 : 0;  // k / 64 nested scales belong to 256 rows
    const bool codes = !L::FORWARD || !p.nested || unit == first_ || (step & 3) == 0;
    barrier_expect(bar, kPackedBytes + nested_bytes + (codes ? kCodeBytes : 0));
    tma_load(s.packed(stage.slot), &p.packed, bar, column_block * 128, row_block * kUnit);
    if (p.nested) bulk_load(s.nested(stage.slot), p.nested_absmax + static_cast<size_t>(row_block) * (p.k >> 6), nested_bytes, bar);
    if (codes) {
      const int buffer = L::FORWARD && p.nested ? code_buffer : stage.slot;
      tma_load(s.codes(buffer), &p.scales, bar, p.nested ? (column_block & ~3) * 4 : column_block * 4, row_block * kUnit);
    }
    stage.advance();
    unit++;
    if (++step == p.work.units) {
      step = 0;
      tile++;
    }
    if ((step & 3) == 0) code_buffer ^= 1;
  }

  __device__ __forceinline__ void load_x() {
    NYBBLE_DELAY(7);
    const uint32_t bar = L::PERMUTE_HERE ? s.raw_x(slot.slot) : s.full_x(slot.slot), to = s.x(slot.slot);
    barrier_expect(bar, L::X_SLOT_BYTES);
    if constexpr (L::PERMUTE_HERE) {
      for (int i = 0; i < 4; i++) tma_load(to + i * L::X_BYTES, &p.activation, bar, i * 16, x_step * 4, 0);
    } else {
      tma_load(to, &p.activation, bar, x_step * kUnit + x_part * 64, 0);
    }
    slot.advance();
    if (!L::PERMUTE_HERE && ++x_part < 4) return;
    x_part = 0;
    x_unit++;
    if (++x_step == p.work.units) x_step = 0;
  }

  __device__ __forceinline__ void run() {
    constexpr int kFirstSlots = L::PERMUTE_HERE ? 1 : L::X_SLOTS < 4 ? L::X_SLOTS : 4;
    load_unit();
    if constexpr (!L::PERMUTED_BEFORE) {
      wait_for_previous_grids();
      for (int i = 0; i < kFirstSlots; i++) load_x();
    }
    for (int i = 1; i < L::STAGES && unit < end; i++) load_unit();
    if constexpr (L::PERMUTED_BEFORE) wait_for_previous_grids();  // the permuted x
    while (unit < end || x_unit < end) {
      if (x_unit < end && barrier_test(s.empty_x(slot.slot), slot.parity)) load_x();
      if (unit < end && barrier_test(s.empty_stage(stage.slot), stage.parity)) load_unit();
    }
  }

 private:
  int first_;
};

// x arrives as 4 x [token][block t of 4][16 of the block], 32-byte swizzled; in place it becomes [token][4 steps of 16] per quarter,
// 128-byte swizzled, where a step holds 4 elements of each of the 4 blocks.
template <typename L>
__device__ __forceinline__ void permute_x(const Smem<L>& s, int units, int warp, int lane) {
  const uint32_t g = lane >> 2, t = lane & 3, matrix = lane >> 3, row = lane & 7;
  const uint32_t read0 = g * 128 + t * 32 + ((g & 1) << 4), read1 = read0 ^ 16;
  const uint32_t write0 = row * 128 + ((matrix ^ row) << 4), write1 = row * 128 + (((4 + matrix) ^ row) << 4);
  Ring<L::X_SLOTS> slot;
  for (int u = 0; u < units; u++) {
    NYBBLE_DELAY(8);
    barrier_wait(s.raw_x(slot.slot), slot.parity);
#pragma unroll 2
    for (int j = warp; j < 4 * L::GROUPS; j += kPermuteWarps) {
      const uint32_t at = s.x(slot.slot) + j * 1024;
      const uint4 low = load_shared_u128(at + read0), high = load_shared_u128(at + read1);
      __syncwarp();
      store_matrix(at + write0, low);
      store_matrix(at + write1, high);
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(s.full_x(slot.slot));
    slot.advance();
  }
}

}  // namespace nybble::small_m
