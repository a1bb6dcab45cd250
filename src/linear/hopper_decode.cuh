// Decode warps of the Hopper kernel: packed bytes and scales by TMA, weights to registers, then to both CTAs' shared memory.
#pragma once

#include "device/cp_async.cuh"
#include "device/global.cuh"
#include "device/scales.cuh"
#include "linear/hopper_kernel.cuh"

namespace nybble::hopper {

// Warp `index` of the decode warps fills JOB_ROWS rows of half `rank` of weight slot index / WARPS, every W_SLOTS-th step.
template <Direction DIRECTION, typename T, typename TILE>
struct Decoder {
  static constexpr int ROWS = TILE::JOB_ROWS / 32;  // of a lane

  const Params& p;
  Barriers<TILE> barriers;
  SegmentList list;
  uint32_t smem, rank;
  int lane, warp, slot, part;
  uint32_t packed, scales;         // this warp's buffers
  uint32_t weights, peer_weights;  // its rows of the slot, here and in the peer
  uint32_t peer_full;

  int step = 0, end = 0, row_tile = 0, segment = 1;
  uint32_t scale_code = 0;  // nested scales: address of the code of this lane's first row
  float offset = 0;
  bool more = true;
  uint4 codes[ROWS];  // kRuns: of 16 steps, and their nested scale
  float run_scale[ROWS];

  __device__ __forceinline__ Decoder(const Params& params, uint32_t base, uint32_t cluster_rank, int index)
      : p(params), barriers{base + TILE::BARRIER_OFFSET}, list{base + TILE::LIST_OFFSET}, smem(base), rank(cluster_rank) {
    lane = static_cast<int>(threadIdx.x & 31);
    warp = index;
    slot = index / TILE::WARPS;
    part = index % TILE::WARPS;
    packed = smem + TILE::PACKED_OFFSET + warp * TILE::PACKED_BYTES;
    scales = smem + TILE::SCALE_OFFSET + warp * 2 * TILE::SCALE_BYTES;
    weights = smem + slot * kWeightBytes + rank * kHalfBytes + part * TILE::JOB_ROWS * 128;
    peer_weights = peer_address(weights, rank ^ 1);
    peer_full = peer_address(barriers.full_w(rank, slot), rank ^ 1);
  }
  // Its own barrier and its first segment are all that the first loads need: they leave before the CTA is set up.
  __device__ __forceinline__ void begin(int cluster) {
    if (lane == 0) {
      barrier_init(barriers.full_packed(warp), 1);
      barrier_init_fence();
    }
    __syncwarp();
    const SegmentList::Entry first = SegmentList::first(p, cluster);
    step = first.begin + slot;
    end = first.end;
    row_tile = first.row_tile;
    more = end > 0;
  }

  // Issues the loads of the next job; `more` turns false after the last one.
  template <ScaleWay WAY>
  __device__ __forceinline__ void load_packed(bool first = false) {
    NYBBLE_DELAY(4);
    const bool other = first || step >= end;  // segment
    if (other && !first) {
      const auto e = list.read(segment++);
      step += e.begin - end;
      end = e.end;
      row_tile = e.row_tile;
      more = end > 0;
    }
    if (!more) return;
    const int first_row =
        part * TILE::JOB_ROWS + (DIRECTION == Direction::kForward ? row_tile * kTileRows + static_cast<int>(rank) * 64 : step * 64);
    const int block = DIRECTION == Direction::kForward ? step : row_tile * 2 + static_cast<int>(rank);  // of 64 along k
    if (lane == 0) {
      barrier_expect(barriers.full_packed(warp), TILE::PACKED_BYTES + (WAY == ScaleWay::kReady ? TILE::SCALE_BYTES : 0));
      tma_load(packed, &p.packed, barriers.full_packed(warp), block * 32, first_row);
      if (WAY == ScaleWay::kReady) tma_load(scales, &p.scales, barriers.full_packed(warp), first_row, block >> p.source.block_shift);
    }
    if (WAY == ScaleWay::kRuns) {
      load_run(first_row + lane, static_cast<uint32_t>(block), other || (step & 15) < TILE::W_SLOTS);
    } else if (WAY != ScaleWay::kReady) {
      load_own_scales<WAY>(first_row + lane, static_cast<uint32_t>(block >> p.source.block_shift));
    }
    step += TILE::W_SLOTS;
  }

  // Codes of 16 steps at a time, in registers; outside W those before stay: there the activations are zero or nothing is stored. A load of
  // a word a job takes the pipe of shared memory and L1 a cycle a row, and wgmma reads its operands through that.
  __device__ __forceinline__ void load_run(int row, uint32_t block, bool other) {
    const ScaleSource& s = p.source;
    const uint32_t index = static_cast<uint32_t>(row) * s.blocks + block;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const bool wanted = other && static_cast<uint32_t>(row) + 32 * i < s.n && block < s.blocks;
      const uint32_t at = index + 32 * i * s.blocks;
      load_global_u128_if(wanted, static_cast<const uint8_t*>(s.absmax) + (at & ~15u), codes[i]);
      load_global_f32_if(wanted, s.nested_absmax + at / static_cast<uint32_t>(kNestedBlockSize), run_scale[i]);
    }
  }
  __device__ __forceinline__ void make_run_scales(float (&scale)[ROWS]) const {
    const int at = step - TILE::W_SLOTS;
    float value[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const uint32_t low = at & 4 ? codes[i].y : codes[i].x, high = at & 4 ? codes[i].w : codes[i].z;
      value[i] = p.source.nested_code[__byte_perm(at & 8 ? high : low, 0, 0x4440 | (at & 3))];
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) scale[i] = nested_scale(value[i], run_scale[i], offset, DType::kFloat32);
  }

  // Every lane fetches what the scales of its own rows are made of, and reads it again itself: cp.async, because results of ordinary loads
  // are waited for where the branches of the loop join. Outside W zeros, like packed: there the activations are zero or nothing is stored.
  template <ScaleWay WAY>
  __device__ __forceinline__ void load_own_scales(int row, uint32_t block) {
    const ScaleSource& s = p.source;
    const uint32_t index = static_cast<uint32_t>(row) * s.blocks + block, to = scales + lane * 4;
    scale_code = to + (index & 3);  // the same byte for row + 32
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const bool inside = block < s.blocks && static_cast<uint32_t>(row) + 32 * i < s.n;
      const uint32_t at = inside ? index + 32 * i * s.blocks : 0, bytes = inside ? 4 : 0;
      if (WAY == ScaleWay::kNested || s.nested) {
        copy_async_fill_4b(to + i * 128, static_cast<const uint8_t*>(s.absmax) + (at & ~3u), bytes);
        copy_async_fill_4b(to + TILE::SCALE_BYTES + i * 128, s.nested_absmax + at / static_cast<uint32_t>(kNestedBlockSize), bytes);
      } else {
        copy_async_fill_4b(to + i * 128, static_cast<const float*>(s.absmax) + at, bytes);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void read_scales(float (&scale)[ROWS]) const {
#pragma unroll
    for (int i = 0; i < ROWS; i++) scale[i] = load_shared_f32(scales + i * 128 + lane * 4);
  }
  template <ScaleWay WAY>
  __device__ __forceinline__ void make_own_scales(float (&scale)[ROWS]) const {
    const ScaleSource& s = p.source;
    const DType dtype = WAY == ScaleWay::kNested ? DType::kFloat32 : s.nested_dtype;
    wait_copies<0>();
    if (WAY == ScaleWay::kAny && !s.nested) return read_scales(scale);
    float value[ROWS], nested[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) value[i] = s.nested_code[load_shared_u8(scale_code + i * 128)];  // 1 KB: stays in L1
#pragma unroll
    for (int i = 0; i < ROWS; i++) nested[i] = load_shared_f32(scales + TILE::SCALE_BYTES + i * 128 + lane * 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) scale[i] = nested_scale(value[i], nested[i], offset, dtype);
  }

  // Lane i decodes rows i, i + 32, ...: 64 weights each, 32 words. The packed buffer is free once this returns.
  __device__ __forceinline__ void decode(const float (&scale)[ROWS], uint32_t (&out)[ROWS][8][4]) {
    const uint32_t first = packed + lane * 32 + (lane >> 2 & 1) * 16;  // 32-byte swizzle: bit 7 of the offset flips bit 4
    uint4 low[ROWS], high[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      low[i] = load_shared_u128(first + i * 1024);
      high[i] = load_shared_u128((first ^ 16) + i * 1024);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const ScaledTable table = make_scaled_table<T>(p.values, scale[i]);
      const uint32_t words[8] = {low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w};
#pragma unroll
      for (int c = 0; c < 8; c++) decode_8(table, words[c], out[i][c]);
    }
    // Everything read from the packed buffer has been used: issuing the next load right after the reads were issued gave wrong weights.
    // That ptxas keeps this order is checked in its output (benchmarks/harness/sass_order.py).
#pragma unroll
    for (int i = 0; i < ROWS * 32; i++) asm volatile("" : "+r"(out[i / 32][i / 4 % 8][i % 4])::"memory");
    __syncwarp();
  }

  __device__ __forceinline__ void store(const uint32_t (&out)[ROWS][8][4]) {
    const uint32_t row = weights + lane * 128, swizzle = lane & 7;
    NYBBLE_DELAY(5);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (uint32_t c = 0; c < 8; c++)
        store_shared_u128(row + i * 4096 + ((c ^ swizzle) << 4), out[i][c][0], out[i][c][1], out[i][c][2], out[i][c][3]);
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(barriers.full_w(rank, slot));
      NYBBLE_DELAY(19);
      bulk_copy_to_peer(peer_weights, weights, TILE::JOB_ROWS * 128, peer_full);
    }
  }

  template <ScaleWay WAY>
  __device__ __forceinline__ void run_jobs() {
    uint32_t phase = 0;
    load_packed<WAY>(true);
    __syncwarp();
    cluster_wait_at_once();
    bool met = false;
    while (more) {
      uint32_t out[ROWS][8][4];
      float scale[ROWS];
      if (WAY == ScaleWay::kRuns) {
        make_run_scales(scale);
      } else if (WAY != ScaleWay::kReady) {
        make_own_scales<WAY>(scale);
      }
      barrier_wait(barriers.full_packed(warp), phase);
      if (WAY == ScaleWay::kReady) read_scales(scale);
      decode(scale, out);
      if (!met) meet_cluster();
      met = true;
      load_packed<WAY>();
      __syncwarp();
      barrier_wait(barriers.empty_w(slot), phase ^ 1);
      store(out);
      phase ^= 1;
    }
    if (!met) meet_cluster();
    if (!NYBBLE_FAULT(kEndNotAwaited)) barrier_wait(barriers.empty_w(slot), phase ^ 1);  // what this warp sent was read in both CTAs
  }
  // With its own scales it reads the weight alone, which no multiply writes; only then it need not wait for the grids before. One loop a
  // way, so that there is no branch on it in a step.
  __device__ __forceinline__ void run(int cluster) {
    const ScaleSource& s = p.source;
    cluster_arrive();
    begin(cluster);
    if (s.way == ScaleWay::kReady) {
      wait_for_previous_grids();
      return run_jobs<ScaleWay::kReady>();
    }
    if (s.way == ScaleWay::kAny) {
      if (s.nested) offset = round_through(*s.offset, s.nested_dtype);
      return run_jobs<ScaleWay::kAny>();
    }
    offset = *s.offset;
    prefetch_l1(reinterpret_cast<const uint8_t*>(s.nested_code) + lane * 32);
    if (DIRECTION == Direction::kForward && s.way == ScaleWay::kRuns) {
      for (int i = 0; i < ROWS; i++) codes[i] = make_uint4(0, 0, 0, 0), run_scale[i] = 0;
      return run_jobs<ScaleWay::kRuns>();
    }
    run_jobs<ScaleWay::kNested>();
  }
};

}  // namespace nybble::hopper
