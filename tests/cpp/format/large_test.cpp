// More than 2^31 weights. Needs 12 GiB and most of a minute, hence only with NYBBLE_LARGE=1.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "format/rounding.h"
#include "nybble/format.h"

namespace nybble::test {
namespace {

double available_gib() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  double kib = 0;
  while (file >> key >> kib >> unit) {
    if (key == "MemAvailable:") return kib / (1 << 20);
  }
  return 0;
}

// x repeats with a period of a whole number of blocks, so every period must give the same bytes: an index that wraps at 2^31 does not.
TEST(LargeWeight, MoreThanTwoToThe31ValuesRoundTrip) {
  if (const char* wanted = std::getenv("NYBBLE_LARGE"); !wanted || std::string(wanted) != "1") {
    GTEST_SKIP() << "NYBBLE_LARGE is not 1: weights of 2^31 + 65 values are not tested";
  }
  if (available_gib() < 12) GTEST_SKIP() << available_gib() << " GiB free, 12 needed: weights of 2^31 + 65 values are not tested";
  constexpr int64_t kCount = (int64_t{1} << 31) + 65;
  constexpr int64_t kPeriod = 64 * 10'007;
  const auto x = std::make_unique<uint16_t[]>(kCount);
  for (int64_t i = 0; i < kCount; i++) x[i] = format::to_bf16(static_cast<float>((i % kPeriod * 7919) % 4001 - 2000) * 1e-3f);
  const auto packed = std::make_unique<uint8_t[]>(packed_bytes(kCount));
  const auto absmax = std::make_unique<float[]>(num_blocks(kCount, 64));
  quantize_4bit(x.get(), DType::kBFloat16, kCount, 64, QuantType::kNf4, packed.get(), absmax.get());
  int64_t different = 0;
  for (int64_t i = kPeriod / 2; i < kCount / 2; i++) different += packed[i] != packed[i - kPeriod / 2];
  EXPECT_EQ(different, 0);
  EXPECT_EQ(packed[kCount / 2] & 15, 7);  // the missing half of the last byte is the code of 0

  Nf4Weight weight{packed.get(), {}, 1, kCount, 64, QuantType::kNf4};
  weight.scales.absmax = absmax.get();
  uint16_t* out = x.get();  // the input is no longer needed
  dequantize_4bit(weight, DType::kBFloat16, 0, kCount, out);
  different = 0;
  for (int64_t i = kPeriod; i < kCount - 1; i++) different += out[i] != out[i - kPeriod];
  EXPECT_EQ(different, 0);
  uint16_t tail[67];
  dequantize_4bit(weight, DType::kBFloat16, kCount - 67, 67, tail);
  EXPECT_EQ(std::memcmp(tail, out + kCount - 67, sizeof tail), 0);
}

}  // namespace
}  // namespace nybble::test
