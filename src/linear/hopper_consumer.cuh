// Consumer warpgroups of the Hopper kernel: activations by TMA, wgmma, and the output. Warpgroup `half` owns rows 64 half .. + 63 of the
// tile and all tokens of this CTA.
#pragma once

#include "linear/hopper_output.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename T, typename TILE>
struct Consumer : Output<DIRECTION, T, TILE> {
  using Base = Output<DIRECTION, T, TILE>;
  using Base::barrier, Base::enter_segment, Base::first_token, Base::leader, Base::group, Base::staging, Base::write_chunks, Base::list,
      Base::locate_output, Base::pack_chunk;
  using Base::begin, Base::end, Base::half, Base::p, Base::rank, Base::segment, Base::sum, Base::thread, Base::token;
  using Base::finish_sums, Base::send_chunk, Base::stage_chunk;

  static constexpr int UNROLL = TILE::UNROLL, CHUNKS = TILE::CHUNKS, STAGING = TILE::STAGING;
  // Progress of the output of the tile before: kFirstChunks (in shared memory, not sent), STAGING .. CHUNKS - 1 (the chunk to write
  // next), CHUNKS (all sent), CHUNKS + 1 (staging buffers free).
  static constexpr int kFirstChunks = 0, kAllSent = CHUNKS, kIdle = CHUNKS + 1;

  Barriers<TILE> barriers;
  uint32_t weights, x_slots, empty_w0;
  uint64_t weight_descriptor, x_descriptor;
  static constexpr int HELD_WORDS = TILE::HELD * kChunkWords;
  uint32_t held[HELD_WORDS > 0 ? HELD_WORDS : 1];
  int pending = kIdle;  // that of the segment before

  __device__ __forceinline__ Consumer(const Params& params, uint32_t smem, uint32_t cluster_rank, int warpgroup, int warp)
      : Base(params, smem, cluster_rank, warpgroup, warp), barriers{smem + TILE::BARRIER_OFFSET} {
    x_slots = smem + TILE::X_OFFSET;
    empty_w0 = peer_address(barriers.empty_w(0), half);
    weights = smem + half * kHalfBytes;
    static_assert(Base::kSpareSlots <= TILE::W_SLOTS);
    weight_descriptor = wgmma_descriptor(weights);
    x_descriptor = wgmma_descriptor(x_slots);
    clear_held();
  }
  // Ends the life of the held words, so that partial sums may use their registers.
  __device__ __forceinline__ void clear_held() {
#pragma unroll
    for (int i = 0; i < HELD_WORDS; i++) held[i] = 0;
  }

  __device__ __forceinline__ bool loader() const { return thread == 32 && half == 1; }  // issues the activation loads

  // ---- activations

  __device__ __forceinline__ void load_x(int slot, int step, int first) const {
    barrier_expect(barriers.full_x(slot), TILE::X_BYTES);
    tma_load(x_slots + slot * TILE::X_BYTES, &p.activation, barriers.full_x(slot), step * kStep, first);
  }

  // After the step of `stage` is done: its weight slot goes back to the decoders, its X slot takes `next_step` of `next_token` (-1: none).
  __device__ __forceinline__ void release(int stage, uint32_t group, int next_step, int next_token) const {
    const int x_slot = stage % TILE::X_SLOTS, w_slot = stage % TILE::W_SLOTS;
    if (loader()) {
      barrier_wait(barriers.empty_x(x_slot), ring_parity<UNROLL, TILE::X_SLOTS>(stage, group));
      if (next_token >= 0) load_x(x_slot, next_step, next_token);
    } else if (leader()) {
      if (half == 0) barrier_arrive(barriers.empty_x(x_slot));
      if (half != rank) barrier_expect(barriers.full_w(half, w_slot), kHalfBytes);
      barrier_arrive_remote(empty_w0 + 8 * (NYBBLE_FAULT(kReleasedUnread) ? (w_slot + 2) % TILE::W_SLOTS : w_slot));
    }
    NYBBLE_DELAY(1);
  }

  // ---- the multiply

  __device__ __forceinline__ void multiply_stage(int stage, uint32_t group, int accumulate) {
    const int x_slot = stage % TILE::X_SLOTS, w_slot = stage % TILE::W_SLOTS;
    NYBBLE_DELAY(2);
    barrier_wait(barriers.full_x(x_slot), ring_parity<UNROLL, TILE::X_SLOTS>(stage, group) ^ NYBBLE_FAULT(kWrongParity));
    if (half == rank || !NYBBLE_FAULT(kPeerNotAwaited))
      barrier_wait(barriers.full_w(half, w_slot), ring_parity<UNROLL, TILE::W_SLOTS>(stage, group));
    const uint64_t a = weight_descriptor + w_slot * (kWeightBytes >> 4), b = x_descriptor + x_slot * (TILE::X_BYTES >> 4);
    constexpr bool TRANSPOSED = DIRECTION == Direction::kGradInput;
    constexpr int kNextA = (TRANSPOSED ? 16 * 128 : 16 * 2) >> 4;  // 16 of the reduction further: 16 rows, or 16 columns
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma<T, TRANSPOSED>(sum, a + i * kNextA, b + i * 2, i > 0 ? 1 : accumulate);
    wgmma_commit();
  }

  __device__ __forceinline__ void run_segment() {
    for (int step = begin; step < end; step += UNROLL) {
#pragma unroll
      for (int s = 0; s < UNROLL; s++) {
        multiply_stage(s, group, s > 0 ? 1 : step != begin);
        int next_step = step + s - 1 + TILE::X_SLOTS, next_token = token;  // goes where the stage before this one was
        if (next_step >= end) {
          const auto e = list.read(segment + 1);
          next_step += e.begin - end;
          next_token = e.end > 0 ? first_token(e.token_tile) : -1;
        }
        asm volatile("" : "+r"(next_step), "+r"(next_token));
        if (s > 0) {
          if (NYBBLE_FAULT(kReleasedEarly)) release(s - 1, group, next_step, next_token);
          wgmma_wait<1>();
          if (!NYBBLE_FAULT(kReleasedEarly)) release(s - 1, group, next_step, next_token);
        } else {
          if (step > begin) wgmma_wait<1>();
          if (step > begin || segment > 0) release(UNROLL - 1, group ^ 1, next_step, next_token);  // at begin: of the tile before
        }
        output_step(s);
      }
      group ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILE::TOKENS / 2; i++) asm volatile("" : "+f"(sum[i])::"memory");
  }

  // ---- output. The SM's store port takes 32 bytes a clock, so a tile's output would block for 2-4 thousand clocks: the first chunks go to
  // staging at once, the rest waits in registers and leaves chunk by chunk beside the steps of the next tile, one short act a step
  // (longer ones would outlast the one wgmma group in flight).

  __device__ __forceinline__ void send_first_chunks() {
    locate_output(segment - 1);
    async_proxy_fence();
    barrier();
#pragma unroll
    for (int c = 0; c < STAGING; c++) send_chunk(c);
    pending = STAGING;
  }
  __device__ __forceinline__ void write_held_chunk(int chunk) {
    if (leader()) tma_wait_read<STAGING - 1>();
    barrier();
    stage_chunk(chunk % STAGING * kChunkBytes, held + (chunk - STAGING) * kChunkWords);
    async_proxy_fence();
    barrier();
    send_chunk(chunk);
    pending = chunk + 1;
  }
  __device__ __forceinline__ void free_staging() {
    if (leader()) tma_wait_read<0>();
    barrier();
    pending = kIdle;
  }

  // The act of one stage; the act that writes held[i] is a constant of the stage.
  __device__ __forceinline__ void output_step(int stage) {
    if (stage == 1 && pending == kFirstChunks) send_first_chunks();
#pragma unroll
    for (int c = STAGING; c < CHUNKS; c++) {
      if (stage == (c - STAGING) % UNROLL && pending == c) write_held_chunk(c);
    }
    if (stage == (CHUNKS - STAGING) % UNROLL && pending == kAllSent) free_staging();
  }
  __device__ __forceinline__ void finish_output() {
    int busy = pending != kIdle;  // mostly not: then the code below is not fetched
    asm volatile("" : "+r"(busy));
    if (busy) {
      if (pending == kFirstChunks) send_first_chunks();
#pragma unroll
      for (int c = STAGING; c < CHUNKS; c++) {
        if (pending == c) write_held_chunk(c);
      }
      if (pending == kAllSent) free_staging();
    }
    pending = kIdle;
    clear_held();
  }
  __device__ __forceinline__ void defer_output() {
#pragma unroll
    for (int c = 0; c < STAGING; c++) {
      uint32_t words[kChunkWords];
      pack_chunk(c, words);
      stage_chunk(c % STAGING * kChunkBytes, words);
    }
#pragma unroll
    for (int c = STAGING; c < CHUNKS; c++) pack_chunk(c, held + (c - STAGING) * kChunkWords);
    if constexpr (TILE::HELD > 0) {
#pragma unroll
      for (int i = 0; i < HELD_WORDS; i++) asm volatile("" : "+r"(held[i]));
    }
    pending = kFirstChunks;
  }
  __device__ __forceinline__ void finish_segment(int cluster) {
    finish_output();
    finish_sums(cluster, [&] { list.is_last(segment) ? write_chunks(0, CHUNKS) : defer_output(); });
  }

  __device__ __forceinline__ void run(int cluster) {
    enter_segment();
    if (p.source.way != ScaleWay::kReady) wait_for_previous_grids();  // otherwise the expansion was launched after whatever wrote x
    if (loader() && end > 0) {
      for (int s = 0; s < TILE::X_SLOTS; s++) load_x(s, begin + s, token);
    }
    wait_for_previous_grids();  // the workspace and the output, which they may use
    while (end > 0) {
      run_segment();
      NYBBLE_DELAY(21);
      if (leader() && list.is_last(segment)) {  // the last stage, too: its decode warp waits for that
        barrier_arrive_remote(empty_w0 + 8 * (NYBBLE_FAULT(kReleasedUnread) ? 1 : TILE::W_SLOTS - 1));
      }
      finish_segment(cluster);
      segment++;
      enter_segment();
    }
    if (leader()) tma_wait_read<0>();
    __syncwarp();
  }
};

}  // namespace nybble::hopper
