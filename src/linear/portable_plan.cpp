#include <algorithm>
#include <limits>
#include <sstream>

#include "linear/portable.h"
#include "linear/portable_params.h"
#include "nybble/error.h"

namespace nybble {
namespace {

constexpr int kStage = 64;          // of the reduction
constexpr int kGroup = 8;           // token tiles that share W columns in L2
constexpr int64_t kSplitCost = 12;  // stages that storing and adding partial sums costs; from a trial on one H200, 12 to 15
constexpr int kMaxPieces = 8;       // of one tile
constexpr int kMinRun = 4;          // stages a CTA
constexpr int64_t kMaxWorkspace = 32 << 20;
constexpr int64_t kGeneralTokens = 128;  // from a trial on one H200: 0.8 of dequantise + dense at 64, 1.4 at 128

// Registers are what the launch bounds of portable_launch.cuh allow.
constexpr PortableTile kTiles[] = {
    {256, 128, 256, portable::shared_bytes(256, 128), 255}, {128, 128, 256, portable::shared_bytes(128, 128), 255},
    {64, 128, 256, portable::shared_bytes(64, 128), 128},   {16, 128, 128, portable::shared_bytes(16, 128), 128},
    {128, 128, 256, portable::shared_bytes(128, 128), 255},
};

struct SmLimits {
  int sm_min, sm_max;
  int shared_bytes, threads;
};
// CUDA programming guide, technical specifications per compute capability.
constexpr SmLimits kSmLimits[] = {{80, 80, 167936, 2048}, {86, 86, 102400, 1536},  {87, 87, 167936, 1536},
                                  {89, 89, 102400, 1536}, {90, 119, 233472, 2048}, {120, 999, 102400, 1536}};

SmLimits limits(const DeviceModel& device) {
  for (const SmLimits& row : kSmLimits) {
    if (row.sm_min <= device.sm && device.sm <= row.sm_max) return row;
  }
  return kSmLimits[1];
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t reduction_of(const LinearProblem& p) { return p.direction == Direction::kForward ? p.k : p.n; }

// What no variant takes.
std::string refuse(const LinearProblem& p, const DeviceModel& device) {
  std::ostringstream why;
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max() - 1024;
  if (device.sm < 80) {
    why << "compute capability " << device.sm << ", needs 80 or later";
  } else if (p.dtype == DType::kFloat32) {
    why << "float32 activations, needs bfloat16 or float16";
  } else if (p.nested && p.nested_dtype != DType::kFloat32) {
    why << "nested scales kept in " << name(p.nested_dtype) << ", needs float32";
  } else if (reduction_of(p) == 0) {
    why << "an empty reduction";
  } else if (p.x_alignment < 2) {
    why << "activations at an odd address";
  } else if (p.m > kMaxInt || p.n > kMaxInt || p.k > kMaxInt) {
    why << "a shape beyond 32-bit counts";
  }
  return why.str();
}

PortableVariant variant_for(const LinearProblem& problem, const DeviceModel& device) {
  if (!supports_portable_fast(problem, device).empty()) return kPortableGeneral;
  const int64_t m = problem.m;
  if (m <= 16) return kPortable16x128;
  if (m <= 64) return kPortable64x128;
  if (m <= 128) return kPortable128x128;
  return kPortable256x128;
}

// Tiles to cut so that every CTA gets the same number of stages: those of the last, unfilled wave and of the one before it.
int64_t tiles_to_cut(int64_t tiles, int64_t slots) {
  const int64_t rest = tiles % slots;
  if (rest == 0) return 0;
  return tiles > slots ? rest + slots : rest;
}

}  // namespace

std::span<const PortableTile> portable_tiles() { return kTiles; }

int portable_ctas_per_sm(const PortableTile& tile, const DeviceModel& device) {
  const SmLimits sm = limits(device);
  const int by_shared = sm.shared_bytes / (tile.shared_bytes + 1024);  // the driver keeps 1 KiB a CTA
  const int by_registers = 65536 / (tile.registers * tile.threads);
  return std::max(1, std::min({by_shared, by_registers, sm.threads / tile.threads}));
}

std::string supports_portable_fast(const LinearProblem& p, const DeviceModel& device) {
  std::ostringstream why;
  const std::string refusal = refuse(p, device);
  const int64_t stride = p.x_row_stride ? p.x_row_stride : reduction_of(p);
  if (!refusal.empty()) {
    why << refusal;
  } else if (p.block_size < 64) {
    why << "block size " << p.block_size << ", needs at least 64";
  } else if (p.k % 64 != 0) {
    why << "in_features " << p.k << ", needs a multiple of 64";
  } else if (p.packed_alignment < 16) {
    why << "packed weights at an address that is a multiple of " << p.packed_alignment << " only, needs 16";
  } else if (p.x_alignment < 16 || (p.m > 1 && stride % 8 != 0)) {
    why << "activation rows that do not start at multiples of 16 bytes (address a multiple of " << p.x_alignment << ", row stride "
        << stride << " elements)";
  } else if (p.direction == Direction::kGradInput && p.n % 8 != 0) {
    why << "out_features " << p.n << " in the input gradient, needs a multiple of 8";
  } else if ((p.n + 256) * (p.k / 64) > std::numeric_limits<uint32_t>::max()) {
    why << "more than 2^32 blocks of 64 weights";
  }
  return why.str();
}

std::string supports_portable(const LinearProblem& p, const DeviceModel& device) {
  const std::string refusal = refuse(p, device);
  if (!refusal.empty()) return refusal;
  const std::string fast = supports_portable_fast(p, device);
  if (fast.empty() || p.m <= kGeneralTokens || p.mode == LinearMode::kFused || p.batch_invariant) return "";
  return fast + "; above " + std::to_string(kGeneralTokens) + " tokens a separate dequantisation is faster than the general kernel";
}

LinearPlan plan_portable_as(PortableVariant variant, bool cut, const LinearProblem& p, const DeviceModel& device) {
  const PortableTile& tile = kTiles[variant];
  const bool forward = p.direction == Direction::kForward;
  const int64_t tiles = ceil_div(p.m, tile.tokens) * ceil_div(forward ? p.n : p.k, tile.columns);
  const int64_t stages = ceil_div(reduction_of(p), kStage);
  const int64_t tile_bytes = int64_t{4} * tile.tokens * tile.columns;
  if (tiles > std::numeric_limits<int32_t>::max() / 2)
    fail(ErrorKind::kUnsupported, "m ", p.m, " gives ", tiles, " output tiles, at most 2^30");
  const int64_t slots = static_cast<int64_t>(std::max(1, device.sm_count)) * portable_ctas_per_sm(tile, device);

  LinearPlan plan;
  plan.path = LinearPath::kPortable;
  plan.variant = variant;
  plan.group = kGroup;
  plan.grid = static_cast<int>(std::min(tiles, slots));
  plan.batch_invariant = true;
  if (!cut) return plan;
  int64_t grid = std::min(slots, (kMaxWorkspace - 65536) / tile_bytes);
  if (tiles < grid) grid = std::max(tiles, std::min({grid, tiles * kMaxPieces, tiles * stages / kMinRun}));
  const int64_t split_tiles = tiles_to_cut(tiles, grid);
  if (split_tiles == 0) return plan;
  plan.grid = static_cast<int>(grid);
  plan.split_tiles = split_tiles;
  plan.split = static_cast<int>(ceil_div(grid, split_tiles) + 1);
  plan.batch_invariant = false;
  plan.workspace_bytes = ceil_div(grid * 4, 256) * 256 + grid * tile_bytes;
  return plan;
}

LinearPlan plan_portable(const LinearProblem& problem, const DeviceModel& device) {
  const PortableVariant variant = variant_for(problem, device);
  const LinearPlan whole = plan_portable_as(variant, false, problem, device);
  if (problem.batch_invariant) return whole;
  const LinearPlan cut = plan_portable_as(variant, true, problem, device);
  if (cut.split_tiles == 0) return whole;
  const bool forward = problem.direction == Direction::kForward;
  const PortableTile& tile = kTiles[variant];
  const int64_t tiles = ceil_div(problem.m, tile.tokens) * ceil_div(forward ? problem.n : problem.k, tile.columns);
  const int64_t stages = ceil_div(reduction_of(problem), kStage);
  const int64_t whole_stages = ceil_div(tiles, whole.grid) * stages;
  const int64_t cut_stages = ceil_div(tiles * stages, cut.grid) + kSplitCost;
  return cut_stages < whole_stages ? cut : whole;
}

}  // namespace nybble
