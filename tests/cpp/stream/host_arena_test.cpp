#include <cstring>

#include "ring_fixture.h"

namespace nybble {
namespace {

std::vector<ArenaPart> parts(int64_t packed, int64_t scales) { return {{"packed", packed, 0}, {"scales", scales, 0}}; }

TEST(HostArena, LaysOutPartsAlignedAndSharesTheLayoutOfSameShapedLayers) {
  HostArena arena;
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{1000, 17}, {1000, 17}, {4096, 256}, {1000, 18}, {1000, 17}};
  for (const auto& [packed, scales] : shapes) arena.add_layer(parts(packed, scales));
  EXPECT_EQ(arena.layers(), 5);
  EXPECT_EQ(arena.layouts(), 3);
  EXPECT_EQ(arena.layout_index(0), arena.layout_index(4));
  EXPECT_NE(arena.layout_index(0), arena.layout_index(3));
  for (int layer = 0; layer < arena.layers(); layer++) {
    const LayerLayout& layout = arena.layout(arena.layout_index(layer));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.blob(layer).data()) % kLayerAlignment, 0u);
    EXPECT_EQ(layout.bytes % kLayerAlignment, 0);
    EXPECT_EQ(layout.parts[0].offset, 0);
    EXPECT_EQ(layout.parts[1].offset % kViewAlignment, 0);
    EXPECT_GE(layout.parts[1].offset, layout.parts[0].bytes);
    EXPECT_LE(layout.parts[1].offset + layout.parts[1].bytes, layout.bytes);
    EXPECT_EQ(layout.parts[1].bytes, shapes[layer].second);
  }
  EXPECT_EQ(arena.bytes(), 4 * 4096 + 8192);
  EXPECT_EQ(arena.largest_layer_bytes(), 8192);
}

TEST(HostArena, KeepsTheBytesAndKnowsWhatIsMissing) {
  HostArena arena;
  arena.add_layer(parts(1000, 17));
  std::vector<std::byte> bytes(1000);
  for (int64_t i = 0; i < 1000; i++) bytes[i] = pattern(3, i);
  const std::span<const std::byte> all(bytes);
  arena.fill(0, 0, 600, all.subspan(600));
  arena.fill(0, 0, 0, all.first(500));
  arena.fill(0, 1, 0, all.first(17));
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { arena.require_complete(0); }).find("part packed"), std::string::npos);
  arena.fill(0, 0, 450, all.subspan(450, 150));
  arena.require_complete(0);
  EXPECT_EQ(std::memcmp(arena.part(0, 0).data(), bytes.data(), 1000), 0);
  EXPECT_EQ(std::memcmp(arena.part(0, 1).data(), bytes.data(), 17), 0);
  EXPECT_EQ(arena.part(0, 1).data(), arena.blob(0).data() + arena.layout(0).parts[1].offset);
}

TEST(HostArena, RefusesWhatDoesNotFit) {
  HostArena arena;
  const std::vector<ArenaPart> none;
  const std::vector<ArenaPart> twice = {{"a", 8, 0}, {"a", 8, 0}};
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { arena.add_layer(none); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { arena.add_layer(twice); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [&] { arena.add_layer(parts(8, 0)); }), "");
  arena.add_layer(parts(8, 8));
  const std::vector<std::byte> bytes(16);
  const std::span<const std::byte> nine = std::span<const std::byte>(bytes).first(9);
  for (const auto& [layer, part, offset] :
       std::vector<std::tuple<int, int, int64_t>>{{0, 0, 0}, {0, 0, -1}, {0, 2, 0}, {1, 0, 0}, {-1, 0, 0}}) {
    EXPECT_NE(error_of(ErrorKind::kValue, [&] { arena.fill(layer, part, offset, nine); }), "") << layer << part << offset;
  }
  arena.fill(0, 0, 0, nine.first(8));
}

TEST(HostArena, OutOfMemoryNamesTheBytes) {
  HostArena arena;
  const std::string text = error_of(ErrorKind::kOutOfMemory, [&] { arena.add_layer(parts(int64_t{1} << 60, 8)); });
  EXPECT_NE(text.find("1152921504606"), std::string::npos) << text;
  EXPECT_EQ(arena.layers(), 0);
}

}  // namespace
}  // namespace nybble
