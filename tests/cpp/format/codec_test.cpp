// The CPU codec against plain float64 loops: every block size, ragged ends, any address, any range, any number of threads.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <map>
#include <random>

#include "core/parallel.h"
#include "format/golden.h"
#include "format/guarded.h"
#include "format/rounding.h"
#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble::test {
namespace {

constexpr int kBlockSizes[] = {32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr QuantType kTypes[] = {QuantType::kNf4, QuantType::kFp4};

std::vector<uint8_t> random_values(DType dtype, int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.7f);
  std::vector<uint8_t> bytes(n * size_of(dtype));
  for (int64_t i = 0; i < n; i++) {
    const float value = normal(random);
    const uint16_t half = dtype == DType::kFloat16 ? format::to_fp16(value) : format::to_bf16(value);
    std::memcpy(bytes.data() + i * size_of(dtype), dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &half, size_of(dtype));
  }
  return bytes;
}

// How much farther from the value this code is than the nearest one, in float64. Exact ties exist, and the format's literal thresholds sit
// up to an ulp beside the midpoints, so the codec may take a code that is worse by that much (the golden vectors pin which).
double excess_distance(QuantType type, uint8_t code, double value) {
  const auto table = code_table(type);
  double best = 2.0;
  for (const float entry : table) best = std::min(best, std::fabs(entry - value));
  return std::fabs(table[code] - value) - best;
}

struct Quantised {
  std::vector<uint8_t> packed;
  std::vector<float> absmax;
  Nf4Weight weight(int64_t n, int block_size, QuantType type) const {
    Nf4Weight result{packed.data(), {}, 1, n, block_size, type};
    result.scales.absmax = absmax.data();
    return result;
  }
};

Quantised quantise(const std::vector<uint8_t>& x, DType dtype, int64_t n, int block_size, QuantType type) {
  Quantised result{std::vector<uint8_t>(packed_bytes(n)), std::vector<float>(num_blocks(n, block_size))};
  quantize_4bit(x.data(), dtype, n, block_size, type, result.packed.data(), result.absmax.data());
  return result;
}

TEST(Codec, QuantisesToTheNearestCodeOfEachBlock) {
  int64_t compared = 0, worse_when_scaled = 0;
  for (const int block_size : kBlockSizes) {
    for (const int64_t n : {int64_t{1}, int64_t{block_size - 1}, int64_t{block_size}, int64_t{3 * block_size + 37}}) {
      for (const DType dtype : kDTypes) {
        for (const QuantType type : kTypes) {
          const std::vector<uint8_t> x = random_values(dtype, n, static_cast<uint32_t>(n));
          const Quantised got = quantise(x, dtype, n, block_size, type);
          for (int64_t i = 0; i < n; i++) {
            double absmax = 0;
            const int64_t block = i / block_size;
            for (int64_t j = block * block_size; j < std::min(n, (block + 1) * block_size); j++) {
              absmax = std::max(absmax, std::fabs(double{format::load_as_float(x.data(), dtype, j)}));
            }
            ASSERT_EQ(double{got.absmax[block]}, absmax);
            const auto code = static_cast<uint8_t>(i % 2 == 0 ? got.packed[i / 2] >> 4 : got.packed[i / 2] & 15);
            const double value = format::load_as_float(x.data(), dtype, i) / absmax;
            ASSERT_LE(excess_distance(type, code, value), 1e-6) << "element " << i << " of " << n << ", block " << block_size;
            worse_when_scaled += excess_distance(type, code, value * 0.9) > 1e-6;
            compared++;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 50'000);
  EXPECT_GT(worse_when_scaled, compared / 10);  // negative control: scales off by a tenth are seen
}

// first, count and addresses at every remainder of a byte and of a vector step; nothing outside the range is written.
TEST(Codec, DequantisesAnyRangeAtAnyAddress) {
  const int64_t n = 2 * 4096 + 333;
  const std::vector<uint8_t> x = random_values(DType::kFloat32, n, 5);
  for (const int block_size : {32, 64, 4096}) {
    for (const DType dtype : kDTypes) {
      const Quantised quantised = quantise(x, DType::kFloat32, n, block_size, QuantType::kNf4);
      Nf4Weight weight = quantised.weight(n, block_size, QuantType::kNf4);
      for (int64_t trial = 0; trial < 300; trial++) {
        const int64_t first = trial * 37 % (n - 1);
        const int64_t count = trial % 3 == 0 ? n - first : std::min(n - first, trial * trial % 700);
        Guarded<uint8_t> packed(packed_bytes(n), trial % 5);
        std::memcpy(packed.data(), quantised.packed.data(), packed_bytes(n));
        Guarded<float> absmax(num_blocks(n, block_size), trial % 7);
        std::memcpy(absmax.data(), quantised.absmax.data(), quantised.absmax.size() * 4);
        weight.packed = packed.data();
        weight.scales.absmax = absmax.data();
        Guarded<uint8_t> out(count * size_of(dtype), trial % 11);
        dequantize_4bit(weight, dtype, first, count, out.data());
        ASSERT_TRUE(out.guards_intact()) << first << " + " << count;
        for (int64_t i = 0; i < count; i++) {
          const uint8_t byte = quantised.packed[(first + i) / 2];
          const double entry = code_table(QuantType::kNf4)[(first + i) % 2 == 0 ? byte >> 4 : byte & 15];
          const float product = static_cast<float>(entry * quantised.absmax[(first + i) / block_size]);
          ASSERT_EQ(format::load_as_float(out.data(), dtype, i), format::round_to(dtype, product)) << first << " + " << i;
        }
      }
    }
  }
}

TEST(Codec, QuantisesFromAnyAddress) {
  const int64_t n = 5 * 64 + 13;
  for (const DType dtype : kDTypes) {
    const std::vector<uint8_t> x = random_values(dtype, n, 9);
    const Quantised expected = quantise(x, dtype, n, 64, QuantType::kFp4);
    for (int64_t shift = 0; shift < 9; shift++) {
      Guarded<uint8_t> moved(static_cast<int64_t>(x.size()), shift);
      std::memcpy(moved.data(), x.data(), x.size());
      Guarded<uint8_t> packed(packed_bytes(n), shift);
      Guarded<float> absmax(num_blocks(n, 64), shift);
      quantize_4bit(moved.data(), dtype, n, 64, QuantType::kFp4, packed.data(), absmax.data());
      EXPECT_TRUE(packed.guards_intact() && absmax.guards_intact());
      EXPECT_EQ(std::memcmp(packed.data(), expected.packed.data(), expected.packed.size()), 0) << shift;
      EXPECT_EQ(std::memcmp(absmax.data(), expected.absmax.data(), expected.absmax.size() * 4), 0) << shift;
    }
  }
}

// bitsandbytes keeps de-nested scales in state2.dtype: the product, the offset and the sum are each rounded to it.
TEST(Codec, NestedScalesRoundThroughTheirDtype) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(0.01f, 1.0f);
  const int64_t blocks = 700;
  std::vector<uint8_t> codes(blocks);
  for (auto& code : codes) code = static_cast<uint8_t>(random());
  std::vector<float> nested(num_blocks(blocks, kNestedBlockSize));
  for (auto& value : nested) value = uniform(random);
  const float offset = uniform(random);
  int64_t narrower = 0;
  for (const DType dtype : kDTypes) {
    Scales scales{nullptr, codes.data(), nested.data(), nested_code_table().data(), &offset, dtype};
    Guarded<float> out(blocks - 1);
    expand_scales(scales, 1, blocks - 1, out.data());
    EXPECT_TRUE(out.guards_intact());
    for (int64_t i = 1; i < blocks; i++) {
      const double product = double{nested_code_table()[codes[i]]} * nested[i / 256];
      const double sum = double{format::round_to(dtype, static_cast<float>(product))} + format::round_to(dtype, offset);
      ASSERT_EQ(out.data()[i - 1], format::round_to(dtype, static_cast<float>(sum))) << name(dtype) << " " << i;
      narrower += out.data()[i - 1] != static_cast<float>(static_cast<float>(product) + double{offset});
    }
  }
  EXPECT_GT(narrower, blocks);  // negative control: rounding once, to fp32, is seen in the 16-bit dtypes
}

struct Results {
  std::vector<uint8_t> bytes;
  void add(const void* data, size_t size) {
    const auto* begin = static_cast<const uint8_t*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
  }
};

// What the codec computes from one input: quantised, nested, and dequantised to out_dtype.
Results round_trip(const std::vector<uint8_t>& x, DType dtype, int64_t n, QuantType type, DType out_dtype) {
  Results results;
  const Quantised quantised = quantise(x, dtype, n, 64, type);
  const auto blocks = static_cast<int64_t>(quantised.absmax.size());
  const float offset = absmax_mean(quantised.absmax.data(), blocks);
  std::vector<uint8_t> codes(blocks);
  std::vector<float> nested(num_blocks(blocks, kNestedBlockSize));
  quantize_scales(quantised.absmax.data(), blocks, offset, nested_code_table().data(), codes.data(), nested.data());
  Nf4Weight weight = quantised.weight(n, 64, type);
  weight.scales = {nullptr, codes.data(), nested.data(), nested_code_table().data(), &offset, DType::kFloat32};
  std::vector<uint8_t> out(n * size_of(out_dtype));
  dequantize_4bit(weight, out_dtype, 0, n, out.data());
  results.add(out.data(), out.size());
  results.add(quantised.packed.data(), quantised.packed.size());
  results.add(quantised.absmax.data(), quantised.absmax.size() * 4);
  results.add(codes.data(), codes.size());
  results.add(nested.data(), nested.size() * 4);
  results.add(&offset, 4);
  return results;
}

TEST(Codec, AThousandRepeatsOnOneTwoAndThreeThreadsGiveTheSameBits) {
  const int threads_before = num_threads();
  const int64_t n = 70'001;  // more than two chunks of work
  const std::vector<uint8_t> x = random_values(DType::kBFloat16, n, 11);
  std::map<std::pair<QuantType, DType>, Results> expected;
  set_num_threads(1);
  for (const QuantType type : kTypes) {
    for (const DType out_dtype : kDTypes) expected[{type, out_dtype}] = round_trip(x, DType::kBFloat16, n, type, out_dtype);
  }
  for (int repeat = 0; repeat < 1000; repeat++) {
    set_num_threads(1 + repeat / 6 % 3);
    const QuantType type = kTypes[repeat % 2];
    const DType out_dtype = kDTypes[repeat / 2 % 3];
    const Results got = round_trip(x, DType::kBFloat16, n, type, out_dtype);
    ASSERT_TRUE((got.bytes == expected[{type, out_dtype}].bytes)) << repeat;
  }
  set_num_threads(threads_before);
}

TEST(Codec, EveryInstructionSetGivesTheSameBits) {
  const int64_t n = 3001;
  const int64_t supported = hwy::SupportedTargets();
  int compared = 0;
  for (const QuantType type : kTypes) {
    for (const DType dtype : kDTypes) {
      const std::vector<uint8_t> x = random_values(dtype, n, 13);
      const Results expected = round_trip(x, dtype, n, type, dtype);
      for (uint64_t bit = 1; bit != 0; bit <<= 1) {
        if (!(supported & static_cast<int64_t>(bit))) continue;
        hwy::SetSupportedTargetsForTest(static_cast<int64_t>(bit));
        hwy::GetChosenTarget().DeInit();
        EXPECT_TRUE((round_trip(x, dtype, n, type, dtype).bytes == expected.bytes)) << hwy::TargetName(static_cast<int64_t>(bit));
        compared++;
      }
      hwy::SetSupportedTargetsForTest(0);
      hwy::GetChosenTarget().DeInit();
    }
  }
  EXPECT_GE(compared, 2 * 6);
}

TEST(Codec, MeanOfScalesIsTheFloat64Mean) {
  std::mt19937 random(17);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  for (const int64_t blocks : {1, 2, 31, 255, 256, 257, 65536, 65537, 1'000'003}) {
    std::vector<float> absmax(blocks);
    for (auto& value : absmax) value = uniform(random);
    long double sum = 0;
    for (const float value : absmax) sum += value;
    EXPECT_EQ(absmax_mean(absmax.data(), blocks), static_cast<float>(sum / blocks)) << blocks;
  }
}

TEST(Codec, WrongArgumentsAreNamed) {
  const std::vector<uint8_t> x(64 * 4);
  uint8_t packed[64];
  float absmax[2];
  for (const int block_size : {0, -64, 16, 63, 65, 96, 8192}) {
    EXPECT_FALSE(is_block_size(block_size));
    EXPECT_THROW(quantize_4bit(x.data(), DType::kFloat32, 64, block_size, QuantType::kNf4, packed, absmax), Error);
  }
  EXPECT_THROW(quantize_4bit(x.data(), DType::kFloat32, -1, 64, QuantType::kNf4, packed, absmax), Error);
  EXPECT_THROW(quantize_4bit(x.data(), DType(7), 64, 64, QuantType::kNf4, packed, absmax), Error);
  EXPECT_THROW(absmax_mean(absmax, 0), Error);
  EXPECT_THROW(set_reciprocal_table(std::vector<uint8_t>(100)), Error);
  const Quantised quantised = quantise(x, DType::kFloat32, 64, 64, QuantType::kNf4);
  const Nf4Weight weight = quantised.weight(64, 64, QuantType::kNf4);
  float out[64];
  EXPECT_THROW(dequantize_4bit(weight, DType::kFloat32, 1, 64, out), Error);
  EXPECT_THROW(dequantize_4bit(weight, DType::kFloat32, -1, 2, out), Error);
  EXPECT_NO_THROW(dequantize_4bit(weight, DType::kFloat32, 64, 0, out));
  set_reciprocal_table({});
  EXPECT_THROW(quantize_4bit(x.data(), DType::kFloat32, 64, 64, QuantType::kNf4, packed, absmax, Reciprocal::kTable), Error);
}

}  // namespace
}  // namespace nybble::test
