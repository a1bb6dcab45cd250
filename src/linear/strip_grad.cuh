// Input gradient of up to 4 tokens: grad_x[token][column] = sum over n of grad_y[token][n] W[n][column]. The two nibbles of a packed byte
// are columns 2 c and 2 c + 1 of one row of W; decoded, they fill one register of A of mma m16n8k16: k = 2 t and 2 t + 1. B tells them
// apart: token j has two columns there, with grad_y at even k and zero at odd k, and the other way round, so that D holds both columns'
// sums. Rows of A are 16 pairs of columns, eight rows of W make a k16 step, and pairs are decoded as in the forward.
//
// A CTA takes a contiguous run of units (256 rows of W in a band of 256 columns, band by band), a warp 16 rows of each, through a ring of
// its own. Thread (g, t): columns 32 g .. 32 g + 31 of the band in rows 4 t .. 4 t + 3. At the end of a band warps are added in shared
// memory, in ascending order. A band that several CTAs share: fp32 partial sums to the workspace, and a kernel behind adds them in
// ascending order. Nothing of that looks at m, so a row's bits are the same for every m.
//
// Order between launches and what bounds it: strip.cuh.
#pragma once

#include "linear/strip.cuh"

namespace nybble::small_m::strip {

constexpr int kItemRows = 16, kScaleBytes = 2 * kItemRows * 4;  // of an item; words of absmax codes, then nested scales
constexpr int kGradStageBytes = kItemBytes + kScaleBytes, kTiles = 8;
static_assert(kUnitRows == kWarps * kItemRows);

// Shared memory: pair table, code values and rings as forward, the rings with scales | half of the sums of the warps.
constexpr uint32_t kGradSums = kRings + kWarps * kStages * kGradStageBytes, kGradSharedBytes = kGradSums + kWarps * kTiles / 2 * 512;
static_assert(kGradSharedBytes <= kSm90SharedBytes);

// A warp's place in a run of units.
struct UnitCursor {
  int band, unit, left;  // unit of the band; of the run

  __device__ __forceinline__ UnitCursor(const Work& w, int first, int end) : left(end - first) {
    band = w.by_units.quotient(first), unit = first - band * w.units;
  }
  __device__ __forceinline__ bool ends_band(const Work& w) const { return unit + 1 == w.units; }
  __device__ __forceinline__ void advance(const Work& w) {
    left--;
    if (++unit == w.units) unit = 0, band++;
  }
  __device__ __forceinline__ int row(int warp) const { return unit * kUnitRows + warp * kItemRows; }
};

// Walks the items of a warp and copies them to stages. From unit to unit of a band its addresses grow by constants, those of the nested
// scales too: a unit's rows hold a multiple of 256 blocks.
struct RowFetcher {
  static_assert(kUnitRows * kSliceColumns / 64 % 256 == 0);
  const Params& p;
  const int warp;
  UnitCursor at;
  const uint8_t *packed, *scale;  // what this lane copies first of an item
  int packed_step, scale_step;    // bytes
  uint32_t place;                 // of what this lane copies first

  __device__ __forceinline__ RowFetcher(const Params& params, int warp_, const UnitCursor& first, int lane)
      : p(params), warp(warp_), at(first) {
    const int blocks = kUnitRows * (p.k >> 6);
    packed_step = kUnitRows * (p.k >> 1), scale_step = lane < kItemRows ? blocks : blocks >> 8 << 2;
    place = (lane >> 3) * 128 + ((lane & 7) << 4);
    enter_band(lane);
  }
  // One word of codes holds four blocks of a row, which share a nested scale.
  __device__ __forceinline__ void enter_band(int lane) {
    const int64_t row = at.row(warp), block = (row + lane % kItemRows) * (p.k >> 6) + at.band * 4;
    packed = p.packed + (row + (lane >> 3)) * (p.k >> 1) + at.band * (kSliceColumns / 2) + (lane & 7) * 16;
    scale = lane < kItemRows ? p.codes + block : reinterpret_cast<const uint8_t*>(p.scales + (block >> 8));
  }
  // Chunk c of 16 bytes of row r lies at c ^ (r >> 2 & 3) << 1: no bank conflicts when a warp reads rows 4 t + j.
  __device__ __forceinline__ void fetch(uint32_t stage, int lane) {
    if (at.left > 0) {
      if (at.row(warp) < p.n) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          copy_async_fill_16b(stage + (place ^ i << 5) + i * 512, packed + static_cast<int64_t>(i) * 2 * p.k, 16);
        }
        copy_async_fill_4b(stage + kItemBytes + lane * 4, scale, 4);
      }
      packed += packed_step, scale += scale_step;
      const bool next_band = at.ends_band(p.work);
      at.advance(p.work);
      if (next_band) enter_band(lane);
    }
    commit_copies();
  }
};

// grad_y of a thread's rows of an item, for its token.
template <typename T>
__device__ __forceinline__ uint2 load_grad_y(const Params& p, int row, int lane) {
  const int token = lane >> 3;
  const T* from = static_cast<const T*>(p.x) + token * p.x_stride + row + 4 * (lane & 3);
  return token < p.m ? __ldcg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
}

// Of a thread's four rows of an item.
struct RowScales {
  float values[4];

  __device__ __forceinline__ void read(uint32_t stage, int lane, float offset) {
    const uint32_t t = lane & 3, shift = lane >> 3 << 3;
    const uint4 codes = load_shared_u128(stage + kItemBytes + t * 16), nested = load_shared_u128(stage + kItemBytes + 64 + t * 16);
    const auto scale_of = [&](uint32_t code, uint32_t group) {
      const float value = load_shared_f32(kCodeValues + (code >> shift & 255) * 4);
      return __fadd_rn(multiply_flushed(value, __uint_as_float(group)), offset);
    };
    values[0] = scale_of(codes.x, nested.x), values[1] = scale_of(codes.y, nested.y);
    values[2] = scale_of(codes.z, nested.z), values[3] = scale_of(codes.w, nested.w);
  }
};

template <typename T>
__device__ __forceinline__ void multiply_rows(const Params& p, const uint2& x, uint32_t stage, int lane, float offset,
                                              float (&sums)[kTiles][4]) {
  const uint32_t g = lane >> 2, t = lane & 3, lane_bytes = 8u * lane;
  RowScales scales;
  scales.read(stage, lane, offset);
  const ScaledTable table = make_scaled_table<T>(p.values, scales.values[0]);
  const auto decode = [&](int j, uint32_t word, uint32_t(&pairs)[4]) {  // one row in four by the scaled table: both pipes are busy alike
    if (j == 0) return decode_8(table, word, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint2 v = load_shared_u64_at<kPairTableAddress>(permute_bytes(word, lane_bytes, 0x5504u | static_cast<uint32_t>(i) << 4));
      const float scale = scales.values[j];
      pairs[i] = pack_pair<T>(multiply_flushed(__uint_as_float(v.x), scale), multiply_flushed(__uint_as_float(v.y), scale));
    }
  };
  // grad_y of row 4 t + j as B's two elements: (v, 0) in even columns, (0, v) in odd ones.
  const uint32_t even = g & 1 ? 0x1044 : 0x4410, odd = g & 1 ? 0x3244 : 0x4432;
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const uint32_t rows = step == 0 ? x.x : x.y, b[2] = {permute_bytes(rows, 0, even), permute_bytes(rows, 0, odd)};
    uint4 words[2];
#pragma unroll
    for (int j = 0; j < 2; j++) words[j] = load_shared_u128(stage + (4 * t + 2 * step + j) * 128 + ((g ^ t << 1) << 4));
#pragma unroll
    for (int w = 0; w < 2; w++) {  // words w and w + 2
      uint32_t pairs[2][2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        decode(2 * step + j, w == 0 ? words[j].x : words[j].y, pairs[j][0]);
        decode(2 * step + j, w == 0 ? words[j].z : words[j].w, pairs[j][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t a[4] = {pairs[0][0][i], pairs[0][1][i], pairs[1][0][i], pairs[1][1][i]};
        multiply_accumulate<T>(sums[w * 4 + i], a, b[0], b[1]);
      }
    }
  }
}

// Where the sums of a warp lie while the warps are added: tiles of 512 bytes, [token][8 pairs of columns], a token's pairs staggered
// against bank conflicts. Half of the tiles go to the area of sums, half to the stage that the warp read last.
struct SumPlace {
  uint32_t first, warp_step;

  __device__ __forceinline__ SumPlace(int tile, uint32_t stage, int token, int pair) {
    const bool in_area = tile < kTiles / 2;
    first = (in_area ? kGradSums : kRings + stage) + tile % (kTiles / 2) * 512 + token * 128 + ((pair ^ 2 * token) << 4);
    warp_step = in_area ? kTiles / 2 * 512 : kStages * kGradStageBytes;
  }
};
static_assert(kTiles / 2 * 512 <= kGradStageBytes);

// By all threads: sums of the warps for a band -> grad_x, or the partial sums of this CTA. Clears the sums. stage: what all warps read
// last, from the begin of their rings; free again when this returns if `more` is to come.
template <typename T>
__device__ __forceinline__ void store_band(const Params& p, float (&sums)[kTiles][4], uint32_t stage, int band, float* partials, bool more,
                                           int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  __syncwarp();  // all lanes have read the stage
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const SumPlace place(tile, stage, lane & 3, lane >> 2);
    float(&v)[4] = sums[tile];
    if ((lane & 3) < p.m) {
      store_shared_u128(place.first + warp * place.warp_step, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                        __float_as_uint(v[3]));
    }
    v[0] = v[1] = v[2] = v[3] = 0.f;
  }
  if (!NYBBLE_FAULT(kSumsNotAwaited)) __syncthreads();
  const int tile = warp >> 1, token = (warp & 1) * 2 + (lane >> 4), pair = lane >> 1 & 7, half = lane & 1;  // columns, or those 16 further
  if (token < p.m) {
    const SumPlace place(tile, stage, token, pair);
    float2 v{0.f, 0.f};
#pragma unroll
    for (int other = 0; other < kWarps; other++) {
      const uint2 next = load_shared_u64(place.first + half * 8 + other * place.warp_step);
      v.x += __uint_as_float(next.x), v.y += __uint_as_float(next.y);
    }
    const int column = pair * 32 + (tile >> 2) * 8 + (tile & 3) * 2 + half * 16;
    if (partials) {
      *reinterpret_cast<float2*>(partials + token * kSliceColumns + column) = v;
    } else {
      T* to = static_cast<T*>(p.out) + static_cast<int64_t>(token) * p.k + band * kSliceColumns + column;
      *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(v.x, v.y);
    }
  }
  if (more) __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) multiply_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const Work& work = p.work;
  const int cta = static_cast<int>(blockIdx.x);
  uint8_t* const table = pair_table(shared);
  Ring<kGradStageBytes> ring(kRings + warp * kStages * kGradStageBytes);
  allow_next_grid();
  UnitCursor at(work, first_unit(work, cta), first_unit(work, cta + 1));
  RowFetcher ahead(p, warp, at, lane);
  for (int i = 0; i < stages_ahead(); i++) ahead.fetch(ring.stage(i), lane);
  const TableValues table_values(p, thread);
  stage_values(p, table, thread);
  fill_tables(table_values, table, thread);
  const float offset = table_values.offset;
  __syncthreads();
  wait_for_previous_grids();

  uint2 next{0, 0};
  if (at.row(warp) < p.n) next = load_grad_y<T>(p, at.row(warp), lane);
  float sums[kTiles][4] = {};
  bool whole = at.unit == 0;
  while (at.left > 0) {
    wait_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies have landed, and the stage before is no longer read
    ahead.fetch(refilled(ring), lane);
    NYBBLE_DELAY(16);
    const uint2 x = next;
    const int band = at.band;
    const bool mine = at.row(warp) < p.n, ends_band = at.ends_band(work);
    at.advance(work);
    if (at.left > 0 && at.row(warp) < p.n) next = load_grad_y<T>(p, at.row(warp), lane);
    if (mine) multiply_rows<T>(p, x, ring.read, lane, offset, sums);
    ring.advance();
    if (!ends_band && at.left > 0) continue;
    float* const partials = whole && ends_band ? nullptr : p.partials + static_cast<int64_t>(cta + band) * p.m * kSliceColumns;
    store_band<T>(p, sums, ring.write - ring.base, band, partials, at.left > 0, thread);
    whole = true;
  }
}

// Partial sums of the CTAs that share a band -> grad_x, in ascending order of rows; four columns a thread.
template <typename T>
__global__ void __launch_bounds__(kSumThreads, 1) add_partials(const __grid_constant__ Params p) {
  allow_next_grid();
  const int i = static_cast<int>(blockIdx.x) * kSumThreads + static_cast<int>(threadIdx.x), vectors = p.m * (kSliceColumns / 4);
  const int band = i / vectors, vector = i - band * vectors, first = band * p.work.units;
  const int low = cta_of_unit(p.work, first), pieces = cta_of_unit(p.work, first + p.work.units - 1) - low + 1;
  const int start = NYBBLE_ANY_OF(pieces);
  wait_for_previous_grids();
  if (band >= p.work.bands || pieces == 1) return;
  const auto from = [&](int i) {
    const int piece = NYBBLE_FAULT(kArrivalOrder) ? (start + i) % pieces : i;
    return reinterpret_cast<const float4*>(p.partials) + static_cast<int64_t>(band + low + piece) * vectors + vector;
  };
  const float4 v = sum_pieces<8>(pieces, from);
  const int token = vector / (kSliceColumns / 4), column = vector % (kSliceColumns / 4) * 4;
  T* to = static_cast<T*>(p.out) + static_cast<int64_t>(token) * p.k + band * kSliceColumns + column;
  *reinterpret_cast<uint2*>(to) = {pack_pair<T>(v.x, v.y), pack_pair<T>(v.z, v.w)};
}

}  // namespace nybble::small_m::strip
