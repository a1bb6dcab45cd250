// The CPU codec against bitsandbytes' CUDA backend, bit for bit.
#include "format/golden.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "format/guarded.h"
#include "nybble/format.h"

namespace nybble::test {
namespace {

struct Counts {
  int64_t cases = 0;
  int64_t values = 0;
  int64_t different = 0;
};

class Golden : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { set_reciprocal_table(read_reciprocal_table()); }
};

// Values in which our quantisation of a golden input differs from the recorded one: packed bytes, scales or nested parts.
Counts compare_quantised(const GoldenCase& golden, Reciprocal reciprocal) {
  Guarded<uint8_t> packed(packed_bytes(golden.n));
  Guarded<float> absmax(golden.blocks());
  quantize_4bit(golden.input.data(), golden.dtype, golden.n, golden.block_size, golden.type, packed.data(), absmax.data(), reciprocal);
  EXPECT_TRUE(packed.guards_intact() && absmax.guards_intact()) << golden.name;
  Counts counts{1, packed_bytes(golden.n) + golden.blocks(), 0};
  for (int64_t i = 0; i < packed_bytes(golden.n); i++) counts.different += packed.data()[i] != golden.packed[i];
  if (!golden.nested) {
    counts.different += count_different(DType::kFloat32, absmax.data(), golden.scales.data(), golden.blocks());
    return counts;
  }
  const int64_t groups = num_blocks(golden.blocks(), kNestedBlockSize);
  Guarded<uint8_t> codes(golden.blocks());
  Guarded<float> nested_absmax(groups);
  quantize_scales(absmax.data(), golden.blocks(), golden.offset, golden.nested_code.data(), codes.data(), nested_absmax.data(), reciprocal);
  EXPECT_TRUE(codes.guards_intact() && nested_absmax.guards_intact()) << golden.name;
  for (int64_t i = 0; i < golden.blocks(); i++) counts.different += codes.data()[i] != golden.absmax_codes[i];
  counts.different += count_different(DType::kFloat32, nested_absmax.data(), golden.nested_absmax.data(), groups);
  counts.values += groups;
  return counts;
}

// Values in which our scales or weights made from `packed` differ from the recorded ones.
Counts compare_dequantised(const GoldenCase& golden, const std::vector<uint8_t>& packed) {
  Nf4Weight weight = golden.weight();
  weight.packed = packed.data();
  Guarded<float> scales(golden.blocks());
  expand_scales(weight.scales, 0, golden.blocks(), scales.data());
  EXPECT_TRUE(scales.guards_intact()) << golden.name;
  Counts counts{1, golden.blocks(), count_different(DType::kFloat32, scales.data(), golden.scales.data(), golden.blocks())};
  for (const auto& [dtype, expected] : golden.weights) {
    Guarded<uint8_t> out(golden.n * size_of(dtype));
    dequantize_4bit(weight, dtype, 0, golden.n, out.data());
    EXPECT_TRUE(out.guards_intact()) << golden.name;
    counts.different += count_different(dtype, out.data(), expected.data(), golden.n);
    counts.values += golden.n;
  }
  return counts;
}

TEST_F(Golden, CodeTablesAreTheRecordedOnes) {
  ASSERT_EQ(golden_code_tables().size(), 6u);
  for (const auto& [file, table] : golden_code_tables()) {
    const auto ours = code_table(file.rfind("nf4", 0) == 0 ? QuantType::kNf4 : QuantType::kFp4);
    ASSERT_EQ(table.size(), 16u);
    EXPECT_EQ(std::memcmp(table.data(), ours.data(), sizeof(float) * 16), 0) << file;
  }
  for (const GoldenCase& golden : golden_cases()) {
    if (!golden.nested) continue;
    ASSERT_EQ(std::memcmp(golden.nested_code.data(), nested_code_table().data(), sizeof(float) * 256), 0) << golden.name;
  }
}

TEST_F(Golden, CoversEveryKindBlockSizeAndType) {
  std::set<std::string> kinds;
  std::set<int> blocks;
  std::set<std::pair<QuantType, DType>> types;
  for (const GoldenCase& golden : golden_cases()) {
    kinds.insert(golden.name.substr(golden.name.find('.', 4) + 1, golden.name.find(".bs") - golden.name.find('.', 4) - 1));
    blocks.insert(golden.block_size);
    types.insert({golden.type, golden.dtype});
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"allzero", "huge", "nan_inf", "neg0", "normal", "pivots", "scaled", "tiny", "zeros_mixed"}));
  EXPECT_EQ(blocks, (std::set<int>{32, 64, 128, 256, 512, 1024, 2048, 4096}));
  EXPECT_EQ(types.size(), 6u);
}

TEST_F(Golden, QuantisedBytesAndScalesMatch) {
  Counts all;
  for (const GoldenCase& golden : golden_cases()) {
    const Counts counts = compare_quantised(golden, Reciprocal::kTable);
    EXPECT_EQ(counts.different, 0) << golden.name;
    all.cases += counts.cases;
    all.values += counts.values;
  }
  EXPECT_GT(all.cases, 1000);
  std::printf("%ld cases, %ld bytes and scales compared\n", long(all.cases), long(all.values));
}

TEST_F(Golden, DequantisedWeightsMatchInEveryDtype) {
  Counts all;
  for (const GoldenCase& golden : golden_cases()) {
    const Counts counts = compare_dequantised(golden, golden.packed);
    EXPECT_EQ(counts.different, 0) << golden.name;
    all.cases += counts.cases;
    all.values += counts.values;
  }
  EXPECT_GT(all.cases, 1000);
  std::printf("%ld cases, %ld scales and weights compared\n", long(all.cases), long(all.values));
}

// Negative control of the two tests above.
TEST_F(Golden, OneFlippedNibbleIsFound) {
  int64_t checked = 0;
  for (const GoldenCase& golden : golden_cases()) {
    if (golden.name.find(".normal.") == std::string::npos || golden.n < 2) continue;
    std::vector<uint8_t> packed = golden.packed;
    packed[packed.size() / 3] ^= 0x10;
    const Counts counts = compare_dequantised(golden, packed);
    EXPECT_EQ(counts.different, static_cast<int64_t>(golden.weights.size())) << golden.name;
    GoldenCase flipped = golden;
    flipped.packed = packed;
    EXPECT_EQ(compare_quantised(flipped, Reciprocal::kTable).different, 1) << golden.name;
    checked++;
  }
  EXPECT_GT(checked, 100);
}

// Negative control of the table, and the statement of docs/format.md: the correctly rounded reciprocal gives the GPU's bytes for bf16 NF4,
// and differs somewhere for the others.
TEST_F(Golden, IeeeReciprocalDiffersOnlyWhereDocumented) {
  std::map<std::pair<QuantType, DType>, Counts> plain;
  for (const GoldenCase& golden : golden_cases()) {
    if (golden.nested) continue;
    const Counts counts = compare_quantised(golden, Reciprocal::kIeee);
    Counts& sum = plain[{golden.type, golden.dtype}];
    sum.values += counts.values;
    sum.different += counts.different;
  }
  int64_t elsewhere = 0;
  for (const auto& [key, counts] : plain) {
    std::printf("%s %s: %ld of %ld values differ with the correctly rounded reciprocal\n", name(key.first), name(key.second),
                long(counts.different), long(counts.values));
    if (key == std::pair(QuantType::kNf4, DType::kBFloat16)) {
      EXPECT_EQ(counts.different, 0);
    } else {
      elsewhere += counts.different;
    }
  }
  EXPECT_GT(elsewhere, 0);
}

}  // namespace
}  // namespace nybble::test
