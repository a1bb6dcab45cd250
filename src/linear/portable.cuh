// Fused 4-bit dequantise and multiply with mma.sync, for sm_80 and later and at most 99 KiB of shared memory. One packed copy, both
// directions:
//   forward     y[m][n]      = x[m][k] W[n][k]^T   reduction k, output columns n
//   grad input  grad_x[m][k] = grad_y[m][n] W[n][k]   reduction n, output columns k
// Tokens are mma's A operand, W its B operand. A CTA decodes its W tile once per stage of 64 into 16-bit values in shared memory, where
// ldmatrix (forward) or ldmatrix.trans (grad input) reads them; 256 tokens share one decode. Accumulators are fp32, the reduction ascends
// in steps of 16.
//
// Shared memory (rows of 128 bytes, 16-byte chunk c of row r at c ^ (r & 7)):
//   x 0 | x 1        [BLOCK_M tokens][64 of the reduction]                         filled by cp.async
//   W 0 | W 1        forward [BLOCK_N rows n][64 k], grad input [BLOCK_N / 64][64 n][64 k]    filled by decode
//   256 nested code values | 16 values | Schedule
//
// Preconditions: k % 64 == 0, block size >= 64, packed and every row of x 16-byte aligned, grad input: n % 8 == 0, n k / 64 < 2^32. Any m,
// n. Bound by: tensor pipe and register read ports (docs/portable.md). No run-time branch may enter the stream of mma: it costs 10-30%.
#pragma once

#include <cstddef>

#include "device/cp_async.cuh"
#include "device/decode.cuh"
#include "device/global.cuh"
#include "device/mma.cuh"
#include "linear/portable_schedule.cuh"
#include "nybble/linear.h"

namespace nybble::portable {

// Below compute capability 9.0 loads between two decodes make ptxas keep a pointer in local memory, inside the loop.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kTakesLoadsBetween = false;
#else
constexpr bool kTakesLoadsBetween = true;
#endif

// REPEAT issues every mma so many times: a timing model of slower tensor cores, with wrong results.
template <Direction DIRECTION, typename T, int BLOCK_M, int BLOCK_N, int WARP_M, int WARP_N, int CTAS_PER_SM, int REPEAT = 1>
struct Traits {
  using Element = T;
  static constexpr bool kForward = DIRECTION == Direction::kForward;
  static constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kWarpM = WARP_M, kWarpN = WARP_N;
  static constexpr int kCtasPerSm = CTAS_PER_SM, kRepeat = REPEAT;
  static constexpr int kTilesM = WARP_M / 16, kTilesN = WARP_N / 8;  // mma tiles of a warp
  static constexpr int kWarpsN = BLOCK_N / WARP_N;
  static constexpr int kThreads = BLOCK_M / WARP_M * kWarpsN * 32;
  static constexpr int kDecodeGroups = kThreads / BLOCK_N;  // thread groups that take turns at decoding a stage
  // Forward, a group loads its packed bytes in the stage in which it does not decode: with slowed tensor cores 1% less time on an H200, 2
  // to 5% beside 28 KiB of L1 (benchmarks/records/h200-portable.md). Grad input takes 10% more that way.
  static constexpr bool kFetchesBetween = kForward && kDecodeGroups == 2 && kTakesLoadsBetween;
  static constexpr int kXBytes = BLOCK_M * 128, kWBytes = BLOCK_N * 128;
  static constexpr int kWOffset = 2 * kXBytes, kCodeOffset = kWOffset + 2 * kWBytes;
  static constexpr int kValueOffset = kCodeOffset + 1024, kScheduleOffset = kValueOffset + 64;
  static constexpr int kSharedBytes = kScheduleOffset + static_cast<int>(sizeof(Schedule));
  static constexpr int kRowsPerPass = kThreads / 8;  // of x, one chunk a thread
  static constexpr int kPasses = BLOCK_M / kRowsPerPass;
  static_assert(kThreads % BLOCK_N == 0 && (kDecodeGroups == 1 || kDecodeGroups == 2), "a thread decodes one row of 64 codes");
  static_assert(BLOCK_N % 64 == 0 && kRowsPerPass % 8 == 0 && BLOCK_M % kRowsPerPass == 0);
  static_assert(WARP_M % 16 == 0 && WARP_N % 32 == 0, "an epilogue quad stores four column tiles");
  static_assert(kSharedBytes == shared_bytes(BLOCK_M, BLOCK_N), "what the plan counts with");
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 to sm_120 lend 99 KiB a CTA");
};

template <int M, int N>
__device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; i++) sums[i / 4 / N][i / 4 % N][i % 4] = 0.f;
}

template <class C>
__device__ __forceinline__ int reduction_length(const Params& p) {
  return C::kForward ? p.k : p.n;
}
template <class C>
__device__ __forceinline__ int output_columns(const Params& p) {
  return C::kForward ? p.n : p.k;
}

// ---- activations: global -> shared by cp.async, two stages ahead. Rows past m are not loaded (their sums are never stored).
template <class C>
struct Activations {
  uint32_t destination;            // of this thread's first chunk in buffer 0
  const char* source[C::kPasses];  // one pointer a pass: cp.async reads its address registers late, a shared one would stall
  int passes;                      // with a row below m
  int left;                        // grad input: stages in which this thread's chunk lies inside its row

  __device__ __forceinline__ explicit Activations(uint32_t shared) {
    const int row = threadIdx.x >> 3, chunk = threadIdx.x & 7;
    destination = shared + row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void start(const Params& p, const Segment& s, int thread) {
    const int row = thread >> 3, column = (thread & 7) * 8;
    passes = (p.m - s.token_tile * C::kBlockM - row + C::kRowsPerPass - 1) / C::kRowsPerPass;
    left = (reduction_length<C>(p) - column + 63) / 64 - s.begin;
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) {
      const int64_t first = static_cast<int64_t>(s.token_tile * C::kBlockM + row + i * C::kRowsPerPass) * p.x_stride;
      source[i] = static_cast<const char*>(p.x) + (first + s.begin * 64 + column) * 2;
      device::pin(source[i]);
    }
  }

  // Starts the copy of one stage; `ahead` stages (0 or 1) after the one at `source`.
  __device__ __forceinline__ void issue(const Params&, int buffer, bool wanted, int ahead) {
    const int count = wanted ? passes : 0;
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) {
      const uint32_t to = destination + buffer * C::kXBytes + i * C::kRowsPerPass * 128;
      if constexpr (C::kForward) {
        device::copy_async_if(to, source[i] + ahead * 128, i, count);
      } else {
        device::copy_async_fill_if(to, source[i] + ahead * 128, left > 0 ? 16 : 0, i, count);
      }
    }
    left--;
  }

  __device__ __forceinline__ void advance_two_stages() {
#pragma unroll
    for (int i = 0; i < C::kPasses; i++) device::advance<256>(source[i]);
  }
};

// ---- weights: packed bytes and scales wait in registers, one turn ahead, and are decoded to the swizzled tile. A unit is one row of 64
// codes of one block; units outside W are clamped and decoded, but never used.
template <class C>
struct PackedWeights {
  uint32_t destination;  // this thread's row of buffer 0
  uint32_t codes;        // shared address of the nested code values
  uint32_t unit;         // index of the 64 codes at hand in the flattened weight
  int live;              // grad input: rows of W from this unit's row on
  uint4 low, high;       // 32 packed bytes
  uint32_t code;
  float absmax;
  device::ScaledTable table;

  __device__ __forceinline__ explicit PackedWeights(uint32_t shared) {
    destination = shared + C::kWOffset + (threadIdx.x % C::kBlockN) * 128 + ((threadIdx.x & 7) << 4);
    codes = shared + C::kCodeOffset;
  }

  __device__ __forceinline__ void start(const Params& p, const Segment& s, int thread, int group) {
    const int row = thread % C::kBlockN, units_per_row = p.k >> 6, stage = s.begin + group;
    if constexpr (C::kForward) {
      unit = static_cast<uint32_t>(min(s.column_tile * C::kBlockN + row, p.n - 1)) * units_per_row + min(stage, units_per_row - 1);
    } else {
      const int n = stage * 64 + (row & 63), column_unit = min(s.column_tile * (C::kBlockN / 64) + (row >> 6), units_per_row - 1);
      unit = static_cast<uint32_t>(n) * units_per_row + column_unit;
      live = p.n - n;
    }
    fetch(p, false);
  }

  // Loads this thread's next unit, or the same one again: without a branch the loads stay in flight.
  __device__ __forceinline__ void fetch(const Params& p, bool next) {
    if (next) unit += C::kForward ? C::kDecodeGroups : C::kDecodeGroups * (p.k & ~63);
    if (!C::kForward && next) live -= C::kDecodeGroups * 64;
    const uint32_t at = !C::kForward && live <= 0 ? 0 : unit;
    const uint32_t block = at >> (p.block_shift - 6);
    const uint8_t* source = p.packed + static_cast<size_t>(at) * 32;
    low = device::load_global_u128(source);
    high = device::load_global_u128(source + 16);
    code = device::load_global_u8(p.codes + block);
    absmax = device::load_global_f32(p.scales + (block >> p.scale_shift));
  }

  __device__ __forceinline__ void build_table(const Params& p) {
    const float code_value = device::load_shared_f32(codes + 4 * code);
    const float offset =
        device::load_shared_f32(codes + C::kScheduleOffset - C::kCodeOffset + static_cast<uint32_t>(offsetof(Schedule, offset)));
    float scale = __fadd_rn(device::multiply_flushed(code_value, absmax), offset);  // two roundings, as dequantize_4bit
    if (!C::kForward && live <= 0) scale = 0.f;
    table = device::make_scaled_table<typename C::Element>(p.values, scale);
  }

  // Chunks [from, to) of 8 codes.
  __device__ __forceinline__ void decode(int buffer, int from, int to) {
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < 8; c++) {
      if (c < from || c >= to) continue;
      uint32_t w[4];
      device::decode_8(table, words[c], w);
      device::store_shared_u128((destination ^ (c << 4)) + buffer * C::kWBytes, w[0], w[1], w[2], w[3]);
    }
  }

  __device__ __forceinline__ void issue(const Params&, int, bool) {}  // W comes through registers
};

// ---- fragments, single buffered: each is loaded for the next step of 16 right after its last use
template <class C>
struct Fragments {
  uint32_t a_address, b_address;
  uint32_t a[C::kTilesM][4], b[C::kTilesN / 2][4];

  __device__ __forceinline__ explicit Fragments(uint32_t shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row_m = warp / C::kWarpsN * C::kWarpM, column_n = warp % C::kWarpsN * C::kWarpN;
    a_address = shared + (row_m + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t w = shared + C::kWOffset;
    if constexpr (C::kForward) {
      b_address = w + (column_n + (lane >> 4) * 8 + (lane & 7)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
    } else {
      b_address =
          w + column_n / 64 * 8192 + (((lane >> 3) & 1) * 8 + (lane & 7)) * 128 + (((column_n % 64 / 8 + (lane >> 4)) ^ (lane & 7)) << 4);
    }
  }

  __device__ __forceinline__ void load_a(int buffer, int step, int i) {
    device::load_matrices(a[i], (a_address ^ (step << 5)) + buffer * C::kXBytes + i * 2048);
  }

  __device__ __forceinline__ void load_b(int buffer, int step, int j) {
    if constexpr (C::kForward) {
      device::load_matrices(b[j], (b_address ^ (step << 5)) + buffer * C::kWBytes + j * 2048);
    } else {
      device::load_matrices_transposed(b[j], (b_address ^ ((j & 3) << 5)) + buffer * C::kWBytes + step * 2048 + (j >> 2) * 8192);
    }
  }

  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int i = 0; i < C::kTilesM; i++) load_a(0, 0, i);
#pragma unroll
    for (int j = 0; j < C::kTilesN / 2; j++) load_b(0, 0, j);
  }
};

// One stage of 64 from buffer BUFFER. DECODES: this thread group decodes the next stage meanwhile, between the mma.
// One barrier, before the last step: by then every fragment of the stage is in registers, so its buffers are free and the next stage is
// open.
template <class C, class X, class W, bool DECODES, int BUFFER>
__device__ __forceinline__ void run_stage(const Params& p, X& x, W& w, Fragments<C>& f, float (&sums)[C::kTilesM][C::kTilesN][4],
                                          int& left) {
  constexpr int kNext = BUFFER ^ 1;
  if constexpr (DECODES) w.build_table(p);
#pragma unroll
  for (int step = 0; step < 4; step++) {
    if (step == 3) {
      NYBBLE_DELAY(12);
      device::wait_copies<0>();
      __syncthreads();
      x.issue(p, BUFFER, left > 2, BUFFER);
      w.issue(p, BUFFER, left > 2);
      device::commit_copies();
      if constexpr (DECODES && !C::kFetchesBetween) w.fetch(p, left > 1 + C::kDecodeGroups);
    }
    if constexpr (!DECODES && C::kFetchesBetween) {
      if (step == 0) w.fetch(p, left > C::kDecodeGroups);
    }
    if (step == 1 && BUFFER == 0) x.advance_two_stages();
    if constexpr (DECODES) {
      if (step < 3) w.decode(kNext, step ? 3 * step - 1 : 0, 3 * step + 2);
    }
    const int from = step < 3 ? BUFFER : kNext, next_step = (step + 1) & 3;  // after the last stage: garbage that nobody uses
#pragma unroll
    for (int j = 0; j < C::kTilesN / 2; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {  // B stays for kTilesM mma: cheapest for the register file
#pragma unroll
        for (int repeat = C::kRepeat - 1; repeat >= 0; repeat--) {
#pragma unroll
          for (int i = 0; i < C::kTilesM; i++) {
            device::multiply_accumulate<typename C::Element>(sums[i][2 * j + half], f.a[i], f.b[j][2 * half], f.b[j][2 * half + 1]);
            if (repeat == 0 && j == C::kTilesN / 2 - 1 && half) f.load_a(from, next_step, i);
          }
        }
      }
      f.load_b(from, next_step, j);
    }
  }
  left--;
}

// All stages of a segment, two an iteration so that buffer numbers are compile-time. FIRST, SECOND: whether this thread group decodes in
// them.
template <class C, class X, class W, bool FIRST, bool SECOND>
__device__ __forceinline__ void run_stages(const Params& p, X& x, W& w, Fragments<C>& f, float (&sums)[C::kTilesM][C::kTilesN][4],
                                           int left) {
  do {
    run_stage<C, X, W, FIRST, 0>(p, x, w, f, sums, left);
    if (!left) break;
    run_stage<C, X, W, SECOND, 1>(p, x, w, f, sums, left);
  } while (left);
}

// ---- epilogue
template <typename T>
__device__ __forceinline__ float load_bias(const void* bias, int column, int columns) {
  if (column >= columns) return 0.f;
  return static_cast<float>(static_cast<const T*>(bias)[column]);
}

// Adds bias[column] in fp32, before the one rounding of the output.
template <class C>
__device__ __forceinline__ void add_bias(const Params& p, float (&sums)[C::kTilesM][C::kTilesN][4], int first_column) {
#pragma unroll
  for (int j = 0; j < C::kTilesN; j++) {
    const float left = load_bias<typename C::Element>(p.bias, first_column + j * 8, p.n);
    const float right = load_bias<typename C::Element>(p.bias, first_column + j * 8 + 1, p.n);
#pragma unroll
    for (int i = 0; i < C::kTilesM; i++) {
      sums[i][j][0] += left;
      sums[i][j][1] += right;
      sums[i][j][2] += left;
      sums[i][j][3] += right;
    }
  }
}

// Transposes a 4x4 matrix of words over the four lanes of a quad: lane q ends with word q of every lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int q) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = q & bit;
    const int step = 3 - bit;  // words whose index differs in `bit` form the pairs (0, bit) and (step, step + bit)
    uint32_t first = upper ? v[0] : v[bit], second = upper ? v[step] : v[step + bit];
    first = __shfl_xor_sync(~0u, first, bit);
    second = __shfl_xor_sync(~0u, second, bit);
    if (upper) {
      v[0] = first;
      v[step] = second;
    } else {
      v[bit] = first;
      v[step + bit] = second;
    }
  }
}

// Eight columns of one row from one lane: 16 bytes where rows are 16-byte aligned, single values at the edge and elsewhere.
__device__ __forceinline__ void store_row(const Params& p, int row, int column, int columns, const uint32_t (&v)[4]) {
  if (row >= p.m || column >= columns) return;
  uint16_t* to = static_cast<uint16_t*>(p.out) + static_cast<size_t>(row) * columns + column;
  if ((columns & 7) == 0 && (reinterpret_cast<size_t>(p.out) & 15) == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 8; e++) {
    if (column + e < columns) to[e] = static_cast<uint16_t>(v[e >> 1] >> ((e & 1) * 16));
  }
}

template <class C>
__device__ __forceinline__ void store_tile(const Params& p, const Segment& s, float (&sums)[C::kTilesM][C::kTilesN][4], int thread) {
  const int lane = thread & 31, warp = thread >> 5, q = lane & 3;
  const int row = s.token_tile * C::kBlockM + warp / C::kWarpsN * C::kWarpM + (lane >> 2);
  const int column = s.column_tile * C::kBlockN + warp % C::kWarpsN * C::kWarpN, columns = output_columns<C>(p);
  if (C::kForward && p.bias) add_bias<C>(p, sums, column + 2 * q);
#pragma unroll
  for (int i = 0; i < C::kTilesM; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = device::pack_pair<typename C::Element>(sums[i][j + e][half * 2], sums[i][j + e][half * 2 + 1]);
        transpose_quad(v, q);
        store_row(p, row + i * 16 + half * 8, column + (j + q) * 8, columns, v);
      }
    }
  }
}

// ---- the kernel
template <class C>
__device__ __forceinline__ void fill_shared(const Params& p, uint8_t* shared, Schedule& schedule) {
  float* code_values = reinterpret_cast<float*>(shared + C::kCodeOffset);
  for (int i = threadIdx.x; i < 256; i += C::kThreads) code_values[i] = p.code_values ? p.code_values[i] : 1.f;
  if (threadIdx.x < 16) reinterpret_cast<float*>(shared + C::kValueOffset)[threadIdx.x] = p.values[threadIdx.x];
  if (threadIdx.x == 0) {
    schedule.offset = p.offset ? *p.offset : -0.f;
    start_schedule(p, schedule);
  }
  __syncthreads();
}

// The loads that a segment starts with; they run under the epilogue of the segment before.
template <class C, class X, class W>
__device__ __forceinline__ void start_segment(const Params& p, const Segment& s, X& x, W& w, int group) {
  const int thread = device::reread_thread_index();
  x.start(p, s, thread);
  w.start(p, s, thread, group);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.issue(p, i, s.begin + i < s.end, i);
    w.issue(p, i, s.begin + i < s.end);
    device::commit_copies();
  }
}

template <class C, template <class> class XOf = Activations, template <class> class WOf = PackedWeights>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) portable_kernel(const __grid_constant__ Params p) {
  using X = XOf<C>;
  using W = WOf<C>;
  extern __shared__ __align__(128) uint8_t shared[];
  Schedule& schedule = *reinterpret_cast<Schedule*>(shared + C::kScheduleOffset);
  const uint32_t base = device::smem_address(shared);
  X x(base);
  W w(base);
  Fragments<C> fragments(base);
  const int group = C::kDecodeGroups == 2 ? __shfl_sync(~0u, threadIdx.x / C::kBlockN, 0) : 0;
  fill_shared<C>(p, shared, schedule);

  int slot = 0;
  if (schedule.segments[0].begin < 0) return;  // more CTAs than work: leave before the first load
  start_segment<C>(p, schedule.segments[0], x, w, group);
  while (true) {
    const int stages = schedule.segments[slot].end - schedule.segments[slot].begin;
    if (device::reread_thread_index() == 0) next_segment(p, schedule, slot ^ 1);
    float sums[C::kTilesM][C::kTilesN][4];
    clear(sums);
    if (group == 0) {
      w.build_table(p);
      w.decode(0, 0, 8);
      if constexpr (!C::kFetchesBetween) w.fetch(p, stages > C::kDecodeGroups);
    }
    device::wait_copies<1>();
    __syncthreads();
    fragments.load_first();
    if constexpr (C::kDecodeGroups == 1) {
      run_stages<C, X, W, true, true>(p, x, w, fragments, sums, stages);
    } else if (group) {
      run_stages<C, X, W, true, false>(p, x, w, fragments, sums, stages);
    } else {
      run_stages<C, X, W, false, true>(p, x, w, fragments, sums, stages);
    }
    const Segment done = schedule.segments[slot];
    slot ^= 1;
    const bool more = schedule.segments[slot].begin >= 0;
    if (NYBBLE_FAULT(kForRacecheck)) __syncthreads();
    if (more) start_segment<C>(p, schedule.segments[slot], x, w, group);
    const int thread = device::reread_thread_index();
    if (!hand_over<C>(p, done, sums, thread)) store_tile<C>(p, done, sums, thread);
    if (!more) break;
    __syncthreads();  // everybody has read the segments before thread 0 writes the next one
  }
}

}  // namespace nybble::portable
