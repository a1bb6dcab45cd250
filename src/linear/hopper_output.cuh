// What the consumer warpgroups of both Hopper kernels share: the sums of a tile, their way to the output, and the exchange of partial sums.
// Warpgroup `half` owns 64 rows and all tokens of this CTA.
#pragma once

#include <type_traits>

#include "linear/hopper_kernel.cuh"

namespace nybble::hopper {

template <Direction DIRECTION, typename T, typename TILE>
struct Output {
  static constexpr int CHUNKS = TILE::CHUNKS, STAGING = TILE::STAGING;
  // grad_x with weights in registers: the nibbles of a byte are rows g and g + 8 of the tile, so a thread holds neighbours of the output.
  static constexpr bool NIBBLE_ROWS = TILE::ROW_PAIRS && DIRECTION == Direction::kGradInput;

  const Params& p;
  SegmentList list;
  uint32_t rank;
  int half, thread;  // thread: in the warpgroup
  uint32_t staging, staging_lane;
  uint32_t spare = 0;  // row pairs: room for the last output, relative to staging; 0 if there is none
  uint32_t group = 0;  // other tiles: parity of the loop's iteration
  // Where a chunk of the last output lies, relative to staging. Row pairs have a slot of x, other tiles staging and this warpgroup's halves
  // of the weight slots.
  static constexpr int kSpareSlots = TILE::ROW_PAIRS ? 0 : (CHUNKS - STAGING + 1) / 2;
  static_assert(TILE::ROW_PAIRS || STAGING >= 2 || CHUNKS <= STAGING, "the first two chunks are stored before the slots are awaited");
  __device__ __forceinline__ uint32_t place(int chunk) const {
    if constexpr (TILE::ROW_PAIRS) return spare + chunk * kChunkBytes;
    if (chunk < STAGING) return chunk * kChunkBytes;
    const int beyond = chunk - STAGING, half_staging = STAGING * kChunkBytes;
    return half * (kHalfBytes - half_staging) - TILE::STAGING_OFFSET + beyond / 2 * kWeightBytes + beyond % 2 * kChunkBytes;
  }
  // Before a barrier of the warpgroup, behind which it writes there: weights that this CTA decoded have been copied to the peer.
  __device__ __forceinline__ void await_spare() const {
    if constexpr (!TILE::ROW_PAIRS) {
      if (half != static_cast<int>(rank) || thread != kThreadsPerGroup / 2 || NYBBLE_FAULT(kSpareNotAwaited)) return;
      const Barriers<TILE> barriers{list.base - TILE::LIST_OFFSET + TILE::BARRIER_OFFSET};
      const uint32_t phase = ring_parity<TILE::UNROLL, TILE::W_SLOTS>(TILE::UNROLL - TILE::W_SLOTS, group ^ 1);
#pragma unroll
      for (int s = 0; s < kSpareSlots; s++) barrier_wait(barriers.empty_w(s), phase);
    }
  }

  float sum[TILE::TOKENS / 2];             // 64 rows x TOKENS over 128 threads: [8-token group][row g: 2 tokens, row g + 8: 2 tokens]
  int pending_row = 0, pending_token = 0;  // of the tile that is sent
  int segment = 0, begin = 0, end = 0, token = 0;
  bool owes_flag = false;  // row pairs: of partial sums that are stored

  __device__ __forceinline__ Output(const Params& params, uint32_t smem, uint32_t cluster_rank, int warpgroup, int warp)
      : p(params), list{smem + TILE::LIST_OFFSET}, rank(cluster_rank), half(warpgroup) {
    thread = static_cast<int>(threadIdx.x & 127);
    const int lane = thread & 31;
    staging = smem + TILE::STAGING_OFFSET + half * STAGING * kChunkBytes;
    if constexpr (NIBBLE_ROWS) {  // a word of 2 outputs of token 2 t
      const uint32_t word = (warp & 2) * 8 + 2 * (lane >> 2) + (warp & 1), even = 2 * (lane & 3);
      staging_lane = staging + even * 128 + (((word >> 2) ^ even) << 4) + (word & 3) * 4;
    } else {
      // stmatrix: lane addresses one 16-byte run of 8 rows for one token; matrices are (tokens 0-7, rows 0-7), (rows 8-15), (tokens 8-15,
      // ..)
      staging_lane = staging + (8 * (lane >> 4) + (lane & 7)) * 128 + ((((warp & 3) * 2 + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    }
  }

  __device__ __forceinline__ bool leader() const { return thread == 0; }  // releases slots, sends output
  __device__ __forceinline__ void barrier() const { named_barrier(1 + half, kThreadsPerGroup); }
  __device__ __forceinline__ int first_row(int row_tile) const {
    return (TILE::ROW_PAIRS ? row_tile * 2 + static_cast<int>(rank) : row_tile) * kTileRows + half * 64;
  }
  __device__ __forceinline__ int first_token(int token_tile) const {
    return (TILE::ROW_PAIRS ? token_tile : token_tile * 2 + static_cast<int>(rank)) * TILE::TOKENS;
  }
  __device__ __forceinline__ void enter_segment() {
    const auto e = list.read(segment);
    begin = e.begin;
    end = e.end;
    token = first_token(e.token_tile);
  }

  // ---- output

  __device__ __forceinline__ void stage_chunk(uint32_t to, const uint32_t* words) const {
    to += staging_lane;
    if constexpr (NIBBLE_ROWS) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        store_shared_u32(to + e * 1024, words[2 * e]);
        store_shared_u32((to ^ 16) + 128 + e * 1024, words[2 * e + 1]);
      }
    } else {
      store_matrix_transposed(to, words);
      store_matrix_transposed(to + 16 * 128, words + 4);
    }
  }
  __device__ __forceinline__ void send_chunk(int chunk) const {
    if (!leader()) return;
    tma_store(&p.output, staging + chunk % STAGING * kChunkBytes, pending_row, pending_token + chunk * kChunkTokens);
    tma_commit();
  }
  __device__ __forceinline__ void locate_output(int of_segment) {
    const auto e = list.read(of_segment);
    pending_row = first_row(e.row_tile);
    pending_token = first_token(e.token_tile);
  }
  __device__ __forceinline__ void pack_chunk(int chunk, uint32_t* words) const {
#pragma unroll
    for (int q = 0; q < kChunkWords; q++) {
      if constexpr (NIBBLE_ROWS) {
        const int i = chunk * 16 + q / 2 * 4 + q % 2;
        words[q] = pack_pair<T>(sum[i], sum[i + 2]);
      } else {
        words[q] = pack_pair<T>(sum[chunk * 16 + 2 * q], sum[chunk * 16 + 2 * q + 1]);
      }
    }
  }
  // As write_chunks(), without waiting for chunks before to leave; two at a time, so that the first leave while others are packed.
  // complete(chunk): before a chunk is packed.
  template <typename COMPLETE>
  __device__ __forceinline__ void write_to_spare(int first, int last, COMPLETE complete) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
      if (c + 2 <= first || c >= last) continue;
#pragma unroll
      for (int i = c; i < c + 2 && i < CHUNKS; i++) {
        if (i < first || i >= last) continue;
        complete(i);
        uint32_t words[kChunkWords];
        pack_chunk(i, words);
        stage_chunk(place(i), words);
      }
      async_proxy_fence();
      if (c == 0) await_spare();
      barrier();
      if (!leader()) continue;
      if (c <= first) locate_output(segment);  // by the leader alone: no load is under way in a thread that fetches x
      for (int i = max(c, first); i < min(c + 2, last); i++) {
        tma_store(&p.output, staging + place(i), pending_row, pending_token + i * kChunkTokens);
      }
      tma_commit();
    }
  }
  // Tokens [32 first, 32 last) of the tile, at once. Row pairs wait until the tile before has left staging; other tiles come here for a
  // cluster's last segment alone.
  __device__ __forceinline__ void write_chunks(int first, int last) {
    if (!TILE::ROW_PAIRS || spare != 0) return write_to_spare(first, last, [](int) {});
    locate_output(segment);
    if (leader()) tma_wait_read<0>();  // of the tile before
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c < first || c >= last) continue;
      if (leader()) tma_wait_read<STAGING - 1>();
      barrier();
      uint32_t words[kChunkWords];
      pack_chunk(c, words);
      stage_chunk(c % STAGING * kChunkBytes, words);
      async_proxy_fence();
      barrier();
      send_chunk(c);
    }
  }
  __device__ __forceinline__ void add_bias(int from = 0, int to = CHUNKS) {
    if (p.bias == nullptr) return;
    const int row = first_row(list.read(segment).row_tile) + (thread >> 5) * 16 + (thread >> 2 & 7);
    const T* bias = static_cast<const T*>(p.bias);
    const float first = row < p.rows ? static_cast<float>(bias[row]) : 0.0f,
                second = row + 8 < p.rows ? static_cast<float>(bias[row + 8]) : 0.0f;
#pragma unroll
    for (int i = 16 * from; i < 16 * to; i++) sum[i] += i & 2 ? second : first;
  }

  // ---- partial sums, in global memory. Waiting is safe: blocks start in index order, and a stream-K owner waits only for blocks of lower
  // index, for what they store first; the pieces of a cut tile are neighbours, and all but one such group per launch are complete whenever
  // SMs are short.
  //
  // A flag is set when it holds the nonce of this launch. Whoever waited for it clears it, and every flag that is set is waited for: so a
  // replay of a captured launch, which has the same nonce again, finds none set, and what the workspace held before does not matter.

  __device__ __forceinline__ float4* partials_of(int block) const {
    using Index = std::conditional_t<TILE::ROW_PAIRS, int64_t, uint32_t>;  // where each spills nothing
    return reinterpret_cast<float4*>(p.partials) + static_cast<Index>(block * 2 + half) * (TILE::TOKENS / 8 * kThreadsPerGroup) + thread;
  }
  __device__ __forceinline__ uint64_t* flag_of(int block, int reader) const {
    return p.flags + static_cast<uint32_t>((block * 2 + half) * kMaxPieces + reader);
  }
  // Of sums that were stored before a barrier of the warpgroup.
  __device__ __forceinline__ void set_flag(int reader) const { store_release(flag_of(static_cast<int>(blockIdx.x), reader), p.nonce); }
  __device__ __forceinline__ void await_flag(int block, int reader) const {
    uint64_t* flag = flag_of(block, reader);
    while (load_acquire(flag) != p.nonce) {
    }
    if (!NYBBLE_FAULT(kFlagNotReset) && !NYBBLE_FAULT(kFlagNotCleared)) *flag = 0;
  }
  __device__ __forceinline__ void store_partial_chunk(float4* to, int chunk) const {
#pragma unroll
    for (int i = 4 * chunk; i < 4 * chunk + 4; i++)
      __stcg(to + i * kThreadsPerGroup, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  }
  __device__ __forceinline__ void store_partial_chunks(int skip_first, int skip_last) const {
    float4* to = partials_of(static_cast<int>(blockIdx.x));
    NYBBLE_DELAY(3);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c < skip_first || c >= skip_last) store_partial_chunk(to, c);
    }
  }
  __device__ __forceinline__ void add_partial_chunks(int block, int first, int last) {
    const float4* from = partials_of(block);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c >= first && c < last) add_sums<4>(4 * c, from);
    }
  }
  template <int COUNT>
  __device__ __forceinline__ void add_sums(int start, const float4* from) {
    float4 v[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = __ldcg(from + (start + i) * kThreadsPerGroup);
#pragma unroll
    for (int i = 0; i < COUNT; i++) add_sum(start + i, v[i]);
  }

  // All sums of a block, with the loads of 8 or 16 under way: as many as spill nothing.
  __device__ __forceinline__ void add_block(int block) {
    constexpr int COUNT = TILE::TOKENS / 8, AT_ONCE = COUNT % 16 == 0 && TILE::ROW_PAIRS ? 16 : COUNT % 8 == 0 ? 8 : 4;
    const float4* from = partials_of(block);
#pragma unroll
    for (int start = 0; start < COUNT; start += AT_ONCE) add_sums<AT_ONCE>(start, from);
  }
  __device__ __forceinline__ void add_sum(int i, const float4& v) {
    sum[4 * i] += v.x;
    sum[4 * i + 1] += v.y;
    sum[4 * i + 2] += v.z;
    sum[4 * i + 3] += v.w;
  }
  // The same sums, with the loads of several pieces under way.
  __device__ __forceinline__ void add_pieces(int block0, int me, int first, int last) {
    constexpr int AT_ONCE = TILE::PIECES_AT_ONCE;
    const int pieces = p.work.pieces, start = NYBBLE_ANY_OF(pieces);
    const auto other = [&](int i) { return NYBBLE_FAULT(kArrivalOrder) ? (start + i) % pieces : i; };
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c < first || c >= last) continue;
      for (int i = 0; i < pieces; i += AT_ONCE) {
        float4 v[AT_ONCE][4];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          if (i + j >= pieces || other(i + j) == me) continue;
          const float4* from = partials_of(block0 - 2 * other(i + j)) + 4 * c * kThreadsPerGroup;
#pragma unroll
          for (int q = 0; q < 4; q++) v[j][q] = __ldcg(from + q * kThreadsPerGroup);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          if (i + j >= pieces || other(i + j) == me) continue;
#pragma unroll
          for (int q = 0; q < 4; q++) add_sum(4 * c + q, v[j][q]);
        }
      }
    }
  }

  // The half that one of two pieces finishes: the registers of the other half take the other piece's sums, all under way at once.
  template <int ME>
  __device__ __forceinline__ void exchange_halves() {
    constexpr int HALF = CHUNKS / 2, FIRST = ME * HALF, GIVEN = HALF - FIRST;
    const int other = static_cast<int>(blockIdx.x) + (ME == 0 ? -2 : 2);
    float4* to = partials_of(static_cast<int>(blockIdx.x));
    NYBBLE_DELAY(3);
#pragma unroll
    for (int c = GIVEN; c < GIVEN + HALF; c++) store_partial_chunk(to, c);
#pragma unroll
    for (int i = 16 * GIVEN; i < 16 * (GIVEN + HALF); i++) sum[i] = 0.0f;  // ends their lives
    barrier();
    if (thread == 0) {
      set_flag(1 - ME);
      await_flag(other, ME);
    }
    await_spare();
    barrier();
    float4 v[4 * HALF];
    const float4* from = partials_of(other) + 4 * FIRST * kThreadsPerGroup;
#pragma unroll
    for (int i = 0; i < 4 * HALF; i++) v[i] = __ldcg(from + i * kThreadsPerGroup);
    write_to_spare(FIRST, FIRST + HALF, [&](int chunk) {
#pragma unroll
      for (int i = 0; i < 4; i++) add_sum(4 * chunk + i, v[4 * (chunk - FIRST) + i]);
      add_bias(chunk, chunk + 1);
    });
  }
  // A tile cut into pieces, one per cluster: each piece stores its sums and finishes its own share of the tokens, its own sums first, then
  // those of the other pieces in ascending order.
  __device__ __forceinline__ void exchange_pieces(int cluster) {
    const int pieces = p.work.pieces, me = cluster % pieces;
    if constexpr (!TILE::ROW_PAIRS && CHUNKS % 2 == 0) {
      if (pieces == 2) return me == 0 ? exchange_halves<0>() : exchange_halves<1>();
    }
    const int first = first_chunk(p.work, me, CHUNKS), last = first_chunk(p.work, me + 1, CHUNKS);
    const int block0 = static_cast<int>(blockIdx.x) + 2 * me;  // of piece 0: block indices fall as clusters rise
    store_partial_chunks(first, last);
    barrier();
    if (thread < pieces && thread != me) {
      if (first_chunk(p.work, thread, CHUNKS) < first_chunk(p.work, thread + 1, CHUNKS)) set_flag(thread);
      if (first < last) await_flag(block0 - 2 * thread, me);
    }
    await_spare();
    barrier();
    if constexpr (TILE::PIECES_AT_ONCE > 1) {
      add_pieces(block0, me, first, last);
    } else {
      const int start = NYBBLE_ANY_OF(pieces);
      for (int i = 0; i < pieces; i++) {
        const int piece = NYBBLE_FAULT(kArrivalOrder) ? (start + i) % pieces : i;
        if (piece != me) add_partial_chunks(block0 - 2 * piece, first, last);
      }
    }
    add_bias();
    write_chunks(first, last);
  }
  // Row pairs set the flag some steps later: nobody waits for it so early, and the next steps need not wait until the sums have left.
  __device__ __forceinline__ void store_for_owner() {
    store_partial_chunks(0, 0);
    if constexpr (TILE::ROW_PAIRS) {
      owes_flag = true;
    } else {
      barrier();
      if (leader()) set_flag(0);
    }
  }
  __device__ __forceinline__ void set_owed_flag() {
    if (!owes_flag) return;
    barrier();
    if (leader()) set_flag(0);
    owes_flag = false;
  }
  // Stream-K: this cluster has the start of the tile; the clusters after it have the rest, in order.
  __device__ __forceinline__ void collect_partials(int cluster) {
    for (int c = cluster + 1; c < p.work.clusters; c++) {
      int owner = cluster;
      asm volatile("" : "+r"(owner));  // the end of the tile again each time: kept, it would be spilled
      if (stream_begin(p.work, c) >= last_tile_end(p.work, owner)) break;
      const int block = (p.work.clusters - 1 - c) * 2 + static_cast<int>(rank);
      if (leader()) await_flag(block, 0);
      barrier();
      add_block(block);
    }
  }
  // What becomes of the sums of a segment; write() takes those of a tile that this cluster finishes alone.
  template <typename WRITE>
  __device__ __forceinline__ void finish_sums(int cluster, WRITE write) {
    const bool whole = end - begin == p.work.steps;
    if (!whole && p.work.pieces > 1) {
      exchange_pieces(cluster);
    } else if (begin > 0) {
      store_for_owner();
    } else {
      if (!whole) collect_partials(cluster);
      add_bias();
      write();
    }
  }
};

}  // namespace nybble::hopper
