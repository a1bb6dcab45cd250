// The scales of row pairs: warps 8 and 9 of a CTA make those of a step, fp32, from the weight's own. Thread `entry` of 64 makes those of
// row `entry` of both halves of a step. Three ways to the same bits, by what the scales look like:
//
//   any     a cp.async a scale, a step at a time
//   units   blocks of 64 in fp32, k a multiple of 256: what lies together is fetched at once, a unit of four steps ahead: forward the
//           scales of four steps or the word of their codes, grad_x the word of the codes of both halves. Lanes are rows of W apart: every
//           fetch is a line of its own, and a sector
//   boxes   grad_x, k a multiple of 1024, with plain scales of 256: by TMA, 16 bytes of neighbours of each of 128 rows
#pragma once

#include "device/cp_async.cuh"
#include "device/scales.cuh"
#include "linear/hopper_rows_tile.cuh"

namespace nybble::hopper {

// named_barrier(), and the values are there before it: loads that they come from are not under way behind it. The compiler may move what
// only uses a value behind a barrier, not what the barrier itself takes.
__device__ __forceinline__ void named_barrier_behind(int id, int threads, float a, float b, float c, float d) {
  const uint32_t bits = __float_as_uint(a) ^ __float_as_uint(b) ^ __float_as_uint(c) ^ __float_as_uint(d);
  asm volatile("{.reg .pred p, q;\nsetp.eq.u32 q, %2, 0;\nbar.red.or.pred p, %0, %1, q;}" ::"r"(id), "r"(threads), "r"(bits) : "memory");
}

template <Direction DIRECTION, typename TILE>
struct RowsScales {
  static constexpr bool FORWARD = DIRECTION == Direction::kForward;
  static constexpr int SLOTS = TILE::SLOTS;
  using Cursor = UnitCursor<SLOTS>;
  const Params& p;
  const uint32_t smem;
  const int rank, lane;
  const RowsBarriers<TILE> barriers;
  const SegmentList::Entry first;

  __device__ __forceinline__ RowsScales(const Params& params, uint32_t base, uint32_t cluster_rank, int cluster)
      : p(params),
        smem(base),
        rank(static_cast<int>(cluster_rank)),
        lane(static_cast<int>(threadIdx.x & 31)),
        barriers(base),
        first(SegmentList::first(params, cluster)) {}
  __device__ __forceinline__ Cursor units() const { return Cursor(smem + TILE::LIST_OFFSET, first); }

  // First row of W, and its block of 64 along k, of half `half` of a step.
  __device__ __forceinline__ int first_row(const Cursor& at, int step, int half) const {
    return FORWARD ? (at.row_tile * 2 + rank) * kTileRows + half * 64 : step * kStep;
  }
  __device__ __forceinline__ int block_of(const Cursor& at, int step, int half) const {
    return FORWARD ? step : (at.row_tile * 2 + rank) * 2 + half;
  }

  // A place of thread `entry`'s own: the scale, or the word that holds its code and behind it the nested scale.
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
  // The offset of nested scales; behind the first fetches, so that the start waits for global memory once.
  __device__ __forceinline__ float load_code_values(int entry) const {
    const ScaleSource& s = p.source;
    if (!s.nested) return 0.0f;
    const float offset = *s.offset;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; i++) value[i] = s.nested_code[entry + 64 * i];
#pragma unroll
    for (int i = 0; i < 4; i++) store_shared_u32(smem + TILE::CODE_VALUES_OFFSET + (entry + 64 * i) * 4, __float_as_uint(value[i]));
    named_barrier(4, 64);
    return round_through(offset, s.nested_dtype);
  }

  // Any block size, fp32 scales or nested ones of any type. Outside W zeros: there the activations are zero or nothing is stored.
  __device__ __forceinline__ void fetch_any(const Cursor& at, bool more, int slot, int entry, uint32_t (&byte)[2]) const {
    const ScaleSource& s = p.source;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t row = static_cast<uint32_t>(first_row(at, at.step + slot, half) + entry),
                     block = static_cast<uint32_t>(block_of(at, at.step + slot, half)) >> p.source.block_shift;
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
  __device__ __forceinline__ void make_any_scales(int entry) const {
    const ScaleSource& s = p.source;
    Cursor at = units(), ahead = units();
    uint32_t byte[SLOTS][2];
    bool more = ahead.advance();
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) fetch_any(ahead, more, slot, entry, byte[slot]);
    const float offset = load_code_values(entry);
    meet_cluster();
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

  // Blocks of 64 in fp32, a multiple of 4 in a row: forward, the scales of a unit or the word of their codes lie together; grad_x, the
  // codes of both halves do, at the same byte in every step. Plain scales of grad_x come as boxes.
  __device__ __forceinline__ bool takes_units() const {
    const ScaleSource& s = p.source;
    if (s.block_shift != 0 || s.blocks % SLOTS != 0) return false;
    return s.nested ? s.nested_dtype == DType::kFloat32 : FORWARD && reinterpret_cast<size_t>(s.absmax) % 16 == 0;
  }
  static constexpr uint32_t FETCHES = FORWARD ? 2 : SLOTS;  // of a thread for a unit: of halves, or of steps
  template <bool NESTED>
  __device__ __forceinline__ uint32_t fetched_at(uint32_t buffer, uint32_t i, int entry) const {
    if (!NESTED) return smem + TILE::SOURCE_OFFSET + buffer * (2 * TILE::SOURCE_BYTES) + (i * 64 + entry) * 16;
    return source_at(buffer * 2 + i / 2, i % 2, entry);
  }
  template <bool NESTED>
  __device__ __forceinline__ void fetch_unit(const Cursor& at, bool more, uint32_t buffer, int entry) const {
    const ScaleSource& s = p.source;
    const uint32_t row = static_cast<uint32_t>(first_row(at, at.step, 0) + entry), block = static_cast<uint32_t>(block_of(at, at.step, 0));
#pragma unroll
    for (uint32_t i = 0; i < FETCHES; i++) {
      const bool inside = more && row + 64 * i < s.n && block < s.blocks;
      const uint32_t index = inside ? (row + 64 * i) * s.blocks + block : 0, to = fetched_at<NESTED>(buffer, i, entry);
      if constexpr (NESTED) {
        copy_async_fill_4b(to, static_cast<const uint8_t*>(s.absmax) + (index & ~3u), inside ? 4 : 0);
        copy_async_fill_4b(to + 4, s.nested_absmax + index / static_cast<uint32_t>(kNestedBlockSize), inside ? 4 : 0);
      } else {
        copy_async_fill_16b(to, static_cast<const float*>(s.absmax) + index, inside ? 16 : 0);
      }
    }
    commit_copies();
  }
  template <bool NESTED>
  __device__ __forceinline__ void make_scales_of_units(int entry) const {
    Cursor at = units(), ahead = units();
    bool more = ahead.advance();
    fetch_unit<NESTED>(ahead, more, 0, entry);
    const float offset = NESTED ? load_code_values(entry) : 0.0f;
    meet_cluster();
    for (uint32_t group = 0; at.advance(); group ^= 1) {
      more = more && ahead.advance();
      fetch_unit<NESTED>(ahead, more, group ^ 1, entry);
      wait_copies<1>();
      uint2 source[FETCHES];
#pragma unroll
      for (uint32_t i = 0; i < FETCHES && NESTED; i++) source[i] = load_shared_u64(fetched_at<true>(group, i, entry));
      const uint32_t shift = FORWARD ? 0 : (static_cast<uint32_t>(block_of(at, 0, 0)) & 3) * 8;
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if constexpr (NESTED) {
            const uint2 from = source[FORWARD ? half : slot];
            const uint32_t code = from.x >> (FORWARD ? slot * 8 : shift + half * 8) & 255;
            scale[half] = nested_scale(code_value(code), __uint_as_float(from.y), offset, DType::kFloat32);
          } else {
            scale[half] = load_shared_f32(fetched_at<false>(group, half, entry) + slot * 4);
          }
        }
        hand_over(slot, group, entry, scale[0], scale[1]);
      }
    }
  }

  // Boxes: scales or codes by TMA, 16 bytes of neighbours of each of 128 rows, so that no thread fetches a line for 4 bytes. Two steps need
  // two neighbours of each row: its own two steps (forward), or both halves of a step (grad_x). Nested scales of 128 rows are neighbours,
  // too.
  __device__ __forceinline__ uint32_t nested_of(uint32_t index) const { return index / static_cast<uint32_t>(kNestedBlockSize); }
  template <bool NESTED>
  __device__ __forceinline__ void fetch_pair(const Cursor& at, bool more, int step, int buffer, int entry) const {
    const ScaleSource& s = p.source;
    const int row = first_row(at, at.step + step, 0), block = block_of(at, at.step + step, 0);
    if (entry == 0 && more) {
      barrier_expect(barriers.full_box(buffer), TILE::BOX_BYTES);
      tma_load(smem + TILE::SOURCE_OFFSET + buffer * TILE::BOX_BYTES, &p.scales, barriers.full_box(buffer),
               block & -(NESTED ? kCodeBox : kScaleBox), row);
    }
    if (!NESTED) return;
    const uint32_t to = smem + TILE::NESTED_OFFSET + buffer * TILE::NESTED_BYTES + entry * 4, last = nested_of(s.n * s.blocks - 1);
    const uint32_t from = nested_of(row * s.blocks + block) + entry;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      if (64 * i + entry > s.blocks / 2) continue;  // 128 rows begin in so many, and one
      const bool there = more && from + 64 * i <= last;
      copy_async_fill_4b(to + 256 * i, s.nested_absmax + (there ? from + 64 * i : 0), there ? 4 : 0);
    }
    commit_copies();
  }
  template <bool NESTED>
  __device__ __forceinline__ void make_scales_of_boxes(int entry) const {
    const ScaleSource& s = p.source;
    Cursor at = units(), ahead = units();
    bool more = ahead.advance();
    NYBBLE_DELAY(22);
    if (entry == 0) {
      for (int pair = 0; pair < 2; pair++) barrier_init(barriers.full_box(pair), 1);
      barrier_init_fence();
    }
    __syncwarp();
    for (int pair = 0; pair < 2; pair++) fetch_pair<NESTED>(ahead, more, 2 * pair, pair, entry);
    const float offset = NESTED ? load_code_values(entry) : 0.0f;
    if constexpr (!NESTED) named_barrier(4, 64);  // the other warp waits for boxes: their barriers are there. Nested: in load_code_values()
    meet_cluster();
    for (uint32_t group = 0; at.advance(); group ^= 1) {
      more = more && ahead.advance();
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        if constexpr (NESTED) {
          wait_copies<1>();
          named_barrier(4, 64);  // the other threads' copies
        }
        barrier_wait(barriers.full_box(pair), group);
        const int row = first_row(at, at.step + 2 * pair, 0), block = block_of(at, at.step + 2 * pair, 0);
        const uint32_t first = row * s.blocks + block, box = smem + TILE::SOURCE_OFFSET + pair * TILE::BOX_BYTES;
        float scale[2][2];  // rows 64 apart, neighbouring codes
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32_t of = 64 * i + entry;
          if constexpr (NESTED) {
            const uint32_t nested = nested_of(first + of * s.blocks) - nested_of(first);
            const uint32_t codes = load_shared_u32(box + of * kCodeBox + (block & (kCodeBox - 4))) >> (block & 2) * 8;
            const float factor = load_shared_f32(smem + TILE::NESTED_OFFSET + pair * TILE::NESTED_BYTES + nested * 4);
#pragma unroll
            for (int j = 0; j < 2; j++) scale[i][j] = nested_scale(code_value(codes >> 8 * j & 255), factor, offset, DType::kFloat32);
          } else {
            const uint2 scales = load_shared_u64(box + of * kCodeBox + (block & 2) * 4);
            scale[i][0] = __uint_as_float(scales.x);
            scale[i][1] = __uint_as_float(scales.y);
          }
        }
        named_barrier_behind(4, 64, scale[0][0], scale[0][1], scale[1][0], scale[1][1]);  // what was read of the box has arrived
        NYBBLE_DELAY(18);
        fetch_pair<NESTED>(ahead, more, 2 * pair, pair, entry);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          hand_over(2 * pair + i, group, entry, FORWARD ? scale[0][i] : scale[i][0], FORWARD ? scale[1][i] : scale[i][1]);
        }
      }
    }
  }

  template <bool NESTED>
  __device__ __forceinline__ void make_scales_of(int entry) const {
    if (!FORWARD && p.source.boxes) return make_scales_of_boxes<NESTED>(entry);
    if ((FORWARD || NESTED) && takes_units()) return make_scales_of_units<NESTED>(entry);
    make_any_scales(entry);
  }
  __device__ __forceinline__ void make_scales(int entry) const {
    p.source.nested ? make_scales_of<true>(entry) : make_scales_of<false>(entry);
  }
};

}  // namespace nybble::hopper
