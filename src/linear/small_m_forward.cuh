// Forward consumer of the small-M kernel: 16 warps, warp w decodes rows 16 w .. 16 w + 15 of the unit. Thread (g, t): rows g and g + 8 of
// its warp, block t of the unit's four; 8 codes of each row (one word) make two k16 steps.
#pragma once

#include "device/decode.cuh"
#include "linear/small_m_decode.cuh"

namespace nybble::small_m {

template <typename T, typename L>
struct ForwardConsumer {
  static constexpr int GROUPS = L::GROUPS;
  static constexpr int BUFFERS = GROUPS == 16 ? 1 : 2;  // of A fragments: one is decoded while wgmma reads the other
  static constexpr int WORDS = GROUPS <= 4 ? 2 : 1;     // decoded per group of wgmma
  // Words of the first row that the scaled table (ALU) decodes; the rest goes through the byte table (shared memory). Both are busy alike.
  static constexpr int SCALED_WORDS = 0x55;
  static constexpr bool SCALES_AHEAD = GROUPS <= 4;  // registers allow it
  using Fragments = uint32_t[BUFFERS][2 * WORDS][4];

  const Params& p;
  const Smem<L> s;
  const ScaleReader<L>& scales;
  const int warp, lane, row, block;
  const uint32_t lane_table;

  __device__ __forceinline__ ForwardConsumer(const Params& params, const Smem<L>& smem, const ScaleReader<L>& reader, int warp_, int lane_)
      : p(params),
        s(smem),
        scales(reader),
        warp(warp_),
        lane(lane_),
        row(warp_ * 16 + (lane_ >> 2)),
        block(lane_ & 3),
        lane_table(smem.table | lane_ << 3) {}

  // Word w of both rows -> two A fragments.
  template <int W>
  __device__ __forceinline__ void decode(const ScaledTable& table, uint32_t upper, uint32_t lower, float upper_scale, float lower_scale,
                                         uint32_t (&first)[4], uint32_t (&second)[4]) const {
    if constexpr ((SCALED_WORDS >> W & 1) != 0) {
      uint32_t pairs[4];
      decode_8(table, upper, pairs);
      first[0] = pairs[0], first[2] = pairs[1], second[0] = pairs[2], second[2] = pairs[3];
    } else {
      first[0] = decode_byte<T, 0>(upper, lane_table, upper_scale);
      first[2] = decode_byte<T, 1>(upper, lane_table, upper_scale);
      second[0] = decode_byte<T, 2>(upper, lane_table, upper_scale);
      second[2] = decode_byte<T, 3>(upper, lane_table, upper_scale);
    }
    first[1] = decode_byte<T, 0>(lower, lane_table, lower_scale);
    first[3] = decode_byte<T, 1>(lower, lane_table, lower_scale);
    second[1] = decode_byte<T, 2>(lower, lane_table, lower_scale);
    second[3] = decode_byte<T, 3>(lower, lane_table, lower_scale);
  }

  __device__ __forceinline__ void store_partial(float (&sum)[GROUPS * 4], int slot) const {
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) asm volatile("" : "+f"(sum[i]));
    wait_for_previous_grids();
    const int groups = (p.m + 7) >> 3;
    float4* to = reinterpret_cast<float4*>(p.partials) + (static_cast<size_t>(slot) * kConsumerWarps + warp) * (GROUPS * 32) + lane;
#pragma unroll
    for (int e = 0; e < GROUPS; e++) {
      if (e < groups) to[e * 32] = make_float4(sum[4 * e], sum[4 * e + 1], sum[4 * e + 2], sum[4 * e + 3]);
      sum[4 * e] = sum[4 * e + 1] = sum[4 * e + 2] = sum[4 * e + 3] = 0.0f;
    }
  }

  // Units [first, end).
  __device__ __forceinline__ void run(int cta, int first, int end) const {
    const uint32_t row_at = row * 128, chunk0 = ((2 * block) ^ (row & 7)) << 4, chunk1 = ((2 * block + 1) ^ (row & 7)) << 4;
    float sum[GROUPS * 4];
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) sum[i] = 0.0f;
    Fragments a;
    float next_upper = 0.0f, next_lower = 0.0f;
    int tile = first / p.work.units, step = first - tile * p.work.units, code_buffer = 0;
    Ring<L::STAGES> stage;
    Ring<L::X_SLOTS> slot;
    int read_slot = 0;  // the slot before, while wgmma may read it
    const auto read_scales = [&](const Ring<L::STAGES>& of, int buffer, int at_step) {
      const int codes = p.nested ? buffer : of.slot;
      next_upper = scales.read(of.slot, codes, row, 4 * at_step + block);
      next_lower = scales.read(of.slot, codes, row + 8, 4 * at_step + block);
    };
    for (int unit = first; unit < end; unit++) {
      NYBBLE_DELAY(9);
      barrier_wait(s.full_stage(stage.slot), stage.parity);
      if (NYBBLE_FAULT(kReleasedEarly) && lane == 0) barrier_arrive(s.empty_stage(stage.slot));
      const uint32_t packed = s.packed(stage.slot) + row_at;
      if (!SCALES_AHEAD || unit == first) read_scales(stage, code_buffer, step);
      const float upper_scale = next_upper, lower_scale = next_lower;
      const ScaledTable table = make_scaled_table<T>(p.values, upper_scale);
      uint4 upper, lower;
      const auto word_step = [&]<int W>() {
        constexpr int kBuffer = W / WORDS % BUFFERS, kAt = 2 * (W % WORDS);
        if constexpr (W % 4 == 0) {
          upper = load_shared_u128(packed + (W == 0 ? chunk0 : chunk1));
          lower = load_shared_u128(packed + 1024 + (W == 0 ? chunk0 : chunk1));
        }
        if constexpr (SCALES_AHEAD && W == 5) {
          if (unit + 1 < end) {
            const Ring<L::STAGES> next = stage.next();
            const int next_step = step + 1 == p.work.units ? 0 : step + 1;
            barrier_wait(s.full_stage(next.slot), next.parity);
            read_scales(next, code_buffer ^ ((next_step & 3) == 0), next_step);
          }
        }
        const uint32_t upper_word = W % 4 == 0 ? upper.x : W % 4 == 1 ? upper.y : W % 4 == 2 ? upper.z : upper.w;
        const uint32_t lower_word = W % 4 == 0 ? lower.x : W % 4 == 1 ? lower.y : W % 4 == 2 ? lower.z : lower.w;
        decode<W>(table, upper_word, lower_word, upper_scale, lower_scale, a[kBuffer][kAt], a[kBuffer][kAt + 1]);
        if constexpr (W % WORDS != WORDS - 1) return;
        if (L::PERMUTE_HERE ? W == WORDS - 1 : W % 2 == 0) barrier_wait(s.full_x(slot.slot), slot.parity ^ NYBBLE_FAULT(kWrongParity));
        const uint64_t x = wgmma_descriptor(s.x(slot.slot) + (L::PERMUTE_HERE ? (W >> 1) * L::X_BYTES : (W & 1) * 64));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * WORDS; i++) wgmma_rs<T>(sum, a[kBuffer][i], x + 2 * i);
        wgmma_commit();
        if constexpr (BUFFERS == 1 || (!L::PERMUTE_HERE && W == 7)) {
          wgmma_wait<0>();
        } else {
          wgmma_wait<1>();
        }
        // A slot is free once only the group after it is in flight.
        if (L::PERMUTE_HERE ? W == WORDS - 1 && unit > first : W > 0 && W % 2 == 0) {
          if (lane == 0) barrier_arrive(s.empty_x(read_slot));
        }
        if (L::PERMUTE_HERE ? W == 7 : W % 2 == 1) {
          read_slot = slot.slot;
          slot.advance();
        }
      };
      word_step.template operator()<0>();
      word_step.template operator()<1>();
      word_step.template operator()<2>();
      word_step.template operator()<3>();
      word_step.template operator()<4>();
      word_step.template operator()<5>();
      word_step.template operator()<6>();
      word_step.template operator()<7>();
      if (!L::PERMUTE_HERE && lane == 0) barrier_arrive(s.empty_x(read_slot));
      __syncwarp();
      if (!NYBBLE_FAULT(kReleasedEarly) && lane == 0) barrier_arrive(s.empty_stage(stage.slot));
      stage.advance();
      step++;
      if (step == p.work.units || unit + 1 == end) {
        if constexpr (L::PERMUTE_HERE) wgmma_wait<0>();
        store_partial(sum, slot_of_piece(cta, tile));
      }
      if (step == p.work.units) {
        step = 0;
        tile++;
      }
      if ((step & 3) == 0) code_buffer ^= 1;
    }
  }
};

}  // namespace nybble::small_m
