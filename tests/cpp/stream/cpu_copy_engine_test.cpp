#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "ring_fixture.h"

namespace nybble {
namespace {

struct Buffers {
  explicit Buffers(int64_t bytes) : from(bytes), to(bytes, kUntouched) {
    for (int64_t i = 0; i < bytes; i++) from[i] = pattern(1, i);
  }
  CopyRequest request(int slot = 0) { return {slot, 1, from.data(), to.data(), static_cast<int64_t>(from.size()), true, false}; }
  std::vector<std::byte> from;
  std::vector<std::byte> to;
};

TEST(CpuCopyEngine, CopiesInTheBackgroundWhileTheCallerWorks) {
  std::atomic<bool> started{false};
  std::atomic<bool> finish{false};
  CopyOptions options;
  options.observer = [&](int, int, int64_t, int64_t) {
    started = true;
    while (!finish) std::this_thread::yield();
  };
  const auto engine = make_cpu_copy_engine(1, options);
  Buffers buffers(1000);
  engine->start(buffers.request(), nullptr);
  while (!started) std::this_thread::yield();  // the caller is free while the copy runs
  EXPECT_FALSE(engine->wait_ready(0, nullptr, std::chrono::milliseconds(1)));
  EXPECT_EQ(buffers.to[0], kUntouched);
  finish = true;
  EXPECT_TRUE(engine->wait_ready(0, nullptr, kPatience));
  EXPECT_EQ(buffers.to, buffers.from);
  EXPECT_TRUE(engine->wait_ready(0, nullptr, kPatience));
}

TEST(CpuCopyEngine, LandsAtTheLatestLegalMomentWhenAsked) {
  for (const bool late : {true, false}) {
    CopyOptions options;
    std::atomic<bool> copied{false};
    options.land_at_wait = late;
    options.observer = [&](int, int, int64_t, int64_t) { copied = true; };
    const auto engine = make_cpu_copy_engine(1, options);
    Buffers buffers(1000);
    engine->start(buffers.request(), nullptr);
    if (late) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_FALSE(copied);
    } else {
      while (!copied) std::this_thread::yield();
    }
    EXPECT_TRUE(engine->wait_ready(0, nullptr, kPatience));
    EXPECT_EQ(buffers.to, buffers.from);
  }
}

TEST(CpuCopyEngine, DelaysEachRefill) {
  CopyOptions options;
  options.delay = std::chrono::milliseconds(15);
  const auto engine = make_cpu_copy_engine(1, options);
  Buffers buffers(100);
  const auto start = std::chrono::steady_clock::now();
  engine->start(buffers.request(), nullptr);
  EXPECT_TRUE(engine->wait_ready(0, nullptr, kPatience));
  EXPECT_GE(std::chrono::steady_clock::now() - start, options.delay);
}

TEST(CpuCopyEngine, WaitingForNoRefillAndBadOptionsAreErrors) {
  const auto engine = make_cpu_copy_engine(1);
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { engine->wait_ready(0, nullptr, kPatience); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [] { make_cpu_copy_engine(0); }), "");
  CopyOptions options;
  options.chunk_bytes = -1;
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { make_cpu_copy_engine(1, options); }), "");
}

TEST(CpuCopyEngine, CancelBeforeDuringAndAfterACopy) {
  CopyOptions options;
  options.land_at_wait = true;
  const auto engine = make_cpu_copy_engine(2, options);
  Buffers buffers(1000);
  engine->cancel(0);
  engine->start(buffers.request(), nullptr);
  engine->cancel(0);
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { engine->wait_ready(0, nullptr, kPatience); }), "");
  EXPECT_EQ(buffers.to[0], kUntouched);
  engine->start(buffers.request(), nullptr);
  EXPECT_TRUE(engine->wait_ready(0, nullptr, kPatience));
  engine->cancel(0);
  EXPECT_EQ(buffers.to, buffers.from);
}

// Without the check of the process, the child would wait for a thread it does not have. The copy before the fork leaves that thread
// asleep: a fork while it allocates would leave the child without a lock of the allocator's (seen with AddressSanitizer's).
TEST(CpuCopyEngine, AForkedChildGetsAnErrorAndExits) {
  auto engine = make_cpu_copy_engine(1);
  Buffers buffers(100);
  engine->start(buffers.request(), nullptr);
  ASSERT_TRUE(engine->wait_ready(0, nullptr, kPatience));
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      engine->start(buffers.request(), nullptr);
    } catch (const Error& error) {
      code = error.kind() == ErrorKind::kUnsupported ? 0 : 2;
    }
    engine.reset();
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace nybble
