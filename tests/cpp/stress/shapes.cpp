#include "stress/shapes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <sstream>

#include "linear/hopper.h"
#include "linear/portable.h"
#include "linear/row.h"
#include "linear/small_m.h"
#include "linear/strip.h"
#include "nybble/error.h"

namespace nybble::stress {
namespace {

int32_t alignment_of(int64_t offset) { return offset == 0 ? 256 : static_cast<int32_t>(std::min<int64_t>(256, offset & -offset)); }

// Sizes near multiples of a tile are where tails go wrong.
int64_t near_multiple(Random& random, int64_t value, int64_t tile) {
  if (!random.one_in(3)) return value;
  return std::max<int64_t>(1, (value + tile - 1) / tile * tile + random.in(-1, 1));
}

void draw_format(Random& random, LinearProblem& p) {
  p.dtype = random.one_in(2) ? DType::kFloat16 : DType::kBFloat16;
  p.direction = random.one_in(2) ? Direction::kForward : Direction::kGradInput;
  p.quant_type = random.one_in(4) ? QuantType::kFp4 : QuantType::kNf4;
  p.nested = !random.one_in(4);
  p.bias = p.direction == Direction::kForward && random.one_in(3);
  p.mode = LinearMode::kFused;
  p.m = near_multiple(random, random.log_in(1, 1200), 64);
}

void draw_shape(Random& random, Kernels kernels, LinearProblem& p) {
  p.block_size = 64;
  switch (kernels) {
    case Kernels::kHopper:
    case Kernels::kHopperRows:
    case Kernels::kHopperRows96And160:
      p.block_size = random.one_in(2) ? 64 : 64 << random.in(0, 3);
      if (p.nested && random.one_in(6)) p.nested_dtype = random.one_in(2) ? DType::kFloat16 : DType::kBFloat16;
      p.n = 8 * random.log_in(1, 700);
      p.k = p.block_size * std::max<int64_t>(1, random.log_in(64, 8192) / p.block_size);
      if (kernels != Kernels::kHopper && random.one_in(2)) {  // codes that are fetched by words and by boxes
        p.block_size = 64;
        p.k = (random.one_in(2) ? 256 : 1024) * random.in(1, 8);
      }
      break;
    case Kernels::kSmallM:
      p.m = std::min<int64_t>(near_multiple(random, random.log_in(1, kSmallMMaxTokens), 8), kSmallMMaxTokens);
      p.n = 256 * random.log_in(1, 24);
      p.k = 1024 * random.in(1, 6);
      break;
    case Kernels::kStrips:
      p.m = random.in(1, small_m::strip::kMaxTokens);
      p.n = 16 * random.log_in(1, 400);
      p.k = 256 * random.log_in(1, 40);
      break;
    case Kernels::kRow:
      p.m = random.in(1, kRowMaxTokens);
      p.block_size = 32 << random.in(0, 4);
      p.n = near_multiple(random, random.log_in(1, 6000), 8);
      p.k = 32 * random.log_in(1, 256);
      break;
    default:
      if (random.one_in(3)) {  // the general variant: nothing divides anything
        p.block_size = 32 << random.in(0, 4);
        p.n = random.log_in(1, 3000);
        p.k = random.log_in(1, 3000);
      } else {
        p.block_size = 64 << random.in(0, 3);
        p.n = 8 * random.log_in(1, 500);
        p.k = 64 * random.log_in(1, 100);
      }
  }
}

bool is_hopper(Kernels kernels) {
  return kernels == Kernels::kHopper || kernels == Kernels::kHopperRows || kernels == Kernels::kHopperRows96And160;
}

// Offsets of the operands and the strides and alignments that follow from them. Plain scales of the Hopper kernels may lie at any float.
void place(Random& random, Kernels kernels, Case& c) {
  LinearProblem& p = c.problem;
  const bool odd = kernels == Kernels::kPortable && random.one_in(3);
  const bool any_float = odd || (is_hopper(kernels) && !p.nested && random.one_in(3));
  const auto offset = [&](int64_t grain) { return random.in(0, kPoolSlack / grain - 1) * grain; };
  c.in_offset = offset(odd ? 2 : 16);
  c.packed_offset = offset(odd ? 1 : 16);
  c.codes_offset = offset(odd ? 1 : 16);
  c.scales_offset = offset(any_float ? 4 : 16);
  c.bias_offset = offset(2);
  if (random.one_in(3)) c.in_row_stride = c.reduction() + (odd ? random.in(0, 40) : (8 - c.reduction() % 8) % 8 + 8 * random.in(0, 8));
  p.x_row_stride = c.in_row_stride;
  p.x_alignment = alignment_of(c.in_offset);
  p.packed_alignment = alignment_of(c.packed_offset);
  p.scales_alignment = alignment_of(c.scales_offset);
  if (p.nested) p.scales_alignment = std::min(p.scales_alignment, alignment_of(c.codes_offset));
}

bool fits(const Case& c, double size) {
  const LinearProblem& p = c.problem;
  const auto below = [size](int64_t value, int64_t limit) { return static_cast<double>(value) <= size * static_cast<double>(limit); };
  const int64_t stride = std::max(c.in_row_stride, c.reduction());
  return below(p.n * p.k, kMaxWeights) && below(p.m * stride, kMaxActivations) && below(p.m * c.columns(), kMaxOutputs) &&
         below(p.m * p.n * p.k, kMaxProducts);
}

std::string refusal(Kernels kernels, const LinearProblem& p, const DeviceModel& device) {
  switch (kernels) {
    case Kernels::kHopper:
    case Kernels::kHopperRows:
    case Kernels::kHopperRows96And160:
      return supports_hopper(p, device);
    case Kernels::kSmallM:
      return supports_small_m_tiles(p, device);
    case Kernels::kStrips:
      return supports_strip(p, device);
    case Kernels::kPortable:
      return supports_portable(p, device);
    case Kernels::kRow:
      return supports_row(p, device);
  }
  return "no such kernels";
}

// A plan for fewer multiprocessors gives every CTA more work, so that rings go round and CTAs meet cut tiles, on small problems too.
DeviceModel draw_device(Random& random, const DeviceModel& device) {
  DeviceModel model = device;
  if (!random.one_in(3)) model.sm_count = static_cast<int>(random.log_in(2, device.sm_count));
  return model;
}

HopperTile draw_tile(Random& random, Kernels kernels) {
  if (kernels == Kernels::kHopperRows96And160) return random.one_in(2) ? HopperTile::kRows96 : HopperTile::kRows160;
  constexpr int kTokenTiles = kHopperTiles - kHopperRowTiles;
  const bool rows = kernels == Kernels::kHopperRows;
  return static_cast<HopperTile>(rows ? random.in(kTokenTiles, kHopperTiles - 1) : random.in(0, kTokenTiles - 1));
}

LinearPlan draw_plan(Random& random, Kernels kernels, const LinearProblem& p, const DeviceModel& device) {
  if (kernels == Kernels::kRow) return plan_row(p, device);
  if (kernels == Kernels::kStrips) return plan_strip(p, device);
  if (kernels == Kernels::kSmallM) return plan_small_m_tiles(p, device);
  if (is_hopper(kernels)) {
    return plan_hopper_as(p, device,
                          {draw_tile(random, kernels), static_cast<HopperSchedule>(random.in(0, kHopperSchedules - 1)),
                           static_cast<HopperScales>(random.in(0, kHopperScales - 1)), static_cast<int>(random.in(1, 6))});
  }
  if (!supports_portable_fast(p, device).empty()) return plan_portable_as(kPortableGeneral, random.one_in(2), p, device);
  return plan_portable_as(static_cast<PortableVariant>(random.in(0, 4)), random.one_in(2), p, device);
}

}  // namespace

const char* name(Kernels kernels) {
  constexpr const char* kNames[] = {"hopper", "hopper_rows", "small_m", "strips", "portable", "row", "hopper_rows_96_160"};
  return kNames[static_cast<int>(kernels)];
}

Kernels kernels_named(const std::string& text) {
  for (const Kernels kernels : kAllKernels) {
    if (text == name(kernels)) return kernels;
  }
  if (text == name(Kernels::kHopperRows96And160)) return Kernels::kHopperRows96And160;
  fail(ErrorKind::kValue, "kernels ", text, ", expected hopper, hopper_rows, hopper_rows_96_160, small_m, strips, portable or row");
}

int64_t Random::log_in(int64_t low, int64_t high) {
  const double part = static_cast<double>(next() >> 11) * 0x1p-53;
  const double value =
      std::exp(std::log(static_cast<double>(low)) + part * std::log(static_cast<double>(high + 1) / static_cast<double>(low)));
  return std::clamp(static_cast<int64_t>(value), low, high);
}

Case draw_case(uint64_t seed, Kernels kernels, const DeviceModel& device, double size) {
  Random random(seed);
  std::string reason;
  for (int attempt = 0; attempt < 1000; attempt++) {
    Case c;
    c.seed = seed;
    draw_format(random, c.problem);
    draw_shape(random, kernels, c.problem);
    place(random, kernels, c);
    if (!fits(c, size)) continue;
    const DeviceModel model = draw_device(random, device);
    reason = refusal(kernels, c.problem, model);
    if (!reason.empty()) continue;
    c.plan = draw_plan(random, kernels, c.problem, model);
    return c;
  }
  fail(ErrorKind::kUnsupported, "kernels ", name(kernels), " on ", device.name,
       " take none of 1000 random problems, the last one because: ", reason);
}

std::string to_string(const Case& c) {
  const LinearProblem& p = c.problem;
  std::ostringstream text;
  text << (p.direction == Direction::kForward ? "forward" : "grad_x") << " m " << p.m << " n " << p.n << " k " << p.k << ' '
       << name(p.dtype) << ' ' << name(p.quant_type) << (p.nested ? " nested " : " plain ") << name(p.nested_dtype) << " block "
       << p.block_size << (p.bias ? " bias" : "") << " stride " << c.in_row_stride << " aligned " << p.x_alignment << '/'
       << p.packed_alignment << '/' << p.scales_alignment << " seed 0x" << std::hex << c.seed << std::dec << " | " << to_string(c.plan);
  return text.str();
}

}  // namespace nybble::stress
