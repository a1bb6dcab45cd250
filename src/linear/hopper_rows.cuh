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
#include "device/cp_async.cuh"
#include "device/mma.cuh"
#include "device/scales.cuh"
#include "device/wgmma_rs.cuh"
#include "linear/hopper_output.cuh"

namespace nybble::hopper {

// STAGING: output chunks of a warpgroup in shared memory. Slots are constants of loops unrolled by SLOTS, the unit of steps. Dynamic shared
// memory starts 1 KB after a multiple of 64 KB:
//   low region, 63 KB: X slots that do not fit above | staging | packed | scales | barriers | list      64 KB: byte table
//   high region, 100 KB: X slots | values of nested codes
template <int TOKENS_, int STAGING_>
struct RowsTile {
  static constexpr int TOKENS = TOKENS_, STAGING = STAGING_, SLOTS = 4;
  static constexpr bool ROW_PAIRS = true;
  static constexpr int PIECES_AT_ONCE = TOKENS == 256 ? 2 : 4;
  static constexpr int THREADS = 384, CHUNKS = TOKENS / kChunkTokens, JOB_ROWS = 64;
  static constexpr int X_BYTES = TOKENS * 128, X_BOX = TOKENS / 2;
  static constexpr int PACKED_BYTES = 2 * JOB_ROWS * 32, SCALE_BYTES = 2 * JOB_ROWS * 4;  // of a step, both halves
  static constexpr int SOURCE_BYTES = 2 * SCALE_BYTES;  // steps ahead that codes and nested scales are fetched
  static constexpr bool MOVE_REGISTERS = true;
  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;

  static constexpr int HIGH_BYTES = 99 * 1024, HIGH_SLOTS = SLOTS < HIGH_BYTES / X_BYTES ? SLOTS : HIGH_BYTES / X_BYTES;
  static constexpr int STAGING_OFFSET = (SLOTS - HIGH_SLOTS) * X_BYTES;
  static constexpr int PACKED_OFFSET = STAGING_OFFSET + 2 * STAGING * kChunkBytes;
  static constexpr int SOURCE_OFFSET = PACKED_OFFSET + SLOTS * PACKED_BYTES;
  static constexpr int SCALE_OFFSET = SOURCE_OFFSET + SLOTS * SOURCE_BYTES;
  static constexpr int BARRIER_OFFSET = SCALE_OFFSET + SLOTS * SCALE_BYTES;
  static constexpr int LIST_OFFSET = BARRIER_OFFSET + 4 * SLOTS * 8;
  static constexpr int TABLE_OFFSET = 63 * 1024, HIGH_OFFSET = TABLE_OFFSET + static_cast<int>(kByteTableBytes);
  static constexpr int CODE_VALUES_OFFSET = HIGH_OFFSET + HIGH_SLOTS * X_BYTES;
  static constexpr int SHARED_BYTES = CODE_VALUES_OFFSET + 1024;

  static_assert(LIST_OFFSET + SegmentList::kBytes <= TABLE_OFFSET && SHARED_BYTES <= 232448, "shared memory of a CTA");
  static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 504 && THREADS >= kHopperMaxSegments && LIST_OFFSET % 16 == 0);

  static __device__ __forceinline__ uint32_t x_slot(uint32_t smem, int slot) {
    const int high = HIGH_OFFSET + slot * X_BYTES;
    if constexpr (HIGH_SLOTS == SLOTS) return smem + high;
    return smem + (slot < HIGH_SLOTS ? high : (slot - HIGH_SLOTS) * X_BYTES);
  }
};

using Rows256 = RowsTile<256, 1>;
using Rows192 = RowsTile<192, 1>;
using Rows128 = RowsTile<128, 2>;
using Rows64 = RowsTile<64, 2>;

// Barriers of a CTA, by address. Phases of a slot alternate full, empty.
template <typename TILE>
struct RowsBarriers {
  uint32_t base;
  __device__ __forceinline__ explicit RowsBarriers(uint32_t smem) : base(smem + TILE::BARRIER_OFFSET) {}
  __device__ uint32_t full_x(int slot) const { return base + 8 * slot; }
  __device__ uint32_t empty_x(int slot) const { return base + 8 * (TILE::SLOTS + slot); }  // read by all warpgroups of the cluster
  __device__ uint32_t full_w(int slot) const { return base + 8 * (2 * TILE::SLOTS + slot); }
  __device__ uint32_t empty_w(int slot) const { return base + 8 * (3 * TILE::SLOTS + slot); }

  __device__ void init() const {
    const int arrivals = NYBBLE_FAULT(kForRacecheck) ? 32 : 1;  // of a warp
    for (int s = 0; s < TILE::SLOTS; s++) {
      barrier_init(full_x(s), 1);
      barrier_init(empty_x(s), 4);
      barrier_init(full_w(s), 1 + 2 * arrivals);  // packed bytes, two warps of scales
      barrier_init(empty_w(s), 8 * arrivals);     // consumer warps
    }
    barrier_init_fence();
  }
};

// The units of SLOTS steps of a cluster, one after the other.
template <int SLOTS>
struct UnitCursor {
  SegmentList list;
  int segment = 0, step = 0, end = 0, row_tile = 0, token_tile = 0;
  __device__ __forceinline__ explicit UnitCursor(uint32_t at) : list{at} {}
  __device__ __forceinline__ bool advance() {
    step += SLOTS;
    if (step < end) return true;
    const auto e = list.read(segment++);
    step = e.begin;
    end = e.end;
    row_tile = e.row_tile;
    token_tile = e.token_tile;
    return end > 0;
  }
};

template <Direction DIRECTION, typename TILE>
struct RowsProducer {
  static constexpr bool FORWARD = DIRECTION == Direction::kForward;
  static constexpr int SLOTS = TILE::SLOTS;
  using Cursor = UnitCursor<SLOTS>;
  const Params& p;
  const uint32_t smem;
  const int rank, lane;
  const RowsBarriers<TILE> barriers;

  __device__ __forceinline__ RowsProducer(const Params& params, uint32_t base, uint32_t cluster_rank)
      : p(params), smem(base), rank(static_cast<int>(cluster_rank)), lane(static_cast<int>(threadIdx.x & 31)), barriers(base) {}

  // First row of W, and its block of 64 along k, of half `half` of a step.
  __device__ __forceinline__ int first_row(const Cursor& at, int step, int half) const {
    return FORWARD ? (at.row_tile * 2 + rank) * kTileRows + half * 64 : step * kStep;
  }
  __device__ __forceinline__ int block_of(const Cursor& at, int step, int half) const {
    return FORWARD ? step : (at.row_tile * 2 + rank) * 2 + half;
  }

  // One lane. Its half of the tokens goes to both CTAs.
  __device__ __forceinline__ void load_activations() const {
    Cursor at(smem + TILE::LIST_OFFSET);
    for (uint32_t group = 0; at.advance(); group ^= 1) {
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
  }

  // One lane.
  __device__ __forceinline__ void load_packed() const {
    Cursor at(smem + TILE::LIST_OFFSET);
    for (uint32_t group = 0; at.advance(); group ^= 1) {
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
  }

  // ---- scales: thread `entry` of 64 makes those of row `entry` of both halves. What they are made of comes by cp.async, a unit ahead,
  // into places of the thread's own: the word that holds the code, behind it the nested scale. Lanes are rows of W apart, so every fetch is
  // a line of its own, and lines are what this costs: a word of 4 codes is fetched once.

  __device__ __forceinline__ uint32_t source_at(int place, int half, int entry) const {
    return smem + TILE::SOURCE_OFFSET + place * TILE::SOURCE_BYTES + (half * 64 + entry) * 8;
  }
  // Where a consumer looks for the scale of a row: by row (forward), or by k16 step, thread t of four and element of the A fragment.
  __device__ __forceinline__ uint32_t scale_place(int slot, int entry) const {
    const int place = FORWARD ? entry : (entry & 48) + ((entry & 6) << 1) + (entry & 1) + (entry >> 2 & 2);
    return smem + TILE::SCALE_OFFSET + slot * TILE::SCALE_BYTES + place * 4;
  }
  __device__ __forceinline__ void hand_over(int slot, uint32_t group, int entry, float first, float second) const {
    NYBBLE_DELAY(13);
    barrier_wait(barriers.empty_w(slot), group ^ 1);
    store_shared_u32(scale_place(slot, entry), __float_as_uint(first));
    store_shared_u32(scale_place(slot, entry) + TILE::SCALE_BYTES / 2, __float_as_uint(second));
    __syncwarp();
    if (lane == 0 || NYBBLE_FAULT(kForRacecheck)) barrier_arrive(barriers.full_w(slot));
  }
  __device__ __forceinline__ float code_value(uint32_t code) const { return load_shared_f32(smem + TILE::CODE_VALUES_OFFSET + code * 4); }

  // Any block size, fp32 scales or nested ones of any type. Outside W zeros: there the activations are zero or nothing is stored.
  __device__ __forceinline__ void fetch_any(const Cursor& at, bool more, int slot, int entry, uint32_t (&byte)[2]) const {
    const ScaleSource& s = p.source;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t row = static_cast<uint32_t>(first_row(at, at.step + slot, half) + entry),
                     block = static_cast<uint32_t>(block_of(at, at.step + slot, half)) >> p.block_shift;
      const bool inside = more && block < s.blocks && row < s.n;
      const uint32_t index = inside ? row * s.blocks + block : 0, bytes = inside ? 4 : 0, to = source_at(slot, half, entry);
      byte[half] = index & 3;
      if (s.nested) {
        copy_async_fill_4b(to, static_cast<const uint8_t*>(s.absmax) + (index & ~3u), bytes);
        copy_async_fill_4b(to + 4, s.nested_absmax + index / static_cast<uint32_t>(kNestedBlockSize), bytes);
      } else {
        copy_async_fill_4b(to, static_cast<const float*>(s.absmax) + index, bytes);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void make_any_scales(int entry, float offset) const {
    const ScaleSource& s = p.source;
    Cursor at(smem + TILE::LIST_OFFSET), ahead(smem + TILE::LIST_OFFSET);
    uint32_t byte[SLOTS][2];
    bool more = ahead.advance();
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) fetch_any(ahead, more, slot, entry, byte[slot]);
    for (uint32_t group = 0; at.advance(); group ^= 1) {
      more = more && ahead.advance();
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        wait_copies<SLOTS - 1>();
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t from = source_at(slot, half, entry);
          scale[half] = s.nested ? nested_scale(code_value(load_shared_u8(from + byte[slot][half])), load_shared_f32(from + 4), offset,
                                                s.nested_dtype)
                                 : load_shared_f32(from);
        }
        hand_over(slot, group, entry, scale[0], scale[1]);
        fetch_any(ahead, more, slot, entry, byte[slot]);
      }
    }
  }

  // Blocks of 64, nested scales in fp32, a multiple of 4 blocks in a row: forward, the 4 codes of a unit are one word; grad_x, the codes of
  // both halves lie in one word, at the same byte in every step.
  __device__ __forceinline__ bool takes_words() const {
    const ScaleSource& s = p.source;
    return s.nested && s.nested_dtype == DType::kFloat32 && p.block_shift == 0 && s.blocks % SLOTS == 0;
  }
  __device__ __forceinline__ void fetch_word(uint32_t to, uint32_t index, bool inside) const {
    const ScaleSource& s = p.source;
    const uint32_t at = inside ? index : 0, bytes = inside ? 4 : 0;
    copy_async_fill_4b(to, static_cast<const uint8_t*>(s.absmax) + (at & ~3u), bytes);
    copy_async_fill_4b(to + 4, s.nested_absmax + at / static_cast<uint32_t>(kNestedBlockSize), bytes);
  }
  __device__ __forceinline__ void fetch_unit(const Cursor& at, bool more, uint32_t buffer, int entry) const {
    const ScaleSource& s = p.source;
    const uint32_t row = static_cast<uint32_t>(first_row(at, at.step, 0) + entry), block = static_cast<uint32_t>(block_of(at, at.step, 0));
#pragma unroll
    for (uint32_t i = 0; i < (FORWARD ? 2 : SLOTS); i++) {  // halves, or steps
      fetch_word(source_at(buffer * 2 + i / 2, i % 2, entry), (row + 64 * i) * s.blocks + block,
                 more && row + 64 * i < s.n && block < s.blocks);
    }
    commit_copies();
  }
  __device__ __forceinline__ void make_scales_of_words(int entry, float offset) const {
    Cursor at(smem + TILE::LIST_OFFSET), ahead(smem + TILE::LIST_OFFSET);
    bool more = ahead.advance();
    fetch_unit(ahead, more, 0, entry);
    for (uint32_t group = 0; at.advance(); group ^= 1) {
      more = more && ahead.advance();
      fetch_unit(ahead, more, group ^ 1, entry);
      wait_copies<1>();
      uint2 source[FORWARD ? 2 : SLOTS];
#pragma unroll
      for (uint32_t i = 0; i < (FORWARD ? 2 : SLOTS); i++) source[i] = load_shared_u64(source_at(group * 2 + i / 2, i % 2, entry));
      const uint32_t shift = FORWARD ? 0 : (static_cast<uint32_t>(block_of(at, 0, 0)) & 3) * 8;
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint2 from = source[FORWARD ? half : slot];
          const uint32_t code = from.x >> (FORWARD ? slot * 8 : shift + half * 8) & 255;
          scale[half] = nested_scale(code_value(code), __uint_as_float(from.y), offset, DType::kFloat32);
        }
        hand_over(slot, group, entry, scale[0], scale[1]);
      }
    }
  }

  __device__ __forceinline__ void make_scales(int entry) const {
    const ScaleSource& s = p.source;
    float offset = 0.0f;
    if (s.nested) {
      offset = round_through(*s.offset, s.nested_dtype);
      for (int i = entry; i < 256; i += 64) {
        store_shared_u32(smem + TILE::CODE_VALUES_OFFSET + i * 4, __float_as_uint(s.nested_code[i]));
      }
      named_barrier(4, 64);
    }
    takes_words() ? make_scales_of_words(entry, offset) : make_any_scales(entry, offset);
  }

  __device__ __forceinline__ void run(int warp) const {
    wait_for_previous_grids();
    if (warp == 2) {
      if (lane == 0) load_activations();
    } else if (warp == 3) {
      if (lane == 0) load_packed();
    } else {
      make_scales(warp * 32 + lane);
    }
  }
};

template <Direction DIRECTION, typename T, typename TILE>
struct RowsConsumer : Output<DIRECTION, T, TILE> {
  using Base = Output<DIRECTION, T, TILE>;
  using Base::begin, Base::end, Base::half, Base::p, Base::rank, Base::segment, Base::sum, Base::thread;
  using Base::enter_segment, Base::finish_sums, Base::leader, Base::write_chunks;
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
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILE::TOKENS / 2; i++) asm volatile("" : "+f"(sum[i])::"memory");
    release_x(SLOTS - 1);
  }

  __device__ __forceinline__ void run(int cluster) {
    wait_for_previous_grids();
    enter_segment();
    uint32_t group = 0;
    while (end > 0) {
      run_segment(group);
      finish_sums(cluster, [&] { write_chunks(0, TILE::CHUNKS); });
      segment++;
      enter_segment();
    }
    if (leader()) tma_wait_all();
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
  if (thread == 256) {
    prefetch_tensor_map(&p.activation);
    prefetch_tensor_map(&p.packed);
    prefetch_tensor_map(&p.output);
    RowsBarriers<TILE>(smem).init();
  }
  if (thread < kHopperMaxSegments) SegmentList{smem + TILE::LIST_OFFSET}.write(p.work, cluster, thread);
  __syncthreads();
  allow_next_grid();  // its blocks set themselves up while the last of this one finish
  cluster_sync();
  if (warpgroup < 2) {
    if constexpr (TILE::MOVE_REGISTERS) raise_register_limit<TILE::CONSUMER_REGISTERS>();
    fill_byte_table(smem + TILE::TABLE_OFFSET, p.values, thread);
    fill_byte_table(smem + TILE::TABLE_OFFSET, p.values, thread + 256);
    named_barrier(3, 2 * kThreadsPerGroup);
    RowsConsumer<DIRECTION, T, TILE>(p, smem, rank, warpgroup, warp).run(cluster);
  } else {
    if constexpr (TILE::MOVE_REGISTERS) lower_register_limit<TILE::PRODUCER_REGISTERS>();
    RowsProducer<DIRECTION, TILE>(p, smem, rank).run(warp - 8);
  }
  __syncwarp();
  cluster_sync();  // the peer may still copy into this CTA
}

}  // namespace nybble::hopper
