#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "linear/hopper.h"

namespace nybble {
namespace {

using hopper::Segment;
using hopper::Share;
using hopper::Work;

const DeviceModel kH200{"NVIDIA H200", 90, 132, 60 << 20, 232448};
constexpr int64_t kMiB = 1 << 20;

LinearProblem problem(int64_t m, int64_t n, int64_t k, Direction direction = Direction::kForward) {
  LinearProblem p;
  p.m = m, p.n = n, p.k = k, p.direction = direction;
  return p;
}

// Per (row tile, token tile): the steps that clusters take of it, or a text that says what is wrong with the lists.
std::string coverage_fault(const Work& w, int max_segments) {
  std::vector<int> taken(static_cast<size_t>(w.row_tiles) * w.token_tiles * w.steps, 0);
  for (int cluster = 0; cluster < w.clusters; cluster++) {
    const Share share = share_of(w, cluster);
    for (int i = 0;; i++) {
      const Segment s = segment_of(w, share, i);
      if (s.end == 0) break;
      if (i >= max_segments - 1) return "cluster " + std::to_string(cluster) + " has too many segments";
      if (s.begin < 0 || s.begin >= s.end || s.end > w.steps) return "bad steps";
      const bool ends = i == 0 || segment_of(w, share, i + 1).end == 0;
      if (!ends && (s.begin != 0 || s.end != w.steps)) return "a segment in the middle of the list is not a whole tile";
      if (s.begin % w.unit != 0 || s.end % w.unit != 0) return "a segment is not cut at the unit";
      if (s.row_tile < 0 || s.row_tile >= w.row_tiles || s.token_tile < 0 || s.token_tile >= w.token_tiles) return "a tile outside";
      for (int step = s.begin; step < s.end; step++)
        taken[(static_cast<size_t>(s.token_tile) * w.row_tiles + s.row_tile) * w.steps + step]++;
    }
  }
  for (const int count : taken) {
    if (count != 1) return "a step is taken " + std::to_string(count) + " times";
  }
  return "";
}

Work work_of(const LinearProblem& p, const LinearPlan& plan) {
  return hopper_work(p, plan, std::min(p.m, hopper_tokens_per_launch(p, plan)));
}

TEST(HopperWork, CoversEveryStepOfEveryTileOnce) {
  int divided = 0;
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    for (const int64_t m : {1, 64, 129, 512, 1000, 2048, 8192, 70000}) {
      for (const auto& [n, k] : {std::pair{14336, 4096}, {4096, 14336}, {1024, 4096}, {200, 576}, {27648, 5120}}) {
        for (int variant = 0; variant < kHopperVariants; variant++) {
          const LinearProblem p = problem(m, n, k, direction);
          const LinearPlan plan = plan_hopper_as(p, kH200, {hopper_tile(variant), hopper_schedule(variant), hopper_scales(variant), 4});
          divided += hopper_schedule(plan.variant) != HopperSchedule::kWhole;
          EXPECT_EQ(coverage_fault(work_of(p, plan), kHopperMaxSegments), "") << m << " " << n << " " << k << " " << variant;
        }
      }
    }
  }
  EXPECT_GT(divided, 100);
}

TEST(HopperWork, ALostTileAndADoubledPieceAreSeen) {
  const LinearProblem p = problem(512, 14336, 4096);
  Work w = work_of(p, plan_hopper_as(p, kH200, {HopperTile::kTokens256, HopperSchedule::kWhole, HopperScales::kInKernel, 4}));
  ASSERT_EQ(coverage_fault(w, kHopperMaxSegments), "");
  w.tiles--;
  derive(w);
  EXPECT_NE(coverage_fault(w, kHopperMaxSegments), "");
  w.tiles++;
  w.stream_tiles = 46, w.pieces = 2;  // the last wave cut in two although the stream-K range moves it
  derive(w);
  EXPECT_NE(coverage_fault(w, kHopperMaxSegments), "");
}

// A stream-K owner waits for what clusters of higher number (lower block index, started earlier) store as their first segment.
TEST(HopperWork, StreamKOwnersWaitOnlyForFirstSegmentsOfLaterClusters) {
  int owners = 0;
  for (const int64_t m : {64, 512, 1024, 4096}) {
    const LinearProblem p = problem(m, 14336, 4096);
    const Work w = work_of(p, plan_hopper_as(p, kH200, {HopperTile::kTokens256, HopperSchedule::kStreamK, HopperScales::kInKernel, 4}));
    for (int c = 0; c < w.clusters; c++) {
      const Share share = share_of(w, c);
      for (int i = 0;; i++) {
        const Segment s = segment_of(w, share, i);
        if (s.end == 0) break;
        EXPECT_TRUE(s.begin == 0 || i == 0) << "cluster " << c << " stores a partial sum as segment " << i;
        owners += s.begin == 0 && s.end < w.steps;
      }
    }
  }
  EXPECT_GT(owners, 50);
}

// Clusters of a stream-K range without a step: whoever waits for one waits for ever.
int idle_clusters(const Work& w) {
  int idle = 0;
  for (int c = 0; w.stream_tiles > 0 && c < w.clusters; c++) idle += stream_begin(w, c) == stream_begin(w, c + 1);
  return idle;
}

TEST(HopperWork, EveryClusterOfAStreamKRangeHasAStep) {
  int streams = 0;
  for (const int64_t m : {1, 16, 64, 100, 256, 1000}) {
    for (const auto& [n, k] : {std::pair{1000, 576}, {8, 64}, {136, 128}, {512, 512}, {576, 1536}, {4096, 4096}}) {
      for (const HopperTile tile : {HopperTile::kTokens256, HopperTile::kTokens128, HopperTile::kTokens64, HopperTile::kRows128}) {
        const LinearProblem p = problem(m, n, k);
        const LinearPlan plan = plan_hopper_as(p, kH200, {tile, HopperSchedule::kStreamK, HopperScales::kExpanded, 4});
        const Work w = work_of(p, plan);
        streams += w.stream_tiles > 0;
        EXPECT_EQ(idle_clusters(w), 0) << m << " " << n << " " << k << ": " << to_string(plan);
      }
    }
  }
  EXPECT_GT(streams, 10);
  Work w = work_of(problem(64, 1000, 576), plan_hopper_as(problem(64, 1000, 576), kH200,
                                                          {HopperTile::kTokens64, HopperSchedule::kStreamK, HopperScales::kExpanded, 4}));
  ASSERT_GT(w.stream_tiles, 0);
  w.clusters = 66;  // more clusters than steps to share
  derive(w);
  EXPECT_GT(idle_clusters(w), 0);
}

// Which flags a launch sets and which it waits for and clears, by (cluster of the flag, reader): +1 and -1, as the kernel decides it.
std::map<std::pair<int, int>, int> flag_balance(const Work& w, int chunks, int& waits) {
  std::map<std::pair<int, int>, int> balance;
  const auto has_share = [&](int piece) { return first_chunk(w, piece, chunks) < first_chunk(w, piece + 1, chunks); };
  for (int cluster = 0; cluster < w.clusters; cluster++) {
    const Share share = share_of(w, cluster);
    for (int i = 0;; i++) {
      const Segment s = segment_of(w, share, i);
      if (s.end == 0) break;
      if (s.end - s.begin == w.steps) continue;
      const int me = cluster % w.pieces;
      for (int other = 0; w.pieces > 1 && other < w.pieces; other++) {
        if (other == me) continue;
        balance[{cluster, other}] += has_share(other);
        balance[{cluster - me + other, me}] -= has_share(me);
        waits += has_share(me);
      }
      if (w.pieces > 1) continue;
      if (s.begin > 0) balance[{cluster, 0}]++;
      for (int c = cluster + 1; s.begin == 0 && c < w.clusters && stream_begin(w, c) < last_tile_end(w, cluster); c++) {
        balance[{c, 0}]--;
        waits++;
      }
    }
  }
  std::erase_if(balance, [](const auto& entry) { return entry.second == 0; });
  return balance;
}

// No wait for a flag that nobody sets, and none left set: a replay with the same nonce would take it for its own.
TEST(HopperWork, EveryFlagThatIsSetIsAwaitedAndOnlyThose) {
  int waits = 0;
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    for (const int64_t m : {1, 64, 129, 512, 1000, 4096}) {
      for (const auto& [n, k] : {std::pair{14336, 4096}, {1024, 4096}, {200, 576}, {2048, 1600}, {8, 64}, {576, 1536}, {512, 16384}}) {
        for (int variant = 0; variant < kHopperVariants; variant++) {
          const LinearProblem p = problem(m, n, k, direction);
          const LinearPlan plan = plan_hopper_as(p, kH200, {hopper_tile(variant), hopper_schedule(variant), hopper_scales(variant), 4});
          const Work w = work_of(p, plan);
          const int chunks[kHopperTiles] = {8, 4, 2, 8, 6, 5, 4, 3, 2};
          EXPECT_TRUE(flag_balance(w, chunks[static_cast<int>(hopper_tile(plan.variant))], waits).empty()) << m << " " << to_string(plan);
        }
      }
    }
  }
  EXPECT_GT(waits, 1000);
  Work idle =
      work_of(problem(64, 1000, 576),
              plan_hopper_as(problem(64, 1000, 576), kH200, {HopperTile::kTokens64, HopperSchedule::kStreamK, HopperScales::kExpanded, 4}));
  idle.clusters = 66;
  derive(idle);
  EXPECT_FALSE(flag_balance(idle, 2, waits).empty()) << "owners wait for clusters that have no step";
}

// In the kernel while that is cheaper than a kernel before: short multiplies.
TEST(HopperPlan, ScalesAreExpandedOnlyForLongMultiplies) {
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    EXPECT_EQ(hopper_scales(plan_hopper(problem(512, 4096, 4096, direction), kH200).variant), HopperScales::kInKernel);
    EXPECT_EQ(hopper_scales(plan_hopper(problem(64, 14336, 4096, direction), kH200).variant), HopperScales::kInKernel);
    EXPECT_EQ(hopper_scales(plan_hopper(problem(4096, 14336, 4096, direction), kH200).variant), HopperScales::kExpanded);
    EXPECT_EQ(hopper_scales(plan_hopper(problem(512, 28672, 8192, direction), kH200).variant), HopperScales::kExpanded);
  }
}

// A long grad_x of short tiles: at the end of each the decode warps catch up.
TEST(HopperPlan, ScalesOfShortTilesAreMadeInTheKernel) {
  EXPECT_EQ(hopper_scales(plan_hopper(problem(16384, 1024, 4096, Direction::kGradInput), kH200).variant), HopperScales::kInKernel);
  EXPECT_EQ(hopper_scales(plan_hopper(problem(16384, 1024, 4096, Direction::kForward), kH200).variant), HopperScales::kExpanded);
  EXPECT_EQ(hopper_scales(plan_hopper(problem(4096, 4096, 4096, Direction::kGradInput), kH200).variant), HopperScales::kExpanded);
}

struct Refusal {
  const char* title;
  std::function<void(LinearProblem&, DeviceModel&)> change;
  const char* words;
};

TEST(HopperSupports, TakesTheTargetShapesAndNamesWhatItDoesNotTake) {
  EXPECT_EQ(supports_hopper(problem(512, 14336, 4096), kH200), "");
  EXPECT_EQ(supports_hopper(problem(1, 1000, 64, Direction::kGradInput), kH200), "");
  const Refusal refusals[] = {
      {"card", [](LinearProblem&, DeviceModel& d) { d.sm = 100; }, "compute capability 9.0"},
      {"shared memory", [](LinearProblem&, DeviceModel& d) { d.smem_per_block_bytes = 101376; }, "shared memory"},
      {"fp32", [](LinearProblem& p, DeviceModel&) { p.dtype = DType::kFloat32; }, "float32"},
      {"no rows", [](LinearProblem& p, DeviceModel&) { p.m = 0; }, "m 0"},
      {"odd n", [](LinearProblem& p, DeviceModel&) { p.n = 1001; }, "n 1001"},
      {"ragged k", [](LinearProblem& p, DeviceModel&) { p.k = 4096 + 32; }, "k 4128"},
      {"small block", [](LinearProblem& p, DeviceModel&) { p.block_size = 32; }, "block size 32"},
      {"block across rows", [](LinearProblem& p, DeviceModel&) { p.k = 64, p.block_size = 128; }, "block size 128"},
      {"stride", [](LinearProblem& p, DeviceModel&) { p.x_row_stride = 4100; }, "4100"},
      {"x", [](LinearProblem& p, DeviceModel&) { p.x_alignment = 8; }, "activation"},
      {"packed", [](LinearProblem& p, DeviceModel&) { p.packed_alignment = 1; }, "packed"},
      {"scales", [](LinearProblem& p, DeviceModel&) { p.scales_alignment = 2; }, "scales"},
      {"too wide", [](LinearProblem& p, DeviceModel&) { p.n = 2 << 20; }, "columns"},
  };
  for (const Refusal& refusal : refusals) {
    LinearProblem p = problem(512, 14336, 4096);
    DeviceModel d = kH200;
    refusal.change(p, d);
    EXPECT_NE(supports_hopper(p, d).find(refusal.words), std::string::npos) << refusal.title << ": " << supports_hopper(p, d);
  }
}

// Segments hold steps in 16 bits, and steps are rounded up to units.
TEST(HopperSupports, TakesTheLongestReductionWhoseStepsFit) {
  constexpr int64_t kLongest = int64_t{65528} * 64;
  const LinearProblem longest = problem(512, 64, kLongest);
  EXPECT_EQ(supports_hopper(longest, kH200), "");
  for (int tile = 0; tile < kHopperTiles; tile++) {
    const LinearPlan plan =
        plan_hopper_as(longest, kH200, {static_cast<HopperTile>(tile), HopperSchedule::kWhole, HopperScales::kInKernel, 4});
    EXPECT_LT(hopper_work(longest, plan, longest.m).steps, 1 << 16);
  }
  EXPECT_NE(supports_hopper(problem(512, 64, kLongest + 64), kH200).find("k up to"), std::string::npos);
}

TEST(HopperPlan, IsPureAndWithinTheWorkspaceBudget) {
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    for (const int64_t m : {1, 100, 256, 512, 777, 2048, 16384, 100000}) {
      for (const auto& [n, k] : {std::pair{14336, 4096}, {4096, 4096}, {1024, 4096}, {28672, 8192}, {72, 64}}) {
        const LinearProblem p = problem(m, n, k, direction);
        const LinearPlan plan = plan_hopper(p, kH200);
        EXPECT_EQ(plan.path, LinearPath::kHopper);
        EXPECT_EQ(to_string(plan), to_string(plan_hopper(p, kH200)));
        EXPECT_LE(plan.workspace_bytes, 32 * kMiB + n * k * 2 / 32) << to_string(plan);
        EXPECT_LE(plan.grid, kH200.sm_count);
        EXPECT_EQ(plan.split > 1, hopper_schedule(plan.variant) == HopperSchedule::kSplitTail);
      }
    }
  }
}

TEST(HopperPlan, PartialSumsStayWithinOneLaunch) {
  const LinearProblem p = problem(100000, 28672, 8192);
  const LinearPlan plan = plan_hopper_as(p, kH200, {HopperTile::kTokens256, HopperSchedule::kStreamK, HopperScales::kInKernel, 4});
  EXPECT_EQ(hopper_schedule(plan.variant), HopperSchedule::kWhole);
  EXPECT_LT(hopper_tokens_per_launch(p, plan), p.m);
}

TEST(HopperPlan, WholeTilesWithScalesInTheKernelNeedNoWorkspace) {
  HopperChoice choice{HopperTile::kTokens256, HopperSchedule::kWhole, HopperScales::kInKernel, 4};
  EXPECT_EQ(plan_hopper_as(problem(2048, 14336, 4096), kH200, choice).workspace_bytes, 0);
  choice.scales = HopperScales::kExpanded;
  EXPECT_EQ(plan_hopper_as(problem(2048, 14336, 4096), kH200, choice).workspace_bytes, 14336 * 4096 / 64 * 4);
  choice.schedule = HopperSchedule::kStreamK, choice.scales = HopperScales::kInKernel;
  EXPECT_GT(plan_hopper_as(problem(2048, 14336, 4096), kH200, choice).workspace_bytes, 0) << "the partial sums";
}

TEST(HopperPlan, LongMultipliesTakeStreamKOnlyWhereItIsClearlyBetter) {
  const auto schedule = [](int64_t m, int64_t n, int64_t k, Direction direction) {
    return hopper_schedule(plan_hopper(problem(m, n, k, direction), kH200).variant);
  };
  EXPECT_EQ(schedule(8192, 14336, 4096, Direction::kForward), HopperSchedule::kSplitTail);
  EXPECT_EQ(schedule(8192, 4096, 14336, Direction::kGradInput), HopperSchedule::kSplitTail);
  EXPECT_EQ(schedule(4096, 14336, 4096, Direction::kForward), HopperSchedule::kStreamK) << "1.4% better by the model";
  EXPECT_EQ(schedule(512, 14336, 4096, Direction::kForward), HopperSchedule::kStreamK) << "short";
}

TEST(HopperPlan, AWeightThatStaysInCacheIsReadMoreOften) {
  EXPECT_EQ(plan_hopper(problem(2048, 4096, 4096), kH200).group, 2);
  EXPECT_EQ(plan_hopper(problem(2048, 14336, 4096), kH200).group, 4);
}

TEST(HopperPlan, AFewHundredTokensGoToTilesOfRowPairs) {
  const auto tile_of = [](const LinearProblem& p) { return hopper_tile(plan_hopper(p, kH200).variant); };
  const auto rows = [&](const LinearProblem& p) { return tile_of(p) >= HopperTile::kRows256; };
  EXPECT_EQ(tile_of(problem(256, 14336, 4096)), HopperTile::kRows256);
  EXPECT_EQ(tile_of(problem(256, 4096, 14336, Direction::kGradInput)), HopperTile::kRows256);
  for (const Direction direction : {Direction::kForward, Direction::kGradInput}) {
    for (const int64_t m : {129, 160}) EXPECT_EQ(tile_of(problem(m, 4096, 4096, direction)), HopperTile::kRows160);
    for (const int64_t m : {161, 192}) EXPECT_EQ(tile_of(problem(m, 4096, 4096, direction)), HopperTile::kRows192);
    EXPECT_EQ(tile_of(problem(193, 14336, 4096, direction)), HopperTile::kRows256);
  }
  EXPECT_EQ(tile_of(problem(128, 4096, 4096)), HopperTile::kRows128);
  EXPECT_EQ(tile_of(problem(128, 4096, 14336, Direction::kGradInput)), HopperTile::kRows128);
  EXPECT_EQ(tile_of(problem(64, 4096, 4096, Direction::kGradInput)), HopperTile::kRows64);
  EXPECT_NE(tile_of(problem(256, 4096, 4096, Direction::kGradInput)), HopperTile::kRows128) << "one tile of tokens only";
  EXPECT_EQ(tile_of(problem(192, 1024, 4096)), HopperTile::kRows96) << "two of a small weight";
  EXPECT_EQ(tile_of(problem(256, 1024, 4096)), HopperTile::kRows128);
  EXPECT_EQ(tile_of(problem(96, 1024, 4096)), HopperTile::kRows96) << "two were not measured";
  LinearProblem plain = problem(256, 14336, 4096);
  plain.nested = false;
  EXPECT_TRUE(rows(plain));
  plain.direction = Direction::kGradInput;
  EXPECT_TRUE(rows(plain));
  const std::function<void(LinearProblem&)> others[] = {[](LinearProblem& p) { p.nested = false, p.scales_alignment = 8; },
                                                        [](LinearProblem& p) { p.nested_dtype = DType::kBFloat16; },
                                                        [](LinearProblem& p) { p.block_size = 128; }, [](LinearProblem& p) { p.k = 4160; }};
  for (const auto& change : others) {
    LinearProblem p = problem(256, 14336, 4096);
    change(p);
    EXPECT_FALSE(suits_row_pairs(p));
    EXPECT_FALSE(rows(p)) << "a way of the scales that was not measured";
  }
}

// Tiles of 512 and 256 tokens would be padded by up to a half.
TEST(HopperPlan, NumbersOfTokensBetweenTheTilesGoToSeveralTilesOfRowPairs) {
  const auto tile_of = [](const LinearProblem& p) { return hopper_tile(plan_hopper(p, kH200).variant); };
  for (const auto& [m, tile] : {std::pair{320, HopperTile::kRows160},
                                {384, HopperTile::kRows192},
                                {576, HopperTile::kRows192},
                                {768, HopperTile::kRows256},
                                {1280, HopperTile::kRows256}}) {
    EXPECT_EQ(tile_of(problem(m, 14336, 4096)), tile) << m;
    EXPECT_EQ(tile_of(problem(m, 4096, 14336)), tile) << m;
  }
  for (const int64_t m : {448, 512, 896, 1024, 1536, 2048, 2100}) EXPECT_EQ(tile_of(problem(m, 14336, 4096)), HopperTile::kTokens256) << m;
  EXPECT_EQ(hopper_schedule(plan_hopper(problem(576, 4096, 14336), kH200).variant), HopperSchedule::kStreamK) << "224 steps a tile";
  LinearProblem plain = problem(576, 14336, 4096);
  plain.nested = false;
  EXPECT_EQ(tile_of(plain), HopperTile::kRows192);
  LinearProblem other = problem(576, 14336, 4096);
  other.block_size = 128;
  EXPECT_LT(tile_of(other), HopperTile::kRows256) << "a way of the scales that was not measured";
}

// 20 tiles for 66 clusters: three pieces each leave 6 idle, stream-K none. 16 tiles: four pieces each leave 2 idle.
TEST(HopperPlan, RowPairsGoToStreamKWherePiecesWouldLeaveClustersIdle) {
  const auto schedule_of = [](const LinearProblem& p) { return hopper_schedule(plan_hopper(p, kH200).variant); };
  EXPECT_EQ(schedule_of(problem(128, 27648, 5120, Direction::kGradInput)), HopperSchedule::kStreamK);
  EXPECT_EQ(schedule_of(problem(96, 5120, 27648)), HopperSchedule::kStreamK);
  EXPECT_EQ(schedule_of(problem(128, 14336, 4096, Direction::kGradInput)), HopperSchedule::kSplitTail);
  for (const int64_t m : {64, 96, 128}) {  // 56 tiles
    EXPECT_EQ(schedule_of(problem(m, 14336, 4096)), HopperSchedule::kStreamK) << m;
    EXPECT_EQ(schedule_of(problem(m, 4096, 14336, Direction::kGradInput)), HopperSchedule::kStreamK) << m;
  }
  EXPECT_EQ(schedule_of(problem(160, 14336, 4096)), HopperSchedule::kWhole);
  EXPECT_EQ(schedule_of(problem(256, 4096, 14336, Direction::kGradInput)), HopperSchedule::kWhole);
}

TEST(HopperPlan, TilesOfRowPairsMakeTheirScalesThemselves) {
  for (const HopperTile tile :
       {HopperTile::kRows256, HopperTile::kRows192, HopperTile::kRows160, HopperTile::kRows128, HopperTile::kRows96, HopperTile::kRows64}) {
    const LinearProblem p = problem(100, 4096, 4096);
    const LinearPlan plan = plan_hopper_as(p, kH200, {tile, HopperSchedule::kWhole, HopperScales::kExpanded, 4});
    EXPECT_EQ(hopper_scales(plan.variant), HopperScales::kInKernel);
    EXPECT_EQ(plan.workspace_bytes, 0);
    EXPECT_EQ(hopper_work(p, plan, p.m).row_tiles, 4096 / 256);
    EXPECT_NE(plan.reason.find("tiles of 256 rows"), std::string::npos) << plan.reason;
  }
}

TEST(HopperPlan, BatchInvariantPlansSumWholeTilesWhateverM) {
  for (const auto& [m, tile] : {std::pair{1, HopperTile::kRows64},
                                {64, HopperTile::kRows64},
                                {128, HopperTile::kRows128},
                                {512, HopperTile::kTokens256},
                                {1000, HopperTile::kTokens256},
                                {8192, HopperTile::kTokens256}}) {
    LinearProblem p = problem(m, 14336, 4096);
    p.batch_invariant = true;
    const LinearPlan plan = plan_hopper(p, kH200);
    EXPECT_EQ(hopper_tile(plan.variant), tile) << to_string(plan);
    EXPECT_EQ(hopper_schedule(plan.variant), HopperSchedule::kWhole);
    EXPECT_TRUE(plan.batch_invariant);
  }
  const LinearPlan cut = plan_hopper_as(problem(512, 14336, 4096, Direction::kGradInput), kH200,
                                        {HopperTile::kTokens256, HopperSchedule::kSplitTail, HopperScales::kInKernel, 4});
  EXPECT_EQ(cut.split, 2);
  EXPECT_FALSE(cut.batch_invariant);
}

}  // namespace
}  // namespace nybble
