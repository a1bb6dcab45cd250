// Forward of up to 8 tokens: y[token][row] = sum over k of W[row][k] x[token][k]. W is the A operand of mma m16n8k16, decoded straight
// into registers; tokens are the 8 columns of B.
//
// 16 warps a CTA, one CTA an SM, cut as strip_work.h says: every output belongs to one CTA (of each range of columns), so there are no
// flags, and no barrier between warps until the sums of a group of strips are complete. Each warp streams what it needs through a ring of
// its own with cp.async, 2 KB a stage: x of a slice, 4 tokens a stage, then the items (16 rows x 256 columns) of that slice. Thread (g, t):
// rows g and g + 8, block t of the four of a slice; 8 codes of both rows (one word each) make two k16 steps, and the x that belongs to them
// are 8 consecutive elements of token g. x stays in registers for all items of a slice.
//
// Absmax codes and nested scales of a group of strips are contiguous in memory; the CTA copies them to shared memory once a group.
//
// Sums: a warp adds its slices in ascending order, then warps are added in ascending order: the same bits for every m.
//
// The weight is read before the grids before this one are complete (dependent launch): only kernels of the multiply let others start early,
// and they write activations and workspace. x is read, and y written, after them.
//
// What bounds it on an H200: issue slots and latency of decoding. About 450 instructions an item are 1800 issue slots of a scheduler for
// 65536 weights and SM, shared memory takes about 2500 clocks, DRAM 2000; measured are 3300 (docs/small_m.md).
#pragma once

#include "device/async.cuh"
#include "device/cp_async.cuh"
#include "device/decode.cuh"
#include "device/fault.h"
#include "device/mma.cuh"
#include "device/pair_table.cuh"
#include "linear/piece_sum.cuh"
#include "linear/strip_params.h"

namespace nybble::small_m::strip {

using namespace nybble::device;

constexpr int kThreads = kWarps * 32;
constexpr int kScaledWords = 0b0001;  // of the words of a chunk of the upper row: those that the scaled table decodes
constexpr int kStageTokens = 4;       // of x in a stage

// Shared memory, by address: pair table | 256 nested code values, 16 of the weight's | rings | of a group: sums, codes, nested scales.
constexpr uint32_t kCodeValues = kPairTableAddress + kPairTableBytes, kRings = kCodeValues + 1024 + 128;
static_assert(kRings + kWarps * kStages * kItemBytes == kGroupsAt);

template <typename T>
__device__ __forceinline__ T rounded(float v) {
  const uint16_t bits = static_cast<uint16_t>(pack_pair<T>(v, 0.f));
  T result;
  memcpy(&result, &bits, 2);
  return result;
}

// What the tables take from memory.
struct TableValues {
  float code_value, offset;

  __device__ __forceinline__ TableValues(const Params& p, int thread)
      : code_value(thread < 256 ? p.code_values[thread] : 0.f), offset(*p.offset) {}
};
static_assert(kThreads >= 256);

// By all threads, one after the other; a barrier must follow.
__device__ __forceinline__ void stage_values(const Params& p, uint8_t* table, int thread) {
  if (thread < 16) reinterpret_cast<float*>(table + kPairTableBytes)[256 + thread] = p.values[thread];
}
__device__ __forceinline__ void fill_tables(const TableValues& v, uint8_t* table, int thread) {
  float* const code_values = reinterpret_cast<float*>(table + kPairTableBytes);
  __syncthreads();
  fill_pair_table(table, code_values + 256, thread % kThreads, kThreads);
  if (thread < 256) code_values[thread] = v.code_value;
}

// One warp's ring of stages: `read` is the next one to be read, `write` the last one that was.
template <int STAGE_BYTES>
struct Ring {
  uint32_t base, read, write;

  explicit __device__ __forceinline__ Ring(uint32_t address) : base(address), read(address), write(address + (kStages - 1) * STAGE_BYTES) {}
  __device__ __forceinline__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t next() const {
    const uint32_t after = read + STAGE_BYTES;
    return after == base + kStages * STAGE_BYTES ? base : after;
  }
  __device__ __forceinline__ void advance() {
    write = read;
    read = next();
  }
};

// The stage that takes the next copy while ring.read is being read: the last one that was.
template <typename RING>
__device__ __forceinline__ uint32_t refilled(const RING& ring) {
  return NYBBLE_FAULT(kReleasedEarly) ? ring.read : ring.write;
}
__device__ __forceinline__ int stages_ahead() { return NYBBLE_FAULT(kReleasedEarly) ? kStages : kStages - 1; }

// x of one slice, of the tokens of a thread; zeros beyond m.
struct Activation {
  uint4 words[8] = {};  // of token g: word w holds elements 8 w .. of the thread's block

  // One token of a warp's first slice straight from memory, while all stages hold packed bytes. Of more tokens it would read every sector
  // twice, and L2 is what limits then.
  __device__ __forceinline__ void load(const Params& p, int slice, int lane) {
    const int token = lane >> 2;
    if (token >= p.m) return;
    const uint8_t* from = static_cast<const uint8_t*>(p.x) + (token * p.x_stride + slice * kSliceColumns + (lane & 3) * 64) * 2;
#pragma unroll
    for (int w = 0; w < 8; w++) words[w] = __ldcg(reinterpret_cast<const uint4*>(from) + w);
  }

  // Part i: tokens 4 i .. 4 i + 3, a row of 512 bytes each. Chunk c of 16 bytes of row r lies at c ^ (c >> 3 | (r & 1) << 2): no bank
  // conflicts when it is written and read.
  static __device__ __forceinline__ void fetch(const Params& p, int slice, int part, uint32_t stage, int lane) {
    const uint8_t* from = static_cast<const uint8_t*>(p.x) + (part * kStageTokens * p.x_stride + slice * kSliceColumns) * 2 + lane * 16;
#pragma unroll
    for (int r = 0; r < kStageTokens; r++) {
      const uint32_t place = lane ^ (lane >> 3 | (r & 1) << 2);
      if (part * kStageTokens + r < p.m) copy_async_fill_16b(stage + r * 512 + place * 16, from + r * p.x_stride * 2, 16);
    }
  }
  __device__ __forceinline__ void read(int m, int part, uint32_t stage, int lane) {
    const uint32_t r = lane >> 2 & 3, t = lane & 3;
    if (part != lane >> 4 || part * kStageTokens + static_cast<int>(r) >= m) return;
#pragma unroll
    for (int w = 0; w < 8; w++) words[w] = load_shared_u128(stage + r * 512 + (((8 * t + w) ^ (t | (r & 1) << 2)) << 4));
  }
};

// Walks what a warp multiplies, in that order, and copies it to stages.
struct Fetcher {
  const Params& p;
  const int warp, first, end;  // strips of the CTA
  const int first_slice, x_parts;
  int group = 0, round = -1, x_left = 0, left = 0;  // left: items of the part
  Part part;
  const uint8_t* packed = nullptr;  // what this lane copies first of an item
  int packed_step = 0;
  uint32_t even, odd;  // where the chunk of this lane lies in rows lane / 8 and lane / 8 + 4

  __device__ __forceinline__ Fetcher(const Params& params, int warp_, int first_, int end_, int first_slice_, int lane)
      : p(params), warp(warp_), first(first_), end(end_), first_slice(first_slice_), x_parts((params.m + kStageTokens - 1) / kStageTokens) {
    const uint32_t row = lane >> 3, chunk = lane & 7;
    even = kept(row * 128 + ((chunk ^ row) << 4)), odd = kept(512 + row * 128 + ((chunk ^ row ^ 4) << 4));
    next_part();
  }
  __device__ __forceinline__ void next_part() {
    do {
      if (++round == rounds(p.work)) round = 0, group += p.work.group;
      if (group >= end) return;
      part = part_of(p.work, warp, round, group, min(group + p.work.group, end));
      part.slice += first_slice;
      left = items_of(p.work, part);
    } while (left == 0);
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int64_t row = static_cast<int64_t>(first + part.low) * kStripRows + (lane >> 3);
    packed = p.packed + row * (p.k >> 1) + part.slice * (kSliceColumns / 2) + (lane & 7) * 16;
    packed_step = part.step * (kStripRows / 2) * p.k;
  }
  // Chunk c of 16 bytes of row r lies at c ^ (r & 7): no bank conflicts when it is read.
  __device__ __forceinline__ void fetch(uint32_t stage, int lane) {
    if (x_left > 0) {
      Activation::fetch(p, part.slice, x_parts - x_left, stage, lane);
      x_left--;
    } else if (left > 0) {
      const int64_t rows = static_cast<int64_t>(p.k) * 2;  // bytes of four
      copy_async_fill_16b(stage + even, packed, 16);
      copy_async_fill_16b(stage + odd, packed + rows, 16);
      copy_async_fill_16b(stage + even + 1024, packed + 2 * rows, 16);
      copy_async_fill_16b(stage + odd + 1024, packed + 3 * rows, 16);
      packed += packed_step;
      if (--left == 0) {
        next_part();
        if (left > 0) x_left = x_parts;
      }
    }
    commit_copies();
  }
};

// Absmax codes and nested scales of a group of strips in shared memory.
struct GroupScales {
  uint32_t codes, nested;  // addresses
  int offset = 0;          // of the group's first slice among the 64 slices that share its first nested scale

  // By all threads, which then wait for their copies and for each other.
  __device__ __forceinline__ void fetch(const Params& p, int first_strip, int count, int first_slice, int thread) {
    const int lane = thread & 31, slices = p.work.slices, rows = count * kStripRows;
    const int64_t row = static_cast<int64_t>(first_strip) * kStripRows;
    const uint8_t* from = p.codes + row * (p.k >> 6) + first_slice * 4;
    if (slices % 4 == 0 && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
      const int vectors = slices >> 2;
#pragma unroll 1  // as below: unrolled, the copies of one round cost more clocks before the first item than they save
      for (int i = thread; i < rows * vectors; i += kThreads) {
        const int r = p.work.by_code_vectors.quotient(i), c = i - r * vectors;
        copy_async_fill_16b(codes + r * code_row_words(slices) * 4 + c * 16, from + static_cast<int64_t>(r) * (p.k >> 6) + c * 16, 16);
      }
    } else {
#pragma unroll 1
      for (int r = thread >> 5; r < rows; r += kWarps) {
#pragma unroll 1
        for (int c = lane; c < slices; c += 32) {
          copy_async_fill_4b(codes + (r * code_row_words(slices) + c) * 4, from + static_cast<int64_t>(r) * (p.k >> 6) + c * 4, 4);
        }
      }
    }
    const int64_t begin = row * (p.k >> 8) + first_slice, end = begin + (rows - 1) * static_cast<int64_t>(p.k >> 8) + slices;
    const int64_t first = begin >> 6, last = (end - 1) >> 6;
#pragma unroll 1
    for (int i = thread; i <= last - first; i += kThreads) copy_async_fill_4b(nested + i * 4, p.scales + first + i, 4);
    offset = static_cast<int>(begin & 63);
    commit_copies();
  }
};

// Scales of a thread's two blocks of an item, for the items of a part in turn.
struct ScaleReader {
  uint32_t code, code_step, lower_code;  // address of the upper row's code, from strip to strip, from the upper to the lower row
  uint32_t nested;
  int index, index_step, lower_index;  // likewise, 64 to a nested scale

  __device__ __forceinline__ ScaleReader(const GroupScales& group, const Work& w, const Part& part, int first_strip, int lane) {
    const int row = (part.low - first_strip) * kStripRows + (lane >> 2), words = code_row_words(w.slices);
    code = group.codes + (row * words + part.slice) * 4 + (lane & 3);
    code_step = part.step * kStripRows * words * 4, lower_code = 32 * words;
    nested = group.nested;
    const int row_slices = w.slices * w.ranges;
    index = group.offset + row * row_slices + part.slice;
    index_step = part.step * kStripRows * row_slices, lower_index = 8 * row_slices;
  }
  __device__ __forceinline__ void advance() { code += code_step, index += index_step; }
  __device__ __forceinline__ float2 read(float offset) const {
    const uint32_t upper = load_shared_u8(code), lower = load_shared_u8(code + lower_code);
    const float upper_group = load_shared_f32(nested + (index >> 6) * 4),
                lower_group = load_shared_f32(nested + ((index + lower_index) >> 6) * 4);
    float2 scales;
    scales.x = __fadd_rn(multiply_flushed(load_shared_f32(kCodeValues + upper * 4), upper_group), offset);
    scales.y = __fadd_rn(multiply_flushed(load_shared_f32(kCodeValues + lower * 4), lower_group), offset);
    return scales;
  }
};

// Word w (8 codes) of both rows -> the A fragments of two k16 steps. Words of the upper row in kScaledWords take the scaled table (ALU),
// all others the pair table (shared memory): both pipes are busy alike.
template <typename T, int W>
__device__ __forceinline__ void decode_words(const ScaledTable& table, uint32_t lane_bytes, uint32_t upper, uint32_t lower,
                                             float upper_scale, float lower_scale, uint32_t (&a)[2][4]) {
  const auto by_pairs = [&](uint32_t word, int byte, float scale) {
    const uint2 v = load_shared_u64_at<kPairTableAddress>(permute_bytes(word, lane_bytes, 0x5504u | static_cast<uint32_t>(byte) << 4));
    return pack_pair<T>(multiply_flushed(__uint_as_float(v.x), scale), multiply_flushed(__uint_as_float(v.y), scale));
  };
  if constexpr ((kScaledWords >> W & 1) != 0) {
    uint32_t pairs[4];
    decode_8(table, upper, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i >> 1][(i & 1) * 2] = pairs[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i >> 1][(i & 1) * 2] = by_pairs(upper, i, upper_scale);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) a[i >> 1][(i & 1) * 2 + 1] = by_pairs(lower, i, lower_scale);
}

// One item: sums += its products.
template <typename T>
__device__ __forceinline__ void multiply_item(const Params& p, const Activation& x, uint32_t stage, int lane, float2 scales,
                                              float (&sums)[4]) {
  const uint32_t g = lane >> 2, t = lane & 3, lane_bytes = 8u * lane;
  const ScaledTable table = make_scaled_table<T>(p.values, scales.x);
  const uint32_t upper_at = stage + g * 128, lower_at = upper_at + 1024;
  const auto half = [&]<int HALF>() {
    const uint32_t chunk = ((2 * t + HALF) ^ g) << 4;
    const uint4 upper = load_shared_u128(upper_at + chunk), lower = load_shared_u128(lower_at + chunk);
    const auto word = [&]<int W>(uint32_t up, uint32_t low) {
      uint32_t a[2][4];
      decode_words<T, W>(table, lane_bytes, up, low, scales.x, scales.y, a);
      const uint4& b = x.words[HALF * 4 + W];
      multiply_accumulate<T>(sums, a[0], b.x, b.y);
      multiply_accumulate<T>(sums, a[1], b.z, b.w);
    };
    word.template operator()<0>(upper.x, lower.x);
    word.template operator()<1>(upper.y, lower.y);
    word.template operator()<2>(upper.z, lower.z);
    word.template operator()<3>(upper.w, lower.w);
  };
  half.template operator()<0>();
  half.template operator()<1>();
}

// A thread's sums of so many strips.
__device__ __forceinline__ void clear_sums(uint32_t own_sums, int strips) {
#pragma unroll 1
  for (int i = 0; i < strips; i++) store_shared_u128(own_sums + i * 512, 0, 0, 0, 0);
}

// By all threads: sums of the warps -> y, or the partial sums of a range, for the strips of a group. sums: float4
// [warp][group][lane].
template <typename T>
__device__ __forceinline__ void store_group(const Params& p, const float4* sums, int first_strip, int count, int range, int thread) {
  for (int i = thread; i < count * 32; i += kThreads) {
    float4 v = sums[i];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) {
      const float4 next = sums[warp * p.work.group * 32 + i];
      v.x += next.x, v.y += next.y, v.z += next.z, v.w += next.w;
    }
    const int lane = i & 31;
    const int row = (first_strip + (i >> 5)) * kStripRows + (lane >> 2), token = 2 * (lane & 3);
    if (p.work.ranges > 1) {
      float* to = p.partials + (static_cast<int64_t>(range) * p.m + token) * p.n + row;
      if (token < p.m) to[0] = v.x, to[8] = v.z;
      if (token + 1 < p.m) to[p.n] = v.y, to[p.n + 8] = v.w;
      continue;
    }
    if (p.bias) {
      const T* bias = static_cast<const T*>(p.bias) + row;
      const float upper = static_cast<float>(bias[0]), lower = static_cast<float>(bias[8]);
      v.x += upper, v.y += upper, v.z += lower, v.w += lower;
    }
    T* to = static_cast<T*>(p.out) + static_cast<int64_t>(token) * p.n + row;
    if (token < p.m) to[0] = rounded<T>(v.x), to[8] = rounded<T>(v.z);
    if (token + 1 < p.m) to[p.n] = rounded<T>(v.y), to[p.n + 8] = rounded<T>(v.w);
  }
}

// The first x of a warp, in the last stages of its ring.
__device__ __forceinline__ void read_first_x(const Params& p, int slice, const Ring<kItemBytes>& ring, int lane, Activation& x) {
  for (int part = 0; part * kStageTokens < p.m; part++) Activation::fetch(p, slice, part, ring.stage(kStages - 1 - part), lane);
  commit_copies();
  wait_copies<0>();
  __syncwarp();
  for (int part = 0; part * kStageTokens < p.m; part++) x.read(p.m, part, ring.stage(kStages - 1 - part), lane);
  __syncwarp();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const Work& work = p.work;
  const int cta = static_cast<int>(blockIdx.x), range = cta & (work.ranges - 1), first_slice = range * work.slices;
  const int first = (cta >> work.range_bits) * work.strips_of_cta, end = min(work.strips_of_cta, work.strips - first);
  if (smem_address(shared) > kSharedStart) __trap();
  uint8_t* const table = pair_table(shared);
  float4* const sums = reinterpret_cast<float4*>(table + (kGroupsAt - kPairTableAddress));
  const uint32_t own_sums = kGroupsAt + (warp * work.group * 32 + lane) * 16;
  const uint32_t codes_at = kGroupsAt + static_cast<uint32_t>(sum_bytes(work.group));
  GroupScales scales{codes_at, codes_at + static_cast<uint32_t>(code_bytes(work.group, work.slices))};
  Ring<kItemBytes> ring{kRings + warp * kStages * kItemBytes};
  allow_next_grid();

  // What reads the weight, first what takes longest.
  Fetcher ahead(p, warp, first, end, first_slice, lane);
  const Part first_part = ahead.part;
  const bool busy = ahead.left > 0;
  ahead.fetch(ring.stage(0), lane);
  clear_sums(own_sums, min(work.group, end));
  const TableValues table_values(p, thread);
  scales.fetch(p, first, min(work.group, end), first_slice, thread);
  stage_values(p, table, thread);
  // The other stages need not wait for the grids before, but those that take the first x before.
  const bool all_early = p.m <= kStageTokens;
  if (all_early) ahead.fetch(ring.stage(1), lane);
  fill_tables(table_values, table, thread);
  all_early ? wait_copies<1>() : wait_copies<0>();  // the scales have landed
  __syncthreads();
  wait_for_previous_grids();
  Activation x;
  if (busy) p.m == 1 ? x.load(p, first_part.slice, lane) : read_first_x(p, first_part.slice, ring, lane, x);
  for (int i = p.m <= kStageTokens ? 2 : 1; i < stages_ahead(); i++) ahead.fetch(ring.stage(i), lane);
  const float offset = table_values.offset;

  int x_left = 0;
  for (int group = 0; group < end; group += work.group) {
    const int count = min(work.group, end - group);
    if (group > 0) clear_sums(own_sums, count);
    for (int round = 0; round < rounds(work); round++) {
      const Part part = part_of(work, warp, round, group, group + count);
      int left = items_of(work, part);
      if (left == 0) continue;
      ScaleReader reader(scales, work, part, group, lane);
      uint32_t to = own_sums + (part.low - group) * 512;
      while (left > 0) {
        wait_copies<kStages - 2>();
        __syncwarp();  // all lanes' copies have landed, and the stage before is no longer read
        ahead.fetch(refilled(ring), lane);
        NYBBLE_DELAY(15);
        if (x_left > 0) {
          x.read(p.m, ahead.x_parts - x_left--, ring.read, lane);
        } else {
          left--;
          const float2 now = reader.read(offset);
          reader.advance();
          const uint4 v = load_shared_u128(to);
          float sum[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
          multiply_item<T>(p, x, ring.read, lane, now, sum);
          store_shared_u128(to, __float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3]));
          to += part.step * 512;
        }
        ring.advance();
      }
      x_left = ahead.x_parts;
    }
    if (!NYBBLE_FAULT(kSumsNotAwaited)) __syncthreads();
    const bool last = group + work.group >= end;
    if (!last) scales.fetch(p, first + group + count, min(work.group, end - group - count), first_slice, thread);
    store_group<T>(p, sums, first + group, count, range, thread);
    if (last) return;
    wait_copies<0>();
    __syncthreads();
  }
}

// Partial sums of the ranges (+ bias) -> y, in ascending order; four rows of W a thread.
constexpr int kSumThreads = 64;
template <typename T>
__global__ void __launch_bounds__(kSumThreads, 1) add_ranges(const __grid_constant__ Params p) {
  allow_next_grid();
  wait_for_previous_grids();
  const int64_t count = static_cast<int64_t>(p.m) * p.n, at = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * 4;
  if (at >= count) return;
  const int start = NYBBLE_ANY_OF(p.work.ranges);
  const auto from = [&](int i) {
    const int range = NYBBLE_FAULT(kArrivalOrder) ? (start + i) % p.work.ranges : i;
    return reinterpret_cast<const float4*>(p.partials + range * count + at);
  };
  float4 v = sum_pieces<2>(p.work.ranges, from);
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + at % p.n;
    v.x += static_cast<float>(bias[0]), v.y += static_cast<float>(bias[1]), v.z += static_cast<float>(bias[2]);
    v.w += static_cast<float>(bias[3]);
  }
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at) = {pack_pair<T>(v.x, v.y), pack_pair<T>(v.z, v.w)};
}

}  // namespace nybble::small_m::strip
