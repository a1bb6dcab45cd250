// What the roles of the kernel for row pairs (hopper_rows.cuh) share: shared memory of a CTA, its barriers, the walk over the steps.
#pragma once

#include "device/byte_table.cuh"
#include "linear/hopper_output.cuh"

namespace nybble::hopper {

// STAGING: output chunks of a warpgroup in shared memory. Slots are constants of loops unrolled by SLOTS, the unit of steps. Dynamic shared
// memory starts 1 KB after a multiple of 64 KB:
//   low region, 63 KB: X slots that do not fit above | staging | packed | scales | barriers | list      64 KB: byte table
//   high region, 100 KB: X slots | values of nested codes | nested scales
template <int TOKENS_, int STAGING_>
struct RowsTile {
  static constexpr int TOKENS = TOKENS_, STAGING = STAGING_, SLOTS = 4;
  static constexpr bool ROW_PAIRS = true;
  static constexpr int PIECES_AT_ONCE = TOKENS == 256 ? 2 : 4;
  static constexpr int THREADS = 384, CHUNKS = TOKENS / kChunkTokens, JOB_ROWS = 64;
  static constexpr int X_BYTES = TOKENS * 128, X_BOX = TOKENS / 2;
  static constexpr int PACKED_BYTES = 2 * JOB_ROWS * 32, SCALE_BYTES = 2 * JOB_ROWS * 4;  // of a step, both halves
  static constexpr int SOURCE_BYTES = 2 * SCALE_BYTES;                                    // what scales are made of, fetched steps ahead
  static constexpr int BOX_BYTES = 128 * kCodeBox, NESTED_BYTES = 240 * 4;                // of two steps: boxes, nested scales
  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;

  static constexpr int HIGH_BYTES = 99 * 1024, HIGH_SLOTS = SLOTS < HIGH_BYTES / X_BYTES ? SLOTS : HIGH_BYTES / X_BYTES;
  static constexpr int STAGING_OFFSET = (SLOTS - HIGH_SLOTS) * X_BYTES;
  static constexpr int PACKED_OFFSET = STAGING_OFFSET + 2 * STAGING * kChunkBytes;
  static constexpr int SOURCE_OFFSET = PACKED_OFFSET + SLOTS * PACKED_BYTES;
  static constexpr int SCALE_OFFSET = SOURCE_OFFSET + SLOTS * SOURCE_BYTES;
  static constexpr int BARRIER_OFFSET = SCALE_OFFSET + SLOTS * SCALE_BYTES;
  static constexpr int LIST_OFFSET = BARRIER_OFFSET + (4 * SLOTS + 2) * 8;
  static constexpr int TABLE_OFFSET = 63 * 1024, HIGH_OFFSET = TABLE_OFFSET + static_cast<int>(kByteTableBytes);
  static constexpr int CODE_VALUES_OFFSET = HIGH_OFFSET + HIGH_SLOTS * X_BYTES;
  static constexpr int NESTED_OFFSET = CODE_VALUES_OFFSET + 1024;
  static constexpr int SHARED_BYTES = NESTED_OFFSET + 2 * NESTED_BYTES;

  static_assert(LIST_OFFSET + SegmentList::kBytes <= TABLE_OFFSET && SHARED_BYTES <= kSm90SharedBytes, "shared memory of a CTA");
  static_assert((kMostBoxedBlocks / 2 + 1) * 4 <= NESTED_BYTES);
  static_assert(2 * 2 * JOB_ROWS * SLOTS * 4 <= SLOTS * SOURCE_BYTES, "plain scales of two units");
  static_assert(2 * BOX_BYTES <= SLOTS * SOURCE_BYTES && X_BYTES == CHUNKS * kChunkBytes && SLOTS >= 4);
  static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 504 && LIST_OFFSET % 16 == 0);

  static __device__ __forceinline__ uint32_t x_slot(uint32_t smem, int slot) {
    const int high = HIGH_OFFSET + slot * X_BYTES;
    if constexpr (HIGH_SLOTS == SLOTS) return smem + high;
    return smem + (slot < HIGH_SLOTS ? high : (slot - HIGH_SLOTS) * X_BYTES);
  }
};

using Rows256 = RowsTile<256, 1>;
using Rows192 = RowsTile<192, 1>;
using Rows160 = RowsTile<160, 2>;
using Rows128 = RowsTile<128, 2>;
using Rows96 = RowsTile<96, 2>;
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
  // Initialised by the thread that fetches boxes.
  __device__ uint32_t full_box(int buffer) const { return base + 8 * (4 * TILE::SLOTS + buffer); }

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

// The units of SLOTS steps of a cluster, one after the other; those of the first segment before the list is there.
template <int SLOTS>
struct UnitCursor {
  SegmentList list;
  int segment = 1, step, end, row_tile, token_tile;
  __device__ __forceinline__ UnitCursor(uint32_t list_at, const SegmentList::Entry& first)
      : list{list_at}, step(first.begin - SLOTS), end(first.end), row_tile(first.row_tile), token_tile(first.token_tile) {}
  __device__ __forceinline__ bool advance() {
    step += SLOTS;
    if (step < end) return true;
    if (end == 0) return false;
    const auto e = list.read(segment++);
    step = e.begin;
    end = e.end;
    row_tile = e.row_tile;
    token_tile = e.token_tile;
    return end > 0;
  }
};

}  // namespace nybble::hopper
