// More than 2^31 weights: runs where 12 GiB are free, a few seconds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
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
  if (available_gib() < 12) GTEST_SKIP() << available_gib() << " GiB free, 12 needed: weights of 2^31 + 65 values are not tested";
  constexpr int64_t kCount = (int64_t{1} << 31) + 65;
  constexpr int64_t kPeriod = 64 * 10'007;
  const auto x = std::make_unique<uint16_t[]>(kCount);
  for (int64_t i = 0; i < kPeriod; i++) x[i] = format::to_bf16(static_cast<float>((i * 7919) % 4001 - 2000) * 1e-3f);
  for (int64_t i = kPeriod; i < kCount; i += kPeriod) std::memcpy(&x[i], &x[0], 2 * std::min(kPeriod, kCount - i));
  const auto packed = std::make_unique<uint8_t[]>(packed_bytes(kCount));
  const auto absmax = std::make_unique<float[]>(num_blocks(kCount, 64));
  quantize_4bit(x.get(), DType::kBFloat16, kCount, 64, QuantType::kNf4, packed.get(), absmax.get());
  EXPECT_EQ(std::memcmp(&packed[kPeriod / 2], &packed[0], kCount / 2 - kPeriod / 2), 0);
  EXPECT_EQ(packed[kCount / 2] & 15, 7);  // the missing half of the last byte is the code of 0

  Nf4Weight weight{packed.get(), {}, 1, kCount, 64, QuantType::kNf4};
  weight.scales.absmax = absmax.get();
  uint16_t* out = x.get();  // the input is no longer needed
  dequantize_4bit(weight, DType::kBFloat16, 0, kCount, out);
  EXPECT_EQ(std::memcmp(out + kPeriod, out, 2 * (kCount - 1 - kPeriod)), 0);
  uint16_t tail[67];
  dequantize_4bit(weight, DType::kBFloat16, kCount - 67, 67, tail);
  EXPECT_EQ(std::memcmp(tail, out + kCount - 67, sizeof tail), 0);
}

}  // namespace
}  // namespace nybble::test
