// A refill that fails at any byte range leaves its slot empty; the next acquire reads the right layer or raises, never another layer.
#include <atomic>
#include <stdexcept>

#include "race_detector.h"
#include "ring_fixture.h"

namespace nybble {
namespace {

constexpr int64_t kChunk = 512;
constexpr int64_t kLayerBytes = 4096 - 100;  // a partial last chunk

// Fails the nth refill (0-based, over the engine's life) of a layer before byte `at`.
struct Fault {
  int layer = -1;
  int64_t at = 0;
  std::atomic<int> left{1};

  CopyOptions options(bool late) {
    CopyOptions copy;
    copy.chunk_bytes = kChunk;
    copy.land_at_wait = late;
    copy.observer = [this](int copied, int, int64_t begin, int64_t) {
      if (copied == layer && begin == at && left.fetch_sub(1) > 0) throw std::runtime_error("injected");
    };
    return copy;
  }
};

struct Engine {
  const char* name;
  bool cuda;
  bool late;
};

class RefillFailure : public ::testing::TestWithParam<Engine> {
 protected:
  std::unique_ptr<CopyEngine> engine(Fault& fault) {
    CopyOptions copy = fault.options(GetParam().late);
    return GetParam().cuda ? make_fake_cuda_engine(runtime_, 2, std::move(copy)) : make_cpu_copy_engine(2, std::move(copy));
  }

 private:
  FakeRuntime runtime_;
};

TEST_P(RefillFailure, AtAnyByteRangeOfAnAcquireRaisesOnceAndTheRetryIsExact) {
  for (int64_t at = 0; at < kLayerBytes; at += kChunk) {
    Fault fault;
    fault.layer = 3;
    fault.at = at;
    Streamed model(4, 2, engine(fault), {false, false}, kLayerBytes);
    model.acquire(1);
    ASSERT_TRUE(model.reads_exactly(1));
    EXPECT_THROW(model.acquire(3), std::runtime_error);
    const SlotStatus after = model.ring().status(1);
    EXPECT_STREQ(name(after.state), "empty");
    EXPECT_EQ(after.layer, -1);
    for (const int layer : {1, 3}) {
      const std::string text = error_of(ErrorKind::kStaleWeight, [&] { model.verify(layer); });
      EXPECT_NE(text.find("slot holds nothing"), std::string::npos) << text;
    }
    model.acquire(3);
    ASSERT_TRUE(model.reads_exactly(3)) << at;
    EXPECT_EQ(model.ring().stats().failed, 1);
  }
}

// The layer whose bytes were half overwritten comes back whole, although its slot "held" it a moment ago.
TEST_P(RefillFailure, TheLayerThatWasInTheSlotIsRefilledNotReused) {
  for (int64_t at = 0; at < kLayerBytes; at += kChunk) {
    Fault fault;
    fault.layer = 3;
    fault.at = at;
    Streamed model(4, 2, engine(fault), {false, false}, kLayerBytes);
    model.acquire(1);
    model.ring().release(1, nullptr);
    EXPECT_THROW(model.acquire(3), std::runtime_error);
    model.acquire(1);
    ASSERT_TRUE(model.reads_exactly(1)) << at;
    EXPECT_EQ(model.ring().stats().hits, 0);
  }
}

TEST_P(RefillFailure, OfAPrefetchIsRaisedByTheAcquireThatNeedsTheLayer) {
  struct Case {
    int layer;
    Order order;
    int fails;
  };
  for (const Case& c : {Case{1, Order::kForward, 2}, Case{2, Order::kBackward, 1}}) {
    for (int64_t at = 0; at < kLayerBytes; at += kChunk) {
      Fault fault;
      fault.layer = c.fails;
      fault.at = at;
      Streamed model(4, 2, engine(fault), {true, false}, kLayerBytes);
      model.acquire(c.layer, c.order);
      ASSERT_TRUE(model.reads_exactly(c.layer));
      EXPECT_THROW(model.acquire(c.fails, c.order), std::runtime_error) << at;
      EXPECT_STREQ(name(model.ring().status(model.slot_index(c.fails)).state), "empty");
      model.acquire(c.fails, c.order);
      ASSERT_TRUE(model.reads_exactly(c.fails));
    }
  }
}

TEST_P(RefillFailure, OfAnUnusedPrefetchHurtsNobody) {
  Fault fault;
  fault.layer = 1;
  Streamed model(4, 2, engine(fault), {true, false}, kLayerBytes);
  model.acquire(0);
  model.acquire(3);
  EXPECT_TRUE(model.reads_exactly(3));
  EXPECT_EQ(model.ring().stats().failed, 0);
}

TEST_P(RefillFailure, ThatRepeatsRaisesEveryTime) {
  Fault fault;
  fault.layer = 0;
  fault.left = 3;
  Streamed model(2, 2, engine(fault), {false, false}, kLayerBytes);
  for (int i = 0; i < 3; i++) EXPECT_THROW(model.acquire(0), std::runtime_error);
  model.acquire(0);
  EXPECT_TRUE(model.reads_exactly(0));
}

INSTANTIATE_TEST_SUITE_P(EveryEngine, RefillFailure,
                         ::testing::Values(Engine{"cpu", false, false}, Engine{"cpu_late", false, true}, Engine{"cuda", true, false},
                                           Engine{"cuda_late", true, true}),
                         [](const auto& info) { return info.param.name; });

// A refill cancelled at any byte range by one of another layer.
TEST(Cancel, ARefillReplacedWhileItCopiesLeavesNoByteBehind) {
  for (int64_t at = 0; at < kLayerBytes; at += kChunk) {
    std::atomic<bool> reached{false};
    std::atomic<bool> go_on{false};
    CopyOptions copy;
    copy.chunk_bytes = kChunk;
    copy.observer = [&](int layer, int, int64_t begin, int64_t) {
      if (layer != 1 || begin != at) return;
      reached = true;
      while (!go_on) std::this_thread::yield();
    };
    Streamed model(4, 2, copy, {true, false}, kLayerBytes);
    model.acquire(0);  // prefetches 1, which halts at `at`
    while (!reached) std::this_thread::yield();
    std::thread unblock([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      go_on = true;
    });
    model.acquire(3, Order::kBackward);
    unblock.join();
    ASSERT_TRUE(model.reads_exactly(3)) << at;
    EXPECT_EQ(model.ring().stats().cancelled, 1);
  }
}

TEST(Cancel, ResetStopsARefillAndTheNextVisitIsExact) {
  CopyOptions copy;
  copy.delay = std::chrono::seconds(30);
  Streamed model(4, 2, copy, {false, false}, kLayerBytes);
  EXPECT_FALSE(model.ring().acquire(0, Order::kForward, nullptr, std::chrono::milliseconds(5), nullptr));
  EXPECT_NE(error_of(ErrorKind::kStaleWeight, [&] { model.verify(0); }), "");
  const auto start = std::chrono::steady_clock::now();
  model.ring().reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_STREQ(name(model.ring().status(0).state), "empty");
}

}  // namespace
}  // namespace nybble
