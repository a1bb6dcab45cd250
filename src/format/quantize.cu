// Blockwise 4-bit quantisation: per block the largest magnitude, r = rcp.approx(largest), code = thresholds below fl32_ftz(x * r).
//
// A lane owns 8 consecutive values, a warp a row of 256; lanes that share a block (4 to 32 of them) reduce by shuffle. Blocks above 256
// values are several rows of one warp, read twice (the second time from cache). The code comes from a table of 32 cells over the value
// range: a cell is narrower than any gap between thresholds, so it holds at most one, and code = codes below the cell's threshold, or above
// it. 32 words lie in 32 banks: look-ups never conflict. NaN falls into cell 0 and above no threshold, hence code 0. Bound by memory for
// 16-bit input: 2.5 bytes a value, about 12 instructions.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/cuda_check.h"
#include "format/anywhere.cuh"
#include "format/arithmetic.cuh"
#include "format/tables.h"
#include "nybble/cuda.h"

namespace nybble::format {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRow = 256;  // values a warp takes at a time
constexpr int kRows = 4;   // of a warp where blocks are no longer than a row; loaded before the first is used
constexpr int kLaneValues = 8;
constexpr int kCells = 32;

// Cell of x: floor(max(position(x), lowest) * scale + shift), in the low bits of that sum plus 2^23, rounded down once.
struct CellRange {
  float lowest;
  float scale;
  float shift;
};
// NF4 looks at x in [-1, 1], FP4 at |x| in [0, 1]. A product x * r may pass 1 by two ulps, which stays in the last cell.
constexpr CellRange kNf4Range = {-1.0f, 15.5f, 16.0f};
constexpr CellRange kFp4Range = {0.0f, 31.0f, 0.0f};

struct Cells {
  float threshold[kCells];  // of the cell, or infinity
  uint32_t codes[kCells];   // below | above << 4
};

// Every threshold lies in a cell of its own, and far enough from its edges that the rounding of the cell number does not matter.
template <size_t COUNT>
constexpr bool cells_are_sound(const std::array<float, COUNT>& thresholds, CellRange range) {
  int last = -1;
  for (const float threshold : thresholds) {
    const double position = double{threshold} * range.scale + range.shift;
    const int cell = static_cast<int>(position);
    if (cell <= last || cell >= kCells || position - cell < 1e-4 || position - cell > 1.0 - 1e-4) return false;
    last = cell;
  }
  return true;
}
static_assert(cells_are_sound(kNf4Pivots, kNf4Range));
static_assert(cells_are_sound(kFp4Pivots, kFp4Range));

template <size_t COUNT, typename CodeOfRank>
constexpr Cells make_cells(const std::array<float, COUNT>& thresholds, CellRange range, CodeOfRank code_of_rank) {
  Cells cells{};
  uint32_t rank = 0;
  for (int cell = 0; cell < kCells; cell++) {
    const bool holds_one = rank < COUNT && static_cast<int>(double{thresholds[rank]} * range.scale + range.shift) == cell;
    cells.threshold[cell] = holds_one ? thresholds[rank] : std::numeric_limits<float>::infinity();
    cells.codes[cell] = code_of_rank(rank) | code_of_rank(holds_one ? rank + 1 : rank) << 4;
    rank += holds_one;
  }
  return cells;
}
constexpr Cells kNf4Cells = make_cells(kNf4Pivots, kNf4Range, [](uint32_t rank) { return rank; });
constexpr Cells kFp4Cells = make_cells(kFp4Pivots, kFp4Range, [](uint32_t rank) { return uint32_t{kFp4Order[rank]}; });

struct Params {
  const uint8_t* x;
  int64_t n;
  uint8_t* packed;
  float* absmax;
  int log2_block_size;
  bool aligned;  // x to 16 bytes, packed to 4
  Cells cells;
};

// ---- one row of a warp ----

// 8 consecutive values of a lane as they lie in memory; 16-bit values two to a word.
template <typename T>
struct LaneValues {
  uint32_t words[kLaneValues * sizeof(T) / 4];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(words[i]);
    const uint32_t word = words[i / 2];
    if constexpr (__is_same(T, __half)) return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)));
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
  }
};

// Zeros beyond n.
template <typename T>
__device__ __noinline__ LaneValues<T> load_values_guarded(const Params& p, int64_t first) {
  LaneValues<T> values = {};
  for (int i = 0; i < kLaneValues && first + i < p.n; i++) {
    const uint8_t* one = p.x + (first + i) * static_cast<int64_t>(sizeof(T));
#pragma unroll
    for (int j = 0; j < kLaneValues; j++) {  // keeps the words in registers
      if (j != i) continue;
      if constexpr (sizeof(T) == 4) values.words[j] = __float_as_uint(load_f32(reinterpret_cast<const float*>(one), 0));
      if constexpr (sizeof(T) == 2) values.words[j / 2] |= load_u16(one) << (16 * (j % 2));
    }
  }
  return values;
}

template <typename T>
__device__ __forceinline__ LaneValues<T> load_values(const Params& p, int64_t first) {
  if (!p.aligned || first + kLaneValues > p.n) return load_values_guarded<T>(p, first);
  LaneValues<T> values;
  const auto* x = reinterpret_cast<const uint4*>(p.x + first * static_cast<int64_t>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; i++) {
    const uint4 v = __ldg(x + i);
    values.words[4 * i] = v.x, values.words[4 * i + 1] = v.y, values.words[4 * i + 2] = v.z, values.words[4 * i + 3] = v.w;
  }
  return values;
}

template <typename T>
__device__ __forceinline__ float largest_of(const LaneValues<T>& values, float largest) {
#pragma unroll
  for (int i = 0; i < kLaneValues; i++) largest = max_magnitude(largest, values[i]);
  return largest;
}

// Over groups of `lanes` lanes.
__device__ __forceinline__ float largest_of_lanes(float largest, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) largest = max_magnitude(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  return largest;
}

template <QuantType TYPE>
__device__ __forceinline__ uint32_t code_of(const Cells& cells, float x, float inverse) {
  constexpr CellRange kRange = TYPE == QuantType::kNf4 ? kNf4Range : kFp4Range;
  const float value = device::multiply_flushed(x, inverse);
  const float position = TYPE == QuantType::kNf4 ? value : fabsf(value);
  const float sum = __fmaf_rd(fmaxf(position, kRange.lowest), kRange.scale, kRange.shift + 0x1p23f);
  const uint32_t cell = __float_as_uint(sum) & (kCells - 1);
  const uint32_t codes = cells.codes[cell];
  const uint32_t code = position > cells.threshold[cell] ? codes >> 4 : codes & 15u;
  return TYPE == QuantType::kFp4 && value < 0.0f ? code | 8u : code;
}

// 8 codes to 4 bytes; element 2 i is the high nibble of byte i.
template <typename T, QuantType TYPE>
__device__ __forceinline__ void store_codes(const Params& p, const Cells& cells, const LaneValues<T>& values, float inverse,
                                            int64_t first) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kLaneValues; i++) word |= code_of<TYPE>(cells, values[i], inverse) << (8 * (i / 2) + (i % 2 == 0 ? 4 : 0));
  uint8_t* packed = p.packed + (first >> 1);
  if (p.aligned && first + kLaneValues <= p.n) {
    *reinterpret_cast<uint32_t*>(packed) = word;
    return;
  }
  for (int i = 0; i < 4 && first + 2 * i < p.n; i++) packed[i] = static_cast<uint8_t>(word >> (8 * i));
}

// ---- blocks of at most a row ----

template <typename T>
__device__ __forceinline__ void load_rows(const Params& p, int64_t begin, int lane, LaneValues<T> (&rows)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; row++) rows[row] = load_values<T>(p, begin + row * kRow + lane * kLaneValues);
}

template <typename T, QuantType TYPE>
__device__ __forceinline__ void quantize_rows(const Params& p, const Cells& cells, const LaneValues<T> (&rows)[kRows], int64_t begin,
                                              int lane) {
  const int lanes = (1 << p.log2_block_size) / kLaneValues;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const int64_t first = begin + row * kRow + lane * kLaneValues;
    const float largest = largest_of_lanes(largest_of(rows[row], -std::numeric_limits<float>::max()), lanes);
    if (lane % lanes == 0 && first < p.n) store_f32(p.absmax, first >> p.log2_block_size, largest);
    store_codes<T, TYPE>(p, cells, rows[row], reciprocal_approximate(largest), first);
  }
}

// ---- longer blocks ----

template <typename T, QuantType TYPE>
__device__ __forceinline__ void quantize_block(const Params& p, const Cells& cells, int64_t begin, int lane) {
  const int rows = (1 << p.log2_block_size) / kRow;
  float largest = -std::numeric_limits<float>::max();
#pragma unroll 2
  for (int row = 0; row < rows; row++) largest = largest_of(load_values<T>(p, begin + row * kRow + lane * kLaneValues), largest);
  largest = largest_of_lanes(largest, 32);
  if (lane == 0) store_f32(p.absmax, begin >> p.log2_block_size, largest);
  const float inverse = reciprocal_approximate(largest);
#pragma unroll 2
  for (int row = 0; row < rows; row++) {
    const int64_t first = begin + row * kRow + lane * kLaneValues;
    store_codes<T, TYPE>(p, cells, load_values<T>(p, first), inverse, first);
  }
}

__device__ __forceinline__ void fill_cells(const Params& p, Cells& cells) {
  if (threadIdx.x < kCells) {
    cells.threshold[threadIdx.x] = p.cells.threshold[threadIdx.x];
    cells.codes[threadIdx.x] = p.cells.codes[threadIdx.x];
  }
  __syncthreads();
}

template <typename T, QuantType TYPE, bool LONG_BLOCKS>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ Params p) {
  __shared__ Cells cells;
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if constexpr (LONG_BLOCKS) {
    const int64_t begin = warp << p.log2_block_size;
    fill_cells(p, cells);
    if (begin < p.n) quantize_block<T, TYPE>(p, cells, begin, lane);
  } else {
    const int64_t begin = warp * (kRow * kRows);
    LaneValues<T> rows[kRows];
    load_rows<T>(p, begin, lane, rows);
    fill_cells(p, cells);
    quantize_rows<T, TYPE>(p, cells, rows, begin, lane);
  }
}

template <typename T, QuantType TYPE>
void launch(const Params& params, cudaStream_t stream) {
  const int block_size = 1 << params.log2_block_size;
  const bool long_blocks = block_size > kRow;
  const int64_t warps = num_blocks(params.n, long_blocks ? block_size : kRow * kRows);
  const auto grid = static_cast<unsigned>(num_blocks(warps, kWarps));
  const auto kernel = long_blocks ? quantize_kernel<T, TYPE, true> : quantize_kernel<T, TYPE, false>;
  kernel<<<grid, kThreads, 0, stream>>>(params);
  check_launch();
}

template <typename T>
void launch_type(const Params& params, QuantType type, cudaStream_t stream) {
  if (type == QuantType::kNf4) return launch<T, QuantType::kNf4>(params, stream);
  launch<T, QuantType::kFp4>(params, stream);
}

}  // namespace
}  // namespace nybble::format

namespace nybble {

void quantize_4bit_cuda(const void* x, DType dtype, int64_t n, int block_size, QuantType type, uint8_t* packed, float* absmax,
                        CudaStream stream) {
  if (!is_block_size(block_size)) {
    fail(ErrorKind::kValue, "block size ", block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (n < 0) fail(ErrorKind::kValue, "quantize_4bit_cuda of ", n, " values, expected at least 0");
  name(dtype), name(type);  // throw for a value outside the enum
  if (n == 0) return;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(packed) % 4 == 0;
  const format::Params params{static_cast<const uint8_t*>(x),
                              n,
                              packed,
                              absmax,
                              std::countr_zero(static_cast<unsigned>(block_size)),
                              aligned,
                              type == QuantType::kNf4 ? format::kNf4Cells : format::kFp4Cells};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::kFloat32:
      return format::launch_type<float>(params, type, cuda_stream);
    case DType::kFloat16:
      return format::launch_type<__half>(params, type, cuda_stream);
    case DType::kBFloat16:
      return format::launch_type<__nv_bfloat16>(params, type, cuda_stream);
  }
}

}  // namespace nybble
