// What the small-M kernel takes, and how its work is cut.
#include <algorithm>
#include <sstream>

#include "linear/sm90.h"
#include "linear/small_m.h"
#include "linear/strip.h"

namespace nybble {
namespace {

using small_m::kUnit;
using small_m::Work;

constexpr int64_t kColumnGrain = 1024;                    // of k: rows of scale codes in steps of 16 bytes
constexpr int64_t kMaxColumns = 28672;                    // of k: shared memory for the nested scales of 256 rows
constexpr int64_t kMaxUnits = int64_t{1} << 20;           // of the weight
constexpr int64_t kMaxWorkspace = 32 << 20;               // of any fused path
constexpr int64_t kPermuteTokens = 32;                    // up to here the kernel permutes x itself
constexpr int64_t kLeastStripWeights = int64_t{1} << 22;  // 1024 x 4096, the smallest measured
constexpr int64_t kManyStripTokens = 4, kLongRows = 14336;
constexpr int kBlock = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

bool forward(const LinearProblem& p) { return p.direction == Direction::kForward; }

int size_of_tokens(int64_t m) {
  int size = 0;
  while (kSmallMTokens[size] < m) size++;
  return size;
}

Work uncut(const LinearProblem& p) {
  Work w;
  w.tiles = static_cast<int>((forward(p) ? p.n : p.k) / kUnit);
  w.units = static_cast<int>((forward(p) ? p.k : p.n) / kUnit);
  return w;
}

// Bytes of the partial sums and of the permuted x.
int64_t piece_bytes(const Work& w, int64_t tokens) { return small_m::slots(w) * int64_t{kUnit} * tokens * int64_t{sizeof(float)}; }
int64_t permuted_bytes(const LinearProblem& p, int64_t tokens) {
  return forward(p) && tokens > kPermuteTokens ? tokens * p.k * size_of(p.dtype) : 0;
}

// Forward it does not look at m: a row's sum must not depend on it.
Work cut(const LinearProblem& p, int sm_count) {
  Work w = uncut(p);
  const int total = w.tiles * w.units;
  w.ctas = std::min(std::max(1, sm_count), total);
  // As many CTAs for each tile where that makes no CTA's run longer: fewer pieces to add. grad_x of 9 to 64 tokens: also where runs become
  // up to 8/7 as long. H200, 4096 x 14336 and 27648 x 5120: 4 to 9% faster so; at 128 tokens 1% slower.
  const bool longer = !forward(p) && p.m > 8 && p.m <= 64;
  const int pieces = std::min(w.ctas / w.tiles, w.units);
  if (pieces >= 1 && 7 * ceil_div(w.units, pieces) <= (longer ? 8 : 7) * ceil_div(total, w.ctas)) w.ctas = w.tiles * pieces;
  // A few CTAs less where the workspace then holds for all m.
  Work fewer = w;
  const auto too_much = [&] { return piece_bytes(fewer, kSmallMMaxTokens) + permuted_bytes(p, kSmallMMaxTokens) > kMaxWorkspace; };
  while (too_much() && fewer.ctas > w.ctas * 15 / 16) fewer.ctas--;
  return too_much() ? w : fewer;
}

}  // namespace

std::string supports_small_m_tiles(const LinearProblem& p, const DeviceModel& device) {
  std::ostringstream no;
  if (device.sm != 90) {
    no << "the small-M kernel runs on compute capability 9.0, found " << device.sm / 10 << "." << device.sm % 10;
  } else if (device.smem_per_block_bytes < kSm90SharedBytes) {
    no << "shared memory of " << device.smem_per_block_bytes << " bytes a block, the small-M kernel needs " << kSm90SharedBytes;
  } else if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    no << "activations in " << name(p.dtype) << ", the small-M kernel takes bfloat16 and float16";
  } else if (p.m < 1 || p.m > kSmallMMaxTokens) {
    no << "m " << p.m << ", the small-M kernel takes 1 to " << kSmallMMaxTokens;
  } else if (p.batch_invariant) {
    no << "batch_invariant is asked for, and above " << kSmallMMaxTokens << " tokens another kernel with other sums takes over";
  } else if (p.n < kUnit || p.n % kUnit != 0 || p.k < kColumnGrain || p.k % kColumnGrain != 0 || p.k > kMaxColumns) {
    no << "n " << p.n << ", k " << p.k << ", the small-M kernel takes n in multiples of " << kUnit << " and k in multiples of "
       << kColumnGrain << " up to " << kMaxColumns;
  } else if (p.n / kUnit * (p.k / kUnit) > kMaxUnits) {
    no << "a weight of " << p.n << " x " << p.k << ", the small-M kernel takes up to " << kMaxUnits * kUnit * kUnit << " elements";
  } else if (p.block_size != kBlock) {
    no << "block size " << p.block_size << ", the small-M kernel takes " << kBlock;
  } else if (p.nested && p.nested_dtype != DType::kFloat32) {
    no << "nested scales in " << name(p.nested_dtype) << ", the small-M kernel takes float32";
  } else if (p.x_alignment < 16 || (p.m > 1 && p.x_row_stride % 8 != 0)) {
    no << "activation rows not aligned to 16 bytes (address " << p.x_alignment << ", row stride " << p.x_row_stride << " elements)";
  } else if (p.packed_alignment < 16 || p.scales_alignment < 16) {
    no << "packed weight and scales aligned to " << p.packed_alignment << " and " << p.scales_alignment
       << " bytes, the small-M kernel needs 16";
  } else if (const int64_t bytes = plan_small_m_tiles(p, device).workspace_bytes; bytes > kMaxWorkspace) {
    no << "a workspace of " << bytes << " bytes for the partial sums, the small-M kernel takes up to " << kMaxWorkspace;
  }
  return no.str();
}

small_m::Work small_m_work(const LinearProblem& p, const LinearPlan& plan) {
  Work w = uncut(p);
  w.ctas = plan.grid;
  return w;
}

SmallMWorkspace small_m_workspace(const LinearProblem& p, const LinearPlan& plan) {
  const Work w = small_m_work(p, plan);
  SmallMWorkspace layout;
  layout.permuted_bytes = permuted_bytes(p, p.m);
  layout.partials = round_up(layout.permuted_bytes, 256);
  layout.bytes = layout.partials + piece_bytes(w, small_m_tokens(plan.variant));
  return layout;
}

LinearPlan plan_small_m_tiles(const LinearProblem& p, const DeviceModel& device) {
  const Work w = cut(p, device.sm_count);
  LinearPlan plan;
  plan.path = LinearPath::kSmallM;
  plan.variant = size_of_tokens(p.m);
  plan.grid = w.ctas;
  for (int tile = 0; tile < w.tiles; tile++) {
    const int pieces = small_m::last_cta(w, tile) - small_m::first_cta(w, tile) + 1;
    plan.split = std::max(plan.split, pieces);
    plan.split_tiles += pieces > 1;
  }
  plan.workspace_bytes = small_m_workspace(p, plan).bytes;
  plan.batch_invariant = forward(p);
  std::ostringstream reason;
  reason << "small-M kernel for up to " << small_m_tokens(plan.variant) << " tokens, partial sums added by a kernel behind";
  plan.reason = reason.str();
  return plan;
}

bool takes_strips(const LinearProblem& p, const DeviceModel& device) {
  if (!supports_strip(p, device).empty() || p.n * p.k < kLeastStripWeights) return false;
  const int64_t slices = p.k / small_m::strip::kSliceColumns, rest = slices % small_m::strip::kWarps;
  if (!forward(p)) return true;
  // Every CTA reads all of x: with 8 tokens 4096 x 14336 and 5120 x 27648 were 3 to 5% slower than tiles.
  if (p.m > kManyStripTokens && p.k >= kLongRows) return false;
  // Few slices beyond a multiple of the warps keep some of them idle: 27648 x 5120 was 13 to 25% slower than tiles.
  return slices >= small_m::strip::kWarps && (rest == 0 || rest > 4);
}

std::string supports_small_m(const LinearProblem& p, const DeviceModel& device) {
  return takes_strips(p, device) ? "" : supports_small_m_tiles(p, device);
}

LinearPlan plan_small_m(const LinearProblem& p, const DeviceModel& device) {
  return takes_strips(p, device) ? plan_strip(p, device) : plan_small_m_tiles(p, device);
}

}  // namespace nybble
