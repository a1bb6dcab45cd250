// Few tokens (m <= 8) without tensor cores: every packed byte is read once, 16 bytes a lane, decoded by the pair table and multiplied in
// fp32.
//
//   forward     A CTA owns `rows` rows of W and up to `slices` slices of 1024 columns, whose x it keeps in shared memory. A warp takes
//   units of
//               4 rows x 1 slice: a lane owns 32 columns of each row. Lanes are summed by shuffles, slices in shared memory.
//   grad input  A CTA owns `rows` rows and one slice of columns. A lane owns grad_codes(TOKENS) columns and keeps their sums over the rows
//   of its
//               warp in registers; warps are summed in shared memory, CTAs by a second kernel.
//
// Every sum has one order, fixed by the plan. Preconditions: k % 32 == 0, packed 16-byte aligned, block size >= 32. x at any address.
// Bound by: memory at one token, then the issue rate: 3.5 instructions a weight for decoding and one FMA a weight and token.
#pragma once

#include "device/global.cuh"
#include "device/pair_table.cuh"
#include "linear/row_params.h"

namespace nybble::row {

// pair table | nested code values [256] | code values [16], offset | the rest, see forward_bytes and grad_bytes
struct Shared {
  uint8_t* table;
  float* code_values;
  float* values;
  float* offset;
  uint8_t* rest;

  __device__ __forceinline__ explicit Shared(uint8_t* shared)
      : table(device::pair_table(shared)),
        code_values(reinterpret_cast<float*>(table + device::kPairTableBytes)),
        values(code_values + 256),
        offset(values + 16),
        rest(table + kFixedBytes - device::kPairTableAddress) {
    if (table < shared) __trap();
  }
};

// Tables for decoding. The caller's barrier makes them visible.
template <int TOKENS>
__device__ __forceinline__ void fill_tables(const Params& p, const Shared& s) {
  const int thread = threadIdx.x;
  if (thread < 256) s.code_values[thread] = p.code_values ? p.code_values[thread] : 1.f;
  if (thread < 16) s.values[thread] = p.values[thread];
  if (thread == 16) *s.offset = p.offset ? *p.offset : -0.f;
  __syncthreads();
  device::fill_pair_table(s.table, s.values, thread, threads(TOKENS));
}

// Packed codes and scales of one lane's columns in kRows rows, on their way from memory.
template <int CODES>
struct Unit {
  uint32_t words[kRows][CODES / 8];
  uint32_t code[kRows];
  float absmax[kRows];

  // Rows past the end are read as the last one, columns past the end as column 0: the caller gives both the scale 0.
  __device__ __forceinline__ void load(const Params& p, int row, int column) {
    int64_t first = static_cast<int64_t>(min(row, p.n - 1)) * p.k + (column < p.k ? column : 0);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r > 0 && row + r < p.n) first += p.k;
      const uint8_t* source = p.packed + (first >> 1);
      if constexpr (CODES == 32) {
        const uint4 v = device::load_global_u128(source);
        words[r][0] = v.x, words[r][1] = v.y, words[r][2] = v.z, words[r][3] = v.w;
      } else if constexpr (CODES == 16) {
        const uint2 v = device::load_global_u64(source);
        words[r][0] = v.x, words[r][1] = v.y;
      } else {
        words[r][0] = device::load_global_u32(source);
      }
      const int64_t block = first >> p.block_shift;
      code[r] = device::load_global_u8(p.codes + block);
      absmax[r] = device::load_global_f32(p.scales + (block >> p.scale_shift));
    }
  }

  __device__ __forceinline__ void scales(const Shared& s, const Params& p, int row, int column, float (&out)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float scale =
          __fadd_rn(device::multiply_flushed(s.code_values[code[r]], absmax[r]), *s.offset);  // two roundings, as dequantize_4bit
      out[r] = row + r < p.n && column < p.k ? scale : 0.f;
    }
  }
};

template <typename T>
__device__ __forceinline__ void store_output(const Params& p, int token, int column, int columns, float sum) {
  if (p.bias) sum += static_cast<float>(static_cast<const T*>(p.bias)[column]);
  static_cast<T*>(p.out)[static_cast<int64_t>(token) * columns + column] = static_cast<T>(sum);
}

// ---- forward

// x[TOKENS][slices of 1024 columns from first on], as 16-byte pieces of 8 columns in the order [slice][token][piece of the lane][lane]:
// lanes that read the same piece of their columns read 512 contiguous bytes. Zeros past m and k.
template <int TOKENS>
__device__ __forceinline__ void fill_x(const Params& p, uint8_t* x, int first, int slices) {
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) & 15) == 0 && (p.x_stride & 7) == 0;
  for (int i = threadIdx.x; i < slices * TOKENS * 128; i += threads(TOKENS)) {
    const int piece = i & 3, lane = (i >> 2) & 31, token = (i >> 7) % TOKENS, slice = (i >> 7) / TOKENS;
    const int column = first + slice * kSlice + lane * kCodes + piece * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (token < p.m && column < p.k) {
      const char* source = static_cast<const char*>(p.x) + (token * p.x_stride + column) * 2;
      if (aligned) {
        v = device::load_global_u128(source);
      } else {
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; e++) pairs[e] = device::load_global_u16(source + 4 * e) | device::load_global_u16(source + 4 * e + 2) << 16;
        v = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    reinterpret_cast<uint4*>(x)[((slice * TOKENS + token) * 4 + piece) * 32 + lane] = v;
  }
}

// sums[r][t] += 32 columns of row r times x of token t.
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_unit(const Unit<kCodes>& unit, const float (&scales)[kRows], const device::PairDecoder& decoder,
                                              const uint4* x, float (&sums)[kRows * TOKENS]) {
#pragma unroll
  for (int w = 0; w < 4; w++) {
    float weights[kRows][8];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 pair = decoder.template decode<T>(unit.words[r][w], i, scales[r]);
        weights[r][2 * i] = pair.x;
        weights[r][2 * i + 1] = pair.y;
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const uint4 v = x[(t * 4 + w) * 32];
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 values = device::unpack_pair<T>(pairs[i]);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          sums[r * TOKENS + t] = fmaf(weights[r][2 * i], values.x, sums[r * TOKENS + t]);
          sums[r * TOKENS + t] = fmaf(weights[r][2 * i + 1], values.y, sums[r * TOKENS + t]);
        }
      }
    }
  }
}

// Sums each of COUNT values over the lanes. The total of value i ends in v[0] of lanes i * 32 / COUNT and on: each step halves the values a
// lane carries, so COUNT totals cost about COUNT + 5 shuffles.
template <int COUNT, int MASK = 16, int SIZE>
__device__ __forceinline__ void reduce_lanes(float (&v)[SIZE], int lane) {
  if constexpr (COUNT > 1) {
    const bool upper = lane & MASK;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      const float kept = upper ? v[i + COUNT / 2] : v[i], sent = upper ? v[i] : v[i + COUNT / 2];
      v[i] = kept + __shfl_xor_sync(~0u, sent, MASK);
    }
    reduce_lanes<COUNT / 2, MASK / 2>(v, lane);
  } else if constexpr (MASK > 0) {
    v[0] += __shfl_xor_sync(~0u, v[0], MASK);
    reduce_lanes<1, MASK / 2>(v, lane);
  }
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(threads(TOKENS), 1) row_forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kThreads = threads(TOKENS), kWarps = kThreads / 32;
  const Shared s(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int chunk = blockIdx.x / p.ranges, range = blockIdx.x - chunk * p.ranges;
  const int first_column = chunk * p.slices * kSlice, first_row = range * p.rows;
  const int slices = min(p.slices, (p.k - first_column + kSlice - 1) / kSlice), rows = min(p.rows, p.n - first_row);
  const int units = (rows + kRows - 1) / kRows * slices;
  float* sums_of_slices = reinterpret_cast<float*>(s.rest + 2 * TOKENS * p.slices * kSlice);  // [slices][p.rows][TOKENS]

  // Unit u: group u / slices, slice u % slices. Kept for the unit on its way; the step of kWarps needs no division.
  const int group_step = kWarps / slices, slice_step = kWarps - group_step * slices;
  int next_group = warp / slices, next_slice = warp - next_group * slices;
  Unit<kCodes> next;
  auto fetch = [&] { next.load(p, first_row + next_group * kRows, first_column + next_slice * kSlice + lane * kCodes); };
  if (warp < units) fetch();
  fill_tables<TOKENS>(p, s);
  fill_x<TOKENS>(p, s.rest, first_column, slices);
  __syncthreads();

  const device::PairDecoder decoder{8u * lane};
  for (int unit = warp; unit < units; unit += kWarps) {
    const int group = next_group, slice = next_slice;
    const Unit<kCodes> now = next;
    next_group += group_step;
    next_slice += slice_step;
    if (next_slice >= slices) {
      next_slice -= slices;
      next_group++;
    }
    if (unit + kWarps < units) fetch();
    float scales[kRows], sums[kRows * TOKENS] = {};
    now.scales(s, p, first_row + group * kRows, first_column + slice * kSlice + lane * kCodes, scales);
    multiply_unit<T, TOKENS>(now, scales, decoder, reinterpret_cast<const uint4*>(s.rest) + slice * TOKENS * 128 + lane, sums);
    reduce_lanes<kRows * TOKENS>(sums, lane);
    constexpr int kLanes = 32 / (kRows * TOKENS);  // that hold the same total
    if (lane % kLanes == 0) sums_of_slices[(slice * p.rows + group * kRows) * TOKENS + lane / kLanes] = sums[0];
  }
  __syncthreads();

  for (int i = threadIdx.x; i < rows * TOKENS; i += kThreads) {
    const int token = i / rows, row = i - token * rows;
    if (token >= p.m) break;
    float sum = 0.f;
    for (int slice = 0; slice < slices; slice++) sum += sums_of_slices[(slice * p.rows + row) * TOKENS + token];
    if (p.partials) {
      p.partials[(static_cast<int64_t>(chunk) * p.m + token) * p.n + first_row + row] = sum;
    } else {
      store_output<T>(p, token, first_row + row, p.n, sum);
    }
  }
}

// ---- input gradient

// grad_y of the CTA's rows as fp32 [rows][TOKENS], zeros past m and n.
template <typename T, int TOKENS>
__device__ __forceinline__ void fill_gradients(const Params& p, float* gradients, int first_row) {
  for (int i = threadIdx.x; i < p.rows * TOKENS; i += threads(TOKENS)) {
    const int token = i / p.rows, row = i - token * p.rows;
    float value = 0.f;
    if (token < p.m && first_row + row < p.n) value = static_cast<float>(static_cast<const T*>(p.x)[token * p.x_stride + first_row + row]);
    gradients[row * TOKENS + token] = value;
  }
}

// Sums one token's columns over the warps, in ascending order, and stores them. `exchange`: [warps][32 * CODES] floats, element e of lane
// l of a warp at e * 32 + (l + e) % 32, so that neither lanes nor neighbouring columns share a bank.
template <typename T, int CODES, int THREADS>
__device__ __forceinline__ void sum_warps(const Params& p, float* exchange, const float (&sums)[CODES], int token, int slice, int range) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int e = 0; e < CODES; e++) exchange[(warp * CODES + e) * 32 + ((lane + e) & 31)] = sums[e];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * CODES; i += THREADS) {
    const int owner = i / CODES, e = i - owner * CODES, column = slice * 32 * CODES + i;
    if (column >= p.k) break;
    float sum = 0.f;
    for (int w = 0; w < THREADS / 32; w++) sum += exchange[(w * CODES + e) * 32 + ((owner + e) & 31)];
    if (p.partials) {
      p.partials[(static_cast<int64_t>(range) * p.m + token) * p.k + column] = sum;
    } else {
      store_output<T>(p, token, column, p.k, sum);
    }
  }
  __syncthreads();
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(threads(TOKENS), 1) row_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kOwned = grad_codes(TOKENS), kThreads = threads(TOKENS), kWarps = kThreads / 32;
  const Shared s(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int range = blockIdx.x / p.slices, slice = blockIdx.x - range * p.slices;
  const int first_row = range * p.rows, rows = min(p.rows, p.n - first_row), column = (slice * 32 + lane) * kOwned;
  float* gradients = reinterpret_cast<float*>(s.rest);

  Unit<kOwned> next;
  if (warp * kRows < rows) next.load(p, first_row + warp * kRows, column);
  fill_tables<TOKENS>(p, s);
  fill_gradients<T, TOKENS>(p, gradients, first_row);
  __syncthreads();

  const device::PairDecoder decoder{8u * lane};
  float sums[TOKENS][kOwned] = {};
  for (int row = warp * kRows; row < rows; row += kWarps * kRows) {
    const Unit<kOwned> now = next;
    if (row + kWarps * kRows < rows) next.load(p, first_row + row + kWarps * kRows, column);
    float scales[kRows];
    now.scales(s, p, first_row + row, column, scales);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float gradient[TOKENS];
#pragma unroll
      for (int t = 0; t < TOKENS; t++) gradient[t] = gradients[(row + r) * TOKENS + t];
#pragma unroll
      for (int i = 0; i < kOwned / 2; i++) {
        const float2 pair = decoder.template decode<T>(now.words[r][i / 4], i & 3, scales[r]);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
          sums[t][2 * i] = fmaf(pair.x, gradient[t], sums[t][2 * i]);
          sums[t][2 * i + 1] = fmaf(pair.y, gradient[t], sums[t][2 * i + 1]);
        }
      }
    }
  }
  __syncthreads();  // the pair table becomes the exchange
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    if (t < p.m) sum_warps<T, kOwned, kThreads>(p, reinterpret_cast<float*>(s.table), sums[t], t, slice, range);
  }
}

// ---- second launch where the reduction was cut: out[m][columns] = partials[0] + partials[1] + ... + bias
template <typename T>
__global__ void __launch_bounds__(256) row_sum(const __grid_constant__ Params p, int columns) {
  const int64_t total = static_cast<int64_t>(p.m) * columns, i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= total) return;
  float sum = 0.f;
#pragma unroll 8
  for (int piece = 0; piece < p.split; piece++) sum += p.partials[piece * total + i];
  store_output<T>(p, static_cast<int>(i / columns), static_cast<int>(i % columns), columns, sum);
}

}  // namespace nybble::row
