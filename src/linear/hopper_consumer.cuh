// Consumer warpgroups of the Hopper kernel: activations by TMA, wgmma, and the output. Warpgroup `half` owns rows 64 half .. + 63 of the
// tile and all tokens of this CTA.
#pragma once

#include "linear/hopper_kernel.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename T, typename TILE>
struct Consumer {
  static constexpr int UNROLL = TILE::UNROLL, CHUNKS = TILE::CHUNKS, STAGING = TILE::STAGING;
  // Progress of the output of the tile before: kFirstChunks (in shared memory, not sent), STAGING .. CHUNKS - 1 (the chunk to write
  // next), CHUNKS (all sent), CHUNKS + 1 (staging buffers free).
  static constexpr int kFirstChunks = 0, kAllSent = CHUNKS, kIdle = CHUNKS + 1;

  const Params& p;
  Barriers<TILE> barriers;
  SegmentList list;
  uint32_t rank;
  int half, thread;  // thread: in the warpgroup
  uint32_t x_slots, staging, staging_lane, empty_w0;
  uint64_t weight_descriptor, x_descriptor;

  float sum[TILE::TOKENS / 2];  // 64 rows x TOKENS over 128 threads: [8-token group][row g: 2 tokens, row g + 8: 2 tokens]
  static constexpr int HELD_WORDS = TILE::HELD * kChunkWords;
  uint32_t held[HELD_WORDS > 0 ? HELD_WORDS : 1];
  int pending = kIdle, pending_row = 0, pending_token = 0, pending_segment = 0;
  int segment = 0, begin = 0, end = 0, token = 0;

  __device__ __forceinline__ Consumer(const Params& params, uint32_t smem, uint32_t cluster_rank, int warpgroup, int warp)
      : p(params), barriers{smem + TILE::BARRIER_OFFSET}, list{smem + TILE::LIST_OFFSET}, rank(cluster_rank), half(warpgroup) {
    thread = static_cast<int>(threadIdx.x & 127);
    const int lane = thread & 31;
    x_slots = smem + TILE::X_OFFSET;
    staging = smem + TILE::STAGING_OFFSET + half * STAGING * kChunkBytes;
    // stmatrix: lane addresses one 16-byte run of 8 rows for one token; matrices are (tokens 0-7, rows 0-7), (rows 8-15), (tokens 8-15, ..)
    staging_lane = staging + (8 * (lane >> 4) + (lane & 7)) * 128 + ((((warp & 3) * 2 + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    empty_w0 = peer_address(barriers.empty_w(0), half);
    weight_descriptor = wgmma_descriptor(smem + half * kHalfBytes);
    x_descriptor = wgmma_descriptor(x_slots);
    clear_held();
  }
  // Ends the life of the held words, so that partial sums may use their registers.
  __device__ __forceinline__ void clear_held() {
#pragma unroll
    for (int i = 0; i < HELD_WORDS; i++) held[i] = 0;
  }

  __device__ __forceinline__ bool leader() const { return thread == 0; }                // releases slots, sends output
  __device__ __forceinline__ bool loader() const { return thread == 32 && half == 1; }  // issues the activation loads
  __device__ __forceinline__ void barrier() const { named_barrier(1 + half, kThreadsPerGroup); }
  __device__ __forceinline__ int first_token(int token_tile) const { return (token_tile * 2 + static_cast<int>(rank)) * TILE::TOKENS; }

  __device__ __forceinline__ void enter_segment() {
    const auto e = list.read(segment);
    begin = e.begin;
    end = e.end;
    token = first_token(e.token_tile);
  }

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

  __device__ __forceinline__ void run_segment(uint32_t& group) {
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

  __device__ __forceinline__ void stage_chunk(int chunk, const uint32_t* words) const {
    const uint32_t to = staging_lane + chunk % STAGING * kChunkBytes;
    store_matrix_transposed(to, words);
    store_matrix_transposed(to + 16 * 128, words + 4);
  }
  __device__ __forceinline__ void send_chunk(int chunk) const {
    if (!leader()) return;
    tma_store(&p.output, staging + chunk % STAGING * kChunkBytes, pending_row, pending_token + chunk * kChunkTokens);
    tma_commit();
  }
  __device__ __forceinline__ void locate_output(int of_segment) {
    const auto e = list.read(of_segment);
    pending_row = e.row_tile * kTileRows + half * 64;
    pending_token = first_token(e.token_tile);
  }
  __device__ __forceinline__ void pack_chunk(int chunk, uint32_t* words) const {
#pragma unroll
    for (int q = 0; q < kChunkWords; q++) words[q] = pack_pair<T>(sum[chunk * 16 + 2 * q], sum[chunk * 16 + 2 * q + 1]);
  }

  __device__ __forceinline__ void send_first_chunks() {
    locate_output(pending_segment);
    async_proxy_fence();
    barrier();
#pragma unroll
    for (int c = 0; c < STAGING; c++) send_chunk(c);
    pending = STAGING;
  }
  __device__ __forceinline__ void write_held_chunk(int chunk) {
    if (leader()) tma_wait_read<STAGING - 1>();
    barrier();
    stage_chunk(chunk, held + (chunk - STAGING) * kChunkWords);
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
    if (pending == kFirstChunks) send_first_chunks();
#pragma unroll
    for (int c = STAGING; c < CHUNKS; c++) {
      if (pending == c) write_held_chunk(c);
    }
    if (pending == kAllSent) free_staging();
    pending = kIdle;
    clear_held();
  }
  __device__ __forceinline__ void defer_output() {
#pragma unroll
    for (int c = 0; c < STAGING; c++) {
      uint32_t words[kChunkWords];
      pack_chunk(c, words);
      stage_chunk(c, words);
    }
#pragma unroll
    for (int c = STAGING; c < CHUNKS; c++) pack_chunk(c, held + (c - STAGING) * kChunkWords);
    if constexpr (TILE::HELD > 0) {
#pragma unroll
      for (int i = 0; i < HELD_WORDS; i++) asm volatile("" : "+r"(held[i]));
    }
    pending = kFirstChunks;
    pending_segment = segment;
  }
  // Tokens [32 first, 32 last) of the tile, at once.
  __device__ __forceinline__ void write_chunks(int first, int last) {
    locate_output(segment);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c < first || c >= last) continue;
      if (leader()) tma_wait_read<0>();
      barrier();
      uint32_t words[kChunkWords];
      pack_chunk(c, words);
      stage_chunk(c, words);
      async_proxy_fence();
      barrier();
      send_chunk(c);
    }
  }
  __device__ __forceinline__ void add_bias() {
    if (p.bias == nullptr) return;
    const int row = list.read(segment).row_tile * kTileRows + half * 64 + (thread >> 5) * 16 + (thread >> 2 & 7);
    const T* bias = static_cast<const T*>(p.bias);
    const float first = row < p.rows ? static_cast<float>(bias[row]) : 0.0f,
                second = row + 8 < p.rows ? static_cast<float>(bias[row + 8]) : 0.0f;
#pragma unroll
    for (int i = 0; i < TILE::TOKENS / 2; i++) sum[i] += i & 2 ? second : first;
  }

  // ---- partial sums, in global memory. Waiting is safe: blocks start in index order, and a stream-K owner waits only for blocks of lower
  // index, for what they store first; the pieces of a cut tile are neighbours, and all but one such group per launch are complete whenever
  // SMs are short.
  //
  // A flag is set when it holds the nonce of this launch. Whoever waited for it clears it, and every flag that is set is waited for: so a
  // replay of a captured launch, which has the same nonce again, finds none set, and what the workspace held before does not matter.

  __device__ __forceinline__ float4* partials_of(int block) const {
    return reinterpret_cast<float4*>(p.partials) + (static_cast<int64_t>(block) * 2 + half) * (TILE::TOKENS / 8 * kThreadsPerGroup) +
           thread;
  }
  __device__ __forceinline__ uint64_t* flag_of(int block, int reader) const { return p.flags + (block * 2 + half) * kMaxPieces + reader; }
  __device__ __forceinline__ void set_flag(int reader) const { store_release(flag_of(static_cast<int>(blockIdx.x), reader), p.nonce); }
  __device__ __forceinline__ void await_flag(int block, int reader) const {
    uint64_t* flag = flag_of(block, reader);
    while (load_acquire(flag) != p.nonce) {
    }
    if (!NYBBLE_FAULT(kFlagNotReset) && !NYBBLE_FAULT(kFlagNotCleared)) *flag = 0;
  }
  __device__ __forceinline__ void store_partial_chunks(int skip_first, int skip_last) const {
    float4* to = partials_of(static_cast<int>(blockIdx.x));
    NYBBLE_DELAY(3);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c >= skip_first && c < skip_last) continue;
#pragma unroll
      for (int i = 4 * c; i < 4 * c + 4; i++)
        __stcg(to + i * kThreadsPerGroup, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    }
    __threadfence();
    barrier();
  }
  __device__ __forceinline__ void add_partial_chunks(int block, int first, int last) {
    const float4* from = partials_of(block);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c < first || c >= last) continue;
#pragma unroll
      for (int i = 4 * c; i < 4 * c + 4; i++) {
        const float4 v = __ldcg(from + i * kThreadsPerGroup);
        sum[4 * i] += v.x;
        sum[4 * i + 1] += v.y;
        sum[4 * i + 2] += v.z;
        sum[4 * i + 3] += v.w;
      }
    }
  }

  // A tile cut into pieces, one per cluster: each piece stores its sums and finishes its own share of the tokens, its own sums first, then
  // those of the other pieces in ascending order.
  __device__ __forceinline__ void exchange_pieces(int cluster) {
    const int pieces = p.work.pieces, me = cluster % pieces;
    const int first = first_chunk(p.work, me, CHUNKS), last = first_chunk(p.work, me + 1, CHUNKS);
    const int block0 = static_cast<int>(blockIdx.x) + 2 * me;  // of piece 0: block indices fall as clusters rise
    store_partial_chunks(first, last);
    if (thread < pieces && thread != me) {
      if (first_chunk(p.work, thread, CHUNKS) < first_chunk(p.work, thread + 1, CHUNKS)) set_flag(thread);
      if (first < last) await_flag(block0 - 2 * thread, me);
    }
    barrier();
    const int start = NYBBLE_ANY_OF(pieces);
    for (int i = 0; i < pieces; i++) {
      const int piece = NYBBLE_FAULT(kArrivalOrder) ? (start + i) % pieces : i;
      if (piece != me) add_partial_chunks(block0 - 2 * piece, first, last);
    }
    add_bias();
    write_chunks(first, last);
  }
  __device__ __forceinline__ void store_for_owner() const {
    store_partial_chunks(0, 0);
    if (leader()) set_flag(0);
  }
  // Stream-K: this cluster has the start of the tile; the clusters after it have the rest, in order.
  __device__ __forceinline__ void collect_partials(int cluster) {
    const int tile_end = last_tile_end(p.work, cluster);
    for (int c = cluster + 1; c < p.work.clusters && stream_begin(p.work, c) < tile_end; c++) {
      const int block = (p.work.clusters - 1 - c) * 2 + static_cast<int>(rank);
      if (leader()) await_flag(block, 0);
      barrier();
      add_partial_chunks(block, 0, CHUNKS);
    }
  }

  __device__ __forceinline__ void finish_segment(int cluster) {
    finish_output();
    const bool whole = end - begin == p.work.steps;
    if (!whole && p.work.pieces > 1) {
      exchange_pieces(cluster);
    } else if (begin > 0) {
      store_for_owner();
    } else {
      if (!whole) collect_partials(cluster);
      add_bias();
      defer_output();
    }
  }

  __device__ __forceinline__ void run(int cluster) {
    enter_segment();
    if (p.source.in_kernel) wait_for_previous_grids();  // otherwise the expansion was launched after whatever wrote x
    if (loader() && end > 0) {
      for (int s = 0; s < TILE::X_SLOTS; s++) load_x(s, begin + s, token);
    }
    wait_for_previous_grids();  // the workspace and the output, which they may use
    uint32_t group = 0;
    while (end > 0) {
      run_segment(group);
      finish_segment(cluster);
      segment++;
      enter_segment();
    }
    finish_output();
    if (leader()) tma_wait_all();
  }
};

}  // namespace nybble::hopper
