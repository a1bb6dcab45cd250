// Reads the golden vectors: safetensors files, plain or gzipped. Written for trusted files; the product's reader is src/store.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "nybble/format.h"

namespace nybble::test {

// Whole content of a file, decompressed when it is gzipped.
std::vector<uint8_t> read_bytes(const std::filesystem::path& path);

// The reciprocal table of the GPU the golden vectors come from.
std::vector<uint8_t> read_reciprocal_table();

// One input and what bitsandbytes' CUDA backend made of it. 16-bit and fp32 values are raw bytes.
struct GoldenCase {
  std::string name;  // <quant type>.<input dtype>.<kind>.bs<block size>.<shape>.<plain|nested>
  QuantType type = QuantType::kNf4;
  DType dtype = DType::kFloat32;
  int block_size = 0;
  int64_t n = 0;
  bool nested = false;
  std::vector<uint8_t> input;                     // [n] of dtype
  std::vector<uint8_t> packed;                    // [packed_bytes(n)]
  std::vector<float> scales;                      // [blocks], as dequantize_4bit uses them
  std::vector<uint8_t> absmax_codes;              // [blocks], nested
  std::vector<float> nested_absmax;               // [ceil(blocks / 256)], nested
  std::vector<float> nested_code;                 // [256], nested
  float offset = 0.0f;                            // nested
  std::map<DType, std::vector<uint8_t>> weights;  // dequantised

  int64_t blocks() const { return num_blocks(n, block_size); }
  // Views of this case's own bytes as a weight [1][n].
  Nf4Weight weight() const;
};

// Every case of every file in the golden folder: $NYBBLE_GOLDEN, else golden/ in the data folder ($NYBBLE_TEST_DATA, else tests/data).
const std::vector<GoldenCase>& golden_cases();

// The input dtypes' code tables as stored in the golden files, one a file.
const std::map<std::string, std::vector<float>>& golden_code_tables();

// Number of values of `dtype` in which two raw arrays differ in bits; two NaNs count as equal.
int64_t count_different(DType dtype, const void* a, const void* b, int64_t count);

}  // namespace nybble::test
