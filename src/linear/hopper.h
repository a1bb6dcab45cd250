// Large M on sm_90a: y = x W^T (+ bias) and grad_x = grad_y W from one packed copy of W, bf16 and fp16. Host-only interface; the design and
// what bounds it: hopper.cu, docs/hopper.md.
#pragma once

#include <string>

#include "linear/hopper_work.h"
#include "nybble/cuda.h"
#include "nybble/linear.h"

namespace nybble {

// Tokens of the tile of one CTA. kTokens*: the CTAs of a cluster share decoded weights and have different tokens. kRows*: they share
// activations and have different rows of the output (hopper_rows.cuh); scales in the kernel only.
enum class HopperTile : uint8_t { kTokens256, kTokens128, kTokens64, kRows256, kRows192, kRows160, kRows128, kRows96, kRows64 };
constexpr int kHopperTiles = 9, kHopperRowTiles = 6;
constexpr int kHopperMaxSegments = 192;  // of a cluster: its list in shared memory

// How tiles that do not fill the clusters evenly are divided. Whole: every output is one sum in ascending k, whatever m is, so a row's bits
// do not depend on m. StreamK, SplitTail: some tiles are sums of pieces, in an order fixed by the plan.
enum class HopperSchedule : uint8_t { kWhole = 0, kStreamK = 1, kSplitTail = 2 };
constexpr int kHopperSchedules = 3;

// Where the decode warps find the scales. Expanded: a kernel before writes them as fp32 to the workspace. InKernel: they make them from the
// weight's own scales, and no kernel runs before. Same bits.
enum class HopperScales : uint8_t { kExpanded = 0, kInKernel = 1 };
constexpr int kHopperScales = 2;

// LinearPlan::variant of this path. LinearPlan::split: pieces of a tile of the last wave (kSplitTail), otherwise 1.
constexpr int kHopperVariants = kHopperTiles * kHopperSchedules * kHopperScales;
constexpr int hopper_variant(HopperTile tile, HopperSchedule schedule, HopperScales scales) {
  return (static_cast<int>(scales) * kHopperTiles + static_cast<int>(tile)) * kHopperSchedules + static_cast<int>(schedule);
}
constexpr HopperScales hopper_scales(int variant) { return static_cast<HopperScales>(variant / (kHopperTiles * kHopperSchedules)); }
constexpr HopperTile hopper_tile(int variant) { return static_cast<HopperTile>(variant / kHopperSchedules % kHopperTiles); }
constexpr HopperSchedule hopper_schedule(int variant) { return static_cast<HopperSchedule>(variant % kHopperSchedules); }

// Empty when the kernel takes the problem, otherwise the reason in words a user understands.
std::string supports_hopper(const LinearProblem& problem, const DeviceModel& device);

// Whether the tiles kRows* find the scales of several steps together; other scales cost them a fetch each, and the plan leaves them out
// then.
bool suits_row_pairs(const LinearProblem& problem);

// Pure. Requires supports_hopper(...) to be empty.
LinearPlan plan_hopper(const LinearProblem& problem, const DeviceModel& device);

// The same with the choice made by the caller: sizes and grid are filled in, a schedule that does not apply becomes kWhole. group: token
// tiles of a raster group.
struct HopperChoice {
  HopperTile tile;
  HopperSchedule schedule;
  HopperScales scales;
  int group;
};
LinearPlan plan_hopper_as(const LinearProblem& problem, const DeviceModel& device, const HopperChoice& choice);

// Work of the launch that covers `tokens` tokens. A plan for more than hopper_tokens_per_launch() is run in several launches.
hopper::Work hopper_work(const LinearProblem& problem, const LinearPlan& plan, int64_t tokens);
int64_t hopper_tokens_per_launch(const LinearProblem& problem, const LinearPlan& plan);

// Byte offsets into the workspace.
struct HopperWorkspace {
  int64_t scales = 0;    // fp32 [k / block_size][n], kExpanded
  int64_t partials = 0;  // fp32 [grid][tile tokens * 128], kStreamK and kSplitTail
  int64_t flags = 0;     // uint64 [grid][2][8], any values before a launch
  int64_t flag_count = 0;
  int64_t bytes = 0;
};
HopperWorkspace hopper_workspace(const LinearProblem& problem, const LinearPlan& plan);

// For measurements: what a launch costs without its parts.
struct HopperLaunchOptions {
  bool prepare = true;  // false: the workspace holds the expanded scales already
  bool overlap = true;  // set the multiply up while the kernel before it runs (programmatic dependent launch)
};

// in, out, packed: 16-byte aligned. A kernel that prepares the workspace, if the plan has one, then the multiply (several times when the
// plan's tokens do not fit one launch). Counts one launch. Only in builds for 90a.
void launch_hopper(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, CudaStream stream,
                   const HopperLaunchOptions& options = {});

}  // namespace nybble
