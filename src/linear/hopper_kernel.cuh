// The kernel behind hopper.h. y = x W^T and grad_x = gy W are one body: out[token][row] = sum over the reduction of A[row] * act[token],
// with A = W (forward, row = n, reduction = k) or A = W^T (grad_x, row = k, reduction = n).
//
// A cluster of two CTAs owns a tile of 128 rows by 2 x TOKENS tokens, CTA c the tokens of its half. Per step (64 of the reduction):
//
//   TMA packed 32 B x 64 rows, 64 scales -> decode warp of CTA c: half c of the 128 x 64 weight tile, 8 KB of 16-bit weights
//       -> own shared memory and, by bulk copy, the peer's                      one decode serves 2 x TOKENS tokens
//   TMA activations TOKENS x 64 -> X slot
//   consumer warpgroup h: wgmma of weight half h (64 rows) with all TOKENS tokens, fp32 accumulators in registers
//
// One smem image of a weight half serves both directions: a unit is 64 weights of one row of W, 128 bytes, swizzled. Forward reads it
// K-major, grad_x MN-major.
//
// What bounds it: beside wgmma at full rate other instructions issue at half rate, so a decode must feed >= 512 tokens; and at large M the
// card is power-limited. docs/hopper.md has the measurements behind the slot counts, the register budgets and the deferred stores.
#pragma once

#include "device/async.cuh"
#include "device/decode.cuh"
#include "device/wgmma.cuh"
#include "linear/hopper.h"
#include "linear/sm90.h"

namespace nybble::hopper {

using namespace nybble::device;

constexpr int kThreadsPerGroup = 128;
constexpr int kHalfBytes = 64 * 128;  // half of a weight slot: 64 rows x 64 weights
constexpr int kWeightBytes = 2 * kHalfBytes;
constexpr int kChunkTokens = 32;  // of one output store
constexpr int kChunkBytes = kChunkTokens * 128;
constexpr int kCodeBox = 16;           // codes of a row that row pairs fetch at once
constexpr int kScaleBox = 4;           // plain scales, in as many bytes
constexpr int kMostBoxedBlocks = 448;  // of a row, where they do: the nested scales of 128 such rows are 225
constexpr int kChunkWords = 8;         // of a thread: 64 rows x 32 tokens, 16 bit, over 128 threads

// The list of segments in shared memory: dividing tile numbers between two wgmma groups would cost more than their time. Only the first and
// the last segment can be parts of a tile:
//   word 0, 1, 2: steps (begin | end << 16) of the first, a middle, the last segment;   word 3: number of the last;   then one tile a
//   segment
struct Params;
struct SegmentList {
  static constexpr int kBytes = 16 + kHopperMaxSegments * 4;
  uint32_t base;
  struct Entry {
    int begin, end, row_tile, token_tile;
  };
  // Every entry is written, each by one thread.
  __device__ __forceinline__ void write(const Work& work, int cluster, int i) const {
    const Share share = share_of(work, cluster);
    const Segment s = segment_of(work, share, i);
    const int last = share.range_segments + share.whole_tiles - (share.last_tile < 0 ? 1 : 0);
    if (i == 0) {
      store_shared_u32(base, s.begin | s.end << 16);
      store_shared_u32(base + 4, work.steps << 16);
      store_shared_u32(base + 12, last);
    }
    if (i == last) store_shared_u32(base + 8, s.begin | s.end << 16);
    store_shared_u32(base + 16 + 4 * i, s.row_tile | s.token_tile << 16);
  }
  // The first, as the host computed it: what a CTA starts with need not wait for the list.
  static __device__ __forceinline__ Entry first(const Params& p, int cluster);
  __device__ __forceinline__ bool is_last(int i) const { return i >= static_cast<int>(load_shared_u32(base + 12)); }
  // end = 0 behind the last.
  __device__ __forceinline__ Entry read(int i) const {
    const int last = static_cast<int>(load_shared_u32(base + 12));
    const uint32_t tile = load_shared_u32(base + 16 + 4 * i);
    uint32_t steps = load_shared_u32(base + (i == 0 ? 0 : i == last ? 8 : 4));
    if (i > last) steps = 0;
    return {static_cast<int>(steps & 0xffff), static_cast<int>(steps >> 16), static_cast<int>(tile & 0xffff), static_cast<int>(tile >> 16)};
  }
};

// TOKENS: per CTA. W_SLOTS, X_SLOTS: depth of the two rings. WARPS: decode warps that share a weight slot.
// STAGING: output chunks of a warpgroup in shared memory.
template <int TOKENS_, int W_SLOTS_, int X_SLOTS_, int WARPS_, int STAGING_>
struct Tile {
  static constexpr int TOKENS = TOKENS_, W_SLOTS = W_SLOTS_, X_SLOTS = X_SLOTS_, WARPS = WARPS_, STAGING = STAGING_;
  static constexpr int PIECES_AT_ONCE = 1;                              // loads of partial sums under way
  static constexpr bool ROW_PAIRS = false;                              // the CTAs of a cluster have the same rows and different tokens
  static constexpr int UNROLL = W_SLOTS > X_SLOTS ? W_SLOTS : X_SLOTS;  // slots are constants in the loop: descriptors stay uniform
  static constexpr int DECODE_WARPS = W_SLOTS * WARPS;
  static constexpr int THREADS = 2 * kThreadsPerGroup + 32 * DECODE_WARPS;
  static constexpr int JOB_ROWS = 64 / WARPS;  // rows of W that a decode warp fills in a slot
  static constexpr int X_BYTES = TOKENS * 128, X_BOX = TOKENS, PACKED_BYTES = JOB_ROWS * 32;
  static constexpr int SCALE_BYTES = JOB_ROWS * 4;  // fp32 scales, or words that hold the codes of nested ones; then as many nested scales
  static constexpr int CHUNKS = TOKENS / kChunkTokens, HELD = CHUNKS - STAGING;  // chunks that wait in registers
  // With 384 threads the launch gets 168 registers a thread; a sum beyond 3 x 168 makes the second raise wait for ever.
  static constexpr bool MOVE_REGISTERS = THREADS == 384;
  static constexpr int CONSUMER_REGISTERS = 200, DECODE_REGISTERS = 104;

  static constexpr int X_OFFSET = W_SLOTS * kWeightBytes;
  static constexpr int STAGING_OFFSET = X_OFFSET + X_SLOTS * X_BYTES;
  static constexpr int PACKED_OFFSET = STAGING_OFFSET + 2 * STAGING * kChunkBytes;
  static constexpr int SCALE_OFFSET = PACKED_OFFSET + DECODE_WARPS * PACKED_BYTES;
  static constexpr int BARRIER_OFFSET = SCALE_OFFSET + DECODE_WARPS * 2 * SCALE_BYTES;
  static constexpr int BARRIERS = 2 * X_SLOTS + 3 * W_SLOTS + DECODE_WARPS;
  static constexpr int LIST_OFFSET = BARRIER_OFFSET + BARRIERS * 8;
  static constexpr int SHARED_BYTES = LIST_OFFSET + SegmentList::kBytes;

  static_assert(SHARED_BYTES <= kSm90SharedBytes, "shared memory of a CTA");
  static_assert(2 * CONSUMER_REGISTERS + DECODE_REGISTERS <= 504, "registers of a CTA of 384 threads");
  static_assert(UNROLL <= 2 * W_SLOTS && UNROLL <= 2 * X_SLOTS && UNROLL % W_SLOTS == 0 && UNROLL % X_SLOTS == 0);
  static_assert(DECODE_WARPS % 4 == 0 && 2 * kThreadsPerGroup - 32 >= kHopperMaxSegments && LIST_OFFSET % 16 == 0 && HELD >= 0 &&
                HELD < UNROLL + 2);
};

using Tile256 = Tile<256, 4, 4, 1, 3>;
using Tile128 = Tile<128, 4, 8, 2, 2>;
using Tile64 = Tile<64, 4, 8, 2, 2>;

// Where decode warps find the scales of a step, by what the weight's own look like.
enum class ScaleWay : uint8_t {
  kReady,   // expanded before, Params::scales is a map of them
  kRuns,    // forward, blocks of 64, nested in fp32: the codes of 16 steps of a row are 16 aligned bytes
  kNested,  // nested in fp32
  kAny
};

// A weight's own scales: what warps need of them before their first load lies in one line of constants, as each costs hundreds of clocks.
struct ScaleSource {
  ScaleWay way;
  bool nested;
  bool boxes;  // row pairs: Params::scales is a map of the codes, or of the plain scales
  DType nested_dtype;
  uint32_t n, blocks;          // rows of W, blocks of a row
  const void* absmax;          // [n][blocks] fp32, or uint8 codes
  const float* nested_absmax;  // [ceil(n * blocks / 256)]
  const float* nested_code;    // [256]
  const float* offset;         // [1]
  int block_shift;             // log2(block / 64)
};

struct Params {
  CUtensorMap activation;  // [tokens][reduction], box TOKENS x 64
  CUtensorMap packed;      // [n][k / 2] bytes, box JOB_ROWS x 32
  CUtensorMap scales;  // [k / block][n] fp32, box 1 x JOB_ROWS; boxes: [n][k / 64] codes or scales, box 128 x 16 bytes; otherwise unused
  CUtensorMap output;  // [tokens][rows], box 32 x 64
  float values[16];    // of the 4-bit codes
  ScaleSource source;
  Work work;
  const void* bias;  // [rows] or null
  int rows;
  float* partials;            // float4 [block][warpgroup][TOKENS / 8][thread]
  uint64_t* flags;            // [block][warpgroup][kMaxPieces]
  uint64_t nonce;             // of this launch, not 0
  uint2 first[kMaxClusters];  // segment of each cluster: begin | end << 16, row tile | token tile << 16
};

__device__ __forceinline__ SegmentList::Entry SegmentList::first(const Params& p, int cluster) {
  const uint2 s = p.first[cluster];
  return {static_cast<int>(s.x & 0xffff), static_cast<int>(s.x >> 16), static_cast<int>(s.y & 0xffff), static_cast<int>(s.y >> 16)};
}

// Before the list, slots that others fill or read, and the peer; first loads into slots that nobody has touched may go before. For
// racecheck (a build with faults) all warps of a CTA wait at once: on a form where they did not it hung.
__device__ __forceinline__ void cluster_wait_at_once() {
  if (NYBBLE_FAULT(kForRacecheck)) cluster_wait();
}
__device__ __forceinline__ void meet_cluster() {
  if (!NYBBLE_FAULT(kForRacecheck)) cluster_wait();
}

// Barriers of a CTA, by address. Phases of a slot alternate full, empty.
template <typename TILE>
struct Barriers {
  uint32_t base;
  __device__ uint32_t full_x(int slot) const { return base + 8 * slot; }
  __device__ uint32_t empty_x(int slot) const { return base + 8 * (TILE::X_SLOTS + slot); }  // warpgroup 0 has read it
  __device__ uint32_t full_w(int half, int slot) const { return base + 8 * (2 * TILE::X_SLOTS + half * TILE::W_SLOTS + slot); }
  // The half that this CTA decodes has been read by its warpgroup in both CTAs.
  __device__ uint32_t empty_w(int slot) const { return base + 8 * (2 * TILE::X_SLOTS + 2 * TILE::W_SLOTS + slot); }
  __device__ uint32_t full_packed(int warp) const { return base + 8 * (2 * TILE::X_SLOTS + 3 * TILE::W_SLOTS + warp); }

  __device__ void init(uint32_t rank) const {
    for (int s = 0; s < TILE::X_SLOTS; s++) {
      barrier_init(full_x(s), 1);
      barrier_init(empty_x(s), 1);
    }
    for (int s = 0; s < TILE::W_SLOTS; s++) {
      barrier_init(full_w(rank, s), TILE::WARPS);
      barrier_init(full_w(rank ^ 1, s), 1);
      barrier_init(empty_w(s), 2);
    }
    barrier_init_fence();
    for (int s = 0; s < TILE::W_SLOTS; s++) barrier_expect(full_w(rank ^ 1, s), kHalfBytes);
  }
};

// Parity of the phase that a ring of SLOTS slots is in at stage `stage` of the unrolled loop; group: parity of the loop's iteration.
template <int UNROLL, int SLOTS>
__device__ __forceinline__ uint32_t ring_parity(int stage, uint32_t group) {
  return UNROLL == SLOTS ? group : static_cast<uint32_t>(stage / SLOTS & 1);
}

}  // namespace nybble::hopper
