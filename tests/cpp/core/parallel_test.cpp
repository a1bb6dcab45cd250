#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace nybble {
namespace {

class ParallelFor : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
};

TEST_P(ParallelFor, VisitsEveryIndexOnce) {
  for (const int64_t count : {0, 1, 2, 63, 64, 65, 10007}) {
    for (const int64_t grain : {1, 7, 64, 100000}) {
      std::vector<std::atomic<int>> visits(count);
      parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; i++) visits[i]++;
      });
      for (const auto& visit : visits) ASSERT_EQ(visit, 1);
    }
  }
}

TEST_P(ParallelFor, RethrowsAndStaysUsable) {
  EXPECT_THROW(parallel_for(1000, 1,
                            [](int64_t begin, int64_t) {
                              if (begin == 500) throw std::runtime_error("500");
                            }),
               std::runtime_error);
  std::atomic<int64_t> sum = 0;
  parallel_for(100, 3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) sum += i;
  });
  EXPECT_EQ(sum, 4950);
}

TEST_P(ParallelFor, NestedCallsAndSeveralCallersFinish) {
  std::atomic<int64_t> sum = 0;
  auto caller = [&] {
    for (int round = 0; round < 50; round++) {
      parallel_for(16, 1, [&](int64_t, int64_t) { parallel_for(4, 1, [&](int64_t begin, int64_t end) { sum += end - begin; }); });
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(sum, 2 * 50 * 16 * 4);
}

INSTANTIATE_TEST_SUITE_P(Threads, ParallelFor, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace nybble
