// The portable kernel on the CPU (tests/cpp/simt): what it reads, decodes, sums and stores, on every tile shape, without a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "linear/portable.cuh"
#include "linear/portable.h"
#include "nybble/error.h"

namespace nybble::portable {
alignas(128) uint8_t shared[99 * 1024];
}

namespace nybble {
namespace {

using Bf16 = __nv_bfloat16;
using Fp16 = __half;
constexpr uint16_t kGuard = 0x7F7F;

struct Case {
  std::string title;
  int variant;
  Direction direction;
  int64_t m, n, k;
  int block_size = 64;
  bool nested = true, bias = false, half = false;
  QuantType quant_type = QuantType::kNf4;
  int sm_count = 0;  // > 0: cut reductions for a device with so many SMs
};

// Everything a launch reads and writes, with random contents.
struct Operands {
  std::vector<uint8_t> packed, codes;
  std::vector<float> scales, code_values, offset;
  std::vector<uint16_t> x, bias, out;
  std::vector<float> dense;  // [n][k], the weights as dequantize_4bit gives them
  std::vector<char> workspace;
  Nf4Weight weight;
};

uint16_t to_16(float v, bool half) { return half ? Fp16(v).bits : Bf16(v).bits; }
float from_16(uint16_t bits, bool half) {
  if (half) return Fp16{std::bit_cast<Fp16>(bits)};
  return Bf16{std::bit_cast<Bf16>(bits)};
}

Operands make_operands(const Case& c, std::mt19937_64& random) {
  Operands o;
  std::normal_distribution<float> normal;
  const int64_t blocks = num_blocks(c.n * c.k, c.block_size);
  o.packed.resize(packed_bytes(c.n * c.k));
  for (auto& byte : o.packed) byte = static_cast<uint8_t>(random());
  o.weight.n = c.n, o.weight.k = c.k, o.weight.block_size = c.block_size, o.weight.quant_type = c.quant_type;
  if (c.nested) {
    o.codes.resize(blocks);
    for (auto& code : o.codes) code = static_cast<uint8_t>(random());
    o.scales.resize(num_blocks(blocks, kNestedBlockSize));
    o.code_values.assign(nested_code_table().begin(), nested_code_table().end());
    o.offset = {0.04f};
  } else {
    o.scales.resize(blocks);
  }
  for (auto& scale : o.scales) scale = 0.01f + 0.02f * std::abs(normal(random));
  Scales& s = o.weight.scales;
  o.weight.packed = o.packed.data();
  (c.nested ? s.nested_absmax : s.absmax) = o.scales.data();
  if (c.nested) s.absmax_codes = o.codes.data(), s.nested_code = o.code_values.data(), s.offset = o.offset.data();
  const bool forward = c.direction == Direction::kForward;
  o.x.resize(c.m * (forward ? c.k : c.n));
  for (auto& v : o.x) v = to_16(normal(random), c.half);
  if (c.bias) o.bias.resize(c.n);
  for (auto& v : o.bias) v = to_16(normal(random), c.half);
  o.dense.resize(c.n * c.k);
  std::vector<uint16_t> rounded(c.n * c.k);
  dequantize_4bit(o.weight, c.half ? DType::kFloat16 : DType::kBFloat16, 0, c.n * c.k, rounded.data());
  for (size_t i = 0; i < rounded.size(); i++) o.dense[i] = from_16(rounded[i], c.half);
  return o;
}

template <class C>
void run_kernel(const portable::Params& p, int grid, uint64_t seed) {
  simt::launch(grid, C::kThreads, portable::shared, C::kSharedBytes, seed, [&] { portable::portable_kernel<C>(p); });
}

template <Direction DIRECTION, typename T>
void run_variant(int variant, const portable::Params& p, int grid, uint64_t seed) {
  switch (variant) {
    case kPortable256x128:
      return run_kernel<portable::Traits<DIRECTION, T, 256, 128, 64, 64, 1>>(p, grid, seed);
    case kPortable128x128:
      return run_kernel<portable::Traits<DIRECTION, T, 128, 128, 64, 32, 1>>(p, grid, seed);
    case kPortable64x128:
      return run_kernel<portable::Traits<DIRECTION, T, 64, 128, 32, 32, 2>>(p, grid, seed);
    case kPortable16x128:
      return run_kernel<portable::Traits<DIRECTION, T, 16, 128, 16, 32, 4>>(p, grid, seed);
  }
  FAIL() << "variant " << variant;
}

LinearProblem problem_of(const Case& c) {
  LinearProblem p;
  p.m = c.m, p.n = c.n, p.k = c.k, p.direction = c.direction, p.block_size = c.block_size, p.nested = c.nested, p.bias = c.bias;
  p.dtype = c.half ? DType::kFloat16 : DType::kBFloat16;
  p.quant_type = c.quant_type;
  return p;
}

// One launch into a poisoned output between guard words.
std::vector<uint16_t> run(const Case& c, Operands& o, uint64_t seed, LinearPlan* used = nullptr) {
  const DeviceModel device{"simulated", 80, c.sm_count > 0 ? c.sm_count : 3, 0, 0};
  const LinearProblem problem = problem_of(c);
  EXPECT_EQ(supports_portable(problem, device), "");
  const LinearPlan plan = plan_portable_as(static_cast<PortableVariant>(c.variant), c.sm_count > 0, problem, device);
  if (used) *used = plan;
  const int64_t outputs = c.m * (c.direction == Direction::kForward ? c.n : c.k);
  std::vector<uint16_t> out(outputs + 16, kGuard);
  std::fill(out.begin() + 8, out.end() - 8, to_16(std::nanf(""), c.half));
  o.workspace.assign(plan.workspace_bytes + 256, 0x7F);
  char* workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(o.workspace.data()) + 255) / 256 * 256);
  LinearArgs args;
  args.in = o.x.data(), args.weight = o.weight, args.bias = c.bias ? o.bias.data() : nullptr, args.out = out.data() + 8,
  args.workspace = workspace;
  const portable::Params p = portable::make_params(plan, problem, args);
  simt::clear_buffers();
  simt::allow(o.packed.data(), o.packed.size(), false);
  simt::allow(o.codes.data(), o.codes.size(), false);
  simt::allow(o.scales.data(), o.scales.size() * 4, false);
  simt::allow(o.x.data(), o.x.size() * 2, false);
  if (plan.split_tiles > 0) {
    simt::allow(workspace, plan.workspace_bytes, true);
    std::memset(p.flags, 0, plan.grid * 4);
  }
  const bool forward = c.direction == Direction::kForward;
  const auto launch = forward ? (c.half ? run_variant<Direction::kForward, Fp16> : run_variant<Direction::kForward, Bf16>)
                              : (c.half ? run_variant<Direction::kGradInput, Fp16> : run_variant<Direction::kGradInput, Bf16>);
  launch(c.variant, p, plan.grid, seed);
  for (int i = 0; i < 8; i++) EXPECT_TRUE(out[i] == kGuard && out[out.size() - 1 - i] == kGuard) << "guard words overwritten";
  return {out.begin() + 8, out.end() - 8};
}

// Count of outputs that differ from the float64 reference by more than their own rounding and that of fp32 sums.
int64_t count_wrong(const Case& c, const Operands& o, const std::vector<uint16_t>& out) {
  const bool forward = c.direction == Direction::kForward;
  const int64_t columns = forward ? c.n : c.k, reduction = forward ? c.k : c.n;
  int64_t wrong = 0;
  for (int64_t i = 0; i < c.m; i++) {
    for (int64_t j = 0; j < columns; j++) {
      double sum = c.bias ? from_16(o.bias[j], c.half) : 0, size = std::abs(sum);
      for (int64_t r = 0; r < reduction; r++) {
        const double product = static_cast<double>(from_16(o.x[i * reduction + r], c.half)) * o.dense[forward ? j * c.k + r : r * c.k + j];
        sum += product;
        size += std::abs(product);
      }
      const double tolerance = std::abs(sum) * (c.half ? 0x1p-11 : 0x1p-8) + size * 0x1p-20 + 1e-7;
      if (!(std::abs(from_16(out[i * columns + j], c.half) - sum) <= tolerance)) wrong++;
    }
  }
  return wrong;
}

class PortableSimt : public ::testing::TestWithParam<Case> {};

TEST_P(PortableSimt, MatchesFloat64AndRepeatsUnderAnyThreadOrder) {
  const Case& c = GetParam();
  std::mt19937_64 random(c.m * 1000003 + c.n * 1009 + c.k);
  Operands o = make_operands(c, random);
  LinearPlan plan;
  const std::vector<uint16_t> out = run(c, o, 1, &plan);
  EXPECT_EQ(plan.split_tiles > 0, c.sm_count > 0) << to_string(plan);
  EXPECT_EQ(count_wrong(c, o, out), 0) << to_string(plan);
  EXPECT_TRUE(out == run(c, o, 2)) << "another order of threads changed bits";
  o.packed[o.packed.size() / 2] ^= 0x80;  // control: one flipped nibble of the packed weight
  EXPECT_GT(count_wrong(c, o, run(c, o, 3)), 0);
}

constexpr Direction kF = Direction::kForward, kG = Direction::kGradInput;

INSTANTIATE_TEST_SUITE_P(
    Cases, PortableSimt,
    ::testing::Values(Case{"Tile256ForwardTails", kPortable256x128, kF, 258, 136, 192},
                      Case{"Tile256GradTails", kPortable256x128, kG, 257, 136, 192},
                      Case{"Tile128Forward", kPortable128x128, kF, 70, 130, 128, 128, true, true},
                      Case{"Tile128Grad", kPortable128x128, kG, 130, 72, 64},
                      Case{"Tile64Forward", kPortable64x128, kF, 33, 257, 256, 4096, false},
                      Case{"Tile64GradPlain", kPortable64x128, kG, 64, 264, 192, 64, false},
                      Case{"Tile16ForwardOneRow", kPortable16x128, kF, 1, 129, 320, 64, true, true},
                      Case{"Tile16Grad", kPortable16x128, kG, 16, 200, 192, 256}, Case{"OneStage", kPortable16x128, kF, 3, 5, 64},
                      Case{"OneStageTwoGroups", kPortable128x128, kF, 3, 5, 64}, Case{"OneStageGrad", kPortable64x128, kG, 3, 8, 64},
                      Case{"Fp4Half", kPortable64x128, kF, 5, 96, 128, 64, true, true, true, QuantType::kFp4},
                      Case{"HalfGrad", kPortable16x128, kG, 5, 96, 128, 64, true, false, true},
                      Case{"CutForward", kPortable128x128, kF, 130, 264, 640, 64, true, true, false, QuantType::kNf4, 9},
                      Case{"CutGrad", kPortable64x128, kG, 70, 640, 192, 64, true, false, false, QuantType::kNf4, 3},
                      Case{"CutRemainder", kPortable16x128, kF, 17, 600, 448, 64, true, false, false, QuantType::kNf4, 1},
                      Case{"CutManyPieces", kPortable16x128, kF, 16, 128, 1088, 64, true, true, false, QuantType::kNf4, 4}),
    [](const auto& info) { return info.param.title; });

TEST(PortableSimtIdentity, GivesBackEveryWeightInBothDirections) {
  for (const Direction direction : {kF, kG}) {
    for (const int variant : {kPortable128x128, kPortable16x128}) {
      Case c{"", variant, direction, direction == kF ? 128 : 136, 136, 128};
      std::mt19937_64 random(7);
      Operands o = make_operands(c, random);
      std::fill(o.x.begin(), o.x.end(), 0);
      for (int64_t i = 0; i < c.m; i++) o.x[i * c.m + i] = to_16(1.f, false);
      const std::vector<uint16_t> out = run(c, o, 11);
      const int64_t columns = direction == kF ? c.n : c.k;
      int64_t wrong = 0;
      for (int64_t i = 0; i < c.m; i++) {
        for (int64_t j = 0; j < columns; j++)
          wrong += from_16(out[i * columns + j], false) != o.dense[direction == kF ? j * c.k + i : i * c.k + j];
      }
      EXPECT_EQ(wrong, 0) << "direction " << int(direction) << " variant " << variant;
    }
  }
}

TEST(PortableSimtControl, AnUnsetFlagAndAWrongScaleAreCaught) {
  Case c{"", kPortable16x128, kF, 16, 128, 640, 64, true, false, false, QuantType::kNf4, 0};
  std::mt19937_64 random(5);
  Operands o = make_operands(c, random);
  ASSERT_EQ(count_wrong(c, o, run(c, o, 1)), 0);
  o.codes[3] ^= 0x40;
  EXPECT_GT(count_wrong(c, o, run(c, o, 1)), 0) << "a changed scale went unnoticed";
  o.packed.pop_back();
  EXPECT_THROW(run(c, o, 1), std::runtime_error) << "a read past the packed weight went unnoticed";
}

}  // namespace
}  // namespace nybble
