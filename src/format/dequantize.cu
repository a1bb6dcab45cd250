// The dense weight from its packed bytes: out[i] = RNE(fl32_ftz(table[code i] * scale of block i)).
//
// A warp makes tiles of 1024 weights as 4 rows of 256: lane l of row j owns weights 256 j + 8 l .. + 7, one packed word (4 bytes in, 16
// bytes out in a 16-bit dtype), so loads and stores of a row are contiguous. Blocks are multiples of 32 weights, hence lane l also works
// out the one scale of weights 32 l .. 32 l + 31 and rows fetch it by shuffle, whatever the block size. Nested scales never leave the
// registers.
//   packed  | lane 0: 4 B | lane 1: 4 B | ...  lane 31 |   row j, 128 B
//   scales  | lane 8j (4 words) | lane 8j + 1 | ...        by shuffle
//   out     | lane 0: 16 B | lane 1: 16 B | ...            row j, 512 B
// Codes select from 16 fp32 values in shared memory: 16 words lie in 16 banks, so a look-up never conflicts. Bound by memory: 2.5 bytes a
// weight; about 5 instructions a weight leave the issue slots three quarters empty.
#include <algorithm>
#include <bit>

#include "core/cuda_check.h"
#include "format/anywhere.cuh"
#include "format/arithmetic.cuh"
#include "format/tables.h"
#include "nybble/cuda.h"

namespace nybble::format {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRow = 256;  // weights a warp stores with one instruction
constexpr int kRows = 4;
constexpr int kTile = kRow * kRows;
constexpr int kTiles = 2;  // of a warp; all their loads are issued before the first is used
static_assert(kTile == 32 * kMinBlockSize, "a lane's 32 weights share a scale");
static_assert(kNestedBlockSize == 1 << 8);

struct Params {
  const uint8_t* packed;
  Scales scales;
  int64_t first;  // weights [first, end) are wanted
  int64_t end;
  uint8_t* out;  // of weight `first`
  int log2_block_size;
  bool aligned;  // packed to 4 bytes and the address of every row's weights in out to 16
  float table[16];
};

struct SharedStorage {
  alignas(64) float table[16];  // so that an offset is or-ed into its address
  float nested_code[256];
};

// What one lane reads of a tile.
struct LaneLoads {
  uint32_t words[kRows];
  uint32_t scale_code;  // nested
  float scale;          // plain: the scale; nested: the nested scale
};

__device__ __forceinline__ void fill_tables(const Params& p, SharedStorage& shared) {
  if (threadIdx.x < 16) shared.table[threadIdx.x] = p.table[threadIdx.x];
  if (p.scales.nested()) {
    for (int i = threadIdx.x; i < 256; i += kThreads) shared.nested_code[i] = load_f32(p.scales.nested_code, i);
  }
  __syncthreads();
}

__device__ __forceinline__ uint32_t load_word_guarded(const Params& p, int64_t weight) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t byte = (weight >> 1) + i;
    if (2 * byte < p.end) word |= device::load_global_u8(p.packed + byte) << (8 * i);
  }
  return word;
}

// The scale of weights run .. run + 31.
__device__ __forceinline__ void load_scale(const Params& p, int64_t run, LaneLoads& loads) {
  const int64_t block = run >> p.log2_block_size;
  if (p.scales.nested()) {
    loads.scale_code = device::load_global_u8(p.scales.absmax_codes + block);
    loads.scale = load_f32(p.scales.nested_absmax, block >> 8);
  } else {
    loads.scale = load_f32(p.scales.absmax, block);
  }
}

// Two roundings and no FMA; in a 16-bit nested dtype both go through it, and so does the offset.
__device__ __forceinline__ float finish_scale(const Params& p, const SharedStorage& shared, const LaneLoads& loads, float offset) {
  if (!p.scales.nested()) return loads.scale;
  const DType dtype = p.scales.nested_dtype;
  const float product = device::multiply_flushed(shared.nested_code[loads.scale_code], loads.scale);
  return round_to(dtype, add(round_to(dtype, product), offset));
}

// The 8 weights of a word in fp32: element 2 i is the high nibble of byte i.
__device__ __forceinline__ void decode_word(const SharedStorage& shared, uint32_t word, float scale, float (&weights)[8]) {
  const uint32_t table = device::smem_address(shared.table);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int shift = 8 * (i / 2) + (i % 2 == 0 ? 4 : 0) - 2;  // leaves the code times 4, a byte offset into the table
    const uint32_t code = shift < 0 ? word << -shift : word >> shift;
    weights[i] = device::multiply_flushed(device::load_shared_f32(device::and_or(code, 0x3Cu, table)), scale);
  }
}

template <typename T>
__device__ __forceinline__ void store_row(const float (&weights)[8], uint8_t* out) {
  auto* words = reinterpret_cast<uint4*>(out);
  if constexpr (sizeof(T) == 4) {
    words[0] = {__float_as_uint(weights[0]), __float_as_uint(weights[1]), __float_as_uint(weights[2]), __float_as_uint(weights[3])};
    words[1] = {__float_as_uint(weights[4]), __float_as_uint(weights[5]), __float_as_uint(weights[6]), __float_as_uint(weights[7])};
  } else {
    words[0] = {pack_pair<T>(weights[0], weights[1]), pack_pair<T>(weights[2], weights[3]), pack_pair<T>(weights[4], weights[5]),
                pack_pair<T>(weights[6], weights[7])};
  }
}

// Only the weights inside [first, end), one by one.
template <typename T>
__device__ __forceinline__ void store_row_guarded(const Params& p, const float (&weights)[8], int64_t weight) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (weight + i < p.first || weight + i >= p.end) continue;
    uint8_t* out = p.out + (weight + i - p.first) * static_cast<int64_t>(sizeof(T));
    if constexpr (sizeof(T) == 4) {
      store_u32(out, __float_as_uint(weights[i]));
    } else {
      store_u16(out, pack_pair<T>(weights[i], 0.0f));
    }
  }
}

// Ends of the range, and operands that are not aligned.
template <typename T>
__device__ __noinline__ void make_tile_guarded(const Params& p, const SharedStorage& shared, int64_t tile_first, float offset) {
  const int lane = threadIdx.x % 32;
  LaneLoads loads = {};
  const int64_t run = tile_first + lane * kMinBlockSize;
  if (run < p.end) load_scale(p, run, loads);
  const float scale = finish_scale(p, shared, loads, offset);
#pragma unroll 1
  for (int row = 0; row < kRows; row++) {
    const int64_t weight = tile_first + row * kRow + lane * 8;
    float weights[8];
    decode_word(shared, load_word_guarded(p, weight), __shfl_sync(0xFFFFFFFFu, scale, row * 8 + lane / 4), weights);
    store_row_guarded<T>(p, weights, weight);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ Params p) {
  __shared__ SharedStorage shared;
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t warp_first = (p.first & -int64_t{kTile}) + warp * (kTile * kTiles);
  const bool whole = p.aligned && warp_first >= p.first && warp_first + kTile * kTiles <= p.end;

  LaneLoads loads[kTiles];
  if (whole) {
    const uint8_t* packed = p.packed + (warp_first >> 1) + lane * 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        loads[tile].words[row] = __ldg(reinterpret_cast<const uint32_t*>(packed + (tile * kRows + row) * (kRow / 2)));
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) load_scale(p, warp_first + tile * kTile + lane * kMinBlockSize, loads[tile]);
  }
  fill_tables(p, shared);
  const float offset = p.scales.nested() ? round_to(p.scales.nested_dtype, load_f32(p.scales.offset, 0)) : 0.0f;
  if (!whole) {
    for (int tile = 0; tile < kTiles; tile++) make_tile_guarded<T>(p, shared, warp_first + tile * kTile, offset);
    return;
  }
  uint8_t* out = p.out + (warp_first - p.first + lane * 8) * static_cast<int64_t>(sizeof(T));
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const float scale = finish_scale(p, shared, loads[tile], offset);
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      float weights[8];
      decode_word(shared, loads[tile].words[row], __shfl_sync(0xFFFFFFFFu, scale, row * 8 + lane / 4), weights);
      store_row<T>(weights, out + (tile * kRows + row) * (kRow * static_cast<int>(sizeof(T))));
    }
  }
}

template <typename T>
void launch(Params params, cudaStream_t stream) {
  const int64_t first_tile = params.first / kTile;
  const int64_t tiles = num_blocks(params.end, kTile) - first_tile;
  const auto grid = static_cast<unsigned>(num_blocks(tiles, kWarps * kTiles));
  const uintptr_t tile_out =
      reinterpret_cast<uintptr_t>(params.out) - static_cast<uintptr_t>(params.first - first_tile * kTile) * sizeof(T);
  params.aligned = tile_out % 16 == 0 && reinterpret_cast<uintptr_t>(params.packed) % 4 == 0;
  dequantize_kernel<T><<<grid, kThreads, 0, stream>>>(params);
  check_launch();
}

}  // namespace
}  // namespace nybble::format

namespace nybble {

void dequantize_4bit_cuda(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, void* out, CudaStream stream) {
  if (!is_block_size(weight.block_size)) {
    fail(ErrorKind::kValue, "block size ", weight.block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (first < 0 || count < 0 || first > weight.n * weight.k - count) {
    fail(ErrorKind::kValue, "weights ", first, " .. ", first + count, " of a weight of ", weight.n * weight.k, " values");
  }
  if (count == 0) return;
  format::Params params{weight.packed,
                        weight.scales,
                        first,
                        first + count,
                        static_cast<uint8_t*>(out),
                        std::countr_zero(unsigned(weight.block_size)),
                        false,
                        {}};
  const auto& table = weight.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  std::copy(table.begin(), table.end(), params.table);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::kFloat32:
      return format::launch<float>(params, cuda_stream);
    case DType::kFloat16:
      return format::launch<__half>(params, cuda_stream);
    case DType::kBFloat16:
      return format::launch<__nv_bfloat16>(params, cuda_stream);
  }
  name(dtype);  // throws
}

}  // namespace nybble
