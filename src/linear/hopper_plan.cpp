// Which tile and which schedule the Hopper kernel runs: a model of its time in clocks, minimised over the candidates.
#include <algorithm>
#include <sstream>

#include "linear/hopper.h"
#include "linear/sm90.h"
#include "nybble/error.h"

namespace nybble {
namespace {

using hopper::kMaxPieces;
using hopper::kSpareSegments;
using hopper::kStep;
using hopper::kTileRows;
using hopper::Work;

constexpr int64_t kMaxExtent = 65528 * 64;        // row tiles and steps, in units of up to 8, travel as 16 bits
constexpr int64_t kMaxBlocks = int64_t{1} << 31;  // block indices are 32-bit, also of rows just beyond n
constexpr int64_t kMaxTokens = int64_t{1} << 31;  // TMA coordinates are 32-bit

// Clocks on an H200, fitted to the times of tiles, schedules and ways of the scales at about 200 problems (docs/hopper.md). step: one step
// of 64 while all clusters work; tile: from the last step of a tile to full speed in the next; exchange: storing, awaiting and adding the
// pieces of a cut tile; stream: the same for the pieces of a stream-K range; stream_tiles: what stream-K costs besides, in tiles. scales:
// what making them in the kernel adds to all that, forward and grad_x, where lanes read codes a row of W apart. several: times step, with
// several tiles of tokens. rows, tokens: of a cluster's tile.
struct TileModel {
  int rows, tokens;
  int unit;
  double step, tile, exchange, stream, stream_tiles;
  double scales[2];
  double several = 1;
};
constexpr TileModel kTileModels[kHopperTiles] = {{128, 512, 4, 1100, 1000, 6000, 9800, 0.06, {0.035, 0.039}},
                                                 {128, 256, 8, 650, 1400, 4500, 4900, 0.08, {0.045, 0.055}},
                                                 {128, 128, 8, 480, 1200, 6400, 2900, 0.2, {0.06, 0.075}},
                                                 {256, 256, 4, 1230, 4400, 3900, 11100, 0.02, {0, 0.005}},
                                                 {256, 192, 4, 950, 3500, 4000, 10500, 0, {0, 0.02}, 1.04},
                                                 {256, 160, 4, 810, 3700, 2300, 9300, 0, {0, 0.03}, 1.12},
                                                 {256, 128, 4, 670, 4200, 1100, 6300, 0, {0, 0.095}},
                                                 {256, 96, 4, 655, 1500, 1300, 5900, 0, {0, 0.045}},
                                                 {256, 64, 4, 640, 500, 1300, 5600, 0, {0, 0.045}}};
// Row pairs take several tiles of tokens where that was measured: two for up to so many tiles, with so many tokens; any number with so
// many, each of so many.
constexpr int64_t kTwoTokenTiles = 8, kTwoTilesFrom = 128, kTwoTilesTo = 256;
constexpr int64_t kSeveralTilesFrom = 257, kSeveralTilesBelow = 2048, kSeveralTilesOf = 160;
constexpr double kCollect = 300, kCollectToken = 3.5;  // stream-K of row pairs: adding the sums of a further cluster to a tile's
// In a long multiply the card's power is the limit. Interleaved with others stream-K and pieces take the same time there, alone for half a
// second stream-K took 3 to 7% longer (benchmarks/records/h200-hopper-plans.md): half a percent more is asked of it.
constexpr double kLongClocks = 400e3, kStreamKLong = 1.005;
constexpr double kPieceClocks = 3;                           // of a piece beyond the second, a token of the tile
constexpr double kExpansion = 8500, kExpandedBlock = 0.002;  // the kernel before: a launch, a block of weights
// Of what scales in the kernel cost grad_x with tiles of 512 tokens: while a tile's output leaves, the decode warps catch up.
constexpr double kCaughtUp = 300;
// Longer tiles put the clusters at distant k: where several token tiles share packed rows, those are read from DRAM several times. Row
// pairs were faster so all the same.
constexpr int kStreamKMaxSteps = 128;
// A weight that stays in L2 may be read once more: two token tiles a raster group instead of four took up to 1% less time (the same
// record).
constexpr int64_t kWeightsInCache = int64_t{16} << 20;

const TileModel& model_of(HopperTile tile) { return kTileModels[static_cast<int>(tile)]; }
bool row_pairs(HopperTile tile) { return tile >= HopperTile::kRows256; }

int cta_tokens(const TileModel& model) { return model.tokens * model.rows / (2 * kTileRows); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

int64_t out_rows(const LinearProblem& p) { return p.direction == Direction::kForward ? p.n : p.k; }
int64_t reduction(const LinearProblem& p) { return p.direction == Direction::kForward ? p.k : p.n; }

int clusters_of(const DeviceModel& device) { return std::clamp(device.sm_count / 2, 1, hopper::kMaxClusters); }

// What the clusters' lists of segments hold.
int64_t tiles_per_launch(int clusters) { return static_cast<int64_t>(kHopperMaxSegments - kSpareSegments) * clusters; }

// Tiles of the last, partial wave.
int tail_tiles(int64_t tiles, int clusters) { return static_cast<int>(tiles % clusters); }

int pieces_of_tail(int64_t tiles, int clusters, int64_t units) {
  const int tail = tail_tiles(tiles, clusters);
  if (tail == 0) return 1;
  return static_cast<int>(std::min<int64_t>({clusters / tail, kMaxPieces, units}));
}

// Expected clocks without making scales, or a negative number when the schedule does not apply.
double multiply_clocks(const LinearProblem& p, const DeviceModel& device, HopperTile tile, HopperSchedule schedule) {
  const TileModel& model = model_of(tile);
  const int clusters = clusters_of(device);
  const int64_t token_tiles = ceil_div(p.m, model.tokens), tiles = token_tiles * ceil_div(out_rows(p), model.rows);
  const int64_t steps = round_up(ceil_div(reduction(p), kStep), model.unit);
  const bool several = token_tiles > 1 && p.m >= kSeveralTilesFrom;
  const double step = several ? model.step * model.several : model.step;
  const double whole_tile = static_cast<double>(steps) * step + model.tile;
  const int tail = tail_tiles(tiles, clusters);
  const int64_t full_waves = tiles / clusters;
  if (schedule == HopperSchedule::kWhole) return static_cast<double>(full_waves + (tail > 0)) * whole_tile;
  if (tail == 0) return -1;
  if (schedule == HopperSchedule::kStreamK) {
    if (steps > kStreamKMaxSteps && token_tiles > 1 && !(several && row_pairs(tile))) return -1;
    const double each = static_cast<double>(tiles) / clusters, further = row_pairs(tile) ? std::max(0.0, 1 / each - 1) : 0;
    const double clocks =
        (each + model.stream_tiles) * whole_tile + model.stream + further * (kCollect + kCollectToken * cta_tokens(model));
    return clocks > kLongClocks ? clocks * kStreamKLong : clocks;
  }
  const int pieces = pieces_of_tail(tiles, clusters, steps / model.unit);
  if (pieces < 2) return -1;
  return static_cast<double>(full_waves) * whole_tile + static_cast<double>(steps) * step / pieces + model.tile + model.exchange +
         (pieces - 2) * kPieceClocks * cta_tokens(model);
}

double expected_clocks(const LinearProblem& p, const DeviceModel& device, const HopperChoice& c) {
  const double clocks = multiply_clocks(p, device, c.tile, c.schedule);
  if (clocks < 0) return clocks;
  if (c.scales == HopperScales::kInKernel) {
    const TileModel& model = model_of(c.tile);
    const double making = clocks * model.scales[static_cast<int>(p.direction)];
    if (c.tile != HopperTile::kTokens256 || p.direction == Direction::kForward) return clocks + making;
    const int64_t tiles = ceil_div(p.m, model.tokens) * ceil_div(out_rows(p), model.rows);
    return clocks + std::max(0.0, making - kCaughtUp * static_cast<double>(ceil_div(tiles, clusters_of(device))));
  }
  return clocks + kExpansion + kExpandedBlock * static_cast<double>(p.n * (p.k / p.block_size));
}

// One tile of tokens, two of small weights; more where the tiles that share a decode would be filled badly.
bool row_pairs_measured(const LinearProblem& p, HopperTile tile) {
  const TileModel& model = model_of(tile);
  const int64_t token_tiles = ceil_div(p.m, model.tokens), tiles = token_tiles * ceil_div(out_rows(p), model.rows);
  const bool two = token_tiles == 2 && tiles <= kTwoTokenTiles && p.m >= kTwoTilesFrom && p.m <= kTwoTilesTo;
  const bool several = p.m >= kSeveralTilesFrom && p.m < kSeveralTilesBelow && model.tokens >= kSeveralTilesOf;
  return (token_tiles == 1 || two || several) && suits_row_pairs(p);
}

LinearPlan finished(const LinearProblem& p, LinearPlan plan) {
  plan.workspace_bytes = hopper_workspace(p, plan).bytes;
  std::ostringstream reason;
  static constexpr const char* kScheduleNames[] = {"whole tiles", "stream-K", "last wave in pieces"};
  reason << "Hopper kernel, tiles of " << model_of(hopper_tile(plan.variant)).rows << " rows by "
         << model_of(hopper_tile(plan.variant)).tokens << " tokens, " << kScheduleNames[plan.variant % kHopperSchedules]
         << (hopper_scales(plan.variant) == HopperScales::kExpanded ? ", scales expanded before" : "");
  plan.reason = reason.str();
  return plan;
}

}  // namespace

std::string supports_hopper(const LinearProblem& p, const DeviceModel& device) {
  std::ostringstream no;
  if (device.sm != 90) {
    no << "the Hopper kernel runs on compute capability 9.0, found " << device.sm / 10 << "." << device.sm % 10;
  } else if (device.smem_per_block_bytes < kSm90SharedBytes) {
    no << "shared memory of " << device.smem_per_block_bytes << " bytes a block, the Hopper kernel needs " << kSm90SharedBytes;
  } else if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    no << "activations in " << name(p.dtype) << ", the Hopper kernel takes bfloat16 and float16";
  } else if (p.m < 1 || p.m >= kMaxTokens) {
    no << "m " << p.m << ", the Hopper kernel takes 1 to " << kMaxTokens - 1;
  } else if (p.n < 8 || p.n % 8 != 0 || p.n > kMaxExtent) {
    no << "n " << p.n << ", the Hopper kernel takes multiples of 8 up to " << kMaxExtent;
  } else if (p.block_size < kStep || p.k < kStep || p.k % p.block_size != 0 || p.k > kMaxExtent) {
    no << "k " << p.k << " with block size " << p.block_size << ", the Hopper kernel takes blocks of at least " << kStep
       << " that divide k, k up to " << kMaxExtent;
  } else if (p.n * (p.k / p.block_size) > kMaxBlocks) {
    no << "a weight of " << p.n * (p.k / p.block_size) << " blocks, the Hopper kernel takes up to " << kMaxBlocks;
  } else if (ceil_div(out_rows(p), kTileRows) > tiles_per_launch(clusters_of(device))) {
    no << "an output of " << out_rows(p) << " columns, too many for the " << device.sm_count << " multiprocessors of this device";
  } else if (p.x_alignment < 16 || p.x_row_stride % 8 != 0) {
    no << "activation rows not aligned to 16 bytes (address " << p.x_alignment << ", row stride " << p.x_row_stride << " elements)";
  } else if (p.packed_alignment < 16) {
    no << "packed weight aligned to " << p.packed_alignment << " bytes, the Hopper kernel needs 16";
  } else if (p.scales_alignment < 4) {
    no << "scales aligned to " << p.scales_alignment << " bytes, the Hopper kernel needs 4";
  }
  return no.str();
}

bool suits_row_pairs(const LinearProblem& p) {
  return p.block_size == kStep && p.k % (4 * kStep) == 0 && (p.nested ? p.nested_dtype == DType::kFloat32 : p.scales_alignment >= 16);
}

int64_t hopper_tokens_per_launch(const LinearProblem& p, const LinearPlan& plan) {
  const TileModel& model = model_of(hopper_tile(plan.variant));
  const int64_t tokens = model.tokens, row_tiles = ceil_div(out_rows(p), model.rows);
  const int64_t tiles = tiles_per_launch(plan.grid / 2);
  return std::max<int64_t>(1, tiles / row_tiles) * tokens;
}

Work hopper_work(const LinearProblem& p, const LinearPlan& plan, int64_t tokens) {
  const TileModel& model = model_of(hopper_tile(plan.variant));
  Work w;
  w.row_tiles = static_cast<int>(ceil_div(out_rows(p), model.rows));
  w.token_tiles = static_cast<int>(ceil_div(tokens, model.tokens));
  w.tiles = w.row_tiles * w.token_tiles;
  w.unit = model.unit;
  w.steps = static_cast<int>(round_up(ceil_div(reduction(p), kStep), model.unit));
  w.clusters = plan.grid / 2;
  w.group = plan.group;
  const int tail = tail_tiles(w.tiles, w.clusters);
  switch (hopper_schedule(plan.variant)) {
    case HopperSchedule::kWhole:
      w.clusters = std::min(w.clusters, w.tiles);
      break;
    case HopperSchedule::kStreamK:
      w.stream_tiles = w.tiles < w.clusters ? w.tiles : tail + (tail > 0 ? w.clusters : 0);
      break;
    case HopperSchedule::kSplitTail:
      w.pieces = plan.split;
      break;
  }
  derive(w);
  return w;
}

HopperWorkspace hopper_workspace(const LinearProblem& p, const LinearPlan& plan) {
  HopperWorkspace w;
  if (hopper_scales(plan.variant) == HopperScales::kExpanded) w.partials = round_up(p.k / p.block_size * p.n * 4, 256);
  w.flags = w.partials;
  if (hopper_schedule(plan.variant) != HopperSchedule::kWhole) {
    w.flags += static_cast<int64_t>(plan.grid) * cta_tokens(model_of(hopper_tile(plan.variant))) * kTileRows * 4;
    w.flag_count = static_cast<int64_t>(plan.grid) * 2 * kMaxPieces;
  }
  w.bytes = w.flags + round_up(w.flag_count * 8, 256);
  return w;
}

LinearPlan plan_hopper_as(const LinearProblem& p, const DeviceModel& device, const HopperChoice& choice) {
  LinearPlan plan;
  HopperSchedule schedule = choice.schedule;
  const HopperScales scales = row_pairs(choice.tile) ? HopperScales::kInKernel : choice.scales;
  const TileModel& model = model_of(choice.tile);
  const int64_t token_tiles = ceil_div(p.m, model.tokens), tiles = token_tiles * ceil_div(out_rows(p), model.rows);
  const int64_t units = ceil_div(ceil_div(reduction(p), kStep), model.unit);
  const int clusters = clusters_of(device);
  plan.path = LinearPath::kHopper;
  plan.group = static_cast<int>(std::min<int64_t>(choice.group, token_tiles));
  plan.grid = 2 * clusters;
  plan.variant = hopper_variant(choice.tile, schedule, scales);
  if (p.m > hopper_tokens_per_launch(p, plan)) schedule = HopperSchedule::kWhole;  // partial sums belong to one launch
  plan.split = schedule == HopperSchedule::kSplitTail ? pieces_of_tail(tiles, clusters, units) : 1;
  if (tail_tiles(tiles, clusters) == 0 || (schedule == HopperSchedule::kSplitTail && plan.split < 2)) schedule = HopperSchedule::kWhole;
  if (schedule == HopperSchedule::kStreamK) {
    // Every cluster needs a part of the range: an owner waits for each cluster up to the end of its tile, also for one that had no work.
    plan.grid = static_cast<int>(2 * std::min<int64_t>(clusters, tiles * units));
    if (plan.grid <= 2 * tiles && tiles < clusters) schedule = HopperSchedule::kWhole;
  }
  plan.variant = hopper_variant(choice.tile, schedule, scales);
  if (schedule == HopperSchedule::kWhole) {
    plan.split = 1;
    plan.grid = static_cast<int>(2 * std::min<int64_t>(clusters, tiles));
  }
  plan.batch_invariant = schedule == HopperSchedule::kWhole;
  return finished(p, plan);
}

LinearPlan plan_hopper(const LinearProblem& p, const DeviceModel& device) {
  const int group = p.n * p.k <= kWeightsInCache ? 2 : 4;
  HopperChoice best{HopperTile::kTokens256, HopperSchedule::kWhole, HopperScales::kExpanded, group};
  double least = expected_clocks(p, device, best);
  for (const HopperScales scales : {HopperScales::kExpanded, HopperScales::kInKernel}) {
    for (int i = 0; i < kHopperTiles; i++) {
      const HopperTile tile = static_cast<HopperTile>(i);
      if (row_pairs(tile) && (scales == HopperScales::kExpanded || !row_pairs_measured(p, tile))) continue;
      for (const HopperSchedule schedule : {HopperSchedule::kWhole, HopperSchedule::kSplitTail, HopperSchedule::kStreamK}) {
        const HopperChoice choice{tile, schedule, scales, group};
        const bool allowed = !p.batch_invariant || schedule == HopperSchedule::kWhole;  // the same bits whatever the tile
        const double clocks = expected_clocks(p, device, choice);
        if (!allowed || clocks < 0 || clocks >= least) continue;
        least = clocks;
        best = choice;
      }
    }
  }
  return plan_hopper_as(p, device, best);
}

}  // namespace nybble
