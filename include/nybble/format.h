// The 4-bit format: bitsandbytes' NF4 and FP4 bytes, bit for bit (DESIGN N1). Quantise and dequantise on the CPU; the
// CUDA twins are in cuda.h. Rounding rules and tables: docs/format.md.
#pragma once

#include <cstdint>
#include <span>

namespace nybble {

enum class QuantType : uint8_t { kNf4 = 0, kFp4 = 1 };
enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t kNestedBlockSize = 256;  // scales that share one nested scale; bitsandbytes fixes it
constexpr int kMinBlockSize = 32;
constexpr int kMaxBlockSize = 4096;

const char* name(QuantType type);  // "nf4", "fp4"
const char* name(DType type);      // "float32", "float16", "bfloat16"
int64_t size_of(DType type);       // bytes

// The 16 values of a quant type, ascending code; FP4's code 8 is +0 here and -0 when dequantised (as on CUDA).
std::span<const float, 16> code_table(QuantType type);
// bitsandbytes' 256-entry dynamic map, used to quantise scales.
std::span<const float, 256> nested_code_table();

// True for 32, 64, 128, 256, 512, 1024, 2048, 4096.
bool is_block_size(int64_t block_size);
// Number of scales of n weights.
constexpr int64_t num_blocks(int64_t n, int64_t block_size) { return (n + block_size - 1) / block_size; }
// Bytes of n packed codes: two codes a byte, element 2j in the HIGH nibble of byte j.
constexpr int64_t packed_bytes(int64_t n) { return (n + 1) / 2; }

// The scales of a weight. Plain: absmax. Nested: absmax_codes, nested_absmax, nested_code and offset; the scale of block b is
// fl32(fl32(nested_code[absmax_codes[b]] * nested_absmax[b / 256]) + offset), two roundings, no FMA.
// state_round: bitsandbytes keeps de-nested scales in state2.dtype; when that is 16 bit both roundings go through it.
struct Scales {
  const float* absmax = nullptr;          // [blocks], plain scales; null when nested
  const uint8_t* absmax_codes = nullptr;  // [blocks], nested scales; null when plain
  const float* nested_absmax = nullptr;   // [ceil(blocks / 256)]
  const float* nested_code = nullptr;     // [256]
  const float* offset = nullptr;          // [1], same device as the rest
  DType nested_dtype = DType::kFloat32;
  constexpr bool nested() const { return absmax_codes != nullptr; }  // constexpr: kernels call it too
};

// A frozen 4-bit weight W[n][k], row major, as views: nothing here owns memory, no alignment is assumed.
// All pointers are on one device. Blocks run over the flattened [n*k] and may cross rows.
struct Nf4Weight {
  const uint8_t* packed = nullptr;  // [packed_bytes(n * k)]
  Scales scales;
  int64_t n = 0;  // out_features
  int64_t k = 0;  // in_features
  int32_t block_size = 64;
  QuantType quant_type = QuantType::kNf4;
};

// What quantize() fills; sizes as in Scales. nested_absmax, nested: null for plain scales.
struct QuantizedOut {
  uint8_t* packed = nullptr;        // [packed_bytes(n)]
  float* absmax = nullptr;          // [blocks]; always written (also the nested case's intermediate)
  uint8_t* absmax_codes = nullptr;  // [blocks], nested only
  float* nested_absmax = nullptr;   // [ceil(blocks / 256)], nested only
};

// 1/x as the GPU's rcp.approx.ftz.f32 gives it. kTable needs set_reciprocal_table(); kIeee is the correctly rounded 1/x (what the
// command uses: it differs from the GPU only where docs/format.md says; for bf16 NF4 nowhere).
enum class Reciprocal : uint8_t { kIeee, kTable };
// deltas: 2^23 values packed 4 to a byte, each (ulp difference + 1) in 2 bits; empty forgets the table. Copied. Source:
// tests/data/README.md.
void set_reciprocal_table(std::span<const uint8_t> deltas);

// Blockwise 4-bit quantisation of n values of x (dtype) into packed codes and fp32 absmax. Any n >= 0.
// Bits do not depend on the number of threads. Throws kValue for a bad block size.
void quantize_4bit(const void* x, DType dtype, int64_t n, int block_size, QuantType type, uint8_t* packed, float* absmax,
                   Reciprocal reciprocal = Reciprocal::kIeee);

// Mean of absmax as fl32 of a float64 sum in a fixed order (a tree over groups of 256, docs/format.md): the offset of nested scales.
// Throws kValue for blocks < 1.
float absmax_mean(const float* absmax, int64_t blocks);

// 8-bit quantisation of (absmax - offset) in blocks of 256 against nested_code (256 entries).
void quantize_scales(const float* absmax, int64_t blocks, float offset, const float* nested_code, uint8_t* codes, float* nested_absmax,
                     Reciprocal reciprocal = Reciprocal::kIeee);

// Scales of blocks [first, first + count) in fp32, exactly as dequantize_4bit uses them.
void expand_scales(const Scales& scales, int64_t first, int64_t count, float* out);

// out[0 .. count) = weights [first, first + count) of the flattened weight in dtype: fp32 table * scale, one round to nearest even.
// Products that are fp32-subnormal become a signed zero, as on CUDA.
void dequantize_4bit(const Nf4Weight& weight, DType dtype, int64_t first, int64_t count, void* out);

}  // namespace nybble
