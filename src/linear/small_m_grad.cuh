// grad_x consumer of the small-M kernel. Rows of the result are columns of W: the high and the low nibble of a packed byte are rows g and
// g + 8 of an m64 tile, byte b of a thread's BYTES belongs to its tile b. A k16 step takes 16 rows of W; thread (g, t) reads those of
// 2t, 2t + 1, 2t + 8, 2t + 9. BYTES warpgroups share the reduction: warpgroup share * COLUMNS + part takes columns `part` of the unit and
// its rows [64 PARTS share, + 64 PARTS).
#pragma once

#include "device/mma.cuh"
#include "linear/small_m_decode.cuh"

namespace nybble::small_m {

template <typename T, typename L>
struct GradConsumer {
  static constexpr int GROUPS = L::GROUPS, BYTES = L::BYTES;
  static constexpr int COLUMNS = 4 / BYTES, PARTS = 4 / BYTES;  // warpgroups side by side; parts of 64 rows of W for each
  static constexpr bool SCALES_AHEAD = GROUPS <= 4;
  static constexpr int SUMS = BYTES * GROUPS;                                          // float4 of a thread
  static constexpr int ROOM = static_cast<int>(L::EXCHANGE_BYTES) / (COLUMNS * 2048);  // float4 of a thread that fit the exchange
  static constexpr int EXCHANGED = BYTES == 1 || SUMS < ROOM ? SUMS : ROOM;
  static_assert(SUMS % EXCHANGED == 0);
  using Sums = float[BYTES][GROUPS * 4];

  const Params& p;
  const Smem<L> s;
  const ScaleReader<L>& scales;
  const int thread, warp, lane, part, share;
  const uint32_t lane_table;

  __device__ __forceinline__ GradConsumer(const Params& params, const Smem<L>& smem, const ScaleReader<L>& reader, int warp_, int lane_)
      : p(params),
        s(smem),
        scales(reader),
        thread((warp_ & 3) * 32 + lane_),
        warp(warp_),
        lane(lane_),
        part((warp_ >> 2) % COLUMNS),
        share((warp_ >> 2) / COLUMNS),
        lane_table(smem.table | lane_ << 3) {}

  // What a thread decodes in one k16 step: BYTES packed bytes of four rows. Four bytes: a word a row. Fewer: a word holds two bytes of two
  // rows, as ldmatrix transposes them, and a thread of one byte takes that of its warp's parity.
  static constexpr int WORDS = BYTES == 4 ? 4 : 2;

  // Byte B of four rows of W -> one A fragment. upper: scales of the first two rows, lower: of the other two.
  template <int B>
  __device__ __forceinline__ void decode(const uint32_t (&w)[WORDS], const float2& upper, const float2& lower, uint32_t (&a)[4]) const {
    float2 v0, v1, v2, v3;
    if constexpr (BYTES == 4) {
      constexpr uint32_t kSelector = byte_selector(B);
      v0 = look_up_byte(w[0], lane_table, kSelector), v1 = look_up_byte(w[1], lane_table, kSelector);
      v2 = look_up_byte(w[2], lane_table, kSelector), v3 = look_up_byte(w[3], lane_table, kSelector);
    } else {
      const uint32_t even = byte_selector(BYTES == 2 ? B : warp & 1), odd = even + 0x20;
      v0 = look_up_byte(w[0], lane_table, even), v1 = look_up_byte(w[0], lane_table, odd);
      v2 = look_up_byte(w[1], lane_table, even), v3 = look_up_byte(w[1], lane_table, odd);
    }
    a[0] = pack_pair<T>(multiply_flushed(v0.x, upper.x), multiply_flushed(v1.x, upper.y));
    a[1] = pack_pair<T>(multiply_flushed(v0.y, upper.x), multiply_flushed(v1.y, upper.y));
    a[2] = pack_pair<T>(multiply_flushed(v2.x, lower.x), multiply_flushed(v3.x, lower.y));
    a[3] = pack_pair<T>(multiply_flushed(v2.y, lower.x), multiply_flushed(v3.y, lower.y));
  }

  // The warpgroups that share a reduction add up in shared memory, the last first; the first one stores.
  __device__ __forceinline__ void store_partial(Sums& sum, int slot) const {
#pragma unroll
    for (int b = 0; b < BYTES; b++) {
#pragma unroll
      for (int i = 0; i < GROUPS * 4; i++) asm volatile("" : "+f"(sum[b][i]));
    }
    wait_for_previous_grids();
    const int groups = (p.m + 7) >> 3;
    float4* to = reinterpret_cast<float4*>(p.partials) +
                 (static_cast<size_t>(slot) * kConsumerWarps + (part * 4 + (warp & 3)) * BYTES) * (GROUPS * 32) + lane;
    const uint32_t exchange = s.exchange() + (part * 128 + thread) * 16;
#pragma unroll
    for (int begin = 0; begin < SUMS; begin += EXCHANGED) {
      for (int turn = BYTES - 1; turn >= 0; turn--) {
        if (share == turn) {
#pragma unroll
          for (int e = begin; e < begin + EXCHANGED; e++) {
            if (e % GROUPS >= groups) continue;
            const float* q = &sum[e / GROUPS][e % GROUPS * 4];
            float4 v = make_float4(q[0], q[1], q[2], q[3]);
            const uint32_t at = exchange + (e - begin) * (COLUMNS * 128 * 16);
            if (turn < BYTES - 1) {
              const uint4 r = load_shared_u128(at);
              v.x += __uint_as_float(r.x), v.y += __uint_as_float(r.y), v.z += __uint_as_float(r.z), v.w += __uint_as_float(r.w);
            }
            if (turn > 0) {
              store_shared_float4(at, v);
            } else {
              to[e * 32] = v;
            }
          }
        }
        if (BYTES > 1 && !NYBBLE_FAULT(kSumsNotAwaited)) named_barrier(kConsumerBarrier, kConsumers);
      }
    }
    clear(sum);
  }

  static __device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
    for (int b = 0; b < BYTES; b++) {
#pragma unroll
      for (int i = 0; i < GROUPS * 4; i++) sum[b][i] = 0.0f;
    }
  }

  // Units [first, end).
  __device__ __forceinline__ void run(int cta, int first, int end) const {
    const uint32_t t = lane & 3, warp_column = part * 32 * BYTES + (warp & 3) * 8 * BYTES;  // packed byte of the unit
    const uint32_t column = warp_column + (lane >> 2) * BYTES;
    const uint32_t even = 2 * t * 128 + (((column >> 4) ^ (2 * t)) << 4) + (column & 15);
    const uint32_t odd = (2 * t + 1) * 128 + (((column >> 4) ^ (2 * t + 1)) << 4) + (column & 15);
    uint32_t transposed[4];
    const int block = part * BYTES + ((warp & 3) * BYTES >> 2), first_row = share * PARTS * 64;
    const uint32_t own_scales = s.warp_scales(warp);
    Sums sum;
    clear(sum);
    float next_scales[2 * PARTS];  // of the warp's rows, its block: 2 PARTS a lane
    uint32_t a[2][2][4];
    int tile = first / p.work.units, step = first - tile * p.work.units;
    Ring<L::STAGES> stage;
    Ring<L::X_SLOTS> slot;
    slot.slot = share * PARTS;  // of the four slots of a unit
    int read_slot = 0;
    const auto read_scales = [&](int of_stage, int of_tile) {
#pragma unroll
      for (int i = 0; i < 2 * PARTS; i++) {
        next_scales[i] = scales.read(of_stage, of_stage, first_row + i * 32 + lane, 4 * of_tile + block);
      }
    };
    for (int unit = first; unit < end; unit++) {
      NYBBLE_DELAY(10);
      barrier_wait(s.full_stage(stage.slot), stage.parity);
      if (NYBBLE_FAULT(kReleasedEarly) && lane == 0) barrier_arrive(s.empty_stage(stage.slot));
      const uint32_t packed = s.packed(stage.slot) + first_row * 128;
      // Row `lane` of two k16 steps; made for every unit, as one register more over the loop is spilled for 64 tokens.
      const uint32_t matrices = kept(lane * 128) + (((warp_column >> 4) ^ (lane & 7)) << 4);
      if (!SCALES_AHEAD || unit == first) read_scales(stage.slot, tile);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * PARTS; i++) store_shared_u32(own_scales + (lane + i * 32) * 4, __float_as_uint(next_scales[i]));
      __syncwarp();
#pragma unroll
      for (int rows = 0; rows < PARTS; rows++) {
#pragma unroll
        for (int q = 0; q < 4; q++) {  // k16 steps of 64 rows
          if (SCALES_AHEAD && q == 2 && unit + 1 < end) {
            const Ring<L::STAGES> next = stage.next();
            barrier_wait(s.full_stage(next.slot), next.parity);
            read_scales(next.slot, step + 1 == p.work.units ? tile + 1 : tile);
          }
          const uint32_t from = packed + rows * 8192 + q * 2048, scale_at = own_scales + (rows * 64 + q * 16 + 2 * t) * 4;
          uint32_t words[WORDS];
          if constexpr (BYTES == 4) {
            words[0] = load_shared_u32(from + even), words[1] = load_shared_u32(from + odd);
            words[2] = load_shared_u32(from + 1024 + even), words[3] = load_shared_u32(from + 1024 + odd);
          } else {
            if (q % 2 == 0) load_matrices_transposed(transposed, from + matrices);
            words[0] = transposed[q % 2 * 2], words[1] = transposed[q % 2 * 2 + 1];
          }
          const float2 upper = load_shared_f32x2(scale_at), lower = load_shared_f32x2(scale_at + 32);
          const auto tile_step = [&]<int B>() {
            const int i = q * BYTES + B;  // wgmma of this part, issued in pairs
            decode<B>(words, upper, lower, a[i >> 1 & 1][i & 1]);
            if ((i & 1) == 0) return;
            if (i == 1) barrier_wait(s.full_x(slot.slot), slot.parity ^ NYBBLE_FAULT(kWrongParity));
            const uint64_t x = wgmma_descriptor(s.x(slot.slot));
            wgmma_fence();
            wgmma_rs<T>(sum[BYTES > 1 ? B - 1 : 0], a[i >> 1 & 1][0], x + 2 * (BYTES > 1 ? q : q - 1));
            wgmma_rs<T>(sum[B], a[i >> 1 & 1][1], x + 2 * q);
            wgmma_commit();
            if (rows == PARTS - 1 && i == 4 * BYTES - 1) {
              wgmma_wait<0>();
            } else {
              wgmma_wait<1>();
            }
            if (i == 1 && rows > 0 && lane == 0) barrier_arrive(s.empty_x(read_slot));
          };
          tile_step.template operator()<0>();
          if constexpr (BYTES > 1) tile_step.template operator()<1>();
          if constexpr (BYTES > 2) tile_step.template operator()<2>();
          if constexpr (BYTES > 2) tile_step.template operator()<3>();
        }
        read_slot = slot.slot;
        slot.advance();
      }
      if (lane == 0) barrier_arrive(s.empty_x(read_slot));
      slot.skip(4 - PARTS);
      __syncwarp();
      if (!NYBBLE_FAULT(kReleasedEarly) && lane == 0) barrier_arrive(s.empty_stage(stage.slot));
      stage.advance();
      if (++step == p.work.units || unit + 1 == end) {
        store_partial(sum, slot_of_piece(cta, tile));
        step = 0;
        tile++;
      }
    }
  }
};

}  // namespace nybble::small_m
