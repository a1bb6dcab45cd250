// The GPU codec against the CPU codec: ranges, addresses, every bf16 value, flushing, lengths above 2^31.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "format/device_array.h"
#include "format/golden.h"
#include "format/rounding.h"
#include "nybble/cuda.h"
#include "nybble/error.h"

namespace nybble::test {
namespace {

constexpr int kBlockSizes[] = {32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr QuantType kTypes[] = {QuantType::kNf4, QuantType::kFp4};

bool is_sm90() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  return properties.major == 9;
}

std::vector<uint8_t> random_bytes(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
  return bytes;
}

std::vector<float> random_scales(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  std::vector<float> values(count);
  for (auto& value : values) value = normal(random);
  return values;
}

std::vector<uint8_t> random_values(DType dtype, int64_t n, uint32_t seed) {
  const std::vector<float> wide = random_scales(n, seed);
  std::vector<uint8_t> bytes(n * size_of(dtype));
  for (int64_t i = 0; i < n; i++) {
    const uint16_t half = dtype == DType::kFloat16 ? format::to_fp16(wide[i]) : format::to_bf16(wide[i]);
    std::memcpy(bytes.data() + i * size_of(dtype), dtype == DType::kFloat32 ? static_cast<const void*>(&wide[i]) : &half, size_of(dtype));
  }
  return bytes;
}

TEST(CudaCodec, DequantisesAnyRangeAtAnyAddress) {
  NYBBLE_NEEDS_GPU();
  std::mt19937 random(23);
  int64_t compared = 0;
  for (int trial = 0; trial < 400; trial++) {
    const int block_size = kBlockSizes[trial % 8];
    const DType dtype = kDTypes[trial % 3];
    const QuantType type = kTypes[trial / 3 % 2];
    const bool nested = trial / 2 % 2 == 0;
    const DType nested_dtype = trial % 5 == 0 ? kDTypes[trial / 5 % 3] : DType::kFloat32;
    const int64_t n = 1 + random() % 40'000;
    const int64_t first = trial % 4 == 0 ? 0 : random() % n;
    const int64_t count = trial % 8 == 0 ? n : 1 + random() % (n - first);
    const auto shift = [&](int values) { return trial % 3 == 0 ? 0 : static_cast<int64_t>(random() % values); };
    const int64_t blocks = num_blocks(n, block_size);
    const std::vector<uint8_t> packed = random_bytes(packed_bytes(n), trial), codes = random_bytes(blocks, trial + 1);
    const std::vector<float> absmax = random_scales(blocks, trial + 2), nested_absmax = random_scales(num_blocks(blocks, 256), trial + 3);
    const std::vector<float> offset = random_scales(1, trial + 4), code(nested_code_table().begin(), nested_code_table().end());
    Nf4Weight weight{packed.data(), {}, 1, n, block_size, type};
    weight.scales.absmax = absmax.data();
    if (nested) weight.scales = {nullptr, codes.data(), nested_absmax.data(), code.data(), offset.data(), nested_dtype};
    std::vector<uint8_t> expected(count * size_of(dtype));
    dequantize_4bit(weight, dtype, first, count, expected.data());

    DeviceArray<uint8_t> d_packed(packed, shift(16)), d_codes(codes, shift(5));
    DeviceArray<float> d_absmax(absmax, shift(5)), d_nested(nested_absmax, shift(5)), d_offset(offset, shift(5)), d_code(code, shift(5));
    weight.packed = d_packed.data();
    weight.scales.absmax = nested ? nullptr : d_absmax.data();
    if (nested) weight.scales = {nullptr, d_codes.data(), d_nested.data(), d_code.data(), d_offset.data(), nested_dtype};
    DeviceArray<uint8_t> out(count * size_of(dtype), shift(17));
    dequantize_4bit_cuda(weight, dtype, first, count, out.data(), nullptr);
    ASSERT_EQ(count_different(dtype, out.to_host().data(), expected.data(), count), 0)
        << trial << ": " << first << " + " << count << " of " << n << ", block " << block_size << ", " << name(dtype);
    ASSERT_TRUE(out.guards_intact()) << trial;
    compared += count;
  }
  EXPECT_GT(compared, 1'000'000);
}

// Scales around those whose products are the smallest normal number: where flushing starts, to the ulp.
TEST(CudaCodec, ProductsFlushWhereTheCpuCodecFlushesThem) {
  NYBBLE_NEEDS_GPU();
  std::vector<float> scales;
  for (const QuantType type : kTypes) {
    for (const float entry : code_table(type)) {
      if (entry == 0.0f) continue;
      const auto edge = static_cast<int32_t>(std::bit_cast<uint32_t>(static_cast<float>(0x1p-126 / std::fabs(double{entry}))));
      for (int32_t ulps = -3000; ulps <= 3000; ulps++) scales.push_back(std::bit_cast<float>(edge + ulps));
    }
  }
  const auto blocks = static_cast<int64_t>(scales.size());
  std::vector<uint8_t> packed(blocks * 16);
  for (size_t i = 0; i < packed.size(); i++) packed[i] = static_cast<uint8_t>((2 * i % 16) << 4 | (2 * i + 1) % 16);
  DeviceArray<uint8_t> d_packed(packed);
  DeviceArray<float> d_scales(scales);
  for (const QuantType type : kTypes) {
    Nf4Weight weight{packed.data(), {}, blocks, 32, 32, type};
    weight.scales.absmax = scales.data();
    std::vector<float> expected(blocks * 32);
    dequantize_4bit(weight, DType::kFloat32, 0, blocks * 32, expected.data());
    weight.packed = d_packed.data();
    weight.scales.absmax = d_scales.data();
    DeviceArray<float> out(blocks * 32);
    dequantize_4bit_cuda(weight, DType::kFloat32, 0, blocks * 32, out.data(), nullptr);
    const std::vector<float> got = out.to_host();
    int64_t different = 0, flushed = 0;
    for (int64_t i = 0; i < blocks * 32; i++) {
      const uint8_t byte = packed[i / 2];
      const float entry = code_table(type)[i % 2 == 0 ? byte >> 4 : byte & 15];
      flushed += entry != 0.0f && got[i] == 0.0f;
      if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
      // The exact product in units of 2^-126: which side of 1 the GPU rounds before it decides.
      if (different++ < 8) {
        std::printf("%s %.9g * %.9g = (1 - %.6g * 2^-24) * 2^-126: GPU %.9g, CPU %.9g\n", name(type), entry, scales[i / 32],
                    (1.0 - std::fabs(double{entry} * scales[i / 32]) * 0x1p126) * 0x1p24, got[i], expected[i]);
      }
    }
    EXPECT_EQ(different, 0);
    EXPECT_GT(flushed, 10'000);
    EXPECT_LT(flushed, blocks * 30);
  }
}

// A block's first value is its absmax; the others run through every bf16 value not above it.
TEST(CudaCodec, QuantisesEveryBf16ValueAgainstEveryMantissa) {
  NYBBLE_NEEDS_GPU();
  if (!is_sm90()) GTEST_SKIP() << "the reciprocal table is sm_90's";
  set_reciprocal_table(read_reciprocal_table());
  std::vector<uint16_t> x;
  for (uint16_t mantissa = 0; mantissa < 128; mantissa += 3) {
    const uint16_t absmax = static_cast<uint16_t>(0x3F80 | mantissa);
    for (uint32_t magnitude = absmax - 20 * 128; magnitude <= absmax; magnitude++) {
      for (uint16_t sign = 0; sign < 2; sign++) {
        if (x.size() % 32 == 0) x.push_back(absmax);
        x.push_back(static_cast<uint16_t>(magnitude | sign << 15));
      }
    }
    while (x.size() % 32 != 0) x.push_back(0);
  }
  const auto n = static_cast<int64_t>(x.size());
  DeviceArray<uint16_t> d_x(x);
  for (const QuantType type : kTypes) {
    std::vector<uint8_t> expected(packed_bytes(n));
    std::vector<float> absmax(num_blocks(n, 32));
    quantize_4bit(x.data(), DType::kBFloat16, n, 32, type, expected.data(), absmax.data(), Reciprocal::kTable);
    DeviceArray<uint8_t> packed(packed_bytes(n));
    DeviceArray<float> d_absmax(num_blocks(n, 32));
    quantize_4bit_cuda(d_x.data(), DType::kBFloat16, n, 32, type, packed.data(), d_absmax.data(), nullptr);
    EXPECT_TRUE((packed.to_host() == expected)) << name(type);
    EXPECT_TRUE((d_absmax.to_host() == absmax)) << name(type);
  }
}

TEST(CudaCodec, QuantisesRandomValuesOfAnyLengthAtAnyAddress) {
  NYBBLE_NEEDS_GPU();
  set_reciprocal_table(read_reciprocal_table());
  std::mt19937 random(29);
  const bool sm90 = is_sm90();
  for (int trial = 0; trial < 300; trial++) {
    const int block_size = kBlockSizes[trial % 8];
    const DType dtype = sm90 ? kDTypes[trial % 3] : DType::kBFloat16;
    const QuantType type = sm90 ? kTypes[trial / 3 % 2] : QuantType::kNf4;
    const int64_t n = 1 + random() % 60'000, blocks = num_blocks(n, block_size), groups = num_blocks(blocks, kNestedBlockSize);
    const auto shift = [&](int values) { return trial % 3 == 0 ? 0 : static_cast<int64_t>(random() % values); };
    const std::vector<uint8_t> x = random_values(dtype, n, trial);
    std::vector<uint8_t> expected(packed_bytes(n)), expected_codes(blocks);
    std::vector<float> expected_absmax(blocks), expected_nested(groups);
    const Reciprocal reciprocal = sm90 ? Reciprocal::kTable : Reciprocal::kIeee;
    quantize_4bit(x.data(), dtype, n, block_size, type, expected.data(), expected_absmax.data(), reciprocal);
    const float expected_offset = absmax_mean(expected_absmax.data(), blocks);
    const std::vector<float> code(nested_code_table().begin(), nested_code_table().end());
    quantize_scales(expected_absmax.data(), blocks, expected_offset, code.data(), expected_codes.data(), expected_nested.data(),
                    reciprocal);

    DeviceArray<uint8_t> d_x(x, shift(17)), packed(packed_bytes(n), shift(5)), codes(blocks, shift(5));
    DeviceArray<float> absmax(blocks, shift(5)), nested(groups, shift(5)), offset(1, shift(5)), d_code(code, shift(5));
    DeviceArray<double> workspace(groups);
    quantize_4bit_cuda(d_x.data(), dtype, n, block_size, type, packed.data(), absmax.data(), nullptr);
    absmax_mean_cuda(absmax.data(), blocks, workspace.data(), offset.data(), nullptr);
    quantize_scales_cuda(absmax.data(), blocks, offset.data(), d_code.data(), codes.data(), nested.data(), nullptr);
    ASSERT_TRUE((packed.to_host() == expected))
        << trial << ": " << n << ", block " << block_size << ", " << name(dtype) << " " << name(type);
    ASSERT_TRUE((absmax.to_host() == expected_absmax)) << trial;
    ASSERT_EQ(offset.to_host()[0], expected_offset) << trial;
    if (sm90) {
      ASSERT_TRUE((codes.to_host() == expected_codes)) << trial;
    }
    ASSERT_TRUE((nested.to_host() == expected_nested)) << trial;
    ASSERT_TRUE(packed.guards_intact() && absmax.guards_intact() && codes.guards_intact() && nested.guards_intact()) << trial;
    ASSERT_TRUE(offset.guards_intact() && workspace.guards_intact()) << trial;
  }
}

TEST(CudaCodec, MeanHasTheCpuCodecsOrderAtEverySize) {
  NYBBLE_NEEDS_GPU();
  for (const int64_t blocks : {1, 2, 255, 256, 257, 65536, 65537, 917'504, 16'777'217 + 300}) {
    const std::vector<float> absmax = random_scales(blocks, static_cast<uint32_t>(blocks));
    DeviceArray<float> d_absmax(absmax), mean(1);
    DeviceArray<double> workspace(num_blocks(blocks, kNestedBlockSize));
    absmax_mean_cuda(d_absmax.data(), blocks, workspace.data(), mean.data(), nullptr);
    EXPECT_EQ(mean.to_host()[0], absmax_mean(absmax.data(), blocks)) << blocks;
    EXPECT_TRUE(mean.guards_intact() && workspace.guards_intact()) << blocks;
  }
}

// The input repeats with a period of whole blocks, so every period must give the bytes of the first: an index that wraps does not.
TEST(CudaCodec, MoreThanTwoToThe31ValuesRoundTrip) {
  NYBBLE_NEEDS_GPU();
  constexpr int64_t kCount = (int64_t{1} << 31) + 65, kPeriod = 64 * 10'007;
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < size_t{12} << 30) GTEST_SKIP() << free_bytes << " bytes free on the GPU, 12 GiB needed";
  std::vector<uint16_t> period(kPeriod);
  for (int64_t i = 0; i < kPeriod; i++) period[i] = format::to_bf16(static_cast<float>(i * 7919 % 4001 - 2000) * 1e-3f);
  uint16_t* x = nullptr;
  uint8_t* packed = nullptr;
  float* absmax = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&x), 2 * kCount));
  check(cudaMalloc(reinterpret_cast<void**>(&packed), packed_bytes(kCount)));
  check(cudaMalloc(reinterpret_cast<void**>(&absmax), 4 * num_blocks(kCount, 64)));
  check(cudaMemcpy(x, period.data(), 2 * kPeriod, cudaMemcpyHostToDevice));
  for (int64_t filled = kPeriod; filled < kCount; filled *= 2) {
    check(cudaMemcpy(x + filled, x, 2 * std::min(filled, kCount - filled), cudaMemcpyDeviceToDevice));
  }
  quantize_4bit_cuda(x, DType::kBFloat16, kCount, 64, QuantType::kNf4, packed, absmax, nullptr);
  const auto window = [&](const void* base, int64_t first_byte, int64_t bytes) {
    std::vector<uint8_t> result(bytes);
    check(cudaMemcpy(result.data(), static_cast<const uint8_t*>(base) + first_byte, bytes, cudaMemcpyDeviceToHost));
    return result;
  };
  const int64_t last = (kCount - 66) / kPeriod;  // the last whole period ends beyond 2^31 - 65
  for (const int64_t at : {int64_t{1}, last / 2, last - 1}) {
    EXPECT_TRUE((window(packed, at * kPeriod / 2, kPeriod / 2) == window(packed, 0, kPeriod / 2))) << at;
  }
  const int64_t rest = kCount - 1 - last * kPeriod;  // even, ends at the last whole block
  EXPECT_TRUE((window(packed, last * kPeriod / 2, rest / 2) == window(packed, 0, rest / 2)));
  EXPECT_EQ(window(packed, packed_bytes(kCount) - 1, 1)[0] & 15, 7);
  Nf4Weight weight{packed, {}, 1, kCount, 64, QuantType::kNf4};
  weight.scales.absmax = absmax;
  check(cudaMemset(x, 0xFF, 2 * kCount));
  dequantize_4bit_cuda(weight, DType::kBFloat16, 0, kCount, x, nullptr);
  for (const int64_t at : {int64_t{1}, last / 2, last - 1}) {
    EXPECT_TRUE((window(x, at * kPeriod * 2, kPeriod * 2) == window(x, 0, kPeriod * 2))) << at;
  }
  EXPECT_TRUE((window(x, last * kPeriod * 2, rest * 2) == window(x, 0, rest * 2)));
  DeviceArray<uint16_t> tail(67);
  dequantize_4bit_cuda(weight, DType::kBFloat16, kCount - 67, 67, tail.data(), nullptr);
  EXPECT_TRUE((DeviceArray<uint8_t>(tail.to_host()).to_host() == window(x, 2 * (kCount - 67), 2 * 67)));
  cudaFree(x), cudaFree(packed), cudaFree(absmax);
}

TEST(CudaCodec, AThousandRepeatsGiveTheSameBits) {
  NYBBLE_NEEDS_GPU();
  const int64_t n = 1'000'003;
  DeviceArray<uint8_t> x(random_values(DType::kBFloat16, n, 31)), packed(packed_bytes(n));
  DeviceArray<float> absmax(num_blocks(n, 64));
  DeviceArray<uint16_t> out(n);
  std::vector<uint8_t> expected_packed;
  std::vector<uint16_t> expected;
  for (int repeat = 0; repeat < 1000; repeat++) {
    quantize_4bit_cuda(x.data(), DType::kBFloat16, n, 64, QuantType::kNf4, packed.data(), absmax.data(), nullptr);
    Nf4Weight weight{packed.data(), {}, 1, n, 64, QuantType::kNf4};
    weight.scales.absmax = absmax.data();
    dequantize_4bit_cuda(weight, DType::kBFloat16, 0, n, out.data(), nullptr);
    if (repeat == 0) expected_packed = packed.to_host(), expected = out.to_host();
    ASSERT_TRUE((packed.to_host() == expected_packed && out.to_host() == expected)) << repeat;
  }
}

TEST(CudaCodec, WrongArgumentsAreNamed) {
  NYBBLE_NEEDS_GPU();
  DeviceArray<uint8_t> x(256), packed(64);
  DeviceArray<float> absmax(2);
  EXPECT_THROW(quantize_4bit_cuda(x.data(), DType::kFloat32, 64, 63, QuantType::kNf4, packed.data(), absmax.data(), nullptr), Error);
  EXPECT_THROW(quantize_4bit_cuda(x.data(), DType::kFloat32, -1, 64, QuantType::kNf4, packed.data(), absmax.data(), nullptr), Error);
  Nf4Weight weight{packed.data(), {}, 1, 64, 64, QuantType::kNf4};
  weight.scales.absmax = absmax.data();
  EXPECT_THROW(dequantize_4bit_cuda(weight, DType::kFloat32, 1, 64, x.data(), nullptr), Error);
  EXPECT_THROW(absmax_mean_cuda(absmax.data(), 0, nullptr, absmax.data(), nullptr), Error);
  EXPECT_NO_THROW(dequantize_4bit_cuda(weight, DType::kFloat32, 64, 0, x.data(), nullptr));
}

}  // namespace
}  // namespace nybble::test
