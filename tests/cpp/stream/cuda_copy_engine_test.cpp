// The CUDA engine without a GPU: the order of its calls, on a runtime that finds races.
#include <random>

#include "race_detector.h"
#include "ring_fixture.h"

namespace nybble {
namespace {

void* const kMain = reinterpret_cast<void*>(0x1);
void* const kOther = reinterpret_cast<void*>(0x2);

// A visit of `layer` on a stream whose kernels read the slot, as a multiply does, once the owner check has passed.
void visit(Streamed& model, FakeRuntime& runtime, int layer, Order order, void* stream, bool release) {
  ASSERT_TRUE(model.ring().acquire(layer, order, stream, kPatience, nullptr));
  ASSERT_TRUE(model.reads_exactly(layer));
  runtime.detector.read(model.slot(layer), stream);
  if (release) model.ring().release(layer, stream);
}

struct Scenario {
  const char* name;
  int window;
  bool releases;
  bool late_read;  // reads that follow a release, as a backward after an early stop does
  bool two_streams;
  bool land_at_wait;
};

constexpr Scenario kScenarios[] = {
    {"released", 2, true, false, false, false},          {"never released", 2, false, false, false, false},
    {"read after release", 2, true, true, false, false}, {"two streams", 2, true, true, true, false},
    {"three slots", 3, true, false, false, false},       {"one slot", 1, false, false, true, false},
    {"late copies", 2, true, true, true, true},
};

// Two training steps, an evaluation and random jumps. Returns the number of waits.
int run(const Scenario& c, FakeRuntime& runtime) {
  constexpr int kLayers = 5;
  CopyOptions copy;
  copy.land_at_wait = c.land_at_wait;
  Streamed model(kLayers, c.window, make_fake_cuda_engine(runtime, c.window, copy), {true, true});
  std::mt19937 random(3);
  int visits = 0;
  const auto go = [&](int layer, Order order) {
    void* const stream = c.two_streams && visits++ % 3 == 2 ? kOther : kMain;
    visit(model, runtime, layer, order, stream, c.releases);
    if (!c.late_read) return;
    model.verify(layer);
    runtime.detector.read(model.slot(layer), stream);
  };
  for (int step = 0; step < 2; step++) {
    for (int layer = 0; layer < kLayers; layer++) go(layer, Order::kForward);
    for (int layer = kLayers - 1; layer >= 0; layer--) go(layer, Order::kBackward);
  }
  for (int i = 0; i < 2 * kLayers; i++) go(i % kLayers, Order::kRepeat);
  for (int i = 0; i < 30; i++) go(static_cast<int>(random() % kLayers), static_cast<Order>(random() % 3));
  return runtime.detector.waits();
}

TEST(CudaCopyEngine, OrdersEveryRefillAfterTheReadsBeforeItAndEveryReadAfterItsRefill) {
  for (const Scenario& c : kScenarios) {
    FakeRuntime runtime;
    EXPECT_GT(run(c, runtime), 40) << c.name;
    EXPECT_EQ(runtime.detector.races(), std::vector<std::string>{}) << c.name;
    EXPECT_TRUE(runtime.live.empty()) << c.name << " leaks streams or events";
  }
}

// The control: the detector must miss every single wait. Only the first refill of a slot has nothing to wait for, and a wait can be implied
// by a later one before anything is read. A late copy waits for compute twice, at its start and where it lands, so both are left out.
TEST(CudaCopyEngine, AWaitThatIsLeftOutIsARace) {
  for (const Scenario& c : kScenarios) {
    FakeRuntime all;
    const int waits = run(c, all);
    int missed = 0;
    for (int skipped = 1; skipped <= waits; skipped++) {
      FakeRuntime runtime;
      runtime.detector.skip_waits(skipped, c.land_at_wait ? 2 : 1);
      run(c, runtime);
      missed += runtime.detector.races().empty();
    }
    EXPECT_LE(missed, waits / 3) << c.name << ": " << missed << " of " << waits;
  }
}

TEST(CudaCopyEngine, ALayerIsOneCopyUnlessChunksAreAskedFor) {
  for (const auto& [chunk, copies] : {std::pair<int64_t, int>{0, 1}, {4096, 1}, {1000, 5}}) {
    FakeRuntime runtime;
    CopyOptions copy;
    copy.chunk_bytes = chunk;
    copy.delay = std::chrono::microseconds(7);
    Streamed model(3, 3, make_fake_cuda_engine(runtime, 3, copy), {false, false});
    visit(model, runtime, 1, Order::kForward, kMain, true);
    EXPECT_EQ(runtime.count("copy"), copies);
    EXPECT_EQ(runtime.count("sleep 7"), 1);
    EXPECT_EQ(runtime.count("finish"), 0) << "the host must not wait";
  }
}

TEST(CudaCopyEngine, WaitsForARefillItGivesUpAndForNoOther) {
  FakeRuntime runtime;
  Streamed model(6, 2, make_fake_cuda_engine(runtime, 2));
  model.acquire(0);  // and 1 is on its way
  model.acquire(2);  // and 3 into the slot of 1, which was never used
  EXPECT_EQ(runtime.count("finish"), 1);
  EXPECT_EQ(model.ring().stats().cancelled, 1);
  EXPECT_TRUE(model.reads_exactly(2));
  model.acquire(3);
  EXPECT_TRUE(model.reads_exactly(3));
  EXPECT_EQ(runtime.count("finish"), 1);
}

TEST(CudaCopyEngine, RefusesToBeCapturedAndRestoresTheDevice) {
  FakeRuntime runtime;
  runtime.device = 3;
  Streamed model(3, 2, make_fake_cuda_engine(runtime, 2));
  EXPECT_EQ(runtime.device, 3);
  runtime.capturing = true;
  EXPECT_NE(error_of(ErrorKind::kUnsupported, [&] { model.acquire(0); }).find("CUDA graph"), std::string::npos);
  EXPECT_EQ(runtime.count("copy"), 0);
  runtime.capturing = false;
  model.acquire(0);
  model.ring().release(0, kMain);
  EXPECT_TRUE(model.reads_exactly(0));
  EXPECT_EQ(runtime.device, 3);
}

TEST(CudaCopyEngine, AFailedSetUpLeavesNothingBehind) {
  for (int at = 0; at < 6; at++) {
    FakeRuntime runtime;
    runtime.fail_at_create = at;
    EXPECT_EQ(error_of(ErrorKind::kOutOfMemory, [&] { make_fake_cuda_engine(runtime, 2); }), "injected");
    EXPECT_TRUE(runtime.live.empty()) << at;
    EXPECT_EQ(runtime.made, at);
  }
  FakeRuntime runtime;
  CopyOptions copy;
  copy.chunk_bytes = -1;
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { make_fake_cuda_engine(runtime, 1, copy); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { make_fake_cuda_engine(runtime, 0); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { make_fake_cuda_engine(runtime, 1)->wait_ready(0, kMain, kPatience); }), "");
}

}  // namespace
}  // namespace nybble
