// What the strip kernel takes, how its work is cut, and what a launch is given.
#include <algorithm>
#include <sstream>

#include "linear/small_m.h"
#include "linear/strip.h"
#include "linear/strip_params.h"

namespace nybble {
namespace strip = small_m::strip;
namespace {

using strip::kSliceColumns;
using strip::kStripRows;
using strip::Work;

constexpr int kBlock = 64;
constexpr int64_t kMaxExtent = int64_t{1} << 23;  // byte steps of an int

// H200: an item of every strip of a CTA, and the kernel that adds ranges.
constexpr double kItemUs = 0.1, kAddUs = 1.5;
constexpr double kGroupItems = 0.6;  // what the end of a group costs, in items of a warp

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

Work grad_work(const LinearProblem& p) {
  Work w;
  w.bands = static_cast<int>(p.k / kSliceColumns);
  w.units = ceil_div(p.n, strip::kUnitRows);
  return w;
}

// As many for each band where runs become up to 8/7 as long: fewer pieces to add, and neighbouring bands of a row are read at the same
// time. Otherwise no more CTAs than the longest run makes necessary: the kernel that adds pieces starts on an SM that is left.
int grad_ctas(const Work& w, int sms) {
  const int64_t total = int64_t{w.bands} * w.units;
  const int ctas = static_cast<int>(std::min<int64_t>(sms, total)), pieces = std::min(ctas / w.bands, w.units);
  const int run = ceil_div(total, ctas);
  return pieces >= 1 && 7 * ceil_div(w.units, pieces) <= 8 * run ? w.bands * pieces : ceil_div(total, run);
}

// Strips at once: as many as shared memory has room for, fewer where that shares slices more evenly among warps. 0: none fits.
int best_group(const Work& of) {
  const Work w = strip::with_dividers(of);
  int best = 0;
  double least = 0;
  for (int group = 1; group <= w.strips_of_cta; group++) {
    if (strip::forward_shared_bytes(group, w) > kSm90SharedBytes) break;
    double cost = 0;
    for (int low = 0; low < w.strips_of_cta; low += group) {
      int busiest = 0;
      for (int warp = 0; warp < strip::kWarps; warp++) {
        int items = 0;
        for (int round = 0; round < strip::rounds(w); round++) {
          items += strip::items_of(w, strip::part_of(w, warp, round, low, std::min(low + group, w.strips_of_cta)));
        }
        busiest = std::max(busiest, items);
      }
      cost += busiest + kGroupItems;
    }
    if (best == 0 || cost < least) best = group, least = cost;
  }
  return best;
}

// Does not look at m: a row's sum must not depend on it.
Work forward_work(const LinearProblem& p, int sms) {
  Work best;
  double least = 0;
  for (const int ranges : {1, 2, 4}) {
    Work w;
    w.strips = static_cast<int>(p.n / kStripRows), w.ranges = ranges, w.slices = static_cast<int>(p.k / kSliceColumns) / ranges;
    if (w.slices * ranges != p.k / kSliceColumns || ranges > sms) break;
    w.strips_of_cta = ceil_div(w.strips, std::min(w.strips, sms / ranges));
    const double cost = w.strips_of_cta * static_cast<double>(w.slices) * kItemUs + (ranges > 1 ? kAddUs : 0);
    if (ranges == 1 || cost < least) best = w, least = cost;
  }
  return best;
}

}  // namespace

std::string supports_strip(const LinearProblem& p, const DeviceModel& device) {
  const int64_t tokens = p.direction == Direction::kForward ? strip::kMaxTokens : strip::kMaxGradTokens;
  std::ostringstream no;
  if (device.sm != 90) {
    no << "the strip kernel runs on compute capability 9.0, found " << device.sm / 10 << "." << device.sm % 10;
  } else if (device.smem_per_block_bytes < kSm90SharedBytes) {
    no << "shared memory of " << device.smem_per_block_bytes << " bytes a block, the strip kernel needs " << kSm90SharedBytes;
  } else if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    no << "activations in " << name(p.dtype) << ", the strip kernel takes bfloat16 and float16";
  } else if (p.m < 1 || p.m > tokens) {
    no << "m " << p.m << ", the strip kernel takes 1 to " << tokens;
  } else if (p.batch_invariant) {
    no << "batch_invariant is asked for, and above " << strip::kMaxTokens << " tokens another kernel with other sums takes over";
  } else if (p.n < kStripRows || p.n % kStripRows != 0 || p.k < kSliceColumns || p.k % kSliceColumns != 0 ||
             std::max(p.n, p.k) > kMaxExtent) {
    no << "n " << p.n << ", k " << p.k << ", the strip kernel takes n in multiples of " << kStripRows << " and k in multiples of "
       << kSliceColumns;
  } else if (p.direction == Direction::kForward && best_group(forward_work(p, std::max(1, device.sm_count))) == 0) {
    no << "k " << p.k << ", the scales of a strip of rows do not fit the strip kernel's shared memory";
  } else if (p.block_size != kBlock) {
    no << "block size " << p.block_size << ", the strip kernel takes " << kBlock;
  } else if (!p.nested || p.nested_dtype != DType::kFloat32) {
    no << "scales that are not nested in float32, the strip kernel takes no others";
  } else if (p.x_alignment < 16 || (p.m > 1 && p.x_row_stride % 8 != 0)) {
    no << "activation rows not aligned to 16 bytes (address " << p.x_alignment << ", row stride " << p.x_row_stride << " elements)";
  } else if (p.packed_alignment < 16 || p.scales_alignment < 4) {
    no << "packed weight and scales aligned to " << p.packed_alignment << " and " << p.scales_alignment
       << " bytes, the strip kernel needs 16 and 4";
  }
  return no.str();
}

LinearPlan plan_strip(const LinearProblem& p, const DeviceModel& device) {
  const int sms = std::max(1, device.sm_count);
  LinearPlan plan;
  plan.path = LinearPath::kSmallM;
  plan.variant = kSmallMStrip;
  std::ostringstream reason;
  if (p.direction == Direction::kForward) {
    const Work w = forward_work(p, sms);
    plan.grid = ceil_div(w.strips, w.strips_of_cta) * w.ranges;
    plan.split = w.ranges;
    if (w.ranges > 1) plan.split_tiles = w.strips, plan.workspace_bytes = w.ranges * p.m * p.n * int64_t{sizeof(float)};
    reason << "small-M kernel for up to " << strip::kMaxTokens << " tokens, " << w.strips_of_cta << " strips of " << kStripRows
           << " rows a CTA";
  } else {
    Work w = grad_work(p);
    plan.grid = w.ctas = grad_ctas(w, sms);
    for (int band = 0; band < w.bands; band++) {
      const int first = band * w.units;
      const int pieces = strip::cta_of_unit(w, first + w.units - 1) - strip::cta_of_unit(w, first) + 1;
      plan.split = std::max(plan.split, pieces);
      plan.split_tiles += pieces > 1;
    }
    if (plan.split > 1) plan.workspace_bytes = (int64_t{w.bands} + w.ctas) * p.m * kSliceColumns * int64_t{sizeof(float)};
    reason << "small-M kernel for up to " << strip::kMaxGradTokens << " tokens, bands of " << kSliceColumns << " columns";
  }
  plan.batch_invariant = false;  // above kMaxTokens other sums take over
  plan.reason = reason.str();
  return plan;
}

small_m::strip::Work small_m::strip::work_of(const LinearProblem& p, const LinearPlan& plan) {
  Work w;
  if (p.direction == Direction::kGradInput) {
    w = grad_work(p);
    w.ctas = plan.grid;
    return with_dividers(w);
  }
  w.strips = static_cast<int>(p.n / kStripRows), w.ranges = plan.split;
  w.slices = static_cast<int>(p.k / kSliceColumns) / w.ranges;
  w.strips_of_cta = ceil_div(w.strips, plan.grid / w.ranges);
  w.group = best_group(w);
  return with_dividers(w);
}

small_m::strip::Params small_m::strip::make_params(const LinearPlan& plan, const LinearProblem& q, const LinearArgs& args) {
  Params p{weight_operand(args.weight)};
  p.x = args.in;
  p.bias = args.bias;
  p.out = args.out;
  p.partials = static_cast<float*>(args.workspace);
  p.x_stride = args.in_row_stride ? args.in_row_stride : q.direction == Direction::kForward ? q.k : q.n;
  p.m = static_cast<int>(q.m), p.n = static_cast<int>(q.n), p.k = static_cast<int>(q.k);
  p.work = work_of(q, plan);
  return p;
}

}  // namespace nybble
