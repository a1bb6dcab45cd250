// Few token tiles on sm_90a: the kernel of the tiles HopperTile::kRows*. The same product as hopper_kernel.cuh, but every weight is decoded
// by the thread that multiplies it, straight into the A operand of wgmma, and stored nowhere. A cluster of two CTAs owns 256 output rows by
// TOKENS tokens, CTA c the rows 128 c .. + 127; what the two share is the activations: each fetches half of them for both.
//
//   packed bytes and scales of a step (64 of the reduction)  ──► weight slot      warp 11 (TMA), warps 8 and 9 (scales as fp32)
//   activations TOKENS x 64  ──► X slot, multicast to both CTAs                   warp 10 (TMA)
//   warpgroup h: rows 64 h .. + 63: byte of W -> two fp32 values (byte table) -> x scale -> one rounding -> wgmma m64 n TOKENS k16
//
// Thread (g, t) of a warp holds rows g and g + 8 of its 16, and 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16 of the reduction:
//   forward  bytes t of two words of rows g and g + 8 of W, in the order in which they lie there
//   grad_x   the two nibbles of one byte are rows g and g + 8: a byte of each of 4 rows of W, which ldmatrix brings pairwise
//
// What bounds it, measured: docs/hopper.md. Decoding takes about 420 clocks a step, wgmma with 256 tokens 1024.
#pragma once

#include "device/byte_table.cuh"
#include "device/mma.cuh"
#include "device/wgmma_rs.cuh"
#include "linear/hopper_rows_scales.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename TILE>
struct RowsProducer : RowsScales<DIRECTION, TILE> {
  using Base = RowsScales<DIRECTION, TILE>;
  using Base::barriers, Base::block_of, Base::first_row, Base::lane, Base::p, Base::rank, Base::SLOTS, Base::smem;
  using Base::Base;
  using typename Base::Cursor;

  // One lane. Its half of the tokens goes to both CTAs.
  __device__ __forceinline__ void load_activations() const {
    Cursor at = this->units();
    uint32_t group = 0;
    for (; at.advance(); group ^= 1) {
      const int token = at.token_tile * TILE::TOKENS + rank * TILE::X_BOX;
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        NYBBLE_DELAY(11);
        barrier_wait(barriers.empty_x(s), group ^ 1);
        barrier_expect(barriers.full_x(s), NYBBLE_FAULT(kPeerNotAwaited) ? TILE::X_BYTES / 2 : TILE::X_BYTES);
        tma_load_multicast(TILE::x_slot(smem, s) + rank * (TILE::X_BYTES / 2), &p.activation, barriers.full_x(s), (at.step + s) * kStep,
                           token, 3);
      }
    }
    // What this CTA sent has arrived and was read in both, and the peer's arrivals are in: either may end, whatever the other does.
    for (int s = 0; s < SLOTS && !NYBBLE_FAULT(kEndNotAwaited); s++) barrier_wait(barriers.empty_x(s), group ^ 1);
  }

  // One lane.
  __device__ __forceinline__ void load_packed_unit(const Cursor& at, uint32_t group) const {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      NYBBLE_DELAY(12);
      barrier_wait(barriers.empty_w(s), group ^ 1);
      barrier_expect(barriers.full_w(s), TILE::PACKED_BYTES);
      const uint32_t to = smem + TILE::PACKED_OFFSET + s * TILE::PACKED_BYTES;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        tma_load(to + half * (TILE::PACKED_BYTES / 2), &p.packed, barriers.full_w(s), block_of(at, at.step + s, half) * 32,
                 first_row(at, at.step + s, half));
      }
    }
  }
  // The first unit needs no more than the barriers, which this lane has made.
  __device__ __forceinline__ void load_packed() const {
    Cursor at = this->units();
    const bool loads = at.advance() && lane == 0;
    if (loads) load_packed_unit(at, 0);
    __syncwarp();
    meet_cluster();
    if (!loads) return;
    for (uint32_t group = 1; at.advance(); group ^= 1) load_packed_unit(at, group);
  }

  // Packed bytes and scales are the weight's and fetched before the grids before are complete (docs/hopper.md).
  __device__ __forceinline__ void run(int warp) const {
    if (warp == 2) {
      meet_cluster();
      wait_for_previous_grids();
      if (lane == 0) load_activations();
    } else if (warp == 3) {
      load_packed();
    } else {
      this->make_scales(warp * 32 + lane);
    }
    __syncwarp();
  }
};

template <Direction DIRECTION, typename T, typename TILE>
struct RowsConsumer : Output<DIRECTION, T, TILE> {
  using Base = Output<DIRECTION, T, TILE>;
  using Base::begin, Base::end, Base::half, Base::list, Base::p, Base::rank, Base::segment, Base::sum, Base::thread;
  using Base::enter_segment, Base::finish_sums, Base::leader, Base::set_owed_flag, Base::write_chunks;
  static constexpr bool FORWARD = DIRECTION == Direction::kForward;
  static constexpr int SLOTS = TILE::SLOTS;

  const uint32_t smem;
  const RowsBarriers<TILE> barriers;
  uint32_t lane_table, selector, peer_empty_x;
  uint32_t packed_lane, scale_lane;  // in a weight slot

  // Packed bytes of a step, as read from its slot. Forward: rows g and g + 8, 16 bytes of each for each half of the step; grad_x: rows 2 t
  // and 2 t + 1 of each 8 rows of W of the half.
  struct Words {
    uint4 upper[2], lower[2];
    float scales[2];  // forward, of both rows
  };
  // What becomes a fragment: table values of 4 bytes and the scales of the 2 rows, or 4 elements.
  struct Values {
    float2 of[4];
    float4 scales;
  };
  Words words;
  Values values[2];
  uint32_t a[2][4];  // fragments: one is made while wgmma reads the other

  __device__ __forceinline__ RowsConsumer(const Params& params, uint32_t base, uint32_t cluster_rank, int warpgroup, int warp)
      : Base(params, base, cluster_rank, warpgroup, warp), smem(base), barriers(base) {
    const uint32_t lane = thread & 31, g = lane >> 2, t = lane & 3;
    lane_table = (base + TILE::TABLE_OFFSET) | lane << 3;
    peer_empty_x = peer_address(barriers.empty_x(0), rank ^ 1);
    packed_lane = TILE::PACKED_OFFSET + half * (TILE::PACKED_BYTES / 2);
    scale_lane = TILE::SCALE_OFFSET + half * (TILE::SCALE_BYTES / 2);
    if constexpr (FORWARD) {  // 32-byte swizzle: bit 7 of the offset flips bit 4
      selector = byte_selector(0) + (t << 4);
      packed_lane += ((warp & 3) * 16 + g) * 32 + (g >> 2) * 16;
      scale_lane += ((warp & 3) * 16 + g) * 4;
    } else {
      selector = byte_selector(0) + ((warp & 1) << 4);
      packed_lane += lane * 32 + (((warp >> 1 & 1) ^ (lane >> 2 & 1)) << 4);
      scale_lane += t * 16;
    }
  }

  __device__ __forceinline__ void read_words(int slot, uint32_t group) {
    NYBBLE_DELAY(14);
    barrier_wait(barriers.full_w(slot), group);
    if (NYBBLE_FAULT(kReleasedUnread)) release_w(slot);
    NYBBLE_DELAY(17);
    const uint32_t packed = smem + packed_lane + slot * TILE::PACKED_BYTES;
#pragma unroll
    for (int q = 0; q < 2; q++) {
      if constexpr (FORWARD) {
        words.upper[q] = load_shared_u128(packed ^ (q * 16));
        words.lower[q] = load_shared_u128((packed ^ (q * 16)) + 256);
        words.scales[q] = load_shared_f32(smem + scale_lane + slot * TILE::SCALE_BYTES + q * 32);
      } else {
        uint32_t tiles[4];
        load_matrices_transposed(tiles, packed + q * 1024);
        words.upper[q] = make_uint4(tiles[0], tiles[1], tiles[2], tiles[3]);
      }
    }
  }
  // k16 step i of the step.
  __device__ __forceinline__ void look_up(int slot, int i) {
    const uint4 &u = words.upper[i / 2], &l = words.lower[i / 2];
    const uint32_t upper[2] = {i % 2 ? u.z : u.x, i % 2 ? u.w : u.y}, lower[2] = {i % 2 ? l.z : l.x, i % 2 ? l.w : l.y};
    Values& v = values[i % 2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v.of[e] = FORWARD ? look_up_byte(e % 2 == 0 ? upper[e / 2] : lower[e / 2], lane_table, selector)
                        : look_up_byte(upper[e / 2], lane_table, selector + e % 2 * 0x20);
    }
    if constexpr (FORWARD) {
      v.scales.x = words.scales[0];
      v.scales.y = words.scales[1];
    } else {
      const uint4 s = load_shared_u128(smem + scale_lane + slot * TILE::SCALE_BYTES + i * 64);
      v.scales = make_float4(__uint_as_float(s.x), __uint_as_float(s.y), __uint_as_float(s.z), __uint_as_float(s.w));
    }
  }
  static __device__ __forceinline__ uint32_t scaled_pair(float low, float high, float low_scale, float high_scale) {
    return pack_pair<T>(multiply_flushed(low, low_scale), multiply_flushed(high, high_scale));
  }
  static __device__ __forceinline__ void make_fragment(const Values& v, uint32_t (&out)[4]) {
    const float4& s = v.scales;
    if constexpr (FORWARD) {
#pragma unroll
      for (int e = 0; e < 4; e++) out[e] = scaled_pair(v.of[e].x, v.of[e].y, e % 2 == 0 ? s.x : s.y, e % 2 == 0 ? s.x : s.y);
    } else {
      out[0] = scaled_pair(v.of[0].x, v.of[1].x, s.x, s.y);
      out[1] = scaled_pair(v.of[0].y, v.of[1].y, s.x, s.y);
      out[2] = scaled_pair(v.of[2].x, v.of[3].x, s.z, s.w);
      out[3] = scaled_pair(v.of[2].y, v.of[3].y, s.z, s.w);
    }
  }

  __device__ __forceinline__ void release_w(int slot) const {
    __syncwarp();
    if ((thread & 31) == 0 || NYBBLE_FAULT(kForRacecheck)) barrier_arrive(barriers.empty_w(slot));
  }
  __device__ __forceinline__ void release_x(int slot) const {
    if (!leader()) return;
    barrier_arrive(barriers.empty_x(slot));
    barrier_arrive_remote(peer_empty_x + 8 * slot);
  }

  // Table values are read two k16 steps ahead, words of the next step while the last half of this one is multiplied; what remains between
  // two wgmma is arithmetic.
  __device__ __forceinline__ void multiply_step(int slot, uint32_t group, bool first, bool last) {
    const int next_slot = (slot + 1) % SLOTS, slot_before = (slot + SLOTS - 1) % SLOTS;
    const uint64_t x = wgmma_descriptor(TILE::x_slot(smem, slot));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      make_fragment(values[i % 2], a[i % 2]);
      if (i == 0) barrier_wait(barriers.full_x(slot), group ^ NYBBLE_FAULT(kWrongParity));
      wgmma_fence();
      wgmma_rs<T>(sum, a[i % 2], x + 2 * i);
      wgmma_commit();
      if (i < 2) {
        look_up(slot, i + 2);
        if (i == 1 && !last) read_words(next_slot, slot + 1 == SLOTS ? group ^ 1 : group);
      } else if (!last) {
        look_up(next_slot, i - 2);
      }
      if (i == 0 && NYBBLE_FAULT(kReleasedEarly) && !first) release_x(slot_before);
      wgmma_wait<1>();
      if (i == 0 && !NYBBLE_FAULT(kReleasedEarly) && !first) release_x(slot_before);
    }
    if (!NYBBLE_FAULT(kReleasedUnread)) release_w(slot);
  }
  __device__ __forceinline__ void run_segment(uint32_t& group) {
#pragma unroll
    for (int i = 0; i < TILE::TOKENS / 2; i++) sum[i] = 0.0f;
    read_words(0, group);
    look_up(0, 0);
    look_up(0, 1);
    for (int step = begin; step < end; step += SLOTS) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        multiply_step(slot, group, slot == 0 && step == begin, slot + 1 == SLOTS && step + SLOTS >= end);
      }
      group ^= 1;
      set_owed_flag();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILE::TOKENS / 2; i++) asm volatile("" : "+f"(sum[i])::"memory");
    NYBBLE_DELAY(20);
    release_x(SLOTS - 1);
  }

  __device__ __forceinline__ void run(int cluster) {
    wait_for_previous_grids();
    enter_segment();
    uint32_t group = 0;
    while (end > 0) {
      run_segment(group);
      if (list.is_last(segment)) {  // no more x: all output of a warpgroup fits a slot that everyone has read
        barrier_wait(barriers.empty_x(half), group ^ 1);
        this->spare = TILE::x_slot(smem, half) - this->staging;
      }
      finish_sums(cluster, [&] { write_chunks(0, TILE::CHUNKS); });
      segment++;
      enter_segment();
    }
    set_owed_flag();
    if (leader()) tma_wait_read<0>();
    __syncwarp();
  }
};

template <Direction DIRECTION, typename T, typename TILE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(TILE::THREADS, 1) multiply_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  if ((smem & (kByteTableBytes - 1)) != 1024) __trap();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0u, thread >> 5, 0), warpgroup = __shfl_sync(~0u, thread >> 7, 0);
  const uint32_t rank = cluster_rank();
  const int cluster = static_cast<int>(gridDim.x / 2 - 1 - blockIdx.x / 2);
  allow_next_grid();  // its blocks set themselves up while the last of this one finish
  if (warpgroup < 2) {
    if (thread < kHopperMaxSegments) SegmentList{smem + TILE::LIST_OFFSET}.write(p.work, cluster, thread);
    raise_register_limit<TILE::CONSUMER_REGISTERS>();
    __syncwarp();
    cluster_arrive();
    cluster_wait_at_once();
    fill_byte_table(smem + TILE::TABLE_OFFSET, p.values, thread);
    fill_byte_table(smem + TILE::TABLE_OFFSET, p.values, thread + 256);
    __syncwarp();
    meet_cluster();
    named_barrier(3, 2 * kThreadsPerGroup);  // the table
    RowsConsumer<DIRECTION, T, TILE>(p, smem, rank, warpgroup, warp).run(cluster);
  } else {
    lower_register_limit<TILE::PRODUCER_REGISTERS>();
    if (thread == 352) RowsBarriers<TILE>(smem).init();  // its warp's first loads need them
    if (thread == 320) {
      prefetch_tensor_map(&p.activation);
      prefetch_tensor_map(&p.output);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait_at_once();
    RowsProducer<DIRECTION, TILE>(p, smem, rank, cluster).run(warp - 8);
  }
}

}  // namespace nybble::hopper
