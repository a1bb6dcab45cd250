// The GPU codec against recorded results of bitsandbytes' CUDA backend, bit for bit.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "format/device_array.h"
#include "format/golden.h"
#include "nybble/cuda.h"

namespace nybble::test {
namespace {

// Copies of a golden case's bytes on the device.
struct DeviceCase {
  explicit DeviceCase(const GoldenCase& golden)
      : packed(golden.packed),
        absmax(golden.nested ? std::vector<float>{} : golden.scales),
        codes(golden.absmax_codes),
        nested_absmax(golden.nested_absmax),
        nested_code(golden.nested_code),
        offset(std::vector<float>{golden.offset}) {
    weight = golden.weight();
    weight.packed = packed.data();
    weight.scales = {};
    if (golden.nested) {
      weight.scales = {nullptr, codes.data(), nested_absmax.data(), nested_code.data(), offset.data(), DType::kFloat32};
    } else {
      weight.scales.absmax = absmax.data();
    }
  }
  DeviceArray<uint8_t> packed;
  DeviceArray<float> absmax;
  DeviceArray<uint8_t> codes;
  DeviceArray<float> nested_absmax;
  DeviceArray<float> nested_code;
  DeviceArray<float> offset;
  Nf4Weight weight;
};

int64_t count_different_bytes(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  int64_t different = 0;
  for (size_t i = 0; i < b.size(); i++) different += a[i] != b[i];
  return different;
}

TEST(CudaGolden, QuantisedBytesAndScalesMatch) {
  NYBBLE_NEEDS_GPU();
  int64_t cases = 0, other_than_sm90 = 0;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  // rcp.approx is the card's own: only NF4 from bf16 is the same on every card.
  const bool sm90 = properties.major == 9;
  for (const GoldenCase& golden : golden_cases()) {
    DeviceArray<uint8_t> x(golden.input);
    DeviceArray<uint8_t> packed(packed_bytes(golden.n));
    DeviceArray<float> absmax(golden.blocks());
    quantize_4bit_cuda(x.data(), golden.dtype, golden.n, golden.block_size, golden.type, packed.data(), absmax.data(), nullptr);
    int64_t different = count_different_bytes(packed.to_host(), golden.packed);
    if (golden.nested) {
      const int64_t groups = num_blocks(golden.blocks(), kNestedBlockSize);
      DeviceArray<uint8_t> codes(golden.blocks());
      DeviceArray<float> nested_absmax(groups), offset(std::vector<float>{golden.offset}), nested_code(golden.nested_code);
      quantize_scales_cuda(absmax.data(), golden.blocks(), offset.data(), nested_code.data(), codes.data(), nested_absmax.data(), nullptr);
      different += count_different_bytes(codes.to_host(), golden.absmax_codes);
      different += count_different(DType::kFloat32, nested_absmax.to_host().data(), golden.nested_absmax.data(), groups);
      ASSERT_TRUE(codes.guards_intact() && nested_absmax.guards_intact()) << golden.name;
    } else {
      different += count_different(DType::kFloat32, absmax.to_host().data(), golden.scales.data(), golden.blocks());
    }
    ASSERT_TRUE(packed.guards_intact() && absmax.guards_intact()) << golden.name;
    if (sm90 || (golden.type == QuantType::kNf4 && golden.dtype == DType::kBFloat16 && !golden.nested)) {
      EXPECT_EQ(different, 0) << golden.name;
    } else {
      other_than_sm90 += different;
    }
    cases++;
  }
  EXPECT_GT(cases, 1000);
  std::printf("%ld cases; %ld values differ where this card's reciprocal may\n", long(cases), long(other_than_sm90));
}

TEST(CudaGolden, DequantisedWeightsMatchInEveryDtype) {
  NYBBLE_NEEDS_GPU();
  int64_t cases = 0, values = 0, found_flips = 0;
  for (const GoldenCase& golden : golden_cases()) {
    DeviceCase on_device(golden);
    for (const auto& [dtype, expected] : golden.weights) {
      DeviceArray<uint8_t> out(golden.n * size_of(dtype));
      dequantize_4bit_cuda(on_device.weight, dtype, 0, golden.n, out.data(), nullptr);
      EXPECT_EQ(count_different(dtype, out.to_host().data(), expected.data(), golden.n), 0) << golden.name << " -> " << name(dtype);
      ASSERT_TRUE(out.guards_intact()) << golden.name;
      values += golden.n;
      if (golden.name.find(".normal.") == std::string::npos || golden.n < 2) continue;
      // Negative control: one flipped nibble is one different weight.
      GoldenCase flipped = golden;
      flipped.packed[flipped.packed.size() / 3] ^= 0x10;
      DeviceCase flipped_on_device(flipped);
      dequantize_4bit_cuda(flipped_on_device.weight, dtype, 0, golden.n, out.data(), nullptr);
      EXPECT_EQ(count_different(dtype, out.to_host().data(), expected.data(), golden.n), 1) << golden.name;
      found_flips++;
    }
    cases++;
  }
  EXPECT_GT(cases, 1000);
  EXPECT_GT(found_flips, 100);
  std::printf("%ld cases, %ld weights compared, %ld flipped nibbles found\n", long(cases), long(values), long(found_flips));
}

}  // namespace
}  // namespace nybble::test
