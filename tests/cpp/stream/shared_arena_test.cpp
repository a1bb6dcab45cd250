// One arena in two processes: the second maps the first one's bytes.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ring_fixture.h"

namespace nybble {
namespace {

constexpr int64_t kBytes = 10000;

void add_layers(HostArena& arena, int layers, int64_t bytes = kBytes) {
  const ArenaPart parts[] = {{"packed", bytes, 0}, {"scales", 100, 0}};
  for (int layer = 0; layer < layers; layer++) arena.add_layer(parts);
}

std::unique_ptr<HostArena> filled() {
  auto arena = HostArena::shared();
  add_layers(*arena, 3);
  for (int layer = 0; layer < 3; layer++) {
    for (int part = 0; part < 2; part++) {
      std::vector<std::byte> bytes(part == 0 ? kBytes : 100);
      for (size_t i = 0; i < bytes.size(); i++) bytes[i] = pattern(layer + part, static_cast<int64_t>(i));
      arena->fill(layer, part, 0, bytes);
    }
  }
  return arena;
}

int wrong_bytes(HostArena& arena) {
  int wrong = 0;
  for (int layer = 0; layer < 3; layer++) {
    arena.require_complete(layer);
    for (int part = 0; part < 2; part++) {
      const std::span<std::byte> bytes = arena.part(layer, part);
      for (size_t i = 0; i < bytes.size(); i++) wrong += bytes[i] != pattern(layer + part, static_cast<int64_t>(i));
    }
  }
  return wrong;
}

TEST(SharedArena, AnotherProcessReadsTheBytesOfTheFirst) {
  const auto arena = filled();
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(arena->shared_file());
  const pid_t child = fork();
  if (child == 0) {
    const auto attached = HostArena::attach(open(path.c_str(), O_RDWR));
    add_layers(*attached, 3);
    const int wrong = wrong_bytes(*attached);
    attached->part(1, 0)[7] = std::byte{0x77};  // one memory, not a copy
    _exit(wrong == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(arena->part(1, 0)[7], std::byte{0x77});
}

TEST(SharedArena, OfAnotherModelOrFilledTwiceIsAnError) {
  const auto arena = filled();
  const auto attached = HostArena::attach(dup(arena->shared_file()));
  add_layers(*attached, 3);
  EXPECT_EQ(wrong_bytes(*attached), 0);
  const std::vector<std::byte> bytes(kBytes);
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { attached->fill(0, 0, 0, bytes); }).find("another process"), std::string::npos);
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { add_layers(*attached, 1); }).find("the same store"), std::string::npos);
  const auto larger = HostArena::attach(dup(arena->shared_file()));
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { add_layers(*larger, 3, 5 * kBytes); }).find("the same store"), std::string::npos);
  HostArena own;
  EXPECT_EQ(own.shared_file(), -1);
}

}  // namespace
}  // namespace nybble
