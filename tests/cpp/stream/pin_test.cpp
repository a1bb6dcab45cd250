// Page-locking the arena, with a locker that refuses as a driver does.
#include <cstdlib>
#include <map>

#include "core/posix.h"
#include "ring_fixture.h"

namespace nybble {
namespace {

constexpr int64_t kPage = 4096;

class FakeLocker final : public HostLocker {
 public:
  int locks_left = 1000;
  int allocations_left = 1000;
  std::map<void*, int64_t> locked;
  std::map<void*, int64_t> allocated;

  std::string lock(void* address, int64_t bytes) override {
    if (locks_left-- <= 0) return "lock refused";
    EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % kPage, 0u);
    EXPECT_EQ(bytes % kPage, 0);
    locked[address] = bytes;
    return "";
  }
  void unlock(void* address) noexcept override { EXPECT_EQ(locked.erase(address), 1u); }
  std::string allocate(int64_t bytes, void** address) override {
    if (allocations_left-- <= 0) return "allocation refused";
    *address = std::aligned_alloc(kPage, static_cast<size_t>(bytes));
    allocated[*address] = bytes;
    return "";
  }
  void free(void* address) noexcept override {
    EXPECT_EQ(allocated.erase(address), 1u);
    std::free(address);
  }
};

std::unique_ptr<HostArena> arena_of(int layers) {
  auto arena = std::make_unique<HostArena>();
  const ArenaPart part{"all", kPage, 0};
  for (int layer = 0; layer < layers; layer++) {
    arena->add_layer({&part, 1});
    const std::vector<std::byte> bytes(kPage, static_cast<std::byte>(layer + 1));
    arena->fill(layer, 0, 0, bytes);
  }
  return arena;
}

TEST(Pin, LocksTheBytesInPlaceElseMovesThemElseLeavesThem) {
  struct Case {
    int locks, allocations;
    int64_t locked, allocated;
    const char* reason;
  };
  for (const Case& c : {Case{9, 9, 4, 0, ""}, Case{3, 9, 3, 1, ""}, Case{0, 2, 0, 2, "lock refused; allocation refused"},
                        Case{1, 1, 1, 1, "lock refused; allocation refused"}, Case{0, 0, 0, 0, "lock refused; allocation refused"}}) {
    const auto locker = std::make_shared<FakeLocker>();
    locker->locks_left = c.locks;
    locker->allocations_left = c.allocations;
    auto arena = arena_of(4);
    const PinReport report = arena->pin(locker);
    EXPECT_EQ(report.bytes, (c.locked + c.allocated) * kPage);
    EXPECT_EQ(report.reason, c.reason);
    EXPECT_EQ(static_cast<int64_t>(locker->locked.size()), c.locked);
    EXPECT_EQ(static_cast<int64_t>(locker->allocated.size()), c.allocated);
    for (int layer = 0; layer < 4; layer++) {
      EXPECT_EQ(arena->blob(layer)[kPage - 1], static_cast<std::byte>(layer + 1));
      EXPECT_EQ(arena->part(layer, 0).data(), arena->blob(layer).data());
    }
    arena.reset();
    EXPECT_TRUE(locker->locked.empty());
    EXPECT_TRUE(locker->allocated.empty());
  }
}

TEST(Pin, AskedAgainLocksOnlyWhatIsLeft) {
  const auto locker = std::make_shared<FakeLocker>();
  locker->locks_left = 2;
  locker->allocations_left = 0;
  auto arena = arena_of(3);
  EXPECT_EQ(arena->pin(locker).bytes, 2 * kPage);
  locker->locks_left = 9;
  const PinReport report = arena->pin(locker);
  EXPECT_EQ(report.bytes, 3 * kPage);
  EXPECT_EQ(report.reason, "");
  EXPECT_EQ(locker->locked.size(), 3u);
}

#ifndef NYBBLE_HAVE_CUDA
TEST(Pin, ABuildWithoutCudaSaysSo) {
  EXPECT_NE(error_of(ErrorKind::kUnsupported, [] { make_cuda_host_locker(); }).find("built without CUDA"), std::string::npos);
  EXPECT_NE(error_of(ErrorKind::kUnsupported, [] { make_cuda_copy_engine(0, 2); }).find("built without CUDA"), std::string::npos);
}
#endif

TEST(HostMemory, IsCheckedBeforeAnythingIsRead) {
  const posix::SystemLimits limits = posix::system_limits();
  ASSERT_GT(limits.available_bytes, 0);
  HostArena small;
  const ArenaPart page{"all", kPage, 0};
  small.add_layer({&page, 1});
  small.require_memory();
  HostArena large;
  const ArenaPart everything{"all", limits.memory_bytes, 0};
  try {
    large.add_layer({&everything, 1});
  } catch (const Error&) {
    GTEST_SKIP() << "this system does not promise more memory than it has";
  }
  const std::string text = error_of(ErrorKind::kOutOfMemory, [&] { large.require_memory(); });
  EXPECT_NE(text.find("bytes of host memory"), std::string::npos) << text;
}

}  // namespace
}  // namespace nybble
